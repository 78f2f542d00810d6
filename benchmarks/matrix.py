"""Which sizes are measured, and the rows: as JSON lines, tables and pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import frontier
from benchmarks.cases import CONTESTANTS, SIZES, Size, contestants
from benchmarks.rivals import NETWORKS, PAIRS, Network
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
    replace(SHOWN, name=name, blocks=blocks, width=64, batch=2, tokens=128)
    for name, blocks in (("depth", 4), ("depth", 8), ("tiny", 16))
]
SHAPE = ("name", "network", "blocks", "width", "batch", "tokens")
DRAWN = (*SHAPE, "contestant", "activation_bytes", "flops_ratio", "time_ratio")

Row = dict[str, Any]


def run(sizes: list[Size], rounds: int, names: Collection[str] | None) -> Iterator[Row]:
    """Rows, as they are measured. A table of each size is printed."""
    todo = [(size, network) for size in sizes for network in _networks_of(size)]
    for i, (size, network) in enumerate(todo, 1):
        start = time.monotonic()
        among = network.contestants if size.name in frontier.SIZES else CONTESTANTS
        found = contestants(size, names, among)
        rows = [
            {"network": network.name, **row}
            for row in measure(size, found, rounds, network.streams)
        ]
        print(f"{i} of {len(todo)}, {time.monotonic() - start:.0f} s\n{table(rows)}\n", flush=True)
        yield from rows


def _networks_of(size: Size) -> list[Network]:
    return list(NETWORKS.values()) if size.name in frontier.SIZES else [PAIRS]


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


def merged(rows: Iterable[Row], known: Iterable[Row]) -> list[Row]:
    """The rows, and those known ones of what was not measured this time."""
    by_what = {_what(row): row for row in known}
    by_what.update({_what(row): row for row in rows})
    return list(by_what.values())


def _what(row: Row) -> tuple[Any, ...]:
    return (*(row[key] for key in SHAPE), row["contestant"])


# --- as tables


TITLES = {"plain": "plain autograd", "checkpoint": "`torch.utils.checkpoint` per block"}


def title(name: str) -> str:
    """A contestant, as documentation calls it."""
    line, _, point = name.partition(", ")
    if line != "retrograd":
        return TITLES.get(name, name)
    if not point:
        return "**retrograd**"
    option = "exact=True" if point == "exact" else f'memory=rg.Budget("{point}")'
    return f"retrograd, `{option}`"


def table(rows: list[Row]) -> str:
    """Rows of one size, as Markdown."""
    first = rows[0]
    head = (
        f"{first['blocks']} blocks, width {first['width']}, {first['batch']} x {first['tokens']} "
        f"tokens ({first['network']})"
    )
    return f"{head}\n{table_of_steps(rows, {row['contestant']: row['contestant'] for row in rows})}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "activations, MiB": lambda row: f"{row['activation_bytes'] / MIB:.2f}",
    "FLOPs": lambda row: f"{row['flops_ratio']:.3f}",
    "time": lambda row: f"{row['time_ratio']:.2f}",
    "input gradient differs by": lambda row: f"{row['gradient_difference']:.0e}",
}


def table_of_steps(
    rows: Iterable[Row], titles: dict[str, str], columns: Iterable[str] = COLUMNS
) -> str:
    """Of these contestants."""
    columns = list(columns)
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for row in rows:
        if row["contestant"] in titles:
            cells = [COLUMNS[column](row) for column in columns]
            lines.append(f"| {titles[row['contestant']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


PEERS = ("reformer-pytorch", "revtorch", "revlib", "memcnn")
BUDGETS = ("retrograd, 25%", "retrograd, 50%")
# The tables of steps: a size, its contestants, and the columns.
STEPS = {
    "large": (("plain", "checkpoint", "retrograd", *BUDGETS, *PEERS), [*COLUMNS]),
    "tiny": (
        ("plain", "checkpoint", "retrograd", "retrograd, exact", *BUDGETS, "revtorch"),
        [*COLUMNS][:3],
    ),
}


def tables(rows: list[Row]) -> dict[str, str]:
    """The tables of docs/benchmarks.md, by the name of their markers."""
    pairs = [row for row in rows if row["network"] == PAIRS.name]
    found = {}
    for size, (names, columns) in STEPS.items():
        titles = {name: title(name) for name in names}
        of_size = [row for row in pairs if row["name"] == size]
        if of_size:
            found[f"steps of {size}"] = table_of_steps(of_size, titles, columns)
    found["depth"] = table_of_depth(_of_most_depths(pairs))
    return found


def table_of_readme(rows: list[Row]) -> str:
    """Of the size "large"."""
    names = ("plain", "checkpoint", "revtorch", "retrograd", *BUDGETS)
    titles = {name: title(name) for name in names}
    titles["revtorch"] = "the leanest other library, revtorch"
    large = [row for row in rows if row["name"] == "large" and row["network"] == PAIRS.name]
    return table_of_steps(large, titles, [*COLUMNS][:3])


def table_of_depth(rows: list[Row]) -> str:
    depths = sorted({row["blocks"] for row in rows})
    lines = [
        f"| blocks | {' | '.join(map(str, depths))} |",
        f"| --- |{' ---: |' * len(depths)}",
    ]
    for name in ("plain", "checkpoint", "retrograd", "retrograd, exact", *PEERS):
        by_depth = {row["blocks"]: row for row in rows if row["contestant"] == name}
        if by_depth.keys() == set(depths):
            cells = [f"{by_depth[depth]['activation_bytes'] / MIB:.1f}" for depth in depths]
            lines.append(f"| {title(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- drawn


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Draw memory against depth, and the frontier of each size that has one.

    Depth is that of the width and the length for which rows of the most depths were measured.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    pairs = [row for row in rows if row["network"] == PAIRS.name]
    figures = {"memory.svg": _memory(_of_most_depths(pairs)), **frontier.figures(rows)}
    with matplotlib.rc_context({"svg.hashsalt": "retrograd"}):  # the same file each time
        for name, figure in figures.items():
            figure.savefig(folder / name, metadata={"Date": None})
    return [folder / name for name in figures]


def _of_most_depths(rows: list[Row]) -> list[Row]:
    """The rows of the width, batch and length that has the most depths."""
    by_shape: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        by_shape.setdefault((row["width"], row["batch"], row["tokens"]), []).append(row)
    return max(by_shape.values(), key=lambda group: len({row["blocks"] for row in group}))


def _memory(rows: list[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure((6, 4), layout="constrained")
    axes = figure.subplots()
    labels = []
    for name in dict.fromkeys(row["contestant"] for row in rows):
        # A share of plain autograd grows as plain autograd does.
        if name not in CONTESTANTS or name.endswith(("%", "exact")):
            continue
        points = [
            (row["blocks"], row["activation_bytes"] / MIB)
            for row in rows
            if row["contestant"] == name
        ]
        width = 2.5 if name == "retrograd" else 1
        (line,) = axes.plot(*zip(*sorted(points)), marker="o", markersize=3, linewidth=width)
        labels.append(LineLabel(*max(points), name, line.get_color()))
    first = rows[0]
    shape = f"width {first['width']}, {first['batch']} x {first['tokens']} tokens"
    axes.set_title(f"Activation memory against depth ({shape})")
    axes.set(xlabel="blocks", ylabel="MiB", xscale="log", yscale="log")
    depths = sorted({row["blocks"] for row in rows})
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_xlim(right=2.6 * depths[-1])  # room for names
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label_lines(axes, labels, fontsize=8, va="center")
    return figure
