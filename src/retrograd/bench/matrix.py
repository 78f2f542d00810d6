"""Which sizes are measured, and what becomes of the rows: JSON lines, tables, pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrograd.bench.cases import SIZES, Size
from retrograd.bench.steps import measure
from retrograd.files import write_whole

MIB = 2**20
SHOWN = SIZES["shown"]
# One of depth, width and length at a time.
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


def run(sizes: list[Size], rounds: int, names: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Rows, as they are measured."""
    for i, size in enumerate(sizes, 1):
        start = time.monotonic()
        rows = measure(size, rounds, names)
        print(f"{i} of {len(sizes)}, {time.monotonic() - start:.0f} s\n{table(rows)}\n", flush=True)
        yield from rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; `ValueError` or `KeyError` if it has others."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows:
        raise ValueError("it is empty")
    for row in rows:
        for key in (
            "contestant",
            "blocks",
            "width",
            "batch",
            "tokens",
            "activation_bytes",
            "time_ratio",
        ):
            row[key]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one size, as Markdown."""
    first = rows[0]
    lines = [
        f"{first['blocks']} blocks, width {first['width']}, {first['batch']} x {first['tokens']} "
        "tokens",
        "| | activations, MiB | FLOPs | time | input gradient differs by |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratios = f"{row['flops_ratio']:.3f} | {row['time_ratio']:.2f}"
        mib = row["activation_bytes"] / MIB
        lines.append(
            f"| {row['contestant']} | {mib:.1f} | {ratios} | {row['gradient_difference']:.0e} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Memory against depth, and time against memory: at the sizes for which there are rows."""
    from matplotlib.figure import Figure

    sizes = {(r["width"], r["batch"], r["tokens"]) for r in rows}
    by_depth = max(
        sizes,
        key=lambda size: len(
            {r["blocks"] for r in rows if (r["width"], r["batch"], r["tokens"]) == size}
        ),
    )
    chosen = [r for r in rows if (r["width"], r["batch"], r["tokens"]) == by_depth]
    width, batch, tokens = by_depth
    shape = f"width {width}, {batch} x {tokens} tokens"
    names = list(dict.fromkeys(r["contestant"] for r in chosen))
    figures = {
        "memory.svg": Figure((6, 4), layout="constrained"),
        "frontier.svg": Figure((6, 4), layout="constrained"),
    }
    axes = figures["memory.svg"].subplots()
    for name in (
        name for name in names if not name.endswith(("%", "exact"))
    ):  # a share of plain grows as plain does
        points = sorted(
            (r["blocks"], r["activation_bytes"] / MIB) for r in chosen if r["contestant"] == name
        )
        axes.plot(
            *zip(*points),
            marker="o",
            markersize=3,
            label=name,
            linewidth=2.5 if name == "retrograd" else 1,
        )
    axes.set(
        title=f"Activation memory against depth ({shape})",
        xlabel="blocks",
        ylabel="MiB",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(
        sorted({r["blocks"] for r in chosen}),
        [str(blocks) for blocks in sorted({r["blocks"] for r in chosen})],
    )
    axes.minorticks_off()
    deepest = max(r["blocks"] for r in chosen)
    last = [r for r in chosen if r["blocks"] == deepest]
    axes = figures["frontier.svg"].subplots()
    ours = [
        r
        for r in last
        if r["contestant"] in ("retrograd", "plain") or r["contestant"].endswith("%")
    ]
    axes.plot(
        *zip(*sorted((r["activation_bytes"] / MIB, r["time_ratio"]) for r in ours)),
        color="gray",
        linewidth=1,
    )
    for r in last:
        axes.plot(
            r["activation_bytes"] / MIB,
            r["time_ratio"],
            "o" if r in ours else "x",
            label=r["contestant"],
        )
    axes.set(
        title=f"Time against memory ({deepest} blocks, {shape})",
        xlabel="MiB",
        ylabel="time of a step, plain = 1",
        xscale="log",
    )
    paths = []
    for name, figure in figures.items():
        for axes in figure.axes:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
        )
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, metadata={"Date": None})
        paths.append(folder / name)
    return paths
