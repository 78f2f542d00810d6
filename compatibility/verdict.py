"""What a row is, and how what it gave is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EQUAL, WRONG, RAISED = "equal", "wrong", "raised"


@dataclasses.dataclass(frozen=True)
class Scene:
    """Where a row runs: with which contestant, as which of its processes, and where it may
    write.
    """

    contestant: str
    rank: int
    folder: Path


Stage = tuple[int, Callable[[Scene], Any]]  # so many processes, and what each of them does


@dataclasses.dataclass(frozen=True)
class Row:
    """One use of one tool."""

    group: str
    title: str
    stages: tuple[Stage, ...]  # one after another; what the last one returns is judged
    expected: Callable[[Scene], Any]  # the same from plain autograd: one process, no tool
    limit: float  # how far numbers may be apart, relative to the largest of their tensor
    needs: tuple[str, ...]  # packages
    launched: (
        bool  # whether processes find each other by environment variables, as torchrun leaves them
    )

    @property
    def key(self) -> str:
        return "".join(
            c if c.isalnum() else "-" for c in f"{self.group} {self.title}".lower()
        ).strip("-")


@dataclasses.dataclass(frozen=True)
class Noted:
    """A result with something to show on the page besides the verdict."""

    result: Any
    note: str


class Rows(list[Row]):
    """The rows of one topic. Adding is a decorator, or a call for one of many that differ in their
    options.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def add(
        self,
        title: str,
        run: Callable[[Scene], Any],
        expected: Callable[[Scene], Any],
        *,
        processes: int = 1,
        before: tuple[Stage, ...] = (),
        limit: float = 1e-9,
        needs: tuple[str, ...] = (),
        launched: bool = False,
    ) -> None:
        self.append(
            Row(self.group, title, (*before, (processes, run)), expected, limit, needs, launched)
        )


def judge(result: Any, expected: Any, limit: float) -> tuple[str, str]:
    """The verdict and, if it is not `EQUAL`, what differs."""
    got, wanted = dict(_leaves(result)), dict(_leaves(expected))
    if got.keys() != wanted.keys():
        return WRONG, f"other results: {sorted(got.keys() ^ wanted.keys())[0]}"
    floats = [
        w for w in wanted.values() if isinstance(w, Tensor) and w.is_floating_point() and w.numel()
    ]
    scale = max((w.abs().max().item() for w in floats), default=0.0)
    differences = {
        name: _difference(got[name], value, 1e-6 * scale + 1e-30) for name, value in wanted.items()
    }
    wrong = {
        name: difference for name, difference in differences.items() if not difference[0] <= limit
    }
    if not wrong:
        return EQUAL, ""
    # A wrong gradient says more than another random state.
    worst = max(wrong, key=lambda name: (not wrong[name][1].endswith("differs"), wrong[name][0]))
    return WRONG, f"{worst}{wrong[worst][1]}"


def _difference(got: Any, wanted: Any, floor: float) -> tuple[float, str]:
    """Relative to the largest value of the tensor; of gradients that are zero but for rounding, to
    a floor.
    """
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        same = (
            got is wanted
            if isinstance(wanted, Tensor) or isinstance(got, Tensor)
            else got == wanted
        )
        missing = (
            ": no gradient"
            if got is None
            else ": a gradient that plain autograd has not"
            if wanted is None
            else ""
        )
        return (0.0, "") if same else (float("inf"), missing or f": {got!r} for {wanted!r}")
    if got.shape != wanted.shape:
        return float("inf"), f": shape {list(got.shape)} for {list(wanted.shape)}"
    if not wanted.numel():
        return 0.0, ""
    if not wanted.is_floating_point():
        return (0.0, "") if torch.equal(got, wanted) else (float("inf"), " differs")
    got, wanted = got.double(), wanted.double()
    worst = ((got - wanted).abs().max() / wanted.abs().max().clamp(min=floor)).item()
    return (worst if worst == worst else float("inf")), f": off by {worst:.0e}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}, {key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}, {i}" if path else f"{i}")
    else:
        yield path, value.detach().clone() if isinstance(value, torch.Tensor) else value
