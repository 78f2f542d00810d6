"""What does a pretrained network lose when `rg.convert` makes it reversible?

    python -m benchmarks.converted_quality [--pretrain 500] [--steps 200] [--seeds 0 1 2] [--write]

Two sizes of Hugging Face's GPT-2 are trained plainly on the source of Python's standard library
(one file in ten is held out). A copy is then converted to each rule, evaluated, fine-tuned with the
same batches, and evaluated again: as the rule runs, so `Bdia` as the ordinary network. The same is
done with attention and feed-forward as two layers of their own. All are exact, so that
`memory=rg.Keep()`, which is used here because it is faster, gives the bits of `rg.Reverse()`; two
steps of each are compared to be sure. Context 64, 16 sequences a step, AdamW. Results go to
docs/figures/converted_quality.jsonl; `--write` puts the table into docs/convert.md. About an hour
on one core. Needs the extra `integrations`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.drift import FIGURES
from benchmarks.exact_training import CONTEXT, batch, texts
from benchmarks.page import write_table

DATA = FIGURES / "converted_quality.jsonl"
SIZES = {"12 layers of width 64": (12, 64, 4), "6 layers of width 128": (6, 128, 4)}
PLAIN = "not converted"
RULES: dict[str, Any] = {
    PLAIN: None,
    "`Blend(1/8)`": rg.Blend(1 / 8),
    "`Blend(1/4)`": rg.Blend(1 / 4),
    "`Blend(1/2)`": rg.Blend(1 / 2),
    "`Midpoint(1)`": rg.Midpoint(1),
    "`Bdia(0.25)`": rg.Bdia(0.25),
    "`Bdia(0.5)`": rg.Bdia(0.5),
}
LAYERS, HALVES = "layers", "halves"
RULES_OF_HALVES = ["`Blend(1/4)`", "`Midpoint(1)`", "`Bdia(0.25)`"]
TITLES = {LAYERS: "", HALVES: ", halves"}


# --- models


class AttentionLayer(nn.Module):
    """The first half of a layer of GPT-2: it adds attention to the hidden state."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.ln_1 = layer.ln_1
        self.attn = layer.attn

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        added, _ = self.attn(
            self.ln_1(hidden_states),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            **kwargs,
        )
        return hidden_states + added


class FeedForwardLayer(nn.Module):
    """The second half: it adds the feed-forward network."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.ln_2 = layer.ln_2
        self.mlp = layer.mlp

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states + self.mlp(self.ln_2(hidden_states))


def gpt2(size: tuple[int, int, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    depth, width, heads = size
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=depth,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def in_halves(model: Any) -> Any:
    """The same network, with attention and feed-forward as layers of their own."""
    parts = []
    for layer in model.transformer.h:
        parts += [AttentionLayer(layer), FeedForwardLayer(layer)]
    model.transformer.h = nn.ModuleList(parts)
    return model


def converted(model: Any, kind: str, rule: Any, memory: Any) -> Any:
    """A copy of a model under a rule; without one, just a copy."""
    model = copy.deepcopy(model)
    if kind == HALVES:
        model = in_halves(model)
    if rule is None:
        return model
    return rg.convert(model, rule, memory, layers="transformer.h")


# --- training


def loss(model: Any, text: Tensor) -> Tensor:
    logits = model(text[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / math.log(2)


def train(model: Any, text: Tensor, steps: int, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # for the signs of Bdia
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch(text, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def evaluate(model: Any, text: Tensor) -> float:
    """The loss on held-out text, in bits per byte."""
    generator = torch.Generator().manual_seed(0)
    model.eval()
    with torch.no_grad():
        values = [loss(model, batch(text, generator)).item() for _ in range(20)]
    return round(sum(values) / len(values), 5)


def same_bits(model: Any, kind: str, rule: Any, text: Tensor) -> bool:
    """Whether two steps give the same parameters with `Keep` as with `Reverse`."""
    trained = []
    for memory in (rg.Keep(), rg.Reverse()):
        network = converted(model, kind, rule, memory)
        train(network, text, 2, 1e-3, seed=0)
        trained.append(network.state_dict())
    return all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def run(seed: int, size: str, options: Any) -> Iterator[dict[str, Any]]:
    text, held_out = texts()
    torch.manual_seed(seed)
    pretrained = gpt2(SIZES[size])
    train(pretrained, text, options.pretrain, 3e-3, seed)
    runs = [(LAYERS, name) for name in RULES] + [(HALVES, name) for name in RULES_OF_HALVES]
    for kind, name in runs:
        rule = RULES[name]
        if seed == 0 and rule is not None:
            assert same_bits(pretrained, kind, rule, text), f"Reverse differs: {name}"
        model = converted(pretrained, kind, rule, rg.Keep())
        before = evaluate(model, held_out)
        train(model, text, options.steps, 1e-3, seed + 1000)
        after = evaluate(model, held_out)
        row = {"size": size, "seed": seed, "kind": kind, "rule": name}
        yield {**row, "steps": options.steps, "before": before, "after": after}


# --- the table


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each rule, the sizes side by side; after `±`, how far a seed is from the mean."""
    titles = [f"{depth} x {width}: before | after" for depth, width, _ in SIZES.values()]
    lines = [f"| layers x width | {' | '.join(titles)} |", f"| --- |{' ---: |' * 2 * len(SIZES)}"]
    for name in RULES:
        for kind in (LAYERS, HALVES):
            cells = [cell(rows, size, name, kind) for size in SIZES]
            if all(cells):
                lines.append(f"| {name}{TITLES[kind]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(rows: list[dict[str, Any]], size: str, name: str, kind: str) -> str:
    """The mean over seeds, against the plain network of the same seed."""
    chosen = [r for r in rows if (r["size"], r["rule"], r["kind"]) == (size, name, kind)]
    if not chosen:
        return ""
    if name == PLAIN:
        means = [sum(r[when] for r in chosen) / len(chosen) for when in ("before", "after")]
        return f"{means[0]:.3f} | {means[1]:.3f}"
    before = [change(rows, row, "before") for row in chosen]
    after = [change(rows, row, "after") for row in chosen]
    return f"{percent(mean(before))} | {percent(mean(after))} ±{100 * spread(after):.2f}"


def spread(values: list[float]) -> float:
    """How far a seed is from the mean, at most."""
    return max(abs(value - mean(values)) for value in values)


def change(rows: list[dict[str, Any]], row: dict[str, Any], when: str) -> float:
    """How much more a network loses than the plain one of the same seed, as a fraction."""
    plain = next(
        r for r in rows if (r["size"], r["seed"], r["rule"]) == (row["size"], row["seed"], PLAIN)
    )
    return row[when] / plain[when] - 1


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def percent(value: float) -> str:
    return f"{100 * value:+.2f}%"


def stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pretrain", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="those to run now")
    parser.add_argument("--write", action="store_true", help="write the table to docs/convert.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for row in stored() if row["seed"] not in options.seeds]
    for seed in options.seeds:
        for size in SIZES:
            for row in run(seed, size, options):
                rows.append(row)
                print(json.dumps(row), flush=True)
                DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    if options.write:
        write_table("quality", table(rows), "convert.md")


if __name__ == "__main__":
    main()
