"""How far rebuilt streams drift with depth: in float32, under bfloat16 autocast, in bfloat16, and
exact.

    python -m benchmarks.drift [--depths 1 4 ... 1024] [--draw-only]

Two errors of a stack of attention and feed-forward blocks, as initialised: of the input as backward
rebuilt it, against what forward saw, relative to its largest value; and of the first block's
gradients, against those of the kept network, relative to their norm. The worst of three networks.
Measurements go to docs/figures/drift.jsonl, the picture to docs/figures/drift.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from retrograd.line_labels import LineLabel, label_lines

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


class Kind(NamedTuple):
    parameters: torch.dtype = torch.float32
    autocast: bool = False
    options: dict[str, Any] = {}


BF16 = torch.bfloat16
KINDS = {
    "float32": Kind(),
    "bfloat16 autocast": Kind(autocast=True),
    "bfloat16 parameters": Kind(BF16),
    "bfloat16 parameters and streams": Kind(BF16, options={"stream_dtype": BF16}),
    "exact, float32": Kind(options={"exact": True}),
    "exact, bfloat16 autocast": Kind(autocast=True, options={"exact": True}),
    "exact, bfloat16 parameters": Kind(BF16, options={"exact": True}),
}


def run(
    kind: Kind, depth: int, width: int, memory: Any, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The input that the first function saw in forward, the one that it saw last, and the gradients
    of the first block.
    """
    torch.manual_seed(seed)
    pairs = [(Attention(width, 4), FeedForward(width)) for _ in range(depth)]
    stack = rg.ReversibleSequence(pairs, memory=memory, drift="ignore", **kind.options).to(
        kind.parameters
    )
    x, seen = torch.randn(2, 32, width, dtype=kind.parameters), []

    pairs[0][0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    with torch.autocast("cpu", BF16) if kind.autocast else contextlib.nullcontext():
        y = stack(x)
    y.float().square().mean().backward()
    return (
        seen[0],
        seen[-1],
        torch.cat(
            [p.grad.float().flatten() for p in stack.blocks[0].parameters() if p.grad is not None]
        ),
    )


def measure(depth: int, width: int) -> list[dict[str, Any]]:
    rows = []
    for name, kind in KINDS.items():
        worst = {"input": 0.0, "gradient": 0.0}
        for seed in range(3):
            x, rebuilt, gradient = run(kind, depth, width, rg.Reverse(keep_last=False), seed)
            _, _, kept = run(kind, depth, width, rg.Keep(), seed)
            worst["input"] = max(
                worst["input"], ((rebuilt.float() - x.float()).abs().max() / x.abs().max()).item()
            )
            worst["gradient"] = max(
                worst["gradient"], ((gradient - kept).norm() / kept.norm()).item()
            )
        rows.append({"kind": name, "depth": depth, **worst})
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.hashsalt": "retrograd",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True, sharey=True)
    floor = 1e-8  # where zero is drawn
    for axis, what, title in zip(
        axes, ("input", "gradient"), ("rebuilt input", "gradients of the first block")
    ):
        labels = []
        for name in KINDS:
            points = sorted((row["depth"], row[what]) for row in rows if row["kind"] == name)
            exact = name.startswith("exact")
            style = {"color": "black", "linewidth": 2} if exact else {}
            (line,) = axis.loglog(
                [depth for depth, _ in points],
                [max(error, floor) for _, error in points],
                marker="o",
                markersize=3,
                **style,
            )
            if not exact or name == "exact, float32":
                text = "exact, all three" if exact else name.replace(" and", "\nand")
                end = max(points[-1][1], floor)
                labels.append(LineLabel(points[-1][0], end, text, line.get_color()))
        axis.set(title=f"Relative error of the {title}", xlabel="blocks", ylim=(floor / 1.6, 4))
        axis.set_yticks([floor, 1e-6, 1e-4, 1e-2, 1], ["0", "1e-6", "1e-4", "1e-2", "1"])
        axis.minorticks_off()
        axis.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
        axis.grid(alpha=0.3)
        axis.set_xlim(right=4e4)  # room for names
        label_lines(axis, labels, va="center", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[4**i for i in range(6)], help="numbers of blocks"
    )
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--draw-only", action="store_true", help="draw what was measured before")
    arguments = parser.parse_args()
    data = FIGURES / "drift.jsonl"
    FIGURES.mkdir(parents=True, exist_ok=True)
    if not arguments.draw_only:
        rows = [row for depth in arguments.depths for row in measure(depth, arguments.width)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    depths = sorted({row["depth"] for row in rows})
    print(
        f"rebuilt input / first gradients\n| blocks | {' | '.join(map(str, depths))} |\n| --- "
        f"|{' ---: |' * len(depths)}"
    )
    for name in KINDS:
        cells = [
            f"{r['input']:.0e} / {r['gradient']:.0e}"
            for d in depths
            for r in rows
            if (r["kind"], r["depth"]) == (name, d)
        ]
        print(f"| {name} | {' | '.join(cells).replace('0e+00', '0')} |")
    draw(rows, FIGURES / "drift.svg")


if __name__ == "__main__":
    main()
