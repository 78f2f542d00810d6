"""Rounding errors of rebuilt streams: kept small by wide streams, and noticed where they
are not.
"""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from retrograd.core.guards import drift
from retrograd.core.walk import Walk


def transformer(depth, width=16, **options):
    torch.manual_seed(0)
    return rg.ReversibleSequence(
        [(Attention(width, 2), FeedForward(width)) for _ in range(depth)], **options
    )


def shaky(**options):
    """Momentum enlarges errors by 1 / gamma at every function."""
    torch.manual_seed(0)
    blocks = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(24)]
    return rg.ReversibleSequence(blocks, coupling=rg.Momentum(0.85), **options)


def backward(stack, x=None):
    stack(torch.randn(2, 4) if x is None else x).square().mean().backward()


def test_warns_once_and_names_the_update():
    stack = shaky()
    with pytest.warns(rg.DriftWarning) as seen:
        backward(stack)
    (warning,) = seen
    text = str(warning.message)
    assert text.startswith("update ") and "(blocks." in text.splitlines()[0]
    assert "of its size; healthy networks of this dtype stay below 3e-04" in text
    assert "exact=True" in text and "rg.check(model, x)" in text
    assert warning.filename == __file__  # where backward was called, not a line of ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(stack)  # once is enough


def test_raises_if_asked_to():
    with pytest.raises(
        rg.DriftError,
        match=r"(?s)update \d+ of 96 \(blocks\.\d+.*rebuilt stream 'x\d' is off by .*exact=True",
    ):
        backward(shaky(drift="raise"))
    assert issubclass(rg.DriftError, rg.RecomputeError)


def test_or_neither():
    backward(shaky(drift="ignore"))


def test_the_first_update_in_walking_order_is_named():
    """The one nearest to the end whose state is off: later in backward means earlier in the
    network, and worse.
    """
    with pytest.raises(rg.DriftError) as error:
        backward(shaky(drift="raise"))
    assert int(str(error.value).split()[1]) > 0


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16-autocast", "bfloat16", "float16"])
def test_healthy_networks_are_left_in_peace(kind):
    """64 blocks of a transformer, in every precision, with streams as wide as they are by
    default.
    """
    stack, x = transformer(64, drift="raise"), torch.randn(2, 8, 16)
    context = contextlib.nullcontext()
    if kind == "bfloat16-autocast":
        context = torch.autocast("cpu", torch.bfloat16)
    else:
        stack, x = stack.to(getattr(torch, kind)), x.to(getattr(torch, kind))
    with context:
        y = stack(x)
    assert y.dtype == x.dtype
    y.float().square().mean().backward()


def test_narrow_streams_are_not():
    stack, x = (
        transformer(192, drift="raise", stream_dtype=torch.bfloat16).bfloat16(),
        torch.randn(2, 8, 16).bfloat16(),
    )
    with pytest.raises(rg.RecomputeError):
        backward(stack, x)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_streams_are_float32_by_default(narrow, monkeypatch):
    seen = []
    begin = Walk.begin_at
    monkeypatch.setattr(
        Walk,
        "begin_at",
        lambda self, state: (seen.append(state["x1"][0].dtype), begin(self, state))[1],
    )
    for options in ({}, {"stream_dtype": narrow}, {"stream_dtype": torch.float64}):
        transformer(2, **options).to(narrow)(torch.randn(1, 4, 16, dtype=narrow))
    assert seen == [torch.float32, narrow, torch.float64]


def test_wide_streams_make_narrow_gradients_right():
    """bfloat16 parameters: rebuilt against kept, the gradients differ by a few roundings, not by
    their size.
    """
    x = torch.randn(2, 8, 16, dtype=torch.bfloat16)

    def gradients(memory, **options):
        stack = transformer(48, memory=memory, drift="ignore", **options).bfloat16()
        backward(stack, x)
        return torch.cat([p.grad.float().flatten() for p in stack.blocks[0].parameters()])

    expected = gradients(rg.Keep())
    wide = (gradients(rg.Reverse()) - expected).norm() / expected.norm()
    expected = gradients(rg.Keep(), stream_dtype=torch.bfloat16)
    narrow = (
        gradients(rg.Reverse(), stream_dtype=torch.bfloat16) - expected
    ).norm() / expected.norm()
    assert wide < 0.01 < narrow


class Scaled(nn.Module):
    """bfloat16 inside, float32 outside: a scale that autocast leaves alone."""

    def __init__(self, fn, width):
        super().__init__()
        self.fn, self.scale = fn, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.fn(x) * self.scale


