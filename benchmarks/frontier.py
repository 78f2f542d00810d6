"""The frontier: bytes against FLOPs of every contestant, and where somebody is ahead of retrograd.

A contestant is named "line, point". A line goes from its fewest bytes to plain autograd, which
every user can mix in, block by block; other reversible libraries cannot, so each is a point. A
point of ours is behind a line if it needs more FLOPs than the line has at the same bytes, between
two of its points by linear interpolation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.cases import CONTESTANTS
from benchmarks.page import DOCS
from retrograd.line_labels import LineLabel, label_lines

MIB = 2**20
SIZES = ("tiny", "large", "deep")
OURS = ("retrograd", "rules")
TOLERANCE = 0.0005  # of FLOPs, plain autograd being 1: rows are rounded
COLOURS = {
    "retrograd": "tab:red",
    "rules": "tab:pink",
    "checkpoint": "black",
    "selective": "tab:blue",
    "torch_remat": "tab:green",
    "offloaded": "tab:orange",
}

Row = dict[str, Any]


class Point(NamedTuple):
    """What a step needs; FLOPs and time relative to plain autograd."""

    bytes: int
    flops: float
    time: float
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.bytes / MIB:.2f} MiB, {self.flops:.3f}, time {self.time:.2f})"


def lines_of(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """The points of each line of one network, from few bytes to many."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        costs = (row["activation_bytes"], row["flops_ratio"], row["time_ratio"])
        point = Point(*costs, row["contestant"])
        found.setdefault(point.name.partition(",")[0], []).append(point)
    plain = found.pop("plain")
    for name, points in found.items():
        if name not in CONTESTANTS or name in ("checkpoint", "retrograd"):
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


class Behind(NamedTuple):
    """A point of ours, and the lines that need fewer FLOPs there."""

    point: Point
    ahead: dict[str, Point]

    def __str__(self) -> str:
        others = [f"{n} {p.flops:.3f}, time {p.time:.2f}" for n, p in self.ahead.items()]
        return f"{self.point}: {'; '.join(others)}"


def all_behind(lines: dict[str, list[Point]]) -> list[Behind]:
    """The points of ours that are not at or under every line."""
    found = []
    for point in ours(lines):
        ahead = {}
        for name, points in lines.items():
            there = None if name in OURS else at(points, point.bytes)
            if there is not None and there.flops < point.flops - TOLERANCE:
                ahead[name] = there
        if ahead:
            found.append(Behind(point, ahead))
    return found


def ours(lines: dict[str, list[Point]]) -> list[Point]:
    return [point for name in OURS for point in lines.get(name, ()) if point.name != "plain"]


def leaner(lines: dict[str, list[Point]]) -> list[Point]:
    """The points of others with fewer bytes than any of ours."""
    least = min(point.bytes for point in ours(lines))
    others = [points for name, points in lines.items() if name not in OURS]
    return sorted(point for points in others for point in points if point.bytes < least)


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
        "| size, network | points of ours at or under every line | who needs fewer FLOPs at the "
        "bytes of the others | who needs fewer bytes than any |",
        "| --- | ---: | --- | --- |",
    ]
    for (size, network), group in groups(rows).items():
        found = lines_of(group)
        behind = all_behind(found)
        count = len(ours(found))
        cells = (
            f"{size}, {network}",
            f"{count - len(behind)} of {count}",
            "<br>".join(map(str, behind)) or "nobody",
            "<br>".join(map(str, leaner(found))) or "nobody",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- drawn


def figures(rows: Iterable[Row]) -> dict[str, Any]:
    """A figure for each size, by its file: both networks side by side."""
    from matplotlib.figure import Figure

    by_size: dict[str, dict[str, list[Row]]] = {}
    for (size, network), group in groups(rows).items():
        by_size.setdefault(size, {})[network] = group
    found = {}
    for size, networks in by_size.items():
        figure = Figure((5.5 * len(networks), 4.5), layout="constrained")
        panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
        for axes, (network, group) in zip(panels, networks.items()):
            axes.set_title(_title(network, group[0]))
            _draw(axes, lines_of(group))
        panels[0].set_ylabel("FLOPs of a step, plain autograd = 1")
        found[f"frontier-{size}.svg"] = figure
    return found


def _title(network: str, row: Row) -> str:
    if "width" not in row:
        return network
    shape = f"{row['blocks']} blocks, width {row['width']}"
    return f"{network}: {shape}, {row['batch']} x {row['tokens']} tokens"


def _draw(axes: Any, lines: dict[str, list[Point]]) -> None:
    labels = []
    for name, points in lines.items():
        colour = COLOURS.get(name, "gray")
        width = 2.5 if name == "retrograd" else 1
        xs, ys = [[p.bytes / MIB for p in points], [p.flops for p in points]]
        axes.plot(xs, ys, "o", markersize=2 + width, color=colour)
        if name != "rules":
            shown = best(points)
            xs, ys = [[p.bytes / MIB for p in shown], [p.flops for p in shown]]
            axes.plot(xs, ys, color=colour, linewidth=width)
        highest = max(points, key=lambda point: point.flops)
        labels.append(LineLabel(highest.bytes / MIB, highest.flops, name, colour))
    axes.set(xlabel="MiB of activations", xscale="log")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label_lines(axes, labels, fontsize=8)
