"""What exact reversal costs, against `exact=False` in the same run; and what the other ways to be
exact would cost.

    python -m benchmarks.exact [--rounds 40]

First a training step of 8 blocks of width 256 (2 x 512 tokens): time as the median of ratios of
steps run in turn, activation bytes exact. Then the arithmetic alone, of one update and its undoing
on one such stream: a grid in float32, in float64, and whole numbers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import retrograd as rg
from benchmarks.cases import SIZES, pairs
from benchmarks.overhead import Without
from benchmarks.steps import example, seconds, step
from retrograd.core.guards.grid_range import GridRange
from retrograd.measure import activation_bytes

KINDS: dict[str, dict[str, Any]] = {
    "exact=False": {},
    "exact=True": {"exact": True},
    "exact=True, without the check of the range": {"exact": True},
    "exact=rg.Grid(dtype=torch.float64)": {"exact": rg.Grid(dtype=torch.float64)},
}


def steps(rounds: int) -> None:
    size = SIZES["large"]
    blocks, x = pairs(size), example(size)
    stacks = {
        n: rg.ReversibleSequence(copy.deepcopy(blocks), streams=rg.Split(), **options)
        for n, options in KINDS.items()
    }
    stream = x.nbytes // 2
    times: dict[str, list[float]] = {name: [] for name in stacks}
    for i in range(rounds + 3):
        for name, stack in stacks.items():
            with Without((GridRange,)) if "without" in name else nullcontext():
                duration = seconds(stack, x)
            if i >= 3:
                times[name].append(duration)
    print("| | time | activations, streams |\n| --- | ---: | ---: |")
    for name, stack in stacks.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times["exact=False"]))
        bytes_ = activation_bytes(lambda: step(stack, x), [*stack.parameters(), x])  # noqa: B023
        print(f"| {name} | {ratio:.3f} | {bytes_ / stream:.2f} |")


def arithmetic(rounds: int) -> None:
    """An update and its undoing: round the output, add it, read the stream; round it again,
    subtract.
    """
    x, out = torch.randn(2, 512, 256), torch.randn(2, 512, 256)
    wide, whole = x.double(), (x * 2**16).to(torch.int32)

    def on_grid(stream: Tensor, bits: int) -> Tensor:
        return out.to(stream.dtype).mul(2.0**bits).round_().mul_(2.0**-bits)

    def integers() -> Tensor:
        return out.mul(2.0**16).round_().to(torch.int32)

    ways: dict[str, Callable[[], Any]] = {
        "float32, not exact": lambda: (x + out).sub_(out),
        "float32, multiples of 2**-16": lambda: (x + on_grid(x, 16)).sub_(on_grid(x, 16)),
        "float64, multiples of 2**-32": lambda: (
            y := wide + on_grid(wide, 32),
            y.float(),
            y.sub_(on_grid(wide, 32)).float(),
        ),
        "int32, multiples of 2**-16": lambda: (
            y := whole + integers(),
            y * 2.0**-16,
            y.sub_(integers()) * 2.0**-16,
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(10 * rounds + 10):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if i >= 10:
                times[name].append(time.perf_counter() - start)
    print("\n| an update and its undoing | microseconds |\n| --- | ---: |")
    for name, values in times.items():
        print(f"| {name} | {1e6 * statistics.median(values):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each kind")
    rounds = parser.parse_args().rounds
    steps(rounds)
    arithmetic(rounds)


if __name__ == "__main__":
    main()
