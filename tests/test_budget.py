"""`Budget`: the peak stays below it, the FLOPs fall with it, and gradients are those of plain
autograd. And `Anchor`.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

import retrograd as rg
from benchmarks import frontier
from benchmarks.cases import (
    SIZES,
    Attention,
    FeedForward,
    Plain,
    Size,
    checkpoint,
    contestants,
    pairs,
)
from benchmarks.rivals import ORDINARY
from benchmarks.steps import example, flops, measure, step
from retrograd import profiling
from retrograd.core import private
from retrograd.core.memory import Choice, Plan, block_starts
from retrograd.core.walk import Walk
from retrograd.measure import Flops, LiveBytes, activation_bytes
from retrograd.profile import Profile
from retrograd.profiling import REMEMBERED
from tests import processes, test_compat_parity, zoo

MIB = 2**20


def needed(network, x):
    """The peak of a step, less gradients; after the steps in which the plan is made."""
    for _ in range(2):
        network.zero_grad()
        x.grad = None
        step(network, x)
    network.zero_grad()
    x.grad = None
    return activation_bytes(lambda: step(network, x), [*network.parameters(), x])


def input_gradient(network, x):
    x.grad = None
    step(network, x)
    return x.grad.clone()


# --- what must be shown: 24 transformer blocks of width 128, 4 x 256 tokens


def test_an_ordinary_network_is_on_the_lines_of_checkpointing():
    size = Size("", blocks=3, width=384, batch=2, tokens=256)
    names = [name for name in ORDINARY.contestants if name.startswith(("checkpoint", "selective"))]
    networks = contestants(size, names, ORDINARY.contestants)
    lines = frontier.lines_of(measure(size, networks, rounds=1, streams=1))
    x = example(size, streams=1)
    of_plain = flops(networks["plain"], x)
    layers = [layer for pair in pairs(size) for layer in pair]
    for point in lines["selective"]:
        net = rg.Residual(layers, memory=rg.Budget(point.bytes))
        bytes_ = needed(net, x)
        assert bytes_ <= point.bytes, point
        for name, points in lines.items():
            there = frontier.at(points, bytes_)
            if there is not None:
                assert flops(net, x) / of_plain <= 1.015 * there.flops, (name, point)


def test_the_line_between_time_and_memory(monkeypatch):
    """In FLOPs without those of attention, which torch before 2.14 does not count on a CPU."""

    def flops(network, x):
        network.zero_grad()
        with Flops() as counter:
            step(network, x)
        return counter.total

    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for attention in (private.CPU_ATTENTION, backward):
        monkeypatch.delitem(flop_registry, attention, raising=False)
    size = SIZES["shown"]
    blocks, x = pairs(size), example(size)
    plain, checkpointed = Plain(copy.deepcopy(blocks)), Plain(copy.deepcopy(blocks), checkpoint)
    most, of_plain, expected = needed(plain, x), flops(plain, x), input_gradient(plain, x)
    limits = {needed(checkpointed, x): 1.20, most // 4: 1.16, most: 1.01}
    for limit, at_most in limits.items():
        stack = rg.ReversibleSequence(blocks, streams=rg.Split(), memory=rg.Budget(limit))
        assert needed(stack, x) <= 1.02 * limit
        stack.zero_grad()
        assert flops(stack, x) / of_plain <= at_most
        stack.zero_grad()
        torch.testing.assert_close(
            input_gradient(stack, x), expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item()
        )
    floor = rg.ReversibleSequence(blocks, streams=rg.Split())
    assert flops(floor, x) / of_plain <= 4 / 3 - 1 / (3 * 24) + 0.01


class Conv(nn.Sequential):
    def __init__(self, width):
        super().__init__(
            nn.BatchNorm2d(width),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, width, 1),
        )


class Dropping(nn.Sequential):
    def __init__(self, width):
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )


NETWORKS = {
    "transformer": (lambda: (Attention(32, 4), FeedForward(32)), (4, 64, 64)),
    "dropout": (lambda: (Dropping(32), Dropping(32)), (256, 64)),
    "convolutions": (lambda: (Conv(8), Conv(8)), (4, 16, 16, 16)),
    "tanh": (lambda: (nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64)), (256, 128)),
    "uneven": (lambda: (FeedForward(32), nn.Tanh()), (256, 64)),
}


@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("share", ["10%", "25%", "50%", "90%", "150%"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_stays_below_it(name, share, accumulating):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    blocks, x = [make() for _ in range(12)], torch.randn(shape, requires_grad=True)
    options = {"streams": rg.Split(1 if name == "convolutions" else -1)}
    stack = rg.ReversibleSequence(blocks, memory=rg.Budget(share), **options)
    try:
        plan = stack.plan(x)
    except rg.BudgetError:
        assert share in ("10%", "25%")
        return
    limit = stack.memory.bytes_of(plan.plain)

    def run():
        step(stack, x)

    if accumulating:
        run()
        with contextlib.suppress(rg.BudgetError):
            for _ in range(2):
                run()
            x.grad = None
            with LiveBytes() as live:
                run()
            plain = next(iter(stack._cache.profiles.values())).plain(False)
            assert live.peak - x.grad.nbytes <= 1.02 * stack.memory.bytes_of(plain)
        return
    assert needed(stack, x) <= 1.02 * limit
    kept = rg.ReversibleSequence(blocks, memory=rg.Keep(), **options)
    torch.manual_seed(1)
    expected = input_gradient(kept, x)
    torch.manual_seed(1)
    stack.zero_grad()
    torch.testing.assert_close(
        input_gradient(stack, x), expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item()
    )


def test_more_memory_means_less_to_run_again():
    stack = rg.ReversibleSequence(
        [(Attention(32, 4), FeedForward(32)) for _ in range(12)], streams=rg.Split()
    )
    x, times, peaks = torch.randn(4, 64, 64), [], []
    for share in range(20, 121, 10):
        stack.memory = rg.Budget(f"{share}%")
        plan = stack.plan(x)
        times.append(plan.time)
        peaks.append(plan.peak)
    assert times == sorted(times, reverse=True)
    assert peaks == sorted(peaks)
    assert times[-1] == 1.0


def test_above_plain_it_is_keep_to_the_bit():
    torch.manual_seed(0)
    stack, x = (
        rg.ReversibleSequence([(zoo.Mix(8), zoo.Mix(8)) for _ in range(4)]),
        torch.randn(4, 8, requires_grad=True),
    )
    grads = []
    for stack.memory in (rg.Keep(), rg.Budget("1 GiB"), rg.Budget("1 GiB")):
        grads.append(torch.autograd.grad(stack(x).square().sum(), [x, *stack.parameters()]))
    assert all(map(torch.equal, grads[0], grads[2]))
    assert (
        next(iter(stack._cache.profiles.values())).plans(rg.Budget("1 GiB"), True)[0].keep_from == 0
    )


def test_below_the_floor_it_says_the_floor():
    stack, x = (
        rg.ReversibleSequence([(FeedForward(64), FeedForward(64)) for _ in range(4)]),
        torch.randn(64, 64),
    )
    stack.memory = rg.Budget("10 KiB")
    for run in (lambda: stack(x), lambda: stack.plan(x)):
        with pytest.raises(
            rg.BudgetError,
            match=r"(?s)10 KiB are less than the .* KiB that this stack needs.*Fix: "
            r"rg.Budget\(\"(.*) KiB\"\)",
        ) as error:
            run()
    fix = str(error.value).split('rg.Budget("')[1].split('"')[0]
    stack.memory = rg.Budget(fix)
    step(stack, x.requires_grad_())
    assert isinstance(error.value, ValueError)


# --- right, whatever is kept


class Fixed:
    """A plan made by hand: by name, because operations cannot be sent to other processes."""

    def __init__(self, choice, cut=None):
        self.choice, self.cut = choice, cut

    def plan(self, call):
        cut = len(call.targets) if self.cut is None else self.cut
        choice = CHOICES[self.choice] if isinstance(self.choice, str) else self.choice
        return Plan(cut, dict.fromkeys(range(cut), choice))


ADDMM = frozenset(
    {
        (torch.ops.aten.addmm.default, 0),
        (torch.ops.aten.mm.default, 0),
        (torch.ops.aten.addmm.default, 1),
    }
)
CHOICES = {
    "output": Choice(output=True),
    "operations": Choice(operations=ADDMM),
    "both": Choice(output=True, operations=ADDMM),
    "streams": Choice(streams=True),
    "all": Choice(output=True, operations=ADDMM, streams=True),
}
KEPT = [case for case in zoo.CASES if case.memory == "keep"]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", KEPT, ids=str)
def test_whatever_is_kept_gradients_are_those_of_plain(case, dropout, choice):
    stack, x = case.build(dropout=dropout)
    torch.manual_seed(3)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    state = torch.get_rng_state()
    stack.memory = Fixed(CHOICES[choice])
    torch.manual_seed(3)
    y = stack(x)
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("choice", CHOICES)
def test_backward_twice_and_its_derivative(choice):
    stack, x = zoo.Case("additive", "mean", "tensor", "keep").build(dropout=0.2)

    def run():
        torch.manual_seed(0)
        y = zoo.loss(stack(x))
        wanted = [x, *stack.parameters()]
        first = torch.autograd.grad(y, wanted, retain_graph=True)
        second = torch.autograd.grad(y, wanted, create_graph=True)
        third = torch.autograd.grad(sum(g.square().sum() for g in second), wanted)
        return [*first, *second, *third]

    expected = run()
    stack.memory = Fixed(CHOICES[choice])
    assert zoo.worst(run(), expected) < 1e-9


@pytest.mark.parametrize("choice", CHOICES)
def test_exact(choice):
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(Attention(16, 2), Dropping(16)) for _ in range(6)], exact=True)
    x, grads = torch.randn(2, 8, 16, requires_grad=True), []
    for stack.memory in (rg.Keep(), Fixed(CHOICES[choice]), Fixed(CHOICES[choice], cut=7)):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = stack(x)
        grads.append([y, *torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])])
    for got in grads[1:]:
        assert all(map(torch.equal, got, grads[0]))


def test_exact_under_a_budget():
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(Attention(16, 2), Dropping(16)) for _ in range(12)], exact=True)
    x, grads = torch.randn(2, 32, 16, requires_grad=True), []
    for stack.memory in (rg.Keep(), *[rg.Budget("30%")] * 3, *[rg.Budget("70%")] * 2):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(stack(x).square().sum(), [x, *stack.parameters()]))
    for got in grads[1:]:
        assert all(map(torch.equal, got, grads[0]))


def test_a_recompute_that_stops_early_leaves_nothing_behind():
    """Not in the buffers, the random state, the grad mode, nor in modules that count."""

    class Norm(nn.Sequential):
        def __init__(self):
            super().__init__(
                nn.BatchNorm1d(4),
                nn.Linear(4, 4),
                nn.Dropout(0.5),
                nn.Linear(4, 4),
                nn.Linear(4, 4),
            )

    torch.manual_seed(0)
    stack, x = rg.ReversibleSequence([(Norm(), Norm()) for _ in range(3)]), torch.randn(8, 4)
    twin = copy.deepcopy(stack)
    stack.memory, twin.memory = Fixed(Choice(output=True)), rg.Keep()
    states = []
    for net in (stack, twin):
        torch.manual_seed(1)
        net(x).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert all(map(torch.equal, stack.buffers(), twin.buffers()))
    assert torch.is_grad_enabled()


def test_functions_that_catch_exceptions_are_stopped_all_the_same():
    class Careful(nn.Linear):
        def forward(self, x):
            try:
                return super().forward(super().forward(x))
            except Exception:
                return x * 0

    torch.manual_seed(0)
    stack, x, grads = (
        rg.ReversibleSequence([(Careful(4, 4), Careful(4, 4))] * 2),
        torch.randn(2, 4, requires_grad=True),
        [],
    )
    for stack.memory in (rg.Keep(), Fixed(Choice(output=True))):
        grads.append(torch.autograd.grad(stack(x).sum(), x)[0])
    torch.testing.assert_close(*grads)


class InPlace(nn.Module):
    """What a product made is written to at once: it cannot be kept."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).relu_())


