"""The report of `rg.check`: plain data, and the same as text, JSON, HTML and a figure."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from retrograd.checking import figure, page
from retrograd.checking.compare import severity, worst
from retrograd.sizes import human

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ProblemKind = Literal[
    "determinism",
    "state",
    "input",
    "coupling",
    "error",
    "noise",
    "drift",
    "gradients",
    "buffers",
    "random",
    "nothing",
]

AdviceKind = Literal["skip", "masks", "precision", "memory"]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, its likely cause, and the fix to type."""

    kind: ProblemKind
    where: str
    what: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  Cause: {self.cause}\n  Fix: {self.fix}"


@dataclass(frozen=True)
class Advice:
    """Something that is not wrong, but could be better: its likely cause, and what to type."""

    kind: AdviceKind
    where: str
    what: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  Cause: {self.cause}\n  Fix: {self.fix}"


class Both(NamedTuple):
    """A figure for the network kept (plain autograd) and for the network reversed."""

    kept: float
    reversed: float

    @property
    def ratio(self) -> float:
        return self.reversed / self.kept if self.kept else math.nan


@dataclass(frozen=True)
class Drift:
    """How far a stream is off when it has been rebuilt back to an update, relative to its size."""

    stack: str
    update: int
    name: str
    stream: str
    relative: float


@dataclass(frozen=True)
class Course:
    """Bytes of activations and gradients over a step. The first `forward` entries are of
    forward.
    """

    bytes: tuple[int, ...]
    forward: int


@dataclass(frozen=True)
class Stack:
    """A stack that ran."""

    name: str
    kind: str
    updates: int
    memory: str
    streams: str


