"""`Chunked`: the same function in pieces, with inner activations that shrink by as much. And
`rg.measure`.
"""

import copy

import pytest
import torch
from torch import nn

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from retrograd.measure import LiveBytes
from tests import zoo


class Wide(nn.Sequential):
    def __init__(self, width, dropout=0.0):
        super().__init__(
            nn.Linear(width, 8 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(8 * width, width)
        )


@pytest.mark.parametrize("chunks", [1, 3, 8, 100])
def test_the_same_result_and_gradients(chunks):
    torch.manual_seed(0)
    fn, x = Wide(4).double(), torch.randn(2, 10, 4, dtype=torch.float64, requires_grad=True)
    chunked = rg.Chunked(fn, chunks)
    assert zoo.worst(zoo.gradients(fn, chunked(x), x), zoo.gradients(fn, fn(x), x)) < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), fn(x))


@pytest.mark.parametrize(
    "memory", [rg.Reverse(), rg.Reverse(keep_last=False), rg.Budget("60%"), rg.Keep()], ids=str
)
def test_in_a_stack_with_dropout_and_a_context(memory):
    torch.manual_seed(0)
    stack = rg.ReversibleSequence(
        [(zoo.Mix(4), rg.Chunked(zoo.Mix(4, dropout=0.3), 3)) for _ in range(4)],
        route={"context": "fg"},
    )
    stack = stack.double()
    x, context = (torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run():
        torch.manual_seed(1)
        return zoo.gradients(stack, stack(x, context=context), x, context)

    stack.memory = rg.Keep()
    expected = run()
    stack.memory = memory
    for _ in range(3):
        assert zoo.worst(run(), expected) < 1e-9


def test_inner_activations_shrink_by_the_number_of_chunks():
    torch.manual_seed(0)
    x, peaks = torch.randn(1, 512, 16, requires_grad=True), []
    for chunks in (1, 8):
        stack = rg.ReversibleSequence([(nn.Tanh(), rg.Chunked(Wide(16), chunks)) for _ in range(4)])
        with LiveBytes() as live:
            stack(x).square().mean().backward()
        peaks.append(live.peak)
    stream, inner = x.nbytes, 8 * x.nbytes
    assert peaks[0] > 3 * inner
    assert peaks[1] < 3 * inner / 8 + 12 * stream


def test_its_price_is_one_more_evaluation():
    stack = rg.ReversibleSequence(
        [(Wide(8), rg.Chunked(Wide(8), 2)) for _ in range(3)], memory=rg.Reverse(keep_last=False)
    )
    x = torch.randn(2, 6, 8)
    calls = []
    stack.blocks[0].g.fn.register_forward_pre_hook(lambda *_: calls.append(1))
    measured = rg.measure.step(lambda: stack(x).sum().backward(), stack)
    assert measured.evaluations["blocks.0.f"] == 2
    assert (
        len(calls) == 2 * 3 * 2
    )  # two pieces, three times, in each of the two steps that `measure` runs


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: rg.Chunked(nn.ReLU(), 0), ValueError, "chunks is a whole number"),
        (lambda: rg.Chunked(nn.ReLU(), 2.0), ValueError, "chunks is a whole number"),
        (lambda: rg.Chunked("fn", 2), TypeError, "fn is a module or a function"),
        (
            lambda: rg.Chunked(nn.ReLU(), 2, dim=3)(torch.zeros(2, 2)),
            ValueError,
            "the input has 2 dimensions",
        ),
    ],
)
def test_what_makes_no_sense(make, error, text):
    with pytest.raises(error, match=text):
        make()


# --- measure


def test_measure_counts_what_a_step_takes():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32)
    model = nn.Sequential(
        nn.Linear(32, 32),
        rg.ReversibleSequence([(Attention(32, 2), FeedForward(32)) for _ in range(6)]),
    )
    run = lambda: model(x).square().mean().backward()  # noqa: E731
    reverse = rg.measure.step(run, model)
    model[1].memory = rg.Keep()
    kept = rg.measure.step(run, model)
    assert {name: count for name, count in kept.evaluations.items() if count != 1} == {}
    assert sum(reverse.evaluations.values()) == 12 + 10  # the last block is free
    assert set(reverse.evaluations) == {f"1.blocks.{i}.{name}" for i in range(6) for name in "fg"}
    assert 1.25 < reverse.flops / kept.flops < 1.34
    assert reverse.activation_bytes < kept.activation_bytes / 2
    assert kept.kept["1.blocks.2.g"] > 9 * x.nbytes
    assert reverse.kept["1.blocks.2.g"] == 0
    assert reverse.allocated is None, "there is no accelerator"