@pytest.mark.parametrize("share", ["40%", "60%", "80%"])
def test_products_that_are_edited_in_place(share):
    torch.manual_seed(0)
    stack, x = (
        rg.ReversibleSequence([(InPlace(), InPlace()) for _ in range(8)], memory=rg.Budget(share)),
        torch.randn(64, 8),
    )
    twin = copy.deepcopy(stack)
    twin.memory = rg.Keep()
    for _ in range(3):
        got, expected = (
            torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
            for net in (stack, twin)
        )
        assert zoo.worst(list(got), list(expected)) < 1e-4
    (profile,) = stack._cache.profiles.values()
    first = [
        operation for operation in profile.updates[0].operations if "addmm" in str(operation.name)
    ]
    assert [operation.counted for operation in first] == [False, True]


def test_an_edit_of_an_output_that_is_kept_is_noticed():
    class Shows(nn.Linear):
        def forward(self, x):
            y = super().forward(super().forward(x))
            return rg.WithAux(y, y)

    stack = rg.ReversibleSequence(
        [(Shows(4, 4), nn.Linear(4, 4)) for _ in range(3)], memory=Fixed(Choice(output=True))
    )
    stack(torch.randn(2, 4))[0].sum().backward()  # the first call is watched, and runs to its end
    y, aux = stack(torch.randn(2, 4))
    with torch.no_grad():
        aux[1].mul_(2)
    with pytest.raises(rg.RetrogradError, match="an output that was kept"):
        y.sum().backward()


