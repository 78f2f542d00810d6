"""What does a rule cost in quality? The language model of `speedrun`, trained under each rule.

    python -m benchmarks.rule_quality [--steps 300] [--seeds 3] [--write]

Same size, same steps, same batches, same seeds: 12 layers of width 64 (24 functions), context 64,
16 sequences a step, AdamW, on the source of Python's standard library; one file in ten is held out.
All are exact, so that `memory=rg.Keep()`, which is used here because it is faster, gives the bits
of `rg.Reverse()`. Results go to docs/figures/rules.jsonl; `--write` puts the table into
docs/rules.md.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.drift import FIGURES
from benchmarks.exact_training import CONTEXT, batch, texts
from benchmarks.page import write_table
from speedrun.model import Config, LanguageModel

DATA = FIGURES / "rules.jsonl"
RULES: dict[str, Any] = {
    "ordinary network, `Euler()`": rg.Euler(),
    "pairs, `ReversibleSequence`": None,
    "`Blend(1/8)`": rg.Blend(1 / 8),
    "`Blend(1/4)`": rg.Blend(1 / 4),
    "`Blend(1/2)`": rg.Blend(1 / 2),
    "`Bdia(0.5)`, evaluated as the ordinary network": rg.Bdia(0.5),
    "`Bdia(0.25)`, evaluated as the ordinary network": rg.Bdia(0.25),
    "`Midpoint(0.5)`": rg.Midpoint(0.5),
    "rewiring, `TwoStep(1, 0, 1)`": rg.TwoStep(1, 0, 1),
    "`Leapfrog(0.5)`": rg.Leapfrog(0.5),
}


def train(rule: Any, steps: int, seed: int) -> float:
    """The loss on held-out text after training, in bits per byte."""
    text, held_out = texts()
    torch.manual_seed(seed)
    config = Config(depth=12, width=64, heads=4, context=CONTEXT)
    model = LanguageModel(config, rule, exact=True, memory=rg.Keep())
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 5e-3, total_steps=steps, pct_start=0.1
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch(text, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    generator.manual_seed(0)
    with torch.no_grad():
        values = [loss(model, batch(held_out, generator)).item() for _ in range(40)]
    return sum(values) / len(values)


def loss(model: LanguageModel, text: Tensor) -> Tensor:
    return model.loss(text[:, :-1], text[:, 1:]) / math.log(2)


def table(rows: list[dict[str, Any]]) -> str:
    """The mean over seeds, and their range."""
    lines = ["| bits per byte, held out | mean | range |", "| --- | ---: | ---: |"]
    for name in RULES:
        values = [row["held_out"] for row in rows if row["rule"] == name]
        if values:
            mean = sum(values) / len(values)
            lines.append(f"| {name} | {mean:.3f} | {min(values):.3f}–{max(values):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table to docs/rules.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(options.seeds):
        for name, rule in RULES.items():
            held_out = round(train(rule, options.steps, seed), 4)
            rows.append({"rule": name, "seed": seed, "steps": options.steps, "held_out": held_out})
            print(f"seed {seed}, {name}: {held_out}", flush=True)
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    if options.write:
        write_table("quality", table(rows))


if __name__ == "__main__":
    main()
