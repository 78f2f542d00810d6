"""Drift guard: sample the streams in forward, compare in backward.

Undoing an addition rounds, so a rebuilt stream drifts from what forward saw. A function that does
something else in recompute leads the walk astray as well. Both show in a few elements: sixteen of
every stream, before eight updates.

There are two limits. Both are relative to the size of the stream here and where the walk began, and
follow from the epsilon of the narrowest dtype in play:

- drift: the square root of epsilon, at most 3 % (3e-4 in float32, 3e-2 in bfloat16). Half of the
  digits are gone. Warns once, or raises, or neither, as the `drift` of the stack says.
- arrival: the fourth root of epsilon (2e-2 in float32, 0.3 in bfloat16). That is far more than
  rounding explains, so it raises.

An exact stack rounds nothing, and any difference raises.

Streams on the CPU are compared as soon as they are rebuilt, streams on an accelerator at the end of
backward (`readback.py`).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable, Iterator
from math import inf, isfinite
from operator import sub
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.guard import Guard
from retrograd.core.private import is_fake
from retrograd.core.program import (
    Application,
    Program,
    place,
)
from retrograd.core.readback import Numbers, Readback
from retrograd.core.streams import State
from retrograd.core.structure import Notices
from retrograd.core.tensors import local

PLACES = 8
ELEMENTS = 16

Sample = Numbers | Tensor | None  # see `sample`
Samples = dict[str, list[Sample]]  # of each leaf of each stream


class Drift(Guard):
    def __init__(
        self,
        program: Program,
        precision: Precision,
        notices: Notices,
        dtypes: Iterable[torch.dtype | None],
        readback: Readback,
    ) -> None:
        self.program = program
        self.readback = readback
        self.drift = precision.drift
        self.is_exact = precision.grid is not None
        self.notices = notices
        stride = max(-(-len(program) // PLACES), 1)
        is_on = self.is_exact or self.drift != "ignore"
        self.places = range(0, len(program) if is_on else 0, stride)
        self.seen: dict[int, Samples] = {}  # in forward, before each of the places
        self.end: Samples = {}  # where the walk begins
        self.epsilon = 0.0  # the largest one of the dtypes that functions compute in
        for dtype in dtypes:
            self.computes_in(dtype)

    def computes_in(self, dtype: torch.dtype | None) -> None:
        """A function computes in this dtype, or returns it."""
        if dtype is not None and dtype.is_floating_point:
            self.epsilon = max(self.epsilon, torch.finfo(dtype).eps)

    def before_function(self, update: Application) -> None:
        if update.index in self.places:
            self.seen[update.index] = samples(update.state)

    def after_update(self, update: Application) -> None:
        if update.fits:
            return  # nearly always
        for leaf, outputs in zip(update.target, update.output):
            for out in outputs:
                if out.dtype != leaf.dtype:
                    self.computes_in(out.dtype)

    def at_cut(self, state: State) -> None:
        if self.seen:
            self.end = samples(state)

    def after_undo(
        self,
        index: int,
        state: State,
    ) -> None:
        if index not in self.places:
            return
        sampled = (samples(state), self.seen[index], self.end)
        dtypes = {name: [leaf.dtype for leaf in leaves] for name, leaves in state.items()}
        tensors = [leaf for leaf in all_leaves(sampled) if isinstance(leaf, Tensor)]
        if not tensors:
            self._compare(index, dtypes, *sampled)
            return
        self.readback.add(tensors, functools.partial(self._compare_read, index, dtypes, sampled))
        self.readback.schedule()

    def _compare_read(
        self,
        index: int,
        dtypes: dict[str, list[torch.dtype]],
        sampled: tuple[Samples, ...],
        values: list[Numbers],
    ) -> None:
        """Compare samples, some of which are tensors, whose values are these."""
        read = iter(values)
        self._compare(index, dtypes, *[with_values(samples, read) for samples in sampled])

    def _compare(
        self,
        index: int,
        dtypes: dict[str, list[torch.dtype]],
        now: Samples,
        then: Samples,
        end: Samples,
    ) -> None:
        """Compare the streams before update `index` with those of forward."""
        for name, leaves in then.items():
            for dtype, a, b in zip(dtypes[name], now[name], leaves):
                if isinstance(a, list) and isinstance(b, list):
                    self._judge(index, name, dtype.to_real(), a, b, then, end)

    def _judge(
        self,
        index: int,
        stream: str,
        dtype: torch.dtype,
        now: Numbers,
        then: Numbers,
        all_then: Samples,
        end: Samples,
    ) -> None:
        epsilon = max(self.epsilon, torch.finfo(dtype).eps)
        if now == then or (not self.is_exact and _is_close(now, then, limit_of(epsilon))):
            return  # nearly always
        judge = Judge(place(self.program, index), self.drift, self.is_exact, self.notices)
        judge(stream, dtype, epsilon, Values(now, then, all_then, end))


class Values(NamedTuple):
    """Samples of a stream, rebuilt and in forward; of all streams, there and where the walk
    began.
    """

    now: Numbers
    then: Numbers
    all_then: Samples
    end: Samples


class Judge(NamedTuple):
    """Says what it means that a rebuilt stream differs."""

    where: str
    drift: str
    is_exact: bool
    notices: Notices

    def __call__(self, stream: str, dtype: torch.dtype, epsilon: float, values: Values) -> None:
        now, then, all_then, end = values
        if lost_to_infinity(then, now) and is_masked(end):
            raise errors.infinite_stream(self.where, stream)
        error = largest(abs(a - b) for a, b in zip(now, then))
        size = size_of(all_then)
        # Rounding errors are relative to the largest values on the way. What they cannot explain is
        # a mistake; what they explain may still be too much.
        largest_size = max(size, size_of(end))
        explained = epsilon**0.25 * largest_size
        # Some roundings of the largest values are always there, also where the input was zero.
        limit = limit_of(epsilon)
        allowed = max(limit * size, 2 * torch.finfo(dtype).eps * largest_size)
        if self.is_exact:
            if error:
                raise errors.not_exact(self.where, stream, error)
        elif error > explained:
            raise errors.wrong_arrival(self.where, stream, error, size, epsilon**0.25)
        elif error > allowed:
            drifted = errors.drifted(self.where, stream, error / size if size else inf, limit)
            report(drifted, self.drift, self.notices)


def limit_of(epsilon: float) -> float:
    return min(epsilon**0.5, 0.03)


def size_of(sampled: Samples) -> float:
    """The size of the largest stream. One of them may be zero."""
    return largest(map(abs, all_values(sampled)))


def report(
    drifted: errors.RetrogradError,
    setting: str,
    notices: Notices,
) -> None:
    """Do what the `drift` of the stack says: raise, warn once, or ignore it."""
    if setting == "raise":
        raise drifted
    if setting == "warn" and not notices.has_warned_of_drift:
        notices.has_warned_of_drift = True
        warnings.warn(str(drifted), errors.DriftWarning, stacklevel=_level_of_caller())


def _is_close(
    now: Numbers,
    then: Numbers,
    limit: float,
) -> bool:
    """A quick test that fails for NaN, which is looked at more closely."""
    return max(map(abs, map(sub, now, then))) <= limit * abs(then[0])


def largest(numbers: Iterable[float]) -> float:
    """The largest finite number, or zero."""
    return max([number for number in numbers if isfinite(number)], default=0.0)


def lost_to_infinity(then: Numbers, now: Numbers) -> bool:
    """Whether a value that was finite is not when it is rebuilt."""
    return any(isfinite(abs(a)) and not isfinite(abs(b)) for a, b in zip(then, now))


def is_masked(end: Samples) -> bool:
    """Whether a stream ends in -inf. NaN and inf are an overflow: plain autograd has NaN, too."""
    numbers = [number for number in all_values(end) if not isfinite(abs(number))]
    return bool(numbers) and all(number == -inf for number in numbers)


def _level_of_caller() -> int:
    """The stack level of whoever called backward: code of neither retrograd nor torch."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    return level


