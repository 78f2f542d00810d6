"""Which sizes are measured, and the rows: as JSON lines, tables and pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import SIZES, Size
from benchmarks.steps import measure
from retrograd.files import write_whole
from retrograd.line_labels import LineLabel, label_lines

MIB = 2**20
SHOWN = SIZES["shown"]
# One of depth, width and length changes at a time.
FULL = [
    *SIZES.values(),
    *(replace(SHOWN, name="depth", blocks=blocks) for blocks in (6, 12, 48)),
    *(replace(SHOWN, name="width", width=width) for width in (64, 256)),
    *(replace(SHOWN, name="length", batch=1024 // tokens, tokens=tokens) for tokens in (64, 1024)),
]
QUICK = [
    replace(SHOWN, name="depth", blocks=blocks, width=64, batch=2, tokens=128)
    for blocks in (4, 8, 16)
]
DRAWN = ("contestant", "blocks", "width", "batch", "tokens", "activation_bytes", "time_ratio")

Row = dict[str, Any]


def run(sizes: list[Size], rounds: int, names: Collection[str] | None) -> Iterator[Row]:
    """Rows, as they are measured. A table of each size is printed."""
    for i, size in enumerate(sizes, 1):
        start = time.monotonic()
        rows = measure(size, rounds, names)
        print(f"{i} of {len(sizes)}, {time.monotonic() - start:.0f} s\n{table(rows)}\n", flush=True)
        yield from rows


# --- stored


def write(rows: list[Row], path: Path) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[Row]:
    """The rows of a file; `ValueError` or `KeyError` if it does not have such rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows:
        raise ValueError("it is empty")
    for row in rows:
        for key in DRAWN:
            row[key]
    return rows


def table(rows: list[Row]) -> str:
    """Rows of one size, as Markdown."""
    first = rows[0]
    lines = [
        f"{first['blocks']} blocks, width {first['width']}, {first['batch']} x {first['tokens']} "
        "tokens",
        "| | activations, MiB | FLOPs | time | input gradient differs by |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = (
            row["contestant"],
            f"{row['activation_bytes'] / MIB:.1f}",
            f"{row['flops_ratio']:.3f}",
            f"{row['time_ratio']:.2f}",
            f"{row['gradient_difference']:.0e}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- drawn


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Draw memory against depth, and time against memory of the deepest network.

    Both show the width and the length for which rows of the most depths were measured.
    """
    from matplotlib.figure import Figure

    rows = _of_most_depths(rows)
    first = rows[0]
    shape = f"width {first['width']}, {first['batch']} x {first['tokens']} tokens"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw_on in (("memory.svg", _draw_memory), ("frontier.svg", _draw_frontier)):
        figure = Figure((6, 4), layout="constrained")
        axes = figure.subplots()
        draw_on(axes, rows, shape)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(
                handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8
            )
        figure.savefig(folder / name, metadata={"Date": None})
        paths.append(folder / name)
    return paths


def _of_most_depths(rows: list[Row]) -> list[Row]:
    """The rows of the width, batch and length that has the most depths."""
    by_shape: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        by_shape.setdefault((row["width"], row["batch"], row["tokens"]), []).append(row)
    return max(by_shape.values(), key=lambda group: len({row["blocks"] for row in group}))


def _draw_memory(axes: Any, rows: list[Row], shape: str) -> None:
    labels = []
    for name in dict.fromkeys(row["contestant"] for row in rows):
        if name.endswith(("%", "exact")):  # a share of plain autograd grows as plain autograd does
            continue
        points = [
            (row["blocks"], row["activation_bytes"] / MIB)
            for row in rows
            if row["contestant"] == name
        ]
        width = 2.5 if name == "retrograd" else 1
        (line,) = axes.plot(*zip(*sorted(points)), marker="o", markersize=3, linewidth=width)
        labels.append(LineLabel(*max(points), name, line.get_color()))
    axes.set_title(f"Activation memory against depth ({shape})")
    axes.set(xlabel="blocks", ylabel="MiB", xscale="log", yscale="log")
    depths = sorted({row["blocks"] for row in rows})
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_xlim(right=2.6 * depths[-1])  # room for names
    label_lines(axes, labels, fontsize=8, va="center")


def _draw_frontier(axes: Any, rows: list[Row], shape: str) -> None:
    deepest = max(row["blocks"] for row in rows)
    points = {
        row["contestant"]: (row["activation_bytes"] / MIB, row["time_ratio"])
        for row in rows
        if row["blocks"] == deepest
    }
    on_line = [name for name in points if name in ("plain", "retrograd") or name.endswith("%")]
    axes.plot(*zip(*sorted(points[name] for name in on_line)), color="gray", linewidth=1)
    for name, point in points.items():
        axes.plot(*point, "o" if name in on_line else "x", label=name)
    axes.set_title(f"Time against memory ({deepest} blocks, {shape})")
    axes.set(xlabel="MiB", ylabel="time of a step, plain = 1", xscale="log")