@pytest.mark.parametrize("depth", [12, 64])
def test_what_functions_compute_in_counts_not_what_they_return(depth):
    torch.manual_seed(0)
    blocks = [(Scaled(Attention(64, 4), 64), Scaled(FeedForward(64), 64)) for _ in range(depth)]
    stack = rg.ReversibleSequence(blocks, drift="raise")
    with torch.autocast("cpu", torch.bfloat16):
        y = stack(torch.randn(4, 32, 64))
    assert y.dtype == torch.float32
    y.square().mean().backward()


def test_infinite_values_do_not_blind_it_to_the_others():
    class Counter(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.where(x.isfinite(), x * self.calls, x)

    stack = rg.ReversibleSequence([(Counter(), Counter()) for _ in range(4)], verify="never")
    x = torch.ones(16, requires_grad=True)
    with torch.no_grad():
        x[3] = float("inf")
    with pytest.raises(rg.RecomputeError, match="did not arrive"):
        stack(x).sum().backward()


def test_hooks_that_cast_and_do_something_else_are_refused():
    stack = rg.ReversibleSequence(
        [(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()) for _ in range(4)]
    )

    def scale(factor):
        return lambda module, args: (
            {k: tuple((v * factor).bfloat16() for v in t) for k, t in args[0].items()},
            *args[1:],
        )

    handles = [block.register_forward_pre_hook(scale(1.02)) for block in stack.blocks]
    with pytest.raises(rg.RetrogradError, match="a hook on the block replaced stream 'x1'"):
        stack(torch.randn(8, 4))
    for handle, block in zip(handles, stack.blocks):
        handle.remove()
        block.register_forward_pre_hook(scale(1.0))
    backward(stack)


def test_leaves_that_are_not_widened_are_left_alone():
    f = lambda x: {"a": x["a"] * 0 + 1, "b": x["b"]}  # noqa: E731
    g = lambda x: {"a": x["a"] * 0, "b": x["b"]}  # noqa: E731
    y = rg.ReversibleSequence([(f, g)])(
        {"a": torch.tensor([2, 3]), "b": torch.ones(2, dtype=torch.bfloat16)}
    )
    assert y["a"].tolist() == [2.5, 3.5]
    assert y["b"].dtype == torch.bfloat16


def test_streams_without_leaves():
    net = rg.Reversible(
        [rg.Update("a", lambda b: {}, ("b",)), rg.Update("b", lambda a: torch.ones(2), ("a",))]
    )
    assert net({"a": {}, "b": torch.ones(2, requires_grad=True)})["b"].tolist() == [2, 2]


def test_couplings_of_ones_own_get_one_dtype():
    class Lerp(rg.Coupling):
        def forward(self, x, out):
            return torch.lerp(x, out, 0.25)

        def inverse(self, y, out):
            return torch.lerp(out, y, 1 / 0.75)

    stack = rg.ReversibleSequence(
        [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)], coupling=Lerp()
    ).bfloat16()
    backward(stack, torch.randn(2, 4).bfloat16())


def test_an_error_in_a_function_names_what_it_was_given():
    stack = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4))])
    with pytest.raises(RuntimeError) as error:
        stack(torch.randn(2, 4).bfloat16())
    assert "which reads x2: bfloat16[2, 4]" in error.value.__notes__[0]


def test_subclasses_of_tensor_are_sampled_like_tensors():
    class Named(torch.Tensor):
        pass

    x = torch.randn(3, 7)
    assert drift.sample(x.as_subclass(Named)) == drift.sample(x)


def test_the_guard_sees_little_and_costs_little():
    """Sixteen elements at eight places, whatever the depth and size."""
    stack = transformer(100)
    y = stack(torch.randn(2, 64, 16))
    assert len(range(0, 200, 25)) == drift.PLACES
    del y
    assert len(drift.sample(torch.randn(64, 64))) == 16
    assert len(drift.sample(torch.randn(2, 3))) == 6
    assert drift.sample(torch.ones(3, dtype=torch.int64)) is None


def test_samples_are_the_same_whatever_the_strides():
    x = torch.randn(6, 10, 4)
    assert drift.sample(x) == drift.sample(x.transpose(0, 2).contiguous().transpose(0, 2))


def test_streams_of_zeros_that_come_back_otherwise():
    """There is no size to be relative to."""

    def otherwise(x):
        return x.tanh() + float(rg.is_recomputing())

    stack = rg.ReversibleSequence([(otherwise, otherwise) for _ in range(4)], verify="never")
    with pytest.raises(rg.RecomputeError, match="is off by inf of its size"):
        stack(torch.zeros(2, 4, requires_grad=True)).sum().backward()