def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("retrograd", "torch")


def samples(state: State) -> Samples:
    return {name: [sample(leaf.detach()) for leaf in leaves] for name, leaves in state.items()}


def sample(leaf: Tensor) -> Sample:
    """Sixteen elements of a tensor, the same ones whatever its strides; None if it has no values.

    Numbers of a tensor on the CPU. On an accelerator a small tensor, because reading it would wait.
    """
    if type(leaf) is not Tensor:
        if is_fake(leaf):
            return None
        leaf = local(leaf).as_subclass(Tensor)  # of a sharded tensor, the local part
    if not has_values(leaf):
        return None
    size = leaf.numel()
    count = min(size, ELEMENTS)
    step = max(size // ELEMENTS, 1)
    step -= step % 2 == 0  # an even step would stay in a few columns
    if leaf.is_contiguous():
        picked = leaf.as_strided((count,), (step,))
    else:
        positions = torch.arange(count, device=leaf.device) * step
        picked = leaf[torch.unravel_index(positions, leaf.shape)]
    return picked.tolist() if type(picked) is Tensor and picked.is_cpu else picked.clone()


def has_values(leaf: Tensor) -> bool:
    """Whether a tensor has floating-point or complex values to compare."""
    if leaf.is_meta or not leaf.numel():
        return False
    return leaf.is_floating_point() or leaf.is_complex()


def all_leaves(sampled: Iterable[Samples]) -> list[Sample]:
    return [leaf for samples in sampled for leaves in samples.values() for leaf in leaves]


def with_values(sampled: Samples, values: Iterator[Numbers]) -> Samples:
    """The samples, with the next of `values` in place of each tensor."""
    return {
        name: [next(values) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for name, leaves in sampled.items()
    }


def all_values(sampled: Samples) -> Numbers:
    """The numbers of all streams."""
    return [number for leaf in all_leaves([sampled]) for number in leaf or ()]  # type: ignore[union-attr]