def test_measure_leaves_modules_as_they_were():
    f = torch.tanh
    net = rg.Reversible([rg.Update("a", f, ("b",)), rg.Update("b", nn.Linear(4, 4), ("a",))])
    before = copy.deepcopy(net.state_dict())
    streams = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}
    measured = rg.measure.step(lambda: net(streams)["b"].sum().backward(), net)
    assert measured.evaluations["updates.0"] in (1, 2)
    assert net.updates[0].fn is f
    assert not net.updates[1].fn._forward_pre_hooks
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_measuring_plain_functions_that_share_arguments():
    """By signature, and each update under its own name, also where blocks share a function."""
    weight = torch.randn(4, 4, requires_grad=True)
    f = lambda x, scale: x @ weight * scale  # noqa: E731
    g = torch.nn.Linear(4, 4)
    stack = rg.ReversibleSequence([(f, g)] * 3, memory=rg.Reverse(keep_last=False))
    measured = rg.measure.step(lambda: stack(torch.randn(2, 4), scale=2.0).sum().backward(), stack)
    assert measured.evaluations == {f"blocks.{i}.{name}": 2 for i in range(3) for name in "fg"}


# --- what its function uses is replayed


class Pieces(nn.Module):
    """The same pieces without recompute: what `Chunked` must equal."""

    def __init__(self, fn, chunks):
        super().__init__()
        self.fn = fn
        self.chunks = chunks

    def forward(self, x, **kwargs):
        return torch.cat([self.fn(piece, **kwargs) for piece in x.chunk(self.chunks, 1)], 1)


class Noise(nn.Linear):
    """A generator of its own."""

    def __init__(self):
        super().__init__(8, 8)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return super().forward(x * noise)

    def state(self):
        return self.generator.get_state().tolist()


class Range(nn.Linear):
    """A range of activations, as a buffer, and the number of calls."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.scale.lerp_(x.abs().max(), 0.5)
            self.calls += 1
        return super().forward(x / self.scale.clone())

    def state(self):
        return [self.scale.item(), self.calls.item()]


class RunningMean(Range):
    """The same in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.seen = [torch.ones((), dtype=torch.float64)]

    def forward(self, x):
        self.seen[0].lerp_(x.detach().abs().max(), 0.5)
        return super().forward(x / self.seen[0].clone())

    def state(self):
        return [*super().state(), self.seen[0].item()]


class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5))

    def state(self):
        return torch.get_rng_state().tolist()


@pytest.mark.parametrize("make", [Noise, Range, RunningMean, Dropped])
@pytest.mark.parametrize("memory", [rg.Reverse(keep_last=False), rg.Keep()], ids=repr)
def test_state_of_the_function_is_replayed(make, memory):
    results = []
    for wrap in (Pieces, rg.Chunked):
        torch.manual_seed(0)
        mode = rg.Keep() if wrap is Pieces else memory
        pairs = [(wrap(make(), 2), nn.Linear(8, 8)) for _ in range(3)]
        stack = rg.ReversibleSequence(pairs, memory=mode).double()
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        for _ in range(2):
            grads = torch.autograd.grad(stack(x).sin().sum(), list(stack.parameters()))
        states = [block.f.fn.state() for block in stack.blocks]
        results.append((list(grads), states))
    (expected, states), (got, states_again) = results
    assert zoo.worst(got, expected) < 1e-9
    assert states_again == states


def doubled(stack):
    state = {name: 2 * value for name, value in stack.state_dict().items()}
    stack.load_state_dict(state, assign=True)


def test_other_weights_between_forward_and_backward():
    results = []
    for wrap in (Pieces, rg.Chunked):
        torch.manual_seed(0)
        pairs = [(wrap(nn.Linear(8, 8), 2), nn.Linear(8, 8)) for _ in range(3)]
        stack = rg.ReversibleSequence(pairs, memory=rg.Keep() if wrap is Pieces else rg.Reverse())
        weights = list(stack.parameters())
        loss = stack(torch.randn(2, 6, 8)).sin().sum()
        doubled(stack)
        results.append(list(torch.autograd.grad(loss, weights)))
    assert zoo.worst(results[1], results[0]) < 1e-5


def test_functional_call():
    results = []
    for wrap in (Pieces, rg.Chunked):
        torch.manual_seed(0)
        pairs = [(wrap(nn.Linear(8, 8), 2), nn.Linear(8, 8)) for _ in range(3)]
        stack = rg.ReversibleSequence(pairs, memory=rg.Keep() if wrap is Pieces else rg.Reverse())
        weights = {n: (1.5 * p.detach()).requires_grad_() for n, p in stack.named_parameters()}
        output = torch.func.functional_call(stack, weights, (torch.randn(2, 6, 8),))
        results.append(list(torch.autograd.grad(output.sin().sum(), list(weights.values()))))
    assert zoo.worst(results[1], results[0]) < 1e-5


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


def test_keyword_arguments_go_by_the_signature_of_the_function():
    pairs = [(rg.Chunked(Masked(8, 8), 2), nn.Linear(8, 8)) for _ in range(2)]
    stack = rg.ReversibleSequence(pairs)
    mask = torch.ones(8, requires_grad=True)
    stack(torch.randn(2, 6, 8), mask=mask).sum().backward()
    assert mask.grad is not None
