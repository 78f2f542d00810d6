"""Where a walk back must pass: a few elements of every stream, noted in forward at a few updates,
compared in backward.

Undoing an addition rounds, so a rebuilt stream *drifts* from what forward saw; and a function that
does something else the second time leads the walk astray. Both show here. Eight places, sixteen
elements of each stream: it costs next to nothing.

Two limits, relative to what the stream held here and where the walk began, by the epsilon of the
narrowest dtype in play:

- of *drift*, its square root, and at most 3 % (3e-4 in float32, 3e-2 in bfloat16): half of the
  digits are gone, or more than bfloat16 costs gradients anyway. Warns once, or raises, or neither,
  as the stack's `drift` says.
- of *arrival*, its fourth root (2e-2 in float32, 0.3 in bfloat16): far beyond healthy rounding.
  Raises.

On an exact stack nothing is rounded, and any difference raises.
"""

from __future__ import annotations

import sys
import warnings
from math import isfinite
from operator import sub
from typing import Any

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.private import is_fake
from retrograd.core.program import Program, State, place
from retrograd.core.replay import Backstage
from retrograd.core.streams import local

PLACES = 8
Samples = dict[str, list[Any]]  # of each leaf of each stream: see `sample`


class Waypoints:
    """The places of one call, and what forward saw there."""

    def __init__(self, program: Program, precision: Precision, backstage: Backstage) -> None:
        self.program = program
        self.drift = precision.drift
        self.exact = precision.grid is not None
        self.backstage = backstage
        stride = max(-(-len(program) // PLACES), 1)
        self.at = range(0, len(program) if self.exact or self.drift != "ignore" else 0, stride)
        self.seen: dict[int, Samples] = {}
        self.end: Samples = {}
        self.narrow = 0.0  # the largest epsilon of what functions compute in
        self.found: list[
            tuple[int, Samples]
        ] = []  # what the walk back saw, where nobody has looked at it yet

    def saw(self, dtype: torch.dtype | None) -> None:
        """A function computes in this dtype, or returned it."""
        if dtype is not None and dtype.is_floating_point:
            self.narrow = max(self.narrow, torch.finfo(dtype).eps)

    def note(self, index: int, state: State) -> None:
        self.seen[index] = samples(state)

    def begin_at(self, state: State) -> None:
        """What the streams held where the walk begins."""
        self.end = samples(state) if self.seen else {}

    def compare(self, index: int, state: State) -> None:
        """The walk is before update `index`: warn or raise if it is not where forward was."""
        self.found.append((index, samples(state)))
        # An accelerator is waited for only once, in the end.
        if index == 0 or all(leaf.is_cpu for leaves in state.values() for leaf in leaves):
            found, self.found = self.found, []
            for place_found, now in found:
                for name, expected in self.seen[place_found].items():
                    for leaf, *rows in zip(state[name], now[name], expected, self.end[name]):
                        if rows[0] is not None:
                            self.judge(place_found, name, leaf.dtype.to_real(), *map(values, rows))

    def judge(
        self,
        index: int,
        stream: str,
        dtype: torch.dtype,
        now: list[Any],
        then: list[Any],
        end: list[Any],
    ) -> None:
        epsilon = max(self.narrow, torch.finfo(dtype).eps)
        expected = min(epsilon**0.5, 0.03)
        if now == then or (
            not self.exact and max(map(abs, map(sub, now, then))) <= expected * abs(then[0])
        ):
            return  # nearly always; NaN is not
        # What became infinite in forward cannot be undone; plain autograd has no use for it either.
        error: float = max(
            [off for off in [abs(a - b) for a, b in zip(now, then)] if isfinite(off)], default=0.0
        )
        scale: float = max([size for size in map(abs, then + end) if isfinite(size)], default=0.0)
        where = place(self.program, index)
        if self.exact:
            if error:
                raise errors.not_exact(where, stream, error)
        elif error > epsilon**0.25 * scale:
            raise errors.wrong_arrival(where, stream, error, scale, epsilon**0.25)
        elif error > expected * scale and not (self.drift == "warn" and self.backstage.warned):
            drifted = errors.drifted(where, stream, error / scale, expected)
            if self.drift == "raise":
                raise drifted
            self.backstage.warned = True
            warnings.warn(str(drifted), errors.DriftWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Of whoever called backward: neither this library nor torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "retrograd",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    return level


def samples(state: State) -> Samples:
    return {name: [sample(leaf.detach()) for leaf in leaves] for name, leaves in state.items()}


def sample(leaf: Tensor) -> Any:
    """Sixteen elements of a tensor, or all of a smaller one: the same ones whatever its strides.
    None if it has none to show.

    Numbers, of a tensor on the CPU; elsewhere a small tensor, because looking at it would wait for
    the device.
    """
    if is_fake(leaf):
        return None
    if type(leaf) is not Tensor:  # of a sharded one, the part that is here
        leaf = local(leaf).as_subclass(Tensor)
    if not (leaf.is_floating_point() or leaf.is_complex()) or not leaf.numel() or leaf.is_meta:
        return None
    count, step = min(leaf.numel(), 16), max(leaf.numel() // 16, 1)
    if leaf.is_contiguous():
        picked = leaf.as_strided((count,), (step,))
    else:
        picked = leaf[
            torch.unravel_index(torch.arange(count, device=leaf.device) * step, leaf.shape)
        ]
    return picked.tolist() if type(picked) is Tensor and picked.is_cpu else picked.clone()


def values(sampled: Any) -> list[Any]:
    return sampled if isinstance(sampled, list) else sampled.tolist()
