"""`rg.pin`: recompute takes a value from forward. Oracle: plain autograd."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.measure import LiveBytes
from tests import zoo

TIES = 1000
WIDTH = 4


class Perturbed:
    """Whether functions run a second time: then what they see is a little off."""

    on = False


class Routed(nn.Module):
    """Each token goes to the expert with the higher score. The two scores are nearly equal, and a
    recompute that is perturbed turns every choice over.
    """

    def __init__(self, pinned):
        super().__init__()
        self.pinned = pinned
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.seen = []

    def forward(self, x):
        first = x.detach().sum(-1)
        off = -1e-9 if rg.is_recomputing() or Perturbed.on else 1e-9
        best = torch.stack((first, first * 0 + first + off), -1).argmax(-1)
        if self.pinned:
            best = rg.pin(best)
        self.seen.append(best.clone())
        return torch.einsum("tw,twv->tv", x, self.experts[best]).tanh()


def stack_of(make, depth=1, **options):
    torch.manual_seed(0)
    pairs = [(make(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)]
    return rg.ReversibleSequence(pairs, **options).double()


def inputs(tokens=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator)


REBUILT = rg.Reverse(keep_last=False)


def gradients(stack, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(zoo.loss(stack(x)), [x, *stack.parameters()])


def expected_of(stack, x):
    stack.memory = rg.Keep()
    expected = gradients(stack, x)
    for module in stack.modules():
        if isinstance(module, Routed):
            module.seen.clear()
    return expected


def test_a_thousand_near_ties_never_turn_over():
    stack = stack_of(lambda: Routed(True))
    x = inputs(TIES)
    expected = expected_of(stack, x)
    stack.memory = REBUILT
    got = gradients(stack, x)
    forward, again = stack.blocks[0].f.seen
    assert (forward != again).sum() == 0
    assert zoo.worst(list(got), list(expected)) < 1e-9


def test_without_it_they_all_turn_over_and_the_stack_raises():
    stack = stack_of(lambda: Routed(False), memory=REBUILT)
    with pytest.raises(rg.RetrogradError):
        gradients(stack, inputs(TIES))
    forward, again = stack.blocks[0].f.seen
    assert (forward != again).sum() == TIES


def test_checkpointing_is_wrong_without_a_word():
    routed = Routed(False).double()
    x = inputs(TIES).requires_grad_()
    expected = torch.autograd.grad(routed(x).sum(), x)[0]
    y = checkpoint(routed, x, use_reentrant=False).sum()
    try:
        Perturbed.on = True
        got = torch.autograd.grad(y, x)[0]
    finally:
        Perturbed.on = False
    assert (routed.seen[-1] != routed.seen[-2]).sum() == TIES
    assert (got - expected).abs().max() > 1e-3


class Decides(nn.Linear):
    """Pins a pytree: a mask, a number, a tensor with a gradient."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        h = super().forward(x)
        off = 1e-3 * rg.is_recomputing()
        pinned = rg.pin({"mask": h.detach() > 0, "pair": (2 if not off else 3, h.sin() + off)})
        times, wave = pinned["pair"]
        return (wave.where(pinned["mask"], wave * 2) * times).tanh()


MODES = {
    "reverse": (rg.Reverse(), {}),
    "reverse all": (REBUILT, {}),
    "anchor": (rg.Anchor(1), {}),
    "budget": (rg.Budget("60%"), {}),
    "exact": (REBUILT, {"exact": True}),
    "verify": (REBUILT, {"verify": "always"}),
}


@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode(mode):
    memory, options = MODES[mode]
    stack = stack_of(Decides, depth=3, **options)
    x = inputs(64)
    expected = expected_of(stack, x)
    for stack.memory in (memory, memory, memory):
        assert zoo.worst(list(gradients(stack, x)), list(expected)) < 1e-9


@pytest.mark.parametrize(
    "choice", [rg.Choice(output=True), rg.Choice(saved=True), rg.Choice(streams=True)]
)
def test_with_what_a_plan_keeps(choice):
    class Fixed:
        def plan(self, call):
            length = len(call.targets)
            return rg.Plan(length, dict.fromkeys(range(length), choice))

    stack = stack_of(Decides, depth=3)
    x = inputs()
    expected = expected_of(stack, x)
    stack.memory = Fixed()
    assert zoo.worst(list(gradients(stack, x)), list(expected)) < 1e-9


