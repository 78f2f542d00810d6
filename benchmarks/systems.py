"""Each of the five systems: the original package's reversible module against retrograd's and
against plain autograd.

    python -m benchmarks.systems [--rounds 11] [--out benchmarks/results/systems.jsonl] [--write]

Bytes are exact. Times are medians of steps that were run in turn, as ratios to plain autograd.
Originals come from PyPI (`benchmarks/peers.txt`); nuwa-pytorch imports torchvision, for which a
stand-in does. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from benchmarks.page import write_table
from retrograd.compat import axial, nuwa, nuwa_video_audio, reformer, se3
from retrograd.measure import activation_bytes
from tests.packages import load

WIDTH, HEADS, BLOCKS = 128, 4, 8


class Tokens(nn.Module):
    """A transformer's function on tokens; on the channels of an image; or on features by degree.
    Other streams are added in.
    """

    def __init__(self, kind: str, layout: str = "tokens") -> None:
        super().__init__()
        self.net = Attention(WIDTH, HEADS) if kind == "f" else FeedForward(WIDTH)
        self.layout = layout

    def forward(self, x: Any, *others: Tensor, **kwargs: Any) -> Any:
        if self.layout == "degrees":  # [batch, points, channels, 2 * degree + 1]
            scalars = self.net(x["0"].squeeze(-1)).unsqueeze(-1)
            return {"0": scalars, "1": x["1"] * scalars.tanh()}
        if self.layout == "image":  # along rows: [batch, channels, rows, columns]
            rows = x.permute(0, 2, 3, 1)
            return self.net(rows.flatten(0, 1)).view_as(rows).permute(0, 3, 1, 2)
        y = self.net(x)
        for other in others:
            y = y + other.mean(1, keepdim=True)
        return y


class Entry(NamedTuple):
    """A system: where its original is, how a stack is built from either module, and what it is
    called with.
    """

    name: str
    original: str
    ours: Any
    build: Callable[[Any], nn.Module]
    example: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = {}


def pairs(layout: str = "tokens") -> list[tuple[nn.Module, nn.Module]]:
    return [(Tokens("f", layout), Tokens("g", layout)) for _ in range(BLOCKS)]


def quads() -> tuple[list[list[nn.Module]], list[str]]:
    types = list(nuwa_video_audio.BLOCK_TYPES) * (BLOCKS // 3)
    return [[Tokens(kind) for kind in "fgfg"] for _ in types], types


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


ENTRIES = [
    Entry(
        "reformer",
        "reformer_pytorch.reversible",
        reformer,
        lambda module: module.ReversibleSequence(pairs()),
        lambda: (leaf(2, 256, 2 * WIDTH),),
    ),
    Entry(
        "nuwa",
        "nuwa_pytorch.reversible",
        nuwa,
        lambda module: module.ReversibleSequence(pairs()),
        lambda: (leaf(2, 256, WIDTH),),
    ),
    Entry(
        "axial",
        "axial_attention.reversible",
        axial,
        lambda module: module.ReversibleSequence(pairs("image")),
        lambda: (leaf(2, WIDTH, 16, 16),),
    ),
    Entry(
        "se3",
        "se3_transformer_pytorch.reversible",
        se3,
        lambda module: module.ReversibleSequence(pairs("degrees")),
        lambda: ({"0": leaf(2, 128, WIDTH, 1), "1": leaf(2, 128, WIDTH, 3)},),
    ),
    Entry(
        "nuwa video and audio",
        "nuwa_pytorch.reversible_video_audio",
        nuwa_video_audio,
        lambda module: module.DualModalityReversibleSequence(*quads()),
        lambda: (leaf(2, 256, WIDTH), leaf(2, 128, WIDTH)),
        {"context": None},
    ),
]


def step(network: nn.Module, example: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    output = network(*example, **kwargs)
    outputs = (
        output.values()
        if isinstance(output, dict)
        else output
        if isinstance(output, list)
        else [output]
    )
    sum(value.square().mean() for value in outputs).backward()  # type: ignore[union-attr]


def activation_mib(network: nn.Module, example: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    inputs = [
        t for value in example for t in (value.values() if isinstance(value, dict) else [value])
    ]
    return (
        activation_bytes(lambda: step(network, example, kwargs), [*network.parameters(), *inputs])
        / 2**20
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each contestant")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/systems.jsonl"),
        help="where rows are written",
    )
    parser.add_argument("--write", action="store_true", help="write the table to the page")
    options = parser.parse_args()
    rows = []
    lines = [
        "| | activations, MiB: plain | original | retrograd | time: original | retrograd |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    print(f"the five systems: {BLOCKS} blocks, width {WIDTH}", *lines, sep="\n")
    for entry in ENTRIES:
        torch.manual_seed(0)
        ours, original = entry.build(entry.ours), entry.build(load(entry.original))
        original.load_state_dict(ours.state_dict(), strict=True)
        plain: Any = copy.deepcopy(ours)
        plain.engine.memory = rg.Keep()
        networks: dict[str, nn.Module] = {"plain": plain, "original": original, "retrograd": ours}
        example, times = entry.example(), {name: [] for name in networks}
        for i in range(options.rounds + 2):
            for name, network in networks.items():
                network.zero_grad(set_to_none=True)
                start = time.perf_counter()
                step(network, example, entry.kwargs)
                if i >= 2:
                    times[name].append(time.perf_counter() - start)
        mib = {
            name: activation_mib(network, example, entry.kwargs)
            for name, network in networks.items()
        }
        ratio = {
            name: statistics.median(t / p for t, p in zip(times[name], times["plain"]))
            for name in networks
        }
        rows += [
            {
                "system": entry.name,
                "who": n,
                "activation_mib": round(mib[n], 2),
                "time": round(ratio[n], 3),
            }
            for n in networks
        ]
        memory = " | ".join(f"{mib[name]:.1f}" for name in networks)
        times_ = f"{ratio['original']:.2f} | {ratio['retrograd']:.2f}"
        lines.append(f"| {entry.name} | {memory} | {times_} |")
        print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows in {options.out}")
    if options.write:
        write_table("systems", "\n".join(lines), "benchmarks.md")


if __name__ == "__main__":
    main()
