"""Promise 11: activation memory is flat in depth; the caller's tensors stay; dropping an output
frees everything at once.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core import memory, tensors, walk
from retrograd.measure import LiveBytes
from tests import zoo


def wide(depth, kind=rg.Split(), dropout=0.0, **options):
    def make():
        layers = [nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout)]
        return nn.Sequential(*layers, nn.Linear(64, 32))

    return rg.ReversibleSequence([(make(), make()) for _ in range(depth)], streams=kind, **options)


def activations(stack, x):
    """The peak of a step, less gradients; and what is alive between forward and backward."""
    stack.zero_grad()
    x.grad = None
    with LiveBytes() as live:
        loss = stack(x).square().mean()
        between = live.now
        loss.backward()
    gradients = sum(p.grad.nbytes for p in [*stack.parameters(), x] if p.grad is not None)
    return live.peak - gradients, between


STREAM = 64 * 32 * 4  # bytes of one stream of 64 rows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": rg.Reverse(keep_last=False)},
        {"coupling": rg.Momentum(0.9), "drift": "ignore"},
    ],
)
def test_flat_in_depth(options):
    x = torch.randn(64, 64, requires_grad=True)
    peaks, betweens = zip(*(activations(wide(depth, **options), x) for depth in (4, 16, 64)))
    assert max(peaks) - peaks[0] < STREAM
    assert max(betweens) - betweens[0] < STREAM


def test_plain_grows():
    """The measure can tell: the same network kept whole needs ten times as much."""
    x = torch.randn(64, 64, requires_grad=True)
    assert activations(wide(64, memory=rg.Keep()), x)[0] > 10 * activations(wide(64), x)[0]


def test_what_is_alive_between_forward_and_backward():
    """Nothing kept: both streams and the output made of them. Counted."""
    x = torch.randn(64, 64, requires_grad=True)
    stack = wide(16, memory=rg.Reverse(keep_last=False))
    with LiveBytes() as live:
        y = stack(x)
        assert live.now == 2 * STREAM + y.nbytes
        del y
        assert live.now == 0


def test_gradients_in_training_do_not_add_to_activations_over_steps():
    stack, x = wide(8), torch.randn(64, 64)
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3)
    with LiveBytes() as live:
        after = []
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            stack(x).square().mean().backward()
            optimizer.step()
            after.append(live.now)
    assert len(set(after)) == 1


@pytest.mark.parametrize("case", zoo.REVERSED, ids=str)
def test_dropping_the_output_frees_everything_without_the_collector(case):
    stack, x = case.build(dropout=0.1)
    context = torch.randn(3, dtype=torch.float64, requires_grad=True)
    walks = weakref.WeakSet()
    original = walk.Walk.begin_at

    def begin_at(self, state):
        walks.add(self)
        original(self, state)

    walk.Walk.begin_at = begin_at
    gc.disable()
    try:
        with LiveBytes() as live:
            y = stack(x, context=context * 1.0)
            assert len(walks) == 1
            del y
            assert (len(walks), live.now) == (0, 0)
            y = stack(x, context=context * 1.0)  # and after a backward, retained or not
            zoo.loss(y).backward(retain_graph=True)
            zoo.loss(y).backward()
            del y
            gradients = sum(
                t.grad.nbytes
                for t in [*zoo.leaves(x), context, *stack.parameters()]
                if t.grad is not None
            )
            assert (len(walks), live.now) == (0, gradients)
    finally:
        gc.enable()
        walk.Walk.begin_at = original


def test_the_streams_before_a_block_are_freed_while_it_runs():
    stack = rg.ReversibleSequence([(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)])
    x = torch.randn(32, 64)
    with torch.no_grad(), LiveBytes() as live:
        stack(x)
    assert live.peak == 4 * x.nbytes  # both streams, what a function returns, and a new stream


def test_an_exception_in_forward_leaves_nothing_behind():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError("mine")

    stack = rg.ReversibleSequence(
        [(nn.Linear(4, 4), nn.Linear(4, 4)), (nn.Linear(4, 4), Fails(4, 4))]
    )
    x = torch.randn(2, 4)
    gc.disable()
    try:
        with LiveBytes() as live:
            try:
                stack(x)
            except KeyError:
                pass
            else:
                pytest.fail("did not raise")
            assert live.now == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_the_callers_tensors_are_neither_freed_nor_changed(case):
    stack, x = case.build()
    context = torch.randn(3, dtype=torch.float64)
    held = [*zoo.leaves(x), context]
    before = [(t.detach().clone(), t._version) for t in held]
    y = stack(x, context=context)
    after = [leaf.detach().clone() for leaf in zoo.leaves(y)]
    zoo.loss(y).backward()
    assert all(
        torch.equal(t, value) and t._version == version for t, (value, version) in zip(held, before)
    )
    assert all(torch.equal(leaf, value) for leaf, value in zip(zoo.leaves(y), after))


def test_streams_that_the_caller_holds_are_not_overwritten():
    """A program hands out its streams; backward starts from them and must not undo into them."""
    net = rg.Reversible(
        [rg.Update("a", zoo.Mix(4), ("b",)), rg.Update("b", zoo.Mix(4), ("a",))] * 3,
        memory=rg.Reverse(False),
    )
    out = net({"a": torch.randn(2, 4), "b": torch.randn(2, 4)})
    before = {name: value.detach().clone() for name, value in out.items()}
    zoo.loss(out).backward()
    assert all(torch.equal(out[name], before[name]) for name in out)


def test_undone_in_place_only_where_no_one_else_sees_it():
    tensor = torch.zeros(3)
    assert tensors.is_unshared(tensor)
    view = tensor[:1]
    assert not tensors.is_unshared(tensor)
    assert not tensors.is_unshared(view)
    del view
    assert tensors.is_unshared(tensor)
    w = torch.ones(3, requires_grad=True)
    saved = w * tensor.detach()  # autograd saves an alias, as it does in a recompute
    assert not tensors.is_unshared(tensor)
    del saved
    assert tensors.is_unshared(tensor)


# --- the plan, as data


@pytest.mark.parametrize(
    ("targets", "plan", "sample"),
    [
        ("", (0, 0), []),
        ("a", (0, 0), []),
        ("ab", (0, 1), []),
        ("abab", (2, 3), [0, 1]),
        ("ababab", (4, 5), [2, 3]),
        ("vwxyvwxy", (4, 7), [0, 1, 2, 3]),
        ("aaaa", (3, 3), [2]),
        ("abbab", (3, 4), [1, 2]),
    ],
)
def test_the_last_block_is_found(targets, plan, sample):
    found = rg.Reverse().plan(rg.Call(targets))
    assert (found.keep_if_free_from, found.keep_from) == plan
    assert list(found.sample) == sample


def test_the_last_block_is_kept_only_if_gradients_to_come_outweigh_it():
    assert memory.is_free([5, 7], 5)
    assert not memory.is_free([5, 7], 4)
    assert not memory.is_free([], 100)
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(rg.is_recomputing())
            return super().forward(x).sin().cos()

    stack = rg.ReversibleSequence([(Counted(32, 32), Counted(32, 32)) for _ in range(4)])

    def recomputed(rows):
        calls.clear()
        stack(torch.randn(rows, 32)).sum().backward()
        return sum(calls)

    assert recomputed(2) == 6  # the last block kept
    assert (
        recomputed(2) == 7
    )  # gradients exist already, nothing is still to come: only the last update is kept
    stack.zero_grad()
    assert recomputed(4096) == 7  # the block is larger than all gradients
    stack.memory = rg.Reverse(keep_last=False)
    assert recomputed(2) == 8


def test_live_bytes_counts_in_place_and_views_once():
    x = torch.zeros(256)
    with LiveBytes() as live:
        x.add_(1)
        view = x[:10]
        assert live.now == 0
        y = x + 1
        y.add_(1)
        z = y[:5]
        assert live.now == 1024
        del y
        assert live.now == 1024
        del z
        assert (live.now, live.peak) == (0, 1024)
    del view