def test_an_ordinary_network_whose_updates_run_twice():
    class Reruns:
        def plan(self, call):
            last = len(call.targets)
            return rg.Plan(last, {i: rg.Choice(rerun=True) for i in range(1, last)})

    torch.manual_seed(0)
    net = rg.Residual([Decides() for _ in range(4)], memory=rg.Keep()).double()
    x = inputs()
    expected = gradients(net, x)
    net.memory = Reruns()
    assert zoo.worst(list(gradients(net, x)), list(expected)) < 1e-9


def test_second_backward_and_second_derivatives():
    stack = stack_of(Decides, depth=2)
    x = inputs().requires_grad_()

    def run():
        y = zoo.loss(stack(x))
        first = torch.autograd.grad(y, [x], retain_graph=True)
        second = torch.autograd.grad(y, [x], create_graph=True)
        third = torch.autograd.grad(second[0].square().sum(), [x])
        return [*first, *second, *third]

    stack.memory = rg.Keep()
    expected = run()
    stack.memory = REBUILT
    got = run()
    assert zoo.worst(got[:2], expected[:2]) < 1e-9
    assert zoo.worst(got[2:], expected[2:]) < 1e-9


def test_stacks_and_chunks_inside_of_a_function():
    for inner in (lambda: stack_of(Decides, memory=REBUILT), lambda: rg.Chunked(Decides(), 2, 0)):
        stack = stack_of(inner, depth=2)
        for part in stack.modules():
            if isinstance(part, rg.ReversibleSequence):
                part.memory = rg.Keep()
        x = inputs()
        expected = gradients(stack, x)
        for part in stack.modules():
            if isinstance(part, rg.ReversibleSequence):
                part.memory = REBUILT
        assert zoo.worst(list(gradients(stack, x)), list(expected)) < 1e-9


def test_autocast():
    stack = stack_of(Decides, depth=2).float()
    x = inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        stack.memory = rg.Keep()
        expected = gradients(stack, x)
        stack.memory = REBUILT
        got = gradients(stack, x)
    assert zoo.worst(list(got), list(expected)) < 2e-2


@pytest.mark.parametrize(("forward", "again"), [(1, 2), (2, 1)])
def test_another_number_of_calls_raises(forward, again):
    class Counts(nn.Linear):
        def forward(self, x):
            for _ in range(again if rg.is_recomputing() else forward):
                rg.pin(x.detach() > 0)
            return super().forward(x)

    stack = stack_of(lambda: Counts(WIDTH, WIDTH), memory=REBUILT)
    with pytest.raises(rg.RecomputeError, match=rf"rg.pin {forward} times in forward"):
        gradients(stack, inputs())


def test_a_pinned_tensor_that_is_edited_raises():
    class Edits(nn.Linear):
        def forward(self, x):
            mask = rg.pin((x.detach() > 0).double())
            return super().forward(x * mask.clone()) + mask.mul_(2)

    stack = stack_of(lambda: Edits(WIDTH, WIDTH), memory=REBUILT)
    with pytest.raises(rg.InPlaceError, match="a pinned value"):
        gradients(stack, inputs())


def test_elsewhere_it_is_the_identity():
    value = {"a": torch.ones(2), "b": None}
    assert rg.pin(value) is value
    stack = stack_of(Decides, depth=2)
    x = inputs()
    with torch.no_grad():
        stack(x)
    result = torch.func.grad(lambda x: zoo.loss(stack(x)))(x)
    torch.testing.assert_close(result, gradients(stack, x)[0])
    assert rg.check(stack, x).ok


def test_bytes_are_counted_and_freed():
    class Pins(nn.Linear):
        def forward(self, x):
            rg.pin(x.new_zeros(10_000))
            return super().forward(x)

    stack = stack_of(lambda: Pins(WIDTH, WIDTH), depth=4, memory=REBUILT)
    other = stack_of(lambda: nn.Linear(WIDTH, WIDTH), depth=4, memory=REBUILT)
    x = inputs()
    with LiveBytes() as live:
        y = stack(x)
        held = live.now
        del y
        assert live.now == 0
        y = other(x)
        assert held - live.now == 4 * 80_000
        del y
    assert stack.plan(x).floor - other.plan(x).floor >= 4 * 80_000
