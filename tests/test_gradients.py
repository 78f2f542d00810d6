"""Promise 1: gradients of parameters, inputs and context agree with plain autograd."""

import pytest
import torch
from torch import nn

import retrograd as rg
from benchmarks import precision
from tests import zoo


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_outputs_and_gradients_are_those_of_plain_autograd(case):
    stack, x = case.build()
    context = torch.randn(3, dtype=torch.float64, requires_grad=True)
    expected = zoo.plain_stack(stack, x, context=context)
    output = stack(x, context=context)
    assert zoo.worst(zoo.leaves(output), zoo.leaves(expected)) < 1e-14
    got = zoo.gradients(stack, output, x, context)
    assert zoo.worst(got, zoo.gradients(stack, expected, x, context)) < 1e-9


@pytest.mark.parametrize("coupling", precision.COUPLINGS)
@pytest.mark.parametrize("streams", precision.STREAMS)
def test_float32_at_depth_24(coupling, streams):
    """24 transformer blocks, every coupling: `python -m benchmarks.precision` prints how far below
    the limit they are.
    """
    stack, x = precision.build(precision.COUPLINGS[coupling], precision.STREAMS[streams], depth=24)
    rebuilt, kept = (precision.gradients(stack, x, memory) for memory in (rg.Reverse(), rg.Keep()))
    assert precision.difference(rebuilt, kept) < 1e-5


class Sum(nn.Module):
    """A function of several streams."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(zoo.Mix(4) for _ in widths)

    def forward(self, *values, context=None):
        return sum(
            part(value.mean(1, keepdim=True).expand_as(values[0]), context)
            for part, value in zip(self.parts, values)
        )


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_four_streams_that_read_each_other(memory):
    """Two modalities of different length, as in the fifth seed."""
    updates = []
    for _ in range(3):
        updates += [
            rg.Update("v1", Sum(1, 1), reads=("v2", "a2")),
            rg.Update("v2", Sum(1), reads=("v1",)),
            rg.Update("a1", Sum(1, 1), reads=("a2", "v2")),
            rg.Update("a2", Sum(1), reads=("a1",), coupling=rg.Momentum(0.5)),
        ]
    net = rg.Reversible(updates, memory=zoo.MEMORY[memory]).double()
    video, audio = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    context = torch.randn(3, dtype=torch.float64, requires_grad=True)
    streams = {"v1": video, "v2": video, "a1": audio, "a2": audio}
    output, expected = (
        net(streams, context=context),
        zoo.plain_program(net, streams, context=context),
    )
    assert list(output) == ["v1", "v2", "a1", "a2"]
    got = zoo.gradients(net, output, video, audio, context)
    assert zoo.worst(got, zoo.gradients(net, expected, video, audio, context)) < 1e-9


@pytest.mark.parametrize(
    "case", [case for case in zoo.REVERSED if case.streams == "split"], ids=str
)
def test_inverse_undoes_forward(case):
    stack, x = case.build()
    with torch.no_grad():
        back = stack.inverse(stack(x))
    assert zoo.worst(zoo.leaves(back), [leaf.detach() for leaf in zoo.leaves(x)]) < 1e-12


def test_inverse_of_a_program():
    net = rg.Reversible(
        [rg.Update("a", zoo.Mix(4), ("b",)), rg.Update("b", zoo.Mix(4), ("a",))]
    ).double()
    streams = {
        "a": torch.randn(2, 4, dtype=torch.float64),
        "b": torch.randn(2, 4, dtype=torch.float64),
    }
    back = net.inverse(net(streams))
    assert all(torch.allclose(back[name], streams[name], atol=1e-14) for name in streams)


@pytest.mark.parametrize("streams", ["mean", "sum", "at-rest"])
def test_inverse_of_a_merged_output_is_refused(streams):
    stack, x = zoo.Case("additive", streams, "tensor", "reverse").build()
    with pytest.raises(ValueError, match="inverse needs both streams"):
        stack.inverse(x)


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_shared_functions(memory):
    """One module in many places: its gradient is the sum."""
    f, g = zoo.Mix(4), zoo.Mix(4)
    stack = rg.ReversibleSequence([(f, g), (f, f), (g, f)], memory=zoo.MEMORY[memory]).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert (
        zoo.worst(
            zoo.gradients(stack, stack(x), x), zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        )
        < 1e-9
    )


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_short_stacks(blocks):
    stack = rg.ReversibleSequence([(zoo.Mix(4), zoo.Mix(4)) for _ in range(blocks)]).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert (
        zoo.worst(
            zoo.gradients(stack, stack(x), x), zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        )
        < 1e-9
    )


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_functions_need_not_be_modules(memory):
    stack = rg.ReversibleSequence([(torch.sin, lambda x: x.cos())] * 4, memory=zoo.MEMORY[memory])
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert (
        zoo.worst(
            zoo.gradients(stack, stack(x), x), zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        )
        < 1e-9
    )


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_aux_outputs_have_gradients(memory):
    """An auxiliary loss from every function that returns one, in forward order."""

    class Balanced(zoo.Mix):
        def forward(self, x, context=None):
            y = super().forward(x, context)
            return rg.WithAux(y, {"balance": y.square().mean(), "seen": x.mean()})

    stack = rg.ReversibleSequence(
        [(Balanced(4), zoo.Mix(4)) for _ in range(3)], memory=zoo.MEMORY[memory]
    ).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y, aux = stack(x)
    assert len(aux) == 3
    assert set(aux[0]) == {"balance", "seen"}
    got = zoo.gradients(stack, [y, aux], x)
    x1, x2, losses = x, x, []
    for block in stack.blocks:
        out = block.f(x2)
        losses.append(out.aux)
        x1 = x1 + out.output
        x2 = x2 + block.g(x1)
    assert zoo.worst(got, zoo.gradients(stack, [(x1 + x2) / 2, losses], x)) < 1e-9


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :3],
        lambda x: x.transpose(0, 1),
        lambda x: x.expand(2, 5, 4),
        lambda x: x[:, ::2],
    ],
    ids=["slice", "transpose", "expand", "every other"],
)
def test_streams_that_are_views(view):
    """What is rebuilt is dense; what forward began with may be a slice, a transpose, an expanded
    tensor.
    """
    net = rg.Reversible(
        [rg.Update(t, torch.nn.Linear(4, 4), reads=(r,)) for t, r in [("a", "b"), ("b", "a")] * 3]
    ).double()
    base = torch.randn(
        1 if view(torch.ones(1, 5, 4)).shape[0] == 2 else 4,
        5,
        4,
        dtype=torch.float64,
        requires_grad=True,
    )
    found, expected = [], []
    for memory, results in ((rg.Reverse(), found), (rg.Keep(), expected)):
        net.memory = memory
        out = net({"a": view(base), "b": view(base)})
        results += torch.autograd.grad(
            sum(value.square().sum() for value in out.values()), [base, *net.parameters()]
        )
    for now, then in zip(found, expected):
        torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-9)
