"""Drift in a compiled graph: a few elements of the streams, in forward and when they are rebuilt.

The eager engine compares the streams before eight updates. Here they are compared once, where
undoing ends: at the values that the streams began with. Limits and messages are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.core.guards.drift import Judge, Values, has_values
from retrograd.core.readback import Numbers, Readback
from retrograd.core.structure import Notices

ELEMENTS = 16
WHERE = "the start of a stack in a compiled graph"

_notices = Notices()


@torch.library.custom_op("retrograd::sample", mutates_args=())
def sample(leaves: list[Tensor]) -> Tensor:
    """A row of elements of each tensor."""
    rows = leaves[0].new_zeros(len(leaves), ELEMENTS)
    for row, leaf in zip(rows, leaves):
        step = max(leaf.numel() // ELEMENTS, 1)
        step -= step % 2 == 0  # an even step would stay in a few columns
        picked = leaf.reshape(-1)[::step][:ELEMENTS]
        row[: picked.numel()] = picked
    return rows


@sample.register_fake
def _(leaves: list[Tensor]) -> Tensor:
    return leaves[0].new_empty(len(leaves), ELEMENTS)


# It says that it changes `now`, because what changes nothing and returns nothing would be removed.
@torch.library.custom_op("retrograd::compare", mutates_args={"now"})
def compare(now: Tensor, seen: Tensor, streams: str, epsilon: float, drift: str) -> None:
    """Raise or warn if rebuilt streams are further off than their dtype explains."""
    names = streams.split(",")

    def look(values: list[Numbers]) -> None:
        _judge_rows(names, now.dtype, epsilon, drift, *map(_rows, values))

    readback = Readback()
    readback.add([now, seen], look)
    if now.is_cpu:
        readback.read()
    else:
        readback.schedule()


def _rows(values: Any) -> list[Numbers]:
    return [values[i : i + ELEMENTS] for i in range(0, len(values), ELEMENTS)]


def _judge_rows(
    names: Sequence[str],
    dtype: torch.dtype,
    epsilon: float,
    drift: str,
    now: list[Numbers],
    seen: list[Numbers],
) -> None:
    then = {name: [row] for name, row in zip(names, seen)}
    end: Any = {"": seen[len(names) :]}
    for name, row, before in zip(names, now, seen):
        if row != before:
            values = Values(row, before, then, end)  # type: ignore[arg-type]
            Judge(WHERE, drift, False, _notices)(name, dtype, epsilon, values)


SAMPLE = torch.ops.retrograd.sample.default
COMPARE = torch.ops.retrograd.compare.default


def can_compare(marks: Sequence[Any]) -> bool:
    """Whether all streams are of one kind: real numbers of one dtype on one device."""
    values = [mark.old.meta["val"] for mark in marks]
    kinds = {(value.dtype, value.device) for value in values}
    return len(kinds) == 1 and values[0].is_floating_point() and has_values(values[0])


def sample_like(node: Any, rows: int) -> Tensor:
    return node.meta["val"].new_empty(rows, ELEMENTS)
