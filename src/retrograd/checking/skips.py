"""Does a function contain its own skip, as f(x) = x + g(x) does?

Without its weights (all matrices and biases set to zero), an ordinary function no longer depends on
its input, and such a function returns that: x, or relu(x), or x normalised. So it is called with
two random inputs, and the outputs are compared. A gated norm returns x normalised, too, but adds
nothing to x: that is looked for among the operations.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.checking.compare import is_same
from retrograd.checking.holdings import Holdings
from retrograd.core.private import DispatchMode, run_in_mode
from retrograd.core.streams import flatten, unflatten
from retrograd.core.updates import WithAux
from retrograd.stack import Stack

LIMIT = 0.05  # of relative differences: far above the rounding of bfloat16


def contains_skip(fn: Callable[..., Any], reads: Sequence[Any], arguments: dict[str, Any]) -> bool:
    """Whether `fn` adds one of its reads to what it computes. Calls it several times.

    False if that cannot be told: without weights, or if it fails for these inputs.
    """
    if _is_compiled(fn):
        return False
    holdings = Holdings((fn,))
    if any(isinstance(module, Stack) for module in holdings.modules):
        return False
    weights = _weights(holdings)
    if all(weight.ndim < 2 for weight in weights):
        return False
    with warnings.catch_warnings(), _set_to_zero(weights):
        warnings.simplefilter("ignore")
        probes = [_Probe(fn, reads, arguments, position) for position in range(len(reads))]
        return any(probe.finds_skip() for probe in probes)


def _is_compiled(fn: Any) -> bool:
    if hasattr(fn, "_orig_mod") or hasattr(fn, "_torchdynamo_orig_callable"):
        return True
    return isinstance(fn, nn.Module) and fn._compiled_call_impl is not None


def _weights(holdings: Holdings) -> list[Tensor]:
    """The matrices and biases of a function; not the gains of norms."""
    named = [pair for module in holdings.modules for pair in module.named_parameters(recurse=False)]
    named += [("", weight) for weight in holdings.weights]
    return [
        weight
        for name, weight in named
        if weight.is_floating_point() and (weight.ndim > 1 or name.endswith("bias"))
    ]


@contextlib.contextmanager
def _set_to_zero(weights: Sequence[Tensor]) -> Iterator[None]:
    """Put zeros in the place of weights, without a new version of them."""
    before = {id(weight): (weight, weight.data) for weight in weights}
    try:
        for weight, data in before.values():
            weight.data = torch.zeros_like(data)
        yield
    finally:
        for weight, data in before.values():
            weight.data = data


class _Probe:
    """A function, called with other values of one of its reads."""

    def __init__(
        self,
        fn: Callable[..., Any],
        reads: Sequence[Any],
        arguments: dict[str, Any],
        position: int,
    ) -> None:
        self.fn = fn
        self.reads = reads
        self.arguments = arguments
        self.position = position
        self.leaves, self.spec = flatten(reads[position])

    def finds_skip(self) -> bool:
        """Whether the read is in the output. False if the function refuses other values."""
        try:
            return bool(self.leaves) and self._finds_skip()
        except Exception:
            return False

    def _finds_skip(self) -> bool:
        """Whether the read is in the output, as it is or normalised."""
        p = self._values(0)
        q = self._values(1)
        at_p = self._call(p)
        at_q = self._call(q)
        if [leaf.shape for leaf in at_p] != [leaf.shape for leaf in p]:
            return False
        given = [b - a for a, b in zip(p, q)]
        returned = [b - a for a, b in zip(at_p, at_q)]
        if all(_distance(a, b) < LIMIT for a, b in zip(returned, given)):
            return True
        # Not as it is, but normalised: over the channels, or over the batch.
        is_alike = all(map(_is_row_by_row, at_q, q)) or all(map(_is_alike, returned, given))
        if not is_alike:
            return False
        twice = [2 * leaf for leaf in q]
        sums = _Sums(twice)
        at_twice_q = run_in_mode(sums, self._call, twice)
        return sums.found and all(_distance(a, b) < LIMIT for a, b in zip(at_twice_q, at_q))

    def _values(self, seed: int) -> list[Tensor]:
        """Numbers from 4 to 8, which a ReLU or GELU after the skip leaves as they are."""
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = [torch.rand(leaf.shape, generator=generator) for leaf in self.leaves]
        pairs = zip(drawn, self.leaves)
        return [(4 + 4 * values).to(leaf.device, leaf.dtype) for values, leaf in pairs]

    def _call(self, values: list[Tensor]) -> list[Tensor]:
        reads = list(self.reads)
        reads[self.position] = unflatten([value.clone() for value in values], self.spec)
        output = self.fn(*reads, **self.arguments)
        if isinstance(output, WithAux):
            output = output.output
        return [leaf.detach() for leaf in flatten(output)[0]]


class _Sums(DispatchMode):
    """While active, looks for an operation that adds something to one of these values."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.values = values
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if name in ("add", "add_"):
            first, second = args[:2]
            self.found |= self._is_sum(first, second) or self._is_sum(second, first)
        return func(*args, **(kwargs or {}))

    def _is_sum(self, value: Any, other: Any) -> bool:
        """Whether `value` is one of the values, and `other` as large."""
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            return False
        is_same_size = value.shape == other.shape
        return is_same_size and any(is_same(value.detach(), known) for known in self.values)


def _distance(a: Tensor, b: Tensor) -> float:
    """The difference, relative to the size of `b`. NaN if that is not finite."""
    a = a.double()
    b = b.double()
    return ((a - b).norm() / b.norm()).item()


def _is_alike(a: Tensor, b: Tensor) -> bool:
    """Whether they are proportional, up to a constant and gains that differ."""
    return bool(_correlations(a.reshape(1, -1), b.reshape(1, -1)) > 0.8)


def _is_row_by_row(a: Tensor, b: Tensor) -> bool:
    """The same for each row."""
    return bool(_correlations(a, b).mean() > 0.8)


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Of the rows. NaN where a row is constant."""
    a = a.double() - a.double().mean(-1, keepdim=True)
    b = b.double() - b.double().mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