@dataclass(frozen=True)
class Report:
    """What `rg.check` found. Print it, or let a notebook show it; `ok` is the verdict.

    A figure is empty or None if the step that it comes from raised an error.

    Attributes:
        problems: a `Problem` for each thing that is wrong.
        advice: an `Advice` for each thing that could be better; it does not change `ok`.
        stacks: the stacks that ran: name, kind, updates, memory, streams.
        limit: of differences of gradients and of drift; set by the narrowest dtype in use.
        gradients: relative difference to plain autograd, by parameter and input.
        noise: the largest relative difference between two kept steps.
        drift: how far each stream is off when it has been rebuilt back to an update.
        determinism: by function: relative difference when it runs again on the same input. 0 means
            the same bits.
        masks: by function: masks, signs and indices that flipped in recompute, and how many there
            are.
        state: Python state that recompute changed.
        buffers: by name: relative difference to what plain autograd leaves.
        random: by generator: whether it is left where plain autograd leaves it.
        evaluations: by function: calls in a kept step, and in a reversed one.
        peak: bytes of activations, less gradients: `kept`, `reversed`, `ratio`.
        seconds: time of a step: `kept`, `reversed`, `ratio`.
        course: bytes over the course of a step, kept and reversed.
        notes: what could not be measured, and why.
        training: the mode that it was checked in.
        versions: with what it was checked.
    """

    problems: tuple[Problem, ...] = ()
    advice: tuple[Advice, ...] = ()
    stacks: tuple[Stack, ...] = ()
    limit: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    drift: tuple[Drift, ...] = ()
    determinism: dict[str, float] = field(default_factory=dict)
    masks: dict[str, tuple[int, int]] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    buffers: dict[str, float] = field(default_factory=dict)
    random: dict[str, bool] = field(default_factory=dict)
    evaluations: dict[str, tuple[int, int]] = field(default_factory=dict)
    peak: Both | None = None
    seconds: Both | None = None
    course: tuple[Course, Course] | None = None
    notes: tuple[str, ...] = ()
    training: bool = True
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    # --- as data

    def as_dict(self) -> dict[str, Any]:
        """The report in plain types."""
        return {
            "ok": self.ok,
            **asdict(self),
            "peak": None if self.peak is None else self.peak._asdict(),
            "seconds": None if self.seconds is None else self.seconds._asdict(),
        }

    def to_json(self) -> str:
        """The report as JSON. Values that are not finite are strings: "nan", "inf"."""
        return json.dumps(_json_value(self.as_dict()), indent=2, allow_nan=False)

    # --- as text

    def __str__(self) -> str:
        lines = [self.verdict(), *(f"  {line}" for line in self.subject()), ""]
        figures = list(self.figures())
        if figures:
            lines += [*_aligned([("", "kept", "reversed", ""), *figures]), ""]
        lines += _aligned(list(self.findings()))
        for number, problem in enumerate(self.problems, 1):
            lines += ["", *_numbered(f"{number}.", problem)]
        for number, advice in enumerate(self.advice, 1):
            lines += ["", *_numbered(f"Advice {number}.", advice)]
        return "\n".join(lines)

    def verdict(self) -> str:
        """The first line."""
        count = len(self.problems)
        if count:
            return f"retrograd check: {count} problem{'s' if count > 1 else ''}."
        is_finite = not any("not all finite" in note for note in self.notes)
        where = "" if is_finite else " wherever these are finite"
        more = " See the advice below." if self.advice else ""
        return f"retrograd check: ok. Gradients and state are those of plain autograd{where}.{more}"

    def subject(self) -> Iterator[str]:
        """What was checked."""
        for stack in self.stacks:
            name = stack.kind if stack.name == stack.kind else f"{stack.name}: {stack.kind}"
            yield f"{name}, {stack.updates} updates, {stack.streams}, {stack.memory}"
        mode = "train" if self.training else "eval"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield f"in {mode} mode; {versions}"
        yield from self.notes

    def figures(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows of the first table: what, kept, reversed, ratio."""
        if self.peak is not None:
            kept, reversed_ = map(human, self.peak)
            yield "activations", kept, reversed_, f"{self.peak.ratio:.3f}"
        if self.seconds is not None:
            kept, reversed_ = (f"{1000 * seconds:.3g} ms" for seconds in self.seconds)
            yield "time of a step", kept, reversed_, f"{self.seconds.ratio:.2f}"
        if self.evaluations:
            once = sum(kept for kept, _ in self.evaluations.values())
            twice = sum(reversed_ for _, reversed_ in self.evaluations.values())
            ratio = f"{twice / once:.2f}" if once else ""
            yield "calls of functions", str(once), str(twice), ratio

    def findings(self) -> Iterator[tuple[str, str, str]]:
        """Rows of the second table: what was compared, the verdict, the figure."""
        if self.gradients:
            yield self._gradients_row()
        if self.drift:
            yield self._drift_row()
        if any(total for _, total in self.masks.values()):
            yield self._masks_row()
        if self.determinism:
            yield self._determinism_row()
            yield self._state_row()
        if self.gradients:
            yield self._buffers_row()
            yield self._random_row()

    def _gradients_row(self) -> tuple[str, str, str]:
        if self._has("noise"):
            text = f"cannot be compared: two steps of plain autograd differ by {self.noise:.1e}"
            return "gradients", "?", text
        name, difference = worst(self.gradients)
        most = f"at most {difference:.1e} off ({name}), limit {self.limit:.0e}"
        if not difference:
            most = "bit-identical"
        return self._row("gradients", f"{len(self.gradients)} parameters and inputs: {most}")

    def _drift_row(self) -> tuple[str, str, str]:
        most = max(self.drift, key=lambda drift: severity(drift.relative))
        text = f"at most {most.relative:.1e} off ({most.stream!r} before {most.name})"
        return self._row("drift", f"rebuilt streams: {text if most.relative else 'bit-identical'}")

    def _determinism_row(self) -> tuple[str, str, str]:
        name, difference = worst(self.determinism)
        text = f"up to {difference:.1e} off ({name})" if difference else "bit-identical"
        functions = f"{len(self.determinism)} functions run again on the same input"
        found = [problem for problem in self.problems if problem.kind == "determinism"]
        if found and not difference:  # it raised
            text = f"not all of them returned ({found[0].where})"
        is_wrong = bool(found) or not difference <= self.limit
        return "determinism", "WRONG" if is_wrong else "ok", f"{functions}: {text}"

    def _masks_row(self) -> tuple[str, str, str]:
        flipped, total = map(sum, zip(*self.masks.values()))
        text = f"{total:,} masks, signs and indices"
        if flipped:
            return "masks", "note", f"{text}: {flipped:,} flipped in recompute"
        return "masks", "ok", f"{text}: the same in recompute"

    def _state_row(self) -> tuple[str, str, str]:
        if self.state:
            return "Python state", "WRONG", f"changed by recompute: {self.state[0]}"
        return "Python state", "ok", "not changed by recompute"

    def _buffers_row(self) -> tuple[str, str, str]:
        if not self.buffers:
            return self._row("buffers", "none")
        name, difference = worst(self.buffers)
        text = f"{len(self.buffers)}, the same as in plain autograd"
        if self._has("buffers"):
            wrong = [name for name, off in self.buffers.items() if not off <= self.limit]
            text = f"not as in plain autograd: {', '.join(wrong[:3])}"
        elif difference:
            text = f"{len(self.buffers)}, at most {difference:.1e} off ({name})"
        return self._row("buffers", text)

    def _random_row(self) -> tuple[str, str, str]:
        wrong = [name for name, same in self.random.items() if not same]
        text = f"{len(self.random)} generators, the same as in plain autograd"
        if wrong:
            text = f"not as in plain autograd: {', '.join(wrong[:3])}"
        return self._row("random", text, title="random state")

    def _row(self, kind: ProblemKind, text: str, title: str = "") -> tuple[str, str, str]:
        return title or kind, "WRONG" if self._has(kind) else "ok", text

    def _has(self, kind: ProblemKind) -> bool:
        return any(problem.kind == kind for problem in self.problems)

    # --- as HTML and as a figure

    def _repr_html_(self) -> str:
        """For notebooks, and for `retrograd check --html`."""
        return page.as_html(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw bytes over a step, reversed against kept, and drift against depth. Returns the
        matplotlib figure; with a `path`, saves it too.

        Needs matplotlib.
        """
        return figure.draw(self, path)


def _numbered(number: str, remark: Problem | Advice) -> list[str]:
    first, *rest = str(remark).splitlines()
    return [f"{number} {first}", *(f"   {line}" for line in rest)]


def thinned(bytes_: Sequence[int], forward: int, most: int = 400) -> Course:
    """A course with about `most` points, each the largest of those it stands for."""
    stride = max(-(-len(bytes_) // most), 1)

    def peaks(begin: int, end: int) -> list[int]:
        return [max(bytes_[i : min(i + stride, end)]) for i in range(begin, end, stride)]

    in_forward = peaks(0, forward)
    in_backward = peaks(forward, len(bytes_))
    return Course((*in_forward, *in_backward), len(in_forward))


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
