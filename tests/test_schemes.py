"""Published reversible networks: each equals its paper's formula in plain autograd."""

import inspect

import pytest
import torch

import retrograd as rg
from benchmarks import schemes
from benchmarks.page import DOCS
from tests import zoo


@pytest.mark.parametrize("scheme", schemes.SCHEMES, ids=lambda scheme: scheme.name)
def test_24_layers_in_float64(scheme):
    layers = schemes.functions(24, 8).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    divides = any(word in scheme.name for word in ("blend", "Dr2Net", "BDIA"))
    memory = rg.Anchor(1) if divides else rg.Reverse()
    network = scheme.build(layers, memory=memory)
    results = []
    for run in (network, lambda x: scheme.formula(list(layers), x)):
        torch.manual_seed(1)
        results.append(zoo.gradients(layers, run(x), x))
    assert zoo.worst(*results) < 1e-9


@pytest.mark.parametrize("scheme", schemes.SCHEMES, ids=lambda scheme: scheme.name)
def test_exact(scheme):
    layers = schemes.functions(24, 8)
    x = torch.randn(3, 5, 8, requires_grad=True)
    results = []
    for memory in (rg.Keep(), rg.Reverse()):
        torch.manual_seed(1)
        y = scheme.build(layers, memory=memory, exact=True)(x)
        results.append(zoo.gradients(layers, y, x))
    assert all(map(torch.equal, *results))


def test_each_is_a_few_lines():
    for scheme in schemes.SCHEMES:
        assert len(inspect.getsource(scheme.build).splitlines()) <= 10, scheme.name


def test_the_page_has_the_table():
    text = (
        (DOCS / "rules.md")
        .read_text()
        .split("<!-- schemes: begin -->")[1]
        .split("<!-- schemes: end -->")[0]
    )
    assert all(f"| {scheme.name} | `{scheme.equation}` |" in text for scheme in schemes.SCHEMES)
