"""What `rg.convert` keeps and computes for a small Llama, against gradient checkpointing.

    python -m benchmarks.converted_memory [--write]

Llama of Hugging Face with 12 and 48 layers of width 64, sequences of 128 tokens, float32: plain,
with `gradient_checkpointing_enable()`, and converted to several rules. Each is measured in the same
run: the peak of activation bytes and the FLOPs of a training step. The first step of a converted
model inspects its layers and chooses the grid, so the second one is measured. Its gradients are
added to those of the first, as in accumulation, so no memory for gradients is counted. Counts are
of tensors and of torch's own formulas, and the same on every machine. Results go to
docs/figures/converted_memory.jsonl; `--write` puts the table into docs/convert.md. Two minutes on
one core. Needs the extra `integrations`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import retrograd as rg
from benchmarks.drift import FIGURES
from benchmarks.page import write_table
from retrograd.measure import Flops, LiveBytes

DATA = FIGURES / "converted_memory.jsonl"
DEPTHS = (12, 48)
WIDTH, HEADS, VOCABULARY = 64, 4, 256
BATCH, LENGTH = 8, 128
ELEMENTS = BATCH * LENGTH * WIDTH  # of a hidden state
PLAIN = "plain"
CHECKPOINTED = "`gradient_checkpointing_enable()`"
CONVERTED: dict[str, tuple[Any, Any]] = {
    "`Euler()`": (rg.Euler(), rg.Reverse()),
    "`Euler()`, `memory=rg.Reverse(keep_last=False)`": (
        rg.Euler(),
        rg.Reverse(keep_last=False),
    ),
    "`Midpoint()`": (rg.Midpoint(), rg.Reverse()),
    "`Blend(1/4)`": (rg.Blend(1 / 4), rg.Reverse()),
    "`Blend(1/8)`": (rg.Blend(1 / 8), rg.Reverse()),
}
NAMES = [PLAIN, CHECKPOINTED, *CONVERTED]


def llama(depth: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=depth,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def prepared(name: str, depth: int) -> nn.Module:
    """The model, as a user would prepare it."""
    model = llama(depth)
    if name == CHECKPOINTED:
        with warnings.catch_warnings():  # transformers 5 has another name for it
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable()
    if name in CONVERTED:
        rg.convert(model, *CONVERTED[name])
    return model


def training_step(model: nn.Module) -> Callable[[], None]:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return lambda: model(input_ids=tokens, labels=tokens).loss.backward()


def measure(name: str, depth: int) -> dict[str, Any]:
    model = prepared(name, depth)
    step = training_step(model)
    step()
    with LiveBytes() as live:
        step()
    with Flops() as flops:
        step()
    return {"name": name, "depth": depth, "bytes": live.peak, "flops": flops.total}


# --- the table


def table(rows: list[dict[str, Any]]) -> str:
    few, many = DEPTHS
    head = [
        "Llama",
        f"MiB, {few} layers",
        f"MiB, {many} layers",
        "KiB for each layer more",
        f"FLOPs, {few} layers",
        f"FLOPs, {many} layers",
    ]
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(line(rows, name) for name in NAMES)])


def line(rows: list[dict[str, Any]], name: str) -> str:
    few, many = (row_of(rows, name, depth) for depth in DEPTHS)
    slope = (many["bytes"] - few["bytes"]) / (DEPTHS[1] - DEPTHS[0])
    flops = [row["flops"] / row_of(rows, PLAIN, row["depth"])["flops"] for row in (few, many)]
    cells = [name, *(f"{row['bytes'] / 2**20:.2f}" for row in (few, many)), f"{slope / 2**10:.1f}"]
    return f"| {' | '.join([*cells, *(f'{value:.2f}' for value in flops)])} |"


def row_of(rows: list[dict[str, Any]], name: str, depth: int) -> dict[str, Any]:
    return next(row for row in rows if (row["name"], row["depth"]) == (name, depth))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table to docs/convert.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for depth in DEPTHS:
        for name in NAMES:
            rows.append(measure(name, depth))
            print(json.dumps(rows[-1]), flush=True)
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    if options.write:
        write_table("memory", table(rows), "convert.md")


if __name__ == "__main__":
    main()
