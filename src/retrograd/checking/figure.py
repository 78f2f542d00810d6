"""A report as a figure: memory over one step, and drift against depth. Needs matplotlib."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from retrograd.files import save_figure
from retrograd.line_labels import LineLabel, label_lines
from retrograd.sizes import MIB, human

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from retrograd.checking.report import Both, Course, Drift, Report


def draw(report: Report, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw the report; save the figure if there is a path."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, drift = figure.subplots(1, 2)
    if report.course is not None and report.peak is not None:
        _draw_memory(memory, report.course, report.peak)
    if report.drift:
        _draw_drift(drift, report)
    for axes in (memory, drift):
        axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        save_figure(figure, path)
    return figure


def _draw_memory(axes: Axes, courses: tuple[Course, Course], peaks: Both) -> None:
    names = ("kept", "reversed")
    colours = ("#6e7781", "#0969da")
    labels = []
    for name, colour, course, peak in zip(names, colours, courses, peaks):
        x = [_progress(i, course) for i in range(len(course.bytes))]
        y = [count / MIB for count in course.bytes]
        axes.plot(x, y, color=colour)
        text = f"{name}: {human(peak)} at most,\nless gradients"
        labels.append(LineLabel(1, y[min(course.forward, len(y) - 1)] if y else 0, text, colour))
        axes.fill_between(x, y, color=colour, alpha=0.15, linewidth=0)
    axes.axvline(1, color="gray", linewidth=0.5)
    largest = max(max(course.bytes, default=1) for course in courses)
    axes.set(xlim=(0, 2), ylim=(0, 1.3 * largest / MIB))  # with room for names
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("MiB of activations and gradients")
    axes.set_title("memory over the course of one step")
    label_lines(axes, labels, rise=0.05)


def _progress(i: int, course: Course) -> float:
    """The x of a point: 0 to 1 in forward, 1 to 2 in backward."""
    if i < course.forward:
        return i / max(course.forward, 1)
    return 1 + (i - course.forward + 1) / max(len(course.bytes) - course.forward, 1)


def _draw_drift(axes: Axes, report: Report) -> None:
    title = "drift of rebuilt streams"
    labels = []
    for name, points in _lines(report.drift):
        x = [point.update for point in points]
        y = [point.relative or math.nan for point in points]  # a log axis has no zero
        (line,) = axes.plot(x, y)
        drawn = [(a, b) for a, b in zip(x, y) if not math.isnan(b)]
        labels += [LineLabel(*point, name, line.get_color()) for point in sorted(drawn)[:1]]
    if report.limit:
        axes.axhline(report.limit, color="gray", linewidth=0.5, linestyle="--")
        title += f" (dashed: limit {report.limit:.0e})"
    if not any(point.relative for point in report.drift):
        text = "no drift: bit-identical"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")
    values = [point.relative for point in report.drift if 0 < point.relative < math.inf] or [1e-16]
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 3, max([*values, report.limit]) * 3)
    axes.invert_xaxis()  # in the direction of backward
    axes.set_xlabel("update that backward has rebuilt the streams to")
    axes.set_ylabel("relative error")
    axes.set_title(title)
    label_lines(axes, labels)


def _lines(drift: tuple[Drift, ...]) -> list[tuple[str, list[Drift]]]:
    """The points of each stream, with its name."""
    has_several_stacks = len({point.stack for point in drift}) > 1
    lines: dict[str, list[Drift]] = {}
    for point in drift:
        name = f"{point.stack}, {point.stream}" if has_several_stacks else point.stream
        lines.setdefault(name, []).append(point)
    return list(lines.items())
