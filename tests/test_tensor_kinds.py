"""Tensors and modules of other kinds: sparse, fake, lazy, scripted, of inference mode. They work,
or raise and say why.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

import retrograd as rg
from tests import zoo

MEMORY = {**zoo.MEMORY, "budget": rg.Budget("100%")}
every_memory = pytest.mark.parametrize("memory", MEMORY)
GRAPH = (
    torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) > 0.5
).double()


class OnGraph(nn.Module):
    """Passes messages along a sparse graph, which is an attribute, a buffer, a parameter or an
    argument.
    """

    def __init__(self, kind, layout):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        graph = GRAPH.to_sparse(layout=layout)
        if kind == "buffer":
            self.register_buffer("graph", graph)
        elif kind != "argument":
            self.graph = nn.Parameter(graph) if kind == "parameter" else graph

    def forward(self, x, graph=None):
        return (self.graph if graph is None else graph) @ self.linear(x).tanh()


@every_memory
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter", "argument"])
def test_sparse_tensors_inside_functions(kind, layout, memory):
    stack = rg.ReversibleSequence(
        [(OnGraph(kind, layout), OnGraph(kind, layout)) for _ in range(3)]
    ).double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    arguments = {"graph": GRAPH.to_sparse(layout=layout)} if kind == "argument" else {}
    found = []
    for choice in (rg.Keep(), MEMORY[memory]):
        stack.memory = choice
        for _ in range(2):
            grads = zoo.gradients(stack, stack(x, **arguments), x)
        found.append([grad.to_dense() if grad.layout != torch.strided else grad for grad in grads])
    assert zoo.worst(*found) < 1e-9


@pytest.mark.parametrize(
    "value",
    [torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged)],
)
def test_streams_are_strided(value):
    stack = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4))])
    with pytest.raises(
        TypeError,
        match=r"the input is (of layout sparse_coo|a nested tensor)\. Streams are strided tensors",
    ):
        stack(value)


@every_memory
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize(
    "make",
    [
        torch.jit.script,
        lambda module: torch.jit.trace(module, torch.ones(2, 4, dtype=torch.float64)),
    ],
)
def test_torchscript_functions(make, memory):
    functions = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(6)]
    plain = rg.ReversibleSequence(zip(functions[::2], functions[1::2]), memory=rg.Keep())
    scripted = [make(function) for function in functions]
    stack = rg.ReversibleSequence(zip(scripted[::2], scripted[1::2]), memory=MEMORY[memory])
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert zoo.worst(zoo.gradients(stack, stack(x), x), zoo.gradients(plain, plain(x), x)) < 1e-9


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_torchscript_with_buffers_raises():
    stack = rg.ReversibleSequence([(torch.jit.script(nn.BatchNorm1d(4)), nn.Linear(4, 4))] * 2)
    with pytest.raises(
        rg.RetrogradError,
        match=r"(?s)has buffers \('running_mean'\) in TorchScript.*Fix: .*rg.Keep\(\)",
    ):
        stack(torch.randn(2, 4))


@every_memory
@pytest.mark.parametrize("exact", [False, True])
def test_fake_tensors(exact, memory):
    """Shapes without values, as memory is estimated with."""
    with FakeTensorMode():
        functions = [
            nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(8)
        ]
        stack = rg.ReversibleSequence(
            zip(functions[::2], functions[1::2]), memory=MEMORY[memory], exact=exact
        )
        for _ in range(2):
            stack(torch.randn(64, 8)).square().mean().backward()
    assert all(p.grad is not None for p in stack.parameters())


@every_memory
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules(memory):
    stack = rg.ReversibleSequence(
        [
            (nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()), nn.LazyLinear(4))
            for _ in range(3)
        ]
    ).double()
    stack.memory = MEMORY[memory]
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    got = []
    for _ in range(2):
        y = stack(x)
        got = zoo.gradients(stack, y, x)
    assert not any(map(is_lazy, stack.parameters()))
    counts = [b.item() for name, b in stack.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts == [2] * 3
    stack.memory = rg.Keep()
    assert zoo.worst(got, zoo.gradients(stack, stack(x), x)) < 1e-9


@every_memory
def test_an_input_of_inference_mode(memory):
    with torch.inference_mode():
        x = torch.randn(2, 4, dtype=torch.float64)
    found = []
    for choice in (rg.Keep(), MEMORY[memory]):
        stack, _ = zoo.Case("additive", "mean", "tensor", "keep").build()
        stack.memory = choice
        for _ in range(2):
            grads = zoo.gradients(stack, stack(x.clone() if choice == rg.Keep() else x))
        found.append(grads)
    assert zoo.worst(*found) < 1e-9


def test_backward_in_inference_mode_raises():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse-all").build()
    loss = stack(x).sum()
    with (
        torch.inference_mode(),
        pytest.raises(rg.RetrogradError, match="(?s)inference_mode.*torch.no_grad"),
    ):
        loss.backward()


def test_a_plan_is_made_whatever_the_default_device_is():
    stack = rg.ReversibleSequence(
        [(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)], memory=rg.Budget("100%")
    )
    x = torch.randn(4, 8)
    with torch.device("meta"):
        stack(x).sum().backward()
