"""What `rg.check` found: to print, to show in a notebook, to keep as JSON, to draw."""

from __future__ import annotations

import contextlib
import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from retrograd.budget import MIB, human


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, what it probably comes from, and what to type."""

    # determinism, state, input, coupling, error, noise, drift, gradients, buffers, random, nothing
    kind: str
    where: str
    what: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  Cause: {self.cause}\n  Fix: {self.fix}"


class Both(NamedTuple):
    """A figure of the network kept (plain autograd) and of the network reversed."""

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
    """Bytes of activations and gradients over the course of a step; the first `forward` points are
    of forward.
    """

    bytes: tuple[int, ...]
    forward: int


@dataclass(frozen=True)
class Stack:
    """One that ran."""

    name: str
    kind: str
    updates: int
    memory: str
    streams: str


@dataclass(frozen=True)
class Report:
    """What `rg.check` found. Print it, or let a notebook show it; `ok` is the verdict.

    Figures that could not be had, because a run raised, are empty or None.
    """

    problems: tuple[Problem, ...] = ()
    stacks: tuple[Stack, ...] = ()
    limit: float = 0.0  # of differences of gradients, and of drift, by the narrowest dtype in play
    gradients: dict[str, float] = field(
        default_factory=dict
    )  # relative difference, by parameter and input
    noise: float = 0.0  # the largest difference between two kept runs
    drift: tuple[Drift, ...] = ()
    determinism: dict[str, float] = field(
        default_factory=dict
    )  # by function: relative difference; 0 means the same bits
    state: tuple[str, ...] = ()  # Python state that recompute changed
    buffers: dict[str, float] = field(
        default_factory=dict
    )  # by name: relative difference to what plain leaves
    random: dict[str, bool] = field(
        default_factory=dict
    )  # by generator: whether it is left where plain leaves it
    evaluations: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # by function: in a kept step, in a reversed one
    peak: Both | None = None  # bytes of activations: the most at once, less gradients
    seconds: Both | None = None
    course: tuple[Course, Course] | None = None  # kept, reversed
    notes: tuple[str, ...] = ()  # what could not be had, and why
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
            "peak": _pair(self.peak),
            "seconds": _pair(self.seconds),
        }

    def to_json(self) -> str:
        """The report as JSON. What is not finite is a string: "nan", "inf"."""
        return json.dumps(_finite(self.as_dict()), indent=2, allow_nan=False)

    # --- as text

    def __str__(self) -> str:
        lines = [self.verdict(), *(f"  {line}" for line in self.subject()), ""]
        figures, findings = list(self.figures()), list(self.findings())
        lines += _aligned([("", "kept", "reversed", ""), *figures]) + [""] if figures else []
        lines += _aligned(findings)
        for number, problem in enumerate(self.problems, 1):
            lines += [
                "",
                *(
                    f"{f'{number}. ' if not i else '   '}{line}"
                    for i, line in enumerate(str(problem).splitlines())
                ),
            ]
        return "\n".join(lines)

    def verdict(self) -> str:
        count = len(self.problems)
        if self.ok:
            where = (
                " wherever these are finite"
                if any("not all finite" in note for note in self.notes)
                else ""
            )
            return f"retrograd check: ok. Gradients and state are those of plain autograd{where}."
        return f"retrograd check: {count} problem{'s' if count > 1 else ''}."

    def subject(self) -> Iterator[str]:
        """What was checked."""
        for stack in self.stacks:
            name = stack.kind if stack.name == stack.kind else f"{stack.name}: {stack.kind}"
            yield f"{name}, {stack.updates} updates, {stack.streams}, {stack.memory}"
        yield f"in {'train' if self.training else 'eval'} mode; " + ", ".join(
            f"{k} {v}" for k, v in self.versions.items()
        )
        yield from self.notes

    def figures(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows of the first table: what, kept, reversed, ratio."""
        if self.peak is not None:
            yield (
                "activations",
                human(self.peak.kept),
                human(self.peak.reversed),
                f"{self.peak.ratio:.3f}",
            )
        if self.seconds is not None:
            kept, reversed_ = (f"{1000 * s:.3g} ms" for s in self.seconds)
            yield "time of a step", kept, reversed_, f"{self.seconds.ratio:.2f}"
        if self.evaluations:
            once, twice = (sum(pair[i] for pair in self.evaluations.values()) for i in (0, 1))
            yield "calls of functions", str(once), str(twice), f"{twice / once:.2f}" if once else ""

    def findings(self) -> Iterator[tuple[str, str, str]]:
        """Rows of the second table: what was compared, the verdict, the figure."""
        if self.gradients:
            name, worst = _worst(self.gradients)
            most = (
                f"at most {worst:.1e} off ({name}), limit {self.limit:.0e}"
                if worst
                else "the same bits"
            )
            text = f"{len(self.gradients)} of parameters and inputs: {most}"
            if self._has("noise"):
                yield (
                    "gradients",
                    "?",
                    f"cannot be judged: plain autograd is {self.noise:.1e} off itself",
                )
            else:
                yield self._row("gradients", "gradients", text)
        if self.drift:
            worst = max(self.drift, key=lambda drift: _order(drift.relative))
            text = (
                f"rebuilt streams: at most {worst.relative:.1e} off ({worst.stream!r} before "
                f"{worst.name})"
            )
            yield self._row(
                "drift", "drift", text if worst.relative else "rebuilt streams: the same bits"
            )
        if self.determinism:
            name, worst = _worst(self.determinism)
            text = f"{len(self.determinism)} functions run again on the same input: "
            text += f"up to {worst:.1e} off ({name})" if worst else "the same bits"
            yield self._row("determinism", "determinism", text)
            text = (
                f"changed by recompute: {self.state[0]}"
                if self.state
                else "left alone by recompute"
            )
            yield "Python state", "WRONG" if self.state else "ok", text
        if self.gradients:
            wrong = [name for name, off in self.buffers.items() if off]
            text = f"{len(self.buffers)}, as plain leaves them" if self.buffers else "none"
            yield self._row(
                "buffers",
                "buffers",
                text if not wrong else f"not as plain leaves them: {', '.join(wrong[:3])}",
            )
            wrong = [name for name, same in self.random.items() if not same]
            text = f"{len(self.random)} generators, left where plain leaves them"
            text = f"elsewhere than plain leaves it: {', '.join(wrong[:3])}" if wrong else text
            yield self._row("random state", "random", text)

    def _has(self, kind: str) -> bool:
        return any(problem.kind == kind for problem in self.problems)

    def _row(self, title: str, kind: str, text: str) -> tuple[str, str, str]:
        return title, "WRONG" if self._has(kind) else "ok", text

    # --- as a page

    def _repr_html_(self) -> str:
        """For notebooks, and for `retrograd check --html`."""
        colour = "#1a7f37" if self.ok else "#cf222e"
        parts = [f'<p style="color:{colour}"><b>{html.escape(self.verdict())}</b></p>']
        parts.append("<br>".join(map(html.escape, self.subject())))
        parts.append(_table([("", "kept", "reversed", "ratio"), *self.figures()], head=True))
        parts.append(_table(list(self.findings())))
        if self.problems:
            rows = [(p.where, p.what, p.cause, p.fix) for p in self.problems]
            parts.append(_table([("where", "what", "likely cause", "fix"), *rows], head=True))
        worst = sorted(
            ((n, off) for n, off in self.gradients.items() if off),
            key=lambda item: -_order(item[1]),
        )[:10]
        if worst:
            parts.append(
                _table(
                    [("gradient", "relative difference"), *((n, f"{off:.1e}") for n, off in worst)],
                    head=True,
                )
            )
        with contextlib.suppress(ImportError):
            parts.append(self._svg())
        return "".join(parts)

    def _svg(self) -> str:
        import io

        file = io.StringIO()
        self.plot().savefig(file, format="svg")
        return file.getvalue()[file.getvalue().index("<svg") :]

    # --- as a picture

    def plot(self, path: Any = None) -> Any:
        """Bytes over the course of a step, reversed against kept, and drift against depth. Returns
        the figure; saves it too.

        Needs matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("report.plot needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(10, 4), layout="constrained")
        memory, drift = figure.subplots(1, 2)
        if self.course is not None and self.peak is not None:
            for name, colour, course, peak in zip(
                ("kept", "reversed"), ("#8c959f", "#0969da"), self.course, self.peak
            ):
                x = [_progress(i, course) for i in range(len(course.bytes))]
                y = [b / MIB for b in course.bytes]
                memory.plot(
                    x, y, color=colour, label=f"{name}: {human(peak)} at most, less gradients"
                )
                memory.fill_between(x, y, color=colour, alpha=0.15, linewidth=0)
            memory.axvline(1, color="gray", linewidth=0.5)
            top = (
                1.3 * max(max(course.bytes, default=1) for course in self.course) / MIB
            )  # with room for the legend
            memory.set(
                xticks=[0.5, 1.5],
                xlim=(0, 2),
                ylim=(0, top),
                ylabel="MiB of activations and gradients",
            )
            memory.set_xticklabels(["forward", "backward"])
            memory.tick_params(axis="x", length=0)
            memory.set_title("memory over the course of one step")
            memory.legend(frameon=False, loc="upper left")
        for name, points in self._lines():
            drift.plot(
                [p.update for p in points], [p.relative or math.nan for p in points], label=name
            )  # no zero on a log axis
        if self.drift:
            if self.limit:
                drift.axhline(self.limit, color="gray", linewidth=0.5, linestyle="--")
            drift.set(
                yscale="log",
                xlabel="update that backward has rebuilt the streams to",
                ylabel="relative error",
            )
            values = [p.relative for p in self.drift if 0 < p.relative < math.inf] or [1e-16]
            drift.set_ylim(min(values) / 3, max([*values, self.limit]) * 3)
            if not any(p.relative for p in self.drift):
                drift.text(
                    0.5, 0.5, "no drift: the same bits", transform=drift.transAxes, ha="center"
                )
            drift.invert_xaxis()  # the way that backward goes
            drift.set_title(
                "drift of rebuilt streams"
                + (f" (dashed: limit {self.limit:.0e})" if self.limit else "")
            )
            drift.legend(frameon=False)
        for axes in (memory, drift):
            axes.spines[["top", "right"]].set_visible(False)
        if path is not None:
            figure.savefig(path)
        return figure

    def _lines(self) -> list[tuple[str, list[Drift]]]:
        several = len({point.stack for point in self.drift}) > 1
        lines: dict[tuple[str, str], list[Drift]] = {}
        for point in self.drift:
            lines.setdefault((point.stack, point.stream), []).append(point)
        return [
            (f"{stack}, {stream}" if several else stream, points)
            for (stack, stream), points in lines.items()
        ]


def thinned(bytes_: Sequence[int], forward: int, most: int = 400) -> Course:
    """A course in fewer points, with its peaks."""
    stride = max(-(-len(bytes_) // most), 1)
    parts = [range(0, forward, stride), range(forward, len(bytes_), stride)]
    found = [[max(bytes_[i : min(i + stride, part.stop)]) for i in part] for part in parts]
    return Course((*found[0], *found[1]), len(found[0]))


def _progress(i: int, course: Course) -> float:
    """Where a point is: 0 to 1 in forward, 1 to 2 in backward."""
    if i < course.forward:
        return i / max(course.forward, 1)
    return 1 + (i - course.forward + 1) / max(len(course.bytes) - course.forward, 1)


def _pair(both: Both | None) -> Any:
    return None if both is None else {"kept": both.kept, "reversed": both.reversed}


def _order(value: float) -> float:
    """NaN is worse than anything."""
    return math.inf if math.isnan(value) else value


def _worst(found: dict[str, float]) -> tuple[str, float]:
    return max(found.items(), key=lambda item: _order(item[1]))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip()
        for row in rows
    ]


def _table(rows: Sequence[Sequence[str]], head: bool = False) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(f'<{tag} style="{style(cell)}">{html.escape(cell)}</{tag}>' for cell in row)
            + "</tr>"
        )

    def style(cell: str) -> str:
        colour = {"ok": "; color:#1a7f37", "WRONG": "; color:#cf222e; font-weight:bold"}.get(
            cell, ""
        )
        return f"text-align:left; padding:2px 12px 2px 0{colour}"

    return (
        '<table style="margin:0.8em 0; border-collapse:collapse">'
        + "".join(cells(row, "th" if head and not i else "td") for i, row in enumerate(rows))
        + "</table>"
    )
