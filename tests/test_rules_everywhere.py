"""Residual networks with the tools that users have: DDP, FSDP2, the compiler, autocast, peers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from compatibility.rows.sharding import average, shard
from tests import processes, test_rules, zoo

RULES = {
    "euler": (rg.Euler(), {}),
    "euler-budget": (rg.Euler(), {"memory": rg.Budget("60%")}),
    "midpoint": (rg.Midpoint(0.25), {}),
    "blend": (rg.Blend(1 / 4), {"exact": rg.Grid(dtype=torch.float64, bits=40)}),
}
STEPS = 2


class Model(nn.Module):
    def __init__(self, rule: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.embedding = nn.Embedding(11, 4)
        rule, settings = RULES[rule]
        self.stack = rg.Residual([zoo.Mix(4) for _ in range(8)], rule=rule, **settings | options)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(tokens)))


def train(model: nn.Module, rank: int | None) -> list[processes.Gradients]:
    """The gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(STEPS):
        processes.loss(model, step, rank).backward()
        if rank is not None and not isinstance(model, DistributedDataParallel):
            average(model)
        optimizer.step()
        steps.append(processes.gradients(model))
    return steps


def ddp(rule: str, rank: int) -> list[processes.Gradients]:
    return train(DistributedDataParallel(Model(rule)), rank)


def fsdp(rule: str, root: bool, rank: int) -> list[processes.Gradients]:
    model = Model(rule)
    shard([*model.stack, *[model] * root])
    return train(model, rank)


CASES: dict[str, processes.Case] = {}
for name in RULES:
    CASES[f"ddp-{name}"] = functools.partial(ddp, name)
    CASES[f"fsdp-{name}"] = functools.partial(fsdp, name, False)
    CASES[f"fsdp-root-{name}"] = functools.partial(fsdp, name, True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    view = "FSDP2-wrapped module .* returned a view tensor"
    return processes.run(CASES, tmp_path_factory.mktemp("rules"), ignore=[view])


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_in_two_processes(case, results):
    rule = case.removeprefix("ddp-").removeprefix("fsdp-").removeprefix("root-")
    expected = train(Model(rule, memory=rg.Keep()), None)
    for got in results[case]:
        for values, wanted in zip(got, expected, strict=True):
            assert zoo.worst(values, wanted) < 1e-9


@pytest.mark.parametrize("rule", ["euler", "midpoint"])
def test_compiled_functions(rule):
    functions = test_rules.layers(4)
    expected_of = test_rules.RULES[rule][1]
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = test_rules.gradients(functions, lambda x: expected_of(list(functions), x), x)
    net = test_rules.build(functions, rule)
    net.compile(backend="aot_eager")
    for _ in range(2):
        assert zoo.worst(test_rules.gradients(functions, net, x), expected) < 1e-9
    model = torch.compile(nn.Sequential(net, nn.Identity()), backend="aot_eager")
    assert zoo.worst(test_rules.gradients(functions, model, x), expected) < 1e-9


@pytest.mark.parametrize("rule", test_rules.RULES)
def test_autocast(rule):
    functions = test_rules.layers(4, dtype=torch.float32)
    net = test_rules.build(functions, rule)
    formula = test_rules.RULES[rule][1]
    x = torch.randn(3, 8, requires_grad=True)

    def under_autocast(run):
        with torch.autocast("cpu", torch.bfloat16):
            return run(x)

    got = test_rules.gradients(functions, lambda x: under_autocast(net), x)
    plain = test_rules.gradients(
        functions, lambda x: under_autocast(lambda x: formula(list(functions), x)), x
    )
    assert zoo.worst(got, plain) < 3e-2


@pytest.mark.parametrize("rule", ["euler", "midpoint"])
def test_hooks_around_it(rule):
    """Saved-tensor hooks, and checkpointing, around a network."""
    functions = test_rules.layers(5, dropout=0.2)
    net = test_rules.build(functions, rule)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = test_rules.gradients(functions, net, x)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return net(x)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)

    nested = rg.Residual([net], skip=True)
    for run in (offloaded, checkpointed, nested):
        assert zoo.worst(test_rules.gradients(functions, run, x), expected) < 1e-12


@pytest.mark.parametrize("rule", ["euler", "midpoint", "blend"])
def test_check_finds_nothing(rule):
    functions = test_rules.layers(4, dropout=0.2)
    options = {"exact": True} if rule == "blend" else {}
    net = rg.Residual(functions, rule=RULES[rule][0], **options)
    report = rg.check(net, torch.randn(3, 8, dtype=torch.float64))
    assert report.ok, str(report)


def test_check_finds_a_counter():
    class Counter(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.tanh() * self.calls

    net = rg.Residual([Counter() for _ in range(4)])
    assert not rg.check(net, torch.randn(3, 8, requires_grad=True)).ok
    with pytest.raises(rg.RecomputeError, match="did something else when it ran again"):
        net(torch.randn(3, 8, requires_grad=True)).sum().backward()


def test_measure_counts():
    from retrograd import measure

    functions = test_rules.layers(4)
    net = rg.Residual(functions)
    x = torch.randn(3, 8, dtype=torch.float64)
    measured = measure.step(lambda: net(x).sum().backward(), net)
    assert list(measured.evaluations.values()) == [2, 2, 2, 1]
    assert list(measured.evaluations) == [f"functions.{i}" for i in range(4)]
    assert measured.kept["functions.1"] >= x.nbytes
