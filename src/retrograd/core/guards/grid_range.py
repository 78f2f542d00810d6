"""Grid range: with exact reversal, no value of a stream may leave the range of the grid.

The range of each stream is recorded after each update and looked at once: on a CPU at the end of
the pass, on an accelerator at the end of backward (`readback.py`). Of a plain pass there
nothing is looked at, because nothing is rebuilt from it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Grid, ScaledOnGrid
from retrograd.core.guard import Guard
from retrograd.core.private import are_transforms_active
from retrograd.core.program import (
    Application,
    Program,
    place,
    rebuilt_streams,
)
from retrograd.core.readback import Numbers, Readback
from retrograd.core.streams import State
from retrograd.core.tensors import dtype_name, local


class Range(NamedTuple):
    """The least and the largest value of a stream after an update."""

    stream: str
    update: int | None  # its index; None: the streams at the start
    dtype: torch.dtype
    low: Tensor
    high: Tensor


class GridRange(Guard):
    rebuilt_only = False

    def __init__(
        self,
        grid: Grid,
        program: Program,
        readback: Readback,
        start: str = "the input",
    ) -> None:
        self.grid = grid
        self.program = program
        self.readback = readback
        self.rebuilt = rebuilt_streams(program)  # the streams that live on the grid
        self.start = start  # what the pass starts from, for messages
        self.ranges: list[Range] = []

    def before_forward(self, state: State) -> None:
        for name in sorted(self.rebuilt):
            self._record(name, None, state[name])

    def after_update(self, update: Application) -> None:
        step = update.step
        if step.target not in self.rebuilt:
            return
        self._record(step.target, update.index, update.result)
        if isinstance(step.coupling, ScaledOnGrid) and abs(step.coupling.coupling.a) > 1:
            self._record(step.target, update.index, update.target, step.coupling.coupling.a)

    def _record(
        self,
        stream: str,
        index: int | None,
        leaves: tuple[Tensor, ...],
        factor: float = 1.0,
    ) -> None:
        """The range of a stream, or of its product with a factor, before anything is added."""
        for leaf in leaves:
            if (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel():
                low, high = range_of(leaf)
                if factor != 1:
                    low, high = low * factor, high * factor
                self.ranges.append(Range(stream, index, leaf.dtype.to_real(), low, high))

    def after_forward(self, state: State) -> None:
        """Raise if a value left the range, or have it looked at later."""
        # Where a graph is traced or transformed there are no values, and nothing is rebuilt.
        ranges = [r for r in self.ranges if type(r.high) is Tensor and not r.high.is_meta]
        self.ranges = []
        if not ranges or are_transforms_active() or torch.compiler.is_compiling():
            return
        ends = [end for r in ranges for end in (r.low, r.high)]
        if all(end.is_cpu for end in ends):
            self._judge(ranges, [[number] for number in torch.stack(ends).tolist()])
        else:
            self.readback.add(ends, functools.partial(self._judge, ranges))

    def _judge(
        self,
        ranges: list[Range],
        ends: list[Numbers],
    ) -> None:
        pairs = zip(ends[::2], ends[1::2])
        extremes: list[float] = [max(low[0], high[0], key=abs) for low, high in pairs]
        for found, value in zip(ranges, extremes):
            if not abs(value) < self.grid.limit(found.dtype):
                same = [abs(v) for v, r in zip(extremes, ranges) if r.dtype == found.dtype]
                raise self._error(found, value, max(same))

    def _error(
        self,
        found: Range,
        value: float,
        largest: float,
    ) -> errors.RetrogradError:
        where = self.start if found.update is None else place(self.program, found.update)
        limit = self.grid.limit(found.dtype)
        bits = self.grid.bits_of(found.dtype)
        dtype = dtype_name(found.dtype)
        return errors.out_of_range(f"{where}:", found.stream, value, largest, limit, bits, dtype)


def range_of(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest element, or NaN. Of a sharded tensor, the local part."""
    leaf = local(leaf.detach())
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    return torch.aminmax(leaf)