def test_weights_are_not_activations():
    """`Linear` saves a view of its weight. A large network with a small batch needs next to
    nothing.
    """
    make = lambda: nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))  # noqa: E731
    stack = rg.ReversibleSequence([(make(), make()) for _ in range(4)])
    assert stack.plan(torch.randn(4, 128)).plain < 300_000 < make()[0].weight.nbytes + 50_000


@pytest.mark.parametrize("share", ["50%", "70%", "90%"])
def test_autocast_casts_a_shared_weight_once_in_forward_and_twice_in_recompute(share):
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    stack, x, grads = (
        rg.ReversibleSequence([(shared, shared)] * 4, exact=True),
        torch.randn(512, 64, requires_grad=True),
        [],
    )
    for stack.memory in (rg.Keep(), *[rg.Budget(share)] * 3):
        with torch.autocast("cpu", torch.bfloat16):
            y = stack(x)
        grads.append(torch.autograd.grad(y.float().square().mean(), [x, *stack.parameters()]))
    for got in grads[1:]:
        assert all(map(torch.equal, got, grads[0]))


@torch.library.custom_op("retrograd_tests::drop", mutates_args=())
def drawing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) * (torch.rand_like(x) > 0.1)


drawing.register_fake(lambda x, w: torch.empty_like(x))
drawing.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
register_flop_formula(torch.ops.retrograd_tests.drop)(
    lambda a, b, *_, out_shape=None, **__: 100 * a[0] * a[1] * b[1]
)


