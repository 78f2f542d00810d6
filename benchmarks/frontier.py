"""The frontier: bytes against FLOPs and time of every contestant, and who is ahead of retrograd.

A contestant is named "line, point". A line goes from its fewest bytes to plain autograd, which
every user can mix in, block by block; other reversible libraries cannot, so each is a point. A
point of ours is behind a line if it needs more FLOPs than the line has at the same bytes, between
two of its points by linear interpolation.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.page import DOCS
from retrograd.line_labels import LineLabel, label_lines

MIB = 2**20
SIZES = ("tiny", "large", "deep")
OURS = ("retrograd", "rules")
# Lines that plain autograd can be mixed into.
MIXED = ("retrograd", "checkpoint", "selective", "torch_remat", "offloaded", "compiler")
# Plain autograd being 1: FLOPs are rounded, time differs by that between runs.
TOLERANCES = {"flops": 0.0005, "time": 0.03}
COLOURS = {
    "retrograd": "tab:red",
    "rules": "tab:pink",
    "checkpoint": "black",
    "selective": "tab:blue",
    "torch_remat": "tab:green",
    "offloaded": "tab:orange",
    "compiler": "tab:blue",
}
OTHER = "gray"  # other reversible libraries

Row = dict[str, Any]


class Point(NamedTuple):
    """What a step needs; FLOPs and time relative to plain autograd."""

    bytes: int
    flops: float
    time: float
    name: str

    @property
    def cost(self) -> str:
        return f"{self.flops:.3f} in {self.time:.2f}"


def lines_of(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """The points of each line of one network, from few bytes to many."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        costs = (row["activation_bytes"], row["flops_ratio"], row["time_ratio"])
        point = Point(*costs, row["contestant"])
        found.setdefault(point.name.partition(",")[0], []).append(point)
    plain = found.pop("plain")
    for name, points in found.items():
        if name in MIXED:
            points += plain
        points.sort()
    return found


def best(points: Sequence[Point]) -> list[Point]:
    """The points, from few bytes to many, that need fewer FLOPs than those with fewer bytes."""
    found: list[Point] = []
    for point in sorted(points):
        if not found or point.flops < found[-1].flops:
            found.append(point)
    return found


def at(points: Sequence[Point], bytes_: int) -> Point | None:
    """The point of a line at so many bytes; None if it needs more bytes."""
    points = best(points)
    if bytes_ < points[0].bytes:
        return None
    for left, right in itertools.pairwise(points):
        if bytes_ <= right.bytes:
            share = (bytes_ - left.bytes) / (right.bytes - left.bytes)
            flops = left.flops + share * (right.flops - left.flops)
            time = left.time + share * (right.time - left.time)
            return Point(bytes_, flops, time, left.name)
    return points[-1]


def behind(lines: dict[str, list[Point]], what: str) -> list[Point]:
    """The points of ours that are not at or under every line, in "flops" or "time"."""
    others = [points for name, points in lines.items() if name not in OURS]
    found = []
    for point in ours(lines):
        there = [at(points, point.bytes) for points in others]
        least = min((getattr(p, what) for p in there if p is not None), default=math.inf)
        if least < getattr(point, what) - TOLERANCES[what]:
            found.append(point)
    return found


def ours(lines: dict[str, list[Point]]) -> list[Point]:
    return [point for name in OURS for point in lines.get(name, ()) if point.name != "plain"]


def ahead(lines: dict[str, list[Point]]) -> list[tuple[Point, Point | None]]:
    """The points of others under our line, and our line there; None if we need more bytes."""
    found = []
    for name, points in lines.items():
        for point in points if name not in OURS else ():
            there = at(lines["retrograd"], point.bytes)
            if there is None or point.flops < there.flops - TOLERANCES["flops"]:
                found.append((point, there))
    return sorted(found)


COMPILED = DOCS / "figures" / "compiled.jsonl"  # of `python -m benchmarks.compiled`


def compiled_rows() -> list[Row]:
    """What was measured of compiled steps, as rows of a network of their own.

    Bytes are those of torch's profiler, so these rows are compared with each other only.
    """
    if not COMPILED.exists():
        return []
    found = [json.loads(line) for line in COMPILED.read_text().splitlines()]
    plain = {_compiled_size(row): row["flops"] for row in found if row["way"] == "plain"}
    return [
        {
            "name": "compiled",
            "network": _compiled_size(row),
            "contestant": WAYS.get(row["way"], row["way"].replace("plain, budget", "compiler,")),
            "activation_bytes": row["peak"],
            "flops_ratio": round(row["flops"] / plain[_compiled_size(row)], 4),
            "time_ratio": row["time"],
        }
        for row in found
        if row["flops"] and _compiled_size(row) in plain and "eager" not in row["way"]
    ]


