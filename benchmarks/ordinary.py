"""An ordinary network under a budget, against `torch.utils.checkpoint` with selective policies.

    python -m benchmarks.ordinary [--blocks 6] [--width 384] [--write]

6 transformer blocks (12 residual layers, attention and feed-forward in turn) of width 384, 2 x 256
tokens, float32. Bytes of activations at the peak of a step and FLOPs, both exact. For each policy,
`rg.Residual(layers, rule=rg.Euler())` gets the bytes that the policy took as its budget. Its FLOPs
are compared with the line through checkpointing's points at the bytes that it really takes.
`--write` puts the table into docs/rules.md.

FLOPs are those of torch's formulas and of attention, which torch counts on a CPU since 2.14 only.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from benchmarks.page import write_table
from benchmarks.steps import step
from retrograd.measure import Flops, activation_bytes, flops_of
from retrograd.profile import flops_of_operation

MIB = 2**20
aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu.default}

Policy = Callable[..., CheckpointPolicy]


def save_if(is_saved: Callable[..., bool]) -> Policy:
    """The policy that saves the results of operations for which `is_saved(operation, *args)`."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_saved(operation, *args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def is_product(operation: Any, *args: Any) -> bool:
    return operation in MATRIX_PRODUCTS


def is_widening(operation: Any, *args: Any) -> bool:
    """Whether the result of a matrix product is wider than its input."""
    return is_product(operation) and args[-1].shape[1] > args[-1].shape[0]


def is_attention(operation: Any, *args: Any) -> bool:
    return operation in ATTENTION


def is_either(operation: Any, *args: Any) -> bool:
    return is_product(operation) or is_attention(operation)


def is_attention_or_widening(operation: Any, *args: Any) -> bool:
    return is_attention(operation) or is_widening(operation, *args)


# What each policy saves of a layer, beside its input.
POLICIES: dict[str, Policy | None] = {
    "per layer": None,
    "saves attention": save_if(is_attention),
    "saves products that widen": save_if(is_widening),
    "saves attention and products that widen": save_if(is_attention_or_widening),
    "saves all matrix products": save_if(is_product),
    "saves all products and attention": save_if(is_either),
}


class Checkpointed(nn.Module):
    """Each layer under `torch.utils.checkpoint`, with a policy."""

    def __init__(self, layers: list[nn.Module], policy: Policy | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.options: dict[str, Any] = {"use_reentrant": False}
        if policy is not None:
            self.options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, policy
            )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(functools.partial(add, layer), x, **self.options)
        return x


class Plain(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = add(layer, x)
        return x


def add(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(x)


class FlopsOfAll(Flops):
    """Counts attention on a CPU, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_attention(func) and flops_of(func, args, kwargs or {}, result) is None:
            self.total += flops_of_operation(func, args, kwargs or {}, result) or 0
        return result


class Cost(NamedTuple):
    bytes: int
    flops: int


def cost(network: nn.Module, x: Tensor) -> Cost:
    for _ in range(2):  # a budget makes its plan
        network.zero_grad()
        step(network, x)
    network.zero_grad()
    peak = activation_bytes(lambda: step(network, x), network.parameters())
    network.zero_grad()
    with FlopsOfAll() as counter:
        step(network, x)
    return Cost(peak, counter.total)


class Row(NamedTuple):
    policy: str
    checkpointed: Cost
    ours: Cost  # with the bytes that checkpointing took as a budget


def measure(blocks: int, width: int, batch: int, tokens: int) -> tuple[Cost, list[Row]]:
    """What plain autograd costs, and a row for each policy."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [Attention(width, 4), FeedForward(width)]
    x = torch.randn(batch, tokens, width)
    plain = cost(Plain(copy.deepcopy(layers)), x)
    rows = []
    for name, policy in POLICIES.items():
        theirs = cost(Checkpointed(copy.deepcopy(layers), policy), x)
        net = rg.Residual(copy.deepcopy(layers), memory=rg.Budget(theirs.bytes))
        rows.append(Row(name, theirs, cost(net, x)))
    return plain, rows


def on_line(rows: list[Row], bytes_: int) -> float:
    """The FLOPs at so many bytes, on the line through the best points of checkpointing."""
    points: list[Cost] = []
    for point in sorted(row.checkpointed for row in rows):
        if not points or point.flops < points[-1].flops:
            points.append(point)
    if bytes_ <= points[0].bytes:
        return points[0].flops
    for left, right in itertools.pairwise(points):
        if bytes_ <= right.bytes:
            share = (bytes_ - left.bytes) / (right.bytes - left.bytes)
            return left.flops + share * (right.flops - left.flops)
    return points[-1].flops


def table(plain: Cost, rows: list[Row]) -> str:
    lines = [
        "| `torch.utils.checkpoint` | MiB | FLOPs | `Euler()` under that budget: MiB | FLOPs "
        "| checkpointing's line there |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for policy, *both in rows:
        cells = [f"{c.bytes / MIB:.2f} | {c.flops / plain.flops:.3f}" for c in both]
        cells.append(f"{on_line(rows, both[1].bytes) / plain.flops:.3f}")
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    lines.append(f"| not used: plain autograd | {plain.bytes / MIB:.2f} | 1.000 | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table to docs/rules.md")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    text = table(*measure(options.blocks, options.width, batch=2, tokens=256))
    print(text)
    if options.write:
        write_table("ordinary", text)


if __name__ == "__main__":
    main()
