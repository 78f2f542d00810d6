"""The line between time and memory: plain autograd, per-block checkpointing, and retrograd at
several budgets.

    python -m benchmarks.budget [--rounds 15] [--scale] [--write] [--draw-only]

24 transformer blocks of width 128, 4 x 256 tokens, float32. Bytes are exact, FLOPs as torch counts
them, both of the step after the plan is settled; time is the median of ratios to plain of steps run
in turn. Writes docs/figures/budget.jsonl and budget.svg, and docs/figures/plan.svg: bytes over the
course of a step.

With `--scale` instead: 1,024 blocks, and a sequence of 65,536 tokens through 24 blocks with
attention in windows of 256; and what plain autograd would have needed, counted from what autograd
saves of each function. `--write` puts the table into docs/memory.md, that of `--scale` into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from benchmarks.cases import SIZES, Attention, FeedForward, Plain, pairs
from benchmarks.drift import FIGURES
from benchmarks.page import write_table
from benchmarks.steps import example, flops, seconds, step
from retrograd.core.operations import KeepOperations, ReuseOperations
from retrograd.line_labels import LineLabel, label_lines
from retrograd.measure import activation_bytes

SIZE = SIZES["shown"]
MIB = 2**20


def peak(network: nn.Module, x: torch.Tensor) -> int:
    network.zero_grad()
    return activation_bytes(lambda: step(network, x), [*network.parameters(), x])


def line(rounds: int) -> list[dict[str, Any]]:
    blocks, x = pairs(SIZE), example(SIZE)
    build: Callable[[Any], nn.Module] = lambda memory: rg.ReversibleSequence(  # noqa: E731
        copy.deepcopy(blocks), streams=rg.Split(), memory=memory
    )
    plain, by_block = Plain(copy.deepcopy(blocks)), Plain(copy.deepcopy(blocks), checkpoint)
    most, least = peak(plain, x), peak(by_block, x)
    networks = {
        "plain autograd": (plain, None),
        "`torch.utils.checkpoint` per block": (by_block, None),
        "`Reverse()`": (build(rg.Reverse()), None),
        "`Budget`: checkpoint's peak": (build(rg.Budget(least)), least),
        "`Budget`: an eighth of plain": (build(rg.Budget(most // 8)), most // 8),
        "`Budget`: a quarter of plain": (build(rg.Budget(most // 4)), most // 4),
        "`Budget`: half of plain": (build(rg.Budget(most // 2)), most // 2),
        "`Budget`: plain's peak": (build(rg.Budget(most)), most),
    }
    times: dict[str, list[float]] = {name: [] for name in networks}
    for i in range(rounds + 3):
        for name, (network, _) in networks.items():
            duration = seconds(network, x)
            if i >= 3:
                times[name].append(duration)
    plain.zero_grad()
    counted = flops(plain, x)
    rows = []
    for name, (network, limit) in networks.items():
        network.zero_grad()
        ratio = statistics.median(a / b for a, b in zip(times[name], times["plain autograd"]))
        of_plain = flops(network, x) / counted
        rows.append(
            {
                "name": name,
                "limit": limit,
                "peak": peak(network, x),
                "flops": of_plain,
                "time": ratio,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
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
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True, layout="constrained")
    for axis, what in zip(axes, ("flops", "time")):
        ours = sorted(
            (row["peak"] / MIB, row[what]) for row in rows if "checkpoint`" not in row["name"]
        )
        (line,) = axis.plot(*zip(*ours), marker="o", markersize=4)
        (other,) = [row for row in rows if "checkpoint`" in row["name"]]
        point = other["peak"] / MIB, other[what]
        axis.plot(*point, "kx")
        axis.set(
            xscale="log",
            xlabel="MiB of activations",
            ylabel=f"{'FLOPs' if what == 'flops' else 'time'} of a step, plain = 1",
        )
        axis.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_xlim(right=400)  # room for names
        named = (ours[0], "Reverse()"), (ours[len(ours) // 2], "budgets"), (ours[-1], "Keep()")
        for place, name in named:
            label_lines(axis, [LineLabel(*place, name, line.get_color())])
        label_lines(axis, [LineLabel(*point, "checkpoint per block", "black")])
    figure.savefig(FIGURES / "budget.svg", metadata={"Date": None})


def dispatch() -> None:
    """What looking at each operation costs, where there is next to nothing to compute."""
    fn, x = Attention(8, 2), torch.randn(1, 4, 8, requires_grad=True)
    count = Counted()
    with count:
        fn(x)

    def both() -> None:
        for context in (KeepOperations(frozenset(), []), ReuseOperations({}, [])):
            with context:
                fn(x)

    def neither() -> None:
        for _ in range(2):
            fn(x)

    times: dict[Any, list[float]] = {both: [], neither: []}
    for _ in range(500):
        for run, measured in times.items():
            start = time.perf_counter()
            run()
            measured.append(time.perf_counter() - start)
    extra = statistics.median(times[both]) - statistics.median(times[neither])
    print(
        f"looking at operations: {1e6 * extra / (2 * count.total):.0f} microseconds an operation, "
        "in forward and in recompute"
    )


class Counted(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def course() -> None:
    """Bytes over a step."""
    blocks, x, plans = pairs(SIZE), example(SIZE), []
    for memory in (rg.Budget("25%"), rg.Budget("16 MiB"), rg.Reverse(), rg.Keep()):
        plans.append(rg.ReversibleSequence(blocks, streams=rg.Split(), memory=memory).plan(x))
    plans[0].draw(FIGURES / "plan.svg", *plans[1:])
    print(plans[0], end="\n\n")


class Windows(Attention):
    """Attention within windows of 256 tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, 256, x.shape[-1])).view_as(x)


def scale() -> str:
    lines = [
        "| | activations | plain autograd would have needed |",
        "| --- | ---: | ---: |",
    ]
    for blocks, batch, tokens in ((1024, 4, 256), (24, 1, 65_536)):
        torch.manual_seed(0)
        stack = rg.ReversibleSequence(
            [(Windows(64, 4), FeedForward(64)) for _ in range(blocks)], streams=rg.Split()
        )
        x = torch.randn(batch, tokens, 128)
        plain = stack.plan(x).plain
        needed = activation_bytes(lambda: step(stack, x), stack.parameters())  # noqa: B023
        shape = f"{blocks:,} blocks of width 64, {batch} x {tokens:,} tokens"
        lines.append(f"| {shape} | {needed / MIB:,.0f} MiB | {plain / MIB:,.0f} MiB |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | allowed, MiB | needed, MiB | FLOPs | time |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        limit = f"{row['limit'] / MIB:.1f}" if row["limit"] else ""
        costs = f"{row['peak'] / MIB:.1f} | {row['flops']:.3f} | {row['time']:.2f}"
        lines.append(f"| {row['name']} | {limit} | {costs} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
    parser.add_argument("--scale", action="store_true", help="the large ones")
    parser.add_argument("--write", action="store_true", help="write the table to its page")
    parser.add_argument("--draw-only", action="store_true", help="draw what was measured before")
    arguments = parser.parse_args()
    if arguments.scale:
        scaled = scale()
        if arguments.write:
            write_table("scale", scaled, "benchmarks.md")
        return
    data = FIGURES / "budget.jsonl"
    if arguments.draw_only:
        return draw([json.loads(line) for line in data.read_text().splitlines()])
    rows = line(arguments.rounds)
    FIGURES.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows), end="\n\n")
    if arguments.write:
        write_table("budget", table(rows), "memory.md")
    course()
    dispatch()
    draw(rows)


if __name__ == "__main__":
    main()
