"""The same network trained with and without exact reversal, on real text: does the grid change what
is learned?

    python -m benchmarks.exact_training [--steps 300] [--blocks 12] [--draw-only]

A byte-level language model (width 64, context 64, 16 sequences a step, AdamW) on the source of
Python's standard library; one file in ten is held out. The same seed draws the same weights and the
same batches for every kind. Losses go to docs/figures/exact_training.jsonl, the picture to
docs/figures/exact_training.svg. About half an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from benchmarks.drift import FIGURES
from retrograd.line_labels import LineLabel, label_lines

WIDTH, CONTEXT, BATCH = 64, 64, 16


class Kind(NamedTuple):
    exact: Any
    autocast: bool = False


KINDS = {
    "float32": Kind(False),
    "float32, exact, 2**-16": Kind(rg.Grid(bits=16)),
    "float32, exact": Kind(True),  # 2**-12
    "float32, exact, 2**-8": Kind(rg.Grid(bits=8)),
    "float32, exact, 2**-4": Kind(rg.Grid(bits=4)),
    "bfloat16 autocast": Kind(False, True),
    "bfloat16 autocast, exact": Kind(True, True),
}


class Model(nn.Module):
    def __init__(self, blocks: int, exact: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        pairs = [(Attention(WIDTH, 4, causal=True), FeedForward(WIDTH)) for _ in range(blocks)]
        self.stack = rg.ReversibleSequence(pairs, exact=exact, drift="ignore")
        self.mix, self.head = (
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)),
        )

    def forward(self, text: Tensor) -> Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.tokens(inputs)
        x = self.mix(
            torch.cat([nn.functional.pad(x, (0, 0, i, -i)) for i in range(4)], -1)
        )  # spelling is local
        h = self.stack(x + self.places.weight[: inputs.shape[1]])
        return nn.functional.cross_entropy(
            self.head(h).flatten(0, 1).float(), targets.flatten()
        ) / math.log(2)


def texts() -> tuple[Tensor, Tensor]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [
        b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 0) == held_out)
        for held_out in (False, True)
    ]
    train, held_out = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts
    )
    return train, held_out


def batch(text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


def train(kind: Kind, steps: int, blocks: int, seed: int) -> dict[str, Any]:
    text, held_out = texts()
    torch.manual_seed(seed)
    model, generator = Model(blocks, kind.exact), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=steps, pct_start=0.1
    )
    largest = [0.0]
    for fn in model.stack.blocks[-1].children():
        fn.register_forward_pre_hook(
            lambda _, args: largest.append(args[0].detach().abs().max().item())
        )

    def loss(text: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if kind.autocast else contextlib.nullcontext():
            return model(text)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(batch(text, generator))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(round(value.item(), 4))
    with torch.no_grad():
        generator.manual_seed(0)
        final = sum(loss(batch(held_out, generator)).item() for _ in range(40)) / 40
    return {"losses": losses, "held_out": round(final, 4), "largest": round(max(largest), 1)}


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
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, kinds in zip(
        axes, (("float32", "float32, exact"), ("bfloat16 autocast", "bfloat16 autocast, exact"))
    ):
        labels = []
        for name, style in zip(
            kinds, ({"linewidth": 3, "alpha": 0.4}, {"linewidth": 1, "color": "black"})
        ):
            runs = [row["losses"] for row in rows if row["kind"] == name]
            mean = torch.tensor(runs).mean(0)
            smooth = [mean[max(0, i - 9) : i + 1].mean().item() for i in range(len(mean))]
            (line,) = axis.plot(smooth, **style)
            at = len(smooth) // 4
            labels.append(LineLabel(at, smooth[at], name, line.get_color()))
        axis.set(xlabel="steps", ylim=(2, 6))
        axis.grid(alpha=0.3)
        label_lines(axis, labels, rise=0.05)
    axes[0].set_ylabel("training loss, bits per byte")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        help="measure these, keep others as they were",
    )
    parser.add_argument("--draw-only", action="store_true", help="draw what was measured before")
    arguments = parser.parse_args()
    data = FIGURES / "exact_training.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()] if data.exists() else []
    if not arguments.draw_only:
        rows = [row for row in rows if row["kind"] not in arguments.kinds]
        for seed in range(arguments.seeds):
            for name in arguments.kinds:
                rows.append(
                    {
                        "kind": name,
                        "seed": seed,
                        **train(KINDS[name], arguments.steps, arguments.blocks, seed),
                    }
                )
                print(f"seed {seed}, {name}: {rows[-1]['held_out']}", flush=True)
        FIGURES.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    print(
        f"| held out, bits per byte | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | "
        "largest value |"
    )
    print(f"| --- |{' ---: |' * (len(seeds) + 2)}")
    for name in KINDS:
        own = [row for row in rows if row["kind"] == name]
        values = [row["held_out"] for row in own]
        cells = [
            *(f"{value:.3f}" for value in values),
            f"{sum(values) / len(values):.3f}",
            f"{max(r['largest'] for r in own):.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    draw(rows, FIGURES / "exact_training.svg")


if __name__ == "__main__":
    main()
