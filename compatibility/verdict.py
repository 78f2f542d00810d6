"""What a row is, and how its result is judged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EQUAL, WRONG, RAISED = "equal", "wrong", "raised"
NOT_RUN = "not run"  # on a device where plain autograd cannot run the row, either


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a row runs with: the contestant, the rank of the process, and a folder for files."""

    contestant: str
    rank: int
    folder: Path


Stage = tuple[int, Callable[[Scene], Any]]  # a number of processes, and what each of them runs


@dataclasses.dataclass(frozen=True)
class Row:
    """One use of one tool."""

    group: str
    title: str
    stages: tuple[Stage, ...]  # one after another; what the last one returns is judged
    expected: Callable[[Scene], Any]  # the same from plain autograd: one process, no tool
    limit: float  # how far numbers may be apart, relative to the largest of their tensor
    needs: tuple[str, ...]  # packages
    launched: bool  # whether processes get torchrun's environment variables, not a process group

    @property
    def key(self) -> str:
        name = f"{self.group} {self.title}".lower()
        return "".join(c if c.isalnum() else "-" for c in name).strip("-")


@dataclasses.dataclass(frozen=True)
class Noted:
    """A result with something to show on the page besides the verdict."""

    result: Any
    note: str


class Rows(list[Row]):
    """The rows of one topic."""

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
    got = dict(_leaves(result))
    wanted = dict(_leaves(expected))
    if got.keys() != wanted.keys():
        return WRONG, f"other results: {sorted(got.keys() ^ wanted.keys())[0]}"
    floor = 1e-6 * _largest(wanted.values()) + 1e-30
    wrong = {}
    for name, value in wanted.items():
        difference = _difference(got[name], value, floor)
        if not difference[0] <= limit:
            wrong[name] = difference
    if not wrong:
        return EQUAL, ""
    # Report a wrong gradient rather than a random state that differs.
    worst = max(wrong, key=lambda name: (not wrong[name][1].endswith("differs"), wrong[name][0]))
    return WRONG, f"{worst}{wrong[worst][1]}"


def _largest(values: Iterable[Any]) -> float:
    """The largest absolute value in any floating-point tensor."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
    return max((tensor.abs().max().item() for tensor in tensors), default=0.0)


def _difference(got: Any, wanted: Any, floor: float) -> tuple[float, str]:
    """How far apart two values are, and a text that says so.

    The difference of tensors is relative to the largest value of the wanted one, or to `floor` if
    that is larger: for gradients that are zero up to rounding.
    """
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return _other_difference(got, wanted)
    if got.shape != wanted.shape:
        return math.inf, f": shape {list(got.shape)} for {list(wanted.shape)}"
    if got.device != wanted.device:
        return math.inf, f": on {got.device} for {wanted.device}"
    if not wanted.numel():
        return 0.0, ""
    if not wanted.is_floating_point():
        return (0.0, "") if torch.equal(got, wanted) else (math.inf, " differs")
    difference = (got.double() - wanted.double()).abs().max()
    worst = (difference / wanted.double().abs().max().clamp(min=floor)).item()
    return (math.inf if math.isnan(worst) else worst), f": off by {worst:.0e}"


def _other_difference(got: Any, wanted: Any) -> tuple[float, str]:
    """`_difference` where at most one value is a tensor."""
    has_tensor = isinstance(got, Tensor) or isinstance(wanted, Tensor)
    if not has_tensor and got == wanted:
        return 0.0, ""
    if got is None:
        return math.inf, ": no gradient"
    if wanted is None:
        return math.inf, ": a gradient that plain autograd has not"
    return math.inf, f": {got!r} for {wanted!r}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dicts and lists, each with its path."""
    prefix = f"{path}, " if path else ""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}{i}")
    else:
        yield path, value.detach().clone() if isinstance(value, Tensor) else value