WAYS = {"checkpoint per block": "checkpoint", "retrograd, whole": "retrograd"}


def _compiled_size(row: Row) -> str:
    return f"{row['depth']} blocks, {row['size']}"


def groups(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each size and network that is compared."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["name"] in (*SIZES, "compiled"):
            found.setdefault((row["name"], row["network"]), []).append(row)
    order = [*SIZES, "compiled"]
    return {key: found[key] for key in sorted(found, key=lambda key: order.index(key[0]))}


def text(rows: Iterable[Row]) -> str:
    """Who is ahead where, as a table."""
    lines = [
        "| size, network | ours under every line: FLOPs | time | others with fewer FLOPs than our "
        "line: MiB, FLOPs in time (ours there) |",
        "| --- | ---: | ---: | --- |",
    ]
    for (size, network), group in groups(rows).items():
        found = lines_of(group)
        count = len(ours(found))
        cells = (
            f"{size}, {network}",
            f"{count - len(behind(found, 'flops'))} of {count}",
            f"{count - len(behind(found, 'time'))} of {count}",
            "<br>".join(described(*pair) for pair in ahead(found)) or "none",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def described(point: Point, there: Point | None) -> str:
    least = "needs more" if there is None else there.cost
    return f"{point.name}: {point.bytes / MIB:.2f}, {point.cost} ({least})"


# --- drawn


def figures(rows: Iterable[Row]) -> dict[str, Any]:
    """A figure for each size, by its file: both networks side by side, FLOPs above time."""
    from matplotlib.figure import Figure

    by_size: dict[str, dict[str, list[Row]]] = {}
    for (size, network), group in groups(rows).items():
        by_size.setdefault(size, {})[network] = group
    found = {}
    for size, networks in by_size.items():
        figure = Figure((5.5 * len(networks), 8), layout="constrained")
        panels = figure.subplots(2, len(networks), sharex="col", sharey="row", squeeze=False)
        for column, (network, group) in zip(panels.T, networks.items()):
            column[0].set_title(_title(network, group[0]))
            column[1].set_xlabel("MiB of activations")
            for axes, what in zip(column, ("flops", "time")):
                _draw(axes, lines_of(group), what)
        for axes, what in zip(panels[:, 0], ("FLOPs", "time")):
            axes.set_ylabel(f"{what} of a step, plain autograd = 1")
        found[f"frontier-{size}.svg"] = figure
    return found


def _title(network: str, row: Row) -> str:
    if "width" not in row:
        return network
    shape = f"{row['blocks']} blocks, width {row['width']}"
    return f"{network}: {shape}, {row['batch']} x {row['tokens']} tokens"


def _draw(axes: Any, lines: dict[str, list[Point]], what: str) -> None:
    from matplotlib.ticker import LogLocator

    labels = []
    for name, points in lines.items():
        colour = COLOURS.get(name, OTHER)
        width = 2.5 if name == "retrograd" else 1
        axes.plot(*_columns(points, what), "o", markersize=2 + width, color=colour)
        shown = best(points)  # in FLOPs, also where time is drawn
        if name != "rules":
            axes.plot(*_columns(shown, what), color=colour, linewidth=width)
        at = shown[min(1, len(shown) - 1)]  # the first points of several lines are nearly the same
        labels.append(LineLabel(at.bytes / MIB, getattr(at, what), name, colour))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label_lines(axes, _together(labels), fontsize=8)


def _columns(points: Sequence[Point], what: str) -> tuple[list[float], list[float]]:
    return [p.bytes / MIB for p in points], [getattr(p, what) for p in points]


def _together(labels: list[LineLabel]) -> list[LineLabel]:
    """One label for other libraries that are at the same height, at the leanest of them."""
    found = [label for label in labels if label.colour != OTHER]
    others = sorted(label for label in labels if label.colour == OTHER)
    for flops in dict.fromkeys(label.y for label in others):
        same = [label for label in others if label.y == flops]
        found.append(same[0]._replace(text=", ".join(label.text for label in same)))
    return found