class Draws(nn.Module):
    """A product that draws, and then dropout, which draws after it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = nn.functional.dropout(torch.ops.retrograd_tests.drop(x, self.first.weight), 0.5)
        return self.last(h.sin())


@pytest.mark.parametrize("share", ["50%", "70%", "90%"])
def test_products_that_draw_are_run_again(share):
    torch.manual_seed(0)
    stack, x, grads = (
        rg.ReversibleSequence([(Draws(), Draws()) for _ in range(4)]),
        torch.randn(512, 64, requires_grad=True),
        [],
    )
    for stack.memory in (rg.Keep(), *[rg.Budget(share)] * 3):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(stack(x).square().mean(), [x])[0])
    for got in grads[1:]:
        torch.testing.assert_close(got, grads[0], rtol=1e-3, atol=1e-6)


def test_ways_that_are_worth_the_same():
    make = lambda: nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))  # noqa: E731
    again = lambda fn: lambda x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)  # noqa: E731
    stack = rg.ReversibleSequence(
        [(make(), again(make())) for _ in range(4)], memory=rg.Budget("90%")
    )
    for _ in range(2):
        step(stack, torch.randn(1024, 32, requires_grad=True))
        stack.zero_grad()


def test_functions_that_were_replaced_are_watched_anew():
    stack = rg.ReversibleSequence(
        [(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(8)], memory=rg.Budget("3 MiB")
    )
    x = torch.randn(512, 64, requires_grad=True)
    needed(stack, x)
    for block in stack.blocks:
        block.f, block.g = FeedForward(64), FeedForward(64)
    assert needed(stack, x) <= 1.02 * 3 * MIB


def test_arguments_that_are_no_tensors_count_too():
    class Repeated(nn.Linear):
        def forward(self, x, n):
            for _ in range(n):
                x = super().forward(x).tanh()
            return x

    stack = rg.ReversibleSequence(
        [(Repeated(64, 64), Repeated(64, 64)) for _ in range(4)], memory=rg.Budget("3 MiB")
    )
    x = torch.randn(512, 64, requires_grad=True)
    for n in (1, 1, 4, 4):
        stack.zero_grad()
        x.grad = None
        bytes_ = activation_bytes(
            lambda n=n: stack(x, n=n).square().mean().backward(), [*stack.parameters(), x]
        )
        assert bytes_ <= 1.02 * 3 * MIB


def test_a_plan_between_forward_and_backward_disturbs_nothing():
    make = lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))  # noqa: E731
    stack = rg.ReversibleSequence([(make(), make()) for _ in range(3)]).eval()
    x = torch.randn(16, 8, requires_grad=True)
    y = stack(x)
    stack.plan(x)
    y.sum().backward()


def test_nothing_to_train():
    stack = rg.ReversibleSequence(
        [(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)], memory=rg.Budget("50%")
    )
    stack.requires_grad_(False)
    for _ in range(3):
        assert not stack(torch.randn(2, 8)).requires_grad


def test_streams_that_an_anchor_kept_and_someone_edited():
    stack = rg.ReversibleSequence(
        [(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)], memory=Fixed(Choice(streams=True))
    )
    x = torch.randn(2, 8)
    y = stack(x)
    x.mul_(2)
    with pytest.raises(rg.RetrogradError, match="a stream that was kept"):
        y.sum().backward()


def test_frozen_functions_run_once_if_their_output_is_kept():
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    frozen = [Counted(4, 4).requires_grad_(False) for _ in range(4)]
    first = rg.Update("a", frozen[0], ("b",))
    net = rg.Reversible(
        [first, rg.Update("c", nn.Linear(4, 4), ("a",)), rg.Update("c", nn.Linear(4, 4), ("b",))]
    )
    net.memory = Fixed(Choice(output=True))
    streams = {name: torch.randn(2, 4) for name in "abc"}
    net(streams)["c"].sum().backward()
    assert frozen[0].calls == 1


# --- when it plans


def test_settled_after_two_steps_and_again_when_shapes_change(monkeypatch):
    made = []
    plan = Profile._made
    monkeypatch.setattr(
        Profile, "_made", lambda self, *args: (made.append(args), plan(self, *args))[1]
    )
    stack = rg.ReversibleSequence(
        [(FeedForward(32), FeedForward(32)) for _ in range(8)], memory=rg.Budget("60%")
    )
    for _ in range(4):
        stack.zero_grad()
        step(stack, torch.randn(256, 32, requires_grad=True))
    assert len(made) == 2  # after the first forward, and after the first backward
    for size in (256, 320, 320, 256, 320):
        stack.zero_grad()
        step(stack, torch.randn(size, 32, requires_grad=True))
    assert len(made) == 4
    assert len(stack._cache.profiles) == 2
    for size in range(256, 356):
        stack(torch.randn(size, 32))
    assert len(stack._cache.profiles) <= REMEMBERED
    assert not copy.deepcopy(stack)._cache.profiles


def test_a_first_step_that_fails_is_not_what_is_planned_from():
    class Fails(nn.Linear):
        fail = True

        def forward(self, x):
            if self.fail:
                raise RuntimeError("no")
            return super().forward(x)

    stack = rg.ReversibleSequence(
        [(FeedForward(8), Fails(8, 8)) for _ in range(3)], memory=rg.Budget("1 MiB")
    )
    with pytest.raises(RuntimeError, match="no"):
        stack(torch.randn(2, 8, requires_grad=True))
    Fails.fail = False
    for _ in range(2):
        step(stack, torch.randn(2, 8, requires_grad=True))
    (profile,) = stack._cache.profiles.values()
    assert profile.is_complete


@pytest.mark.parametrize("around", ["checkpoint", "stack"])
def test_inside_something_that_runs_it_again(around):
    torch.manual_seed(0)
    inner = rg.ReversibleSequence(
        [(zoo.Mix(4), zoo.Mix(4)) for _ in range(3)], memory=rg.Budget("1 GiB")
    ).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    if around == "checkpoint":
        run = lambda: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)  # noqa: E731
    else:
        outer = rg.ReversibleSequence(
            [(inner, zoo.Mix(4).double())] * 2, memory=rg.Reverse(keep_last=False)
        )
        run = lambda: outer(x)  # noqa: E731
    for _ in range(3):
        inner.memory = rg.Budget("1 GiB")
        got = torch.autograd.grad(zoo.loss(run()), x)
        inner.memory = rg.Keep()
        torch.testing.assert_close(got, torch.autograd.grad(zoo.loss(run()), x))


@pytest.mark.parametrize(
    "wrong", [0, -1, 1.5, True, None, "much", "2 XB", "-1 GiB", "0%", "1..2 MB"]
)
def test_budgets_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="pass a number of bytes, a size such as"):
        rg.Budget(wrong)


def test_sizes():
    sizes = {
        "1 KiB": 1024,
        "2kb": 2000,
        "1.5 MiB": 3 * 2**19,
        ".5 GiB": 2**29,
        "7": 7,
        "3 B": 3,
        12: 12,
    }
    assert {size: rg.Budget(size).bytes_of(0) for size in sizes} == sizes
    assert rg.Budget("25%").bytes_of(1000) == 250


# --- the plan, as data


def test_a_plan_is_data(tmp_path):
    stack = rg.ReversibleSequence(
        [(FeedForward(32), FeedForward(32)) for _ in range(6)], memory=rg.Budget("40%")
    )
    x = torch.randn(64, 32)
    state = torch.get_rng_state()
    plan = stack.plan(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert plan == stack.plan(x)
    assert [row.name for row in plan.rows][:2] == ["blocks.0.f", "blocks.0.g"]
    assert "12 updates" in str(plan) and "MiB at the peak" in str(plan)
    stack.memory = rg.Reverse()
    other = stack.plan(x)
    assert other != plan and other.peak < plan.peak < plan.plain and other.time > plan.time
    plan.draw(tmp_path / "plan.png", other)
    assert (tmp_path / "plan.png").stat().st_size > 5000
    stack.memory = rg.Keep()
    assert {row.keeps for row in stack.plan(x).rows} == {"everything"}


def test_plans_of_programs_and_of_modules_with_buffers():
    net = rg.Reversible(
        [rg.Update("ab"[i % 2], nn.BatchNorm1d(4), ("ba"[i % 2],)) for i in range(6)],
        memory=rg.Budget("80%"),
    )
    before = [buffer.clone() for buffer in net.buffers()]
    plan = net.plan({"a": torch.randn(8, 4), "b": torch.randn(8, 4)})
    assert len(plan.rows) == 6 and "updates.0" in str(plan)
    assert all(map(torch.equal, before, net.buffers()))


# --- anchors


def test_anchors_bound_drift(monkeypatch):
    """With bfloat16 streams, 96 blocks deep: the input as rebuilt is off by what a few blocks make
    of it.
    """
    torch.manual_seed(0)
    blocks = [(Attention(16, 2), FeedForward(16)) for _ in range(96)]
    stack = rg.ReversibleSequence(blocks, stream_dtype=torch.bfloat16, drift="ignore").bfloat16()
    x, seen = torch.randn(2, 8, 16).bfloat16(), []
    blocks[0][0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    errors = []
    for stack.memory in (
        rg.Reverse(keep_last=False),
        rg.Anchor(every=4, keep_last=False),
        rg.Anchor(every=96, keep_last=False),
    ):
        seen.clear()
        stack(x).float().square().mean().backward()
        errors.append((seen[0] - seen[-1]).abs().max().item())
    assert errors[1] < errors[0] / 4
    assert errors[2] == errors[0]


def test_anchors_cost_one_state_each_and_are_let_go():
    x = torch.randn(64, 64, requires_grad=True)
    make = lambda memory: rg.ReversibleSequence(  # noqa: E731
        [(FeedForward(32), FeedForward(32)) for _ in range(16)], streams=rg.Split(), memory=memory
    )
    state = 2 * 64 * 32 * 4
    between = []
    for memory in (rg.Reverse(keep_last=False), rg.Anchor(every=4, keep_last=False)):
        stack = make(memory)
        with LiveBytes() as live:
            y = stack(x)
            between.append(live.now)
            del y
            assert live.now == 0
    assert between[1] - between[0] == 3 * state


def test_where_blocks_start():
    assert block_starts("ababab") == [0, 2, 4]
    assert block_starts("aab") == [0, 1]
    assert block_starts("") == []
    assert sorted(rg.Anchor(2, keep_last=False).plan(rg.Call("abababab")).choices) == [4]
    with pytest.raises(ValueError, match="every is a number of blocks"):
        rg.Anchor(every=0)


# --- with everything else


@pytest.mark.parametrize("system", test_compat_parity.CASES, ids=lambda system: system.__name__)
def test_the_five_systems(system):
    case = system()
    net, (args, kwargs) = case.build(case.ours, 0.2).double(), case.inputs()

    def run(memory):
        net.engine.memory = memory
        return [
            t
            for ts in test_compat_parity.step(net, args, kwargs).values()
            for t in ts
            if t is not None
        ]

    expected = run(rg.Keep())
    for _ in range(3):
        for got, then in zip(run(rg.Budget("80%")), expected, strict=True):
            torch.testing.assert_close(got, then)


def test_keyword_arguments_with_gradients():
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(zoo.Mix(4), zoo.Mix(4)) for _ in range(12)]).double()
    x, context = (torch.randn(64, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grads = []
    for stack.memory in (rg.Keep(), rg.Budget("60%"), rg.Budget("60%"), Fixed(CHOICES["both"])):
        grads.append(
            torch.autograd.grad(
                zoo.loss(stack(x, context=context)), [x, context, *stack.parameters()]
            )
        )
    for got in grads[1:]:
        assert zoo.worst(list(got), list(grads[0])) < 1e-9


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's own
@pytest.mark.parametrize("share", ["40%", "80%"])
def test_compiled_functions(share):
    torch.manual_seed(0)
    functions = [(FeedForward(16), FeedForward(16)) for _ in range(10)]
    plain = rg.ReversibleSequence(functions, memory=rg.Keep())
    x = torch.randn(128, 16, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    compiled = [tuple(torch.compile(fn, backend="aot_eager") for fn in pair) for pair in functions]
    stack = rg.ReversibleSequence(compiled, memory=rg.Budget(share))
    for _ in range(3):
        got = torch.autograd.grad(stack(x).square().sum(), [x, *stack.parameters()])
        assert zoo.worst(list(got), list(expected)) < 1e-4


def ddp(memory, rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        rg.ReversibleSequence([(Attention(16, 2), Dropping(16)) for _ in range(6)], memory=memory)
    )
    return distributed_steps(model, rank)


def fsdp(memory, rank):
    torch.manual_seed(0)
    model = rg.ReversibleSequence(
        [(Attention(16, 2), Dropping(16)) for _ in range(6)], memory=memory
    )
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return distributed_steps(model, rank)


def distributed_steps(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        torch.manual_seed(10 * i + rank)
        model(torch.randn(2, 8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


MEMORY = {
    "budget": rg.Budget("60%"),
    "keep": rg.Keep(),
    "output": Fixed("output"),
    "both": Fixed("both"),
}
CASES = {
    f"{run.__name__}-{name}": functools.partial(run, memory)
    for run in (ddp, fsdp)
    for name, memory in MEMORY.items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.run(CASES, tmp_path_factory.mktemp("budget"))


@pytest.mark.distributed
@pytest.mark.parametrize("memory", [name for name in MEMORY if name != "keep"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_in_many_processes(results, wrapper, memory):
    for got, expected in zip(results[f"{wrapper}-{memory}"], results[f"{wrapper}-keep"]):
        assert zoo.worst(got, expected) < 1e-5


def test_frames_go_as_backward_goes(monkeypatch):
    """What is kept for an update is let go when backward has passed it: so late updates may have
    more.
    """
    stack = rg.ReversibleSequence(
        [(FeedForward(32), FeedForward(32)) for _ in range(16)], memory=Fixed(Choice(output=True))
    )
    x, now = torch.randn(256, 32, requires_grad=True), []
    recompute = Walk.recompute
    with LiveBytes() as live:
        monkeypatch.setattr(
            Walk,
            "recompute",
            lambda self, *a, **k: (now.append(live.now), recompute(self, *a, **k))[1],
        )
        stack(x).square().mean().backward()
    gradients = sum(p.nbytes for p in stack.blocks[0].f.parameters())
    fell = [a - b + gradients for a, b in itertools.pairwise(now[2:])]
    assert sum(fell) / len(fell) > 0.9 * 256 * 32 * 4


# --- what a plan is made for


class Pairs(nn.Module):
    """Whose backward needs more than the gradients of what it read."""

    def __init__(self, power):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.o = nn.Linear(128, 16)
        self.power = power

    def forward(self, x):
        h = self.q(x)
        return self.o(self.power(h[:, None] - h[None]).sum(-1).tanh()) * 0.01


@pytest.mark.parametrize("power", [torch.square, torch.sin, torch.erf, torch.cosh, torch.abs])
@pytest.mark.parametrize("limit", ["40%", "70%"])
def test_functions_whose_backward_needs_intermediate_tensors(power, limit):
    torch.manual_seed(0)
    pairs = [(Pairs(power), Pairs(power)) for _ in range(6)]
    stack = rg.ReversibleSequence(pairs, memory=rg.Budget(limit))
    x = torch.randn(128, 16)
    bytes_ = stack.memory.bytes_of(stack.plan(x).plain)
    for _ in range(3):
        run = lambda: stack(x).square().mean().backward()  # noqa: E731
        assert activation_bytes(run, stack.parameters()) <= 1.02 * bytes_


def mlp(hidden):
    return nn.Sequential(nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32))


def replace_functions(stack):
    for block in stack.blocks:
        block.f = mlp(512)
        block.g = mlp(512)


def replace_inner_layers(stack):
    for block in stack.blocks:
        for function in (block.f, block.g):
            function[0] = nn.Linear(32, 512)
            function[2] = nn.Linear(512, 32)


def widen_by_an_attribute(stack):
    for block in stack.blocks:
        block.f.times = 8


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(64)
        self.times = 1

    def forward(self, x):
        for _ in range(self.times):
            x = self.inner(x)
        return x


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: mlp(64), replace_functions),
        (lambda: mlp(64), replace_inner_layers),
        (Repeats, widen_by_an_attribute),
    ],
)
def test_a_plan_is_made_anew_for_other_functions(make, change):
    limit = 2_500_000
    stack = rg.ReversibleSequence([(make(), make()) for _ in range(4)], memory=rg.Budget(limit))
    x = torch.randn(256, 32)
    for changed in (False, True):
        if changed:
            change(stack)
        for _ in range(3):
            bytes_ = activation_bytes(lambda: stack(x).sum().backward(), stack.parameters())
            assert bytes_ <= 1.02 * limit


class Tempered(nn.Linear):
    def forward(self, x, temperature):
        return super().forward(x) * (1 + temperature / 1000)


@pytest.mark.parametrize(("value", "measured"), [(lambda i: 1 - i / 100, 1), (lambda i: i, 9)])
def test_numbers_that_change_in_every_call(value, measured, monkeypatch):
    made = []
    monkeypatch.setattr(
        profiling, "Profile", lambda targets: made.append(len(targets)) or Profile(targets)
    )
    pairs = [(Tempered(32, 32), Tempered(32, 32)) for _ in range(4)]
    stack = rg.ReversibleSequence(pairs, memory=rg.Budget("150%"))
    x = torch.randn(64, 32)
    for i in range(40):
        stack(x, temperature=value(i)).sum().backward()
    assert len(made) <= measured


def test_a_number_that_turns_out_to_matter():
    class Repeated(nn.Linear):
        def forward(self, x, share):
            for _ in range(int(4 * share)):
                x = super().forward(x).tanh()
            return x

    limit = 2_200_000  # less than everything, whatever the number is
    stack = rg.ReversibleSequence(
        [(Repeated(64, 64), Repeated(64, 64)) for _ in range(4)], memory=rg.Budget(limit)
    )
    x = torch.randn(512, 64)
    peaks = []
    for share in (0.25, 0.25, 1.0, 1.0, 0.25, 1.0):
        run = lambda share=share: stack(x, share=share).square().mean().backward()  # noqa: E731
        peaks.append(activation_bytes(run, stack.parameters()))
    assert max(peaks[:2] + peaks[3:]) <= 1.02 * limit < peaks[2]


def test_many_lengths_settle(monkeypatch):
    made = []
    monkeypatch.setattr(
        profiling, "Profile", lambda targets: made.append(len(targets)) or Profile(targets)
    )
    stack = rg.ReversibleSequence([(mlp(64), mlp(64)) for _ in range(2)], memory=rg.Budget("90%"))
    for i in range(300):
        stack(torch.randn(200 + i % 100, 32)).sum().backward()
    assert len(made) == 100


def test_many_budgets_are_forgotten():
    stack = rg.ReversibleSequence([(mlp(64), mlp(64)) for _ in range(2)])
    x = torch.randn(256, 32)
    for i in range(50):
        stack.memory = rg.Budget(2_000_000 + i)
        stack(x).sum().backward()
    (profile,) = stack._cache.profiles.values()
    assert len(profile._plans) <= 8
