"""What the engine itself keeps for each update between forward and backward, counted: Python
objects and tensor bytes.

python -m benchmarks.bookkeeping
"""

from __future__ import annotations

import gc
import tracemalloc

import torch

import retrograd as rg
from benchmarks.cases import FeedForward
from retrograd.measure import LiveBytes


def per_update(depth: int, dropout: float) -> tuple[float, float, int]:
    """Python objects and bytes for each update; and tensor bytes of the whole call."""
    functions = [
        torch.nn.Sequential(*FeedForward(16), torch.nn.Dropout(dropout)) for _ in range(2 * depth)
    ]
    stack = rg.ReversibleSequence(
        zip(functions[::2], functions[1::2]), memory=rg.Reverse(keep_last=False)
    )
    x = torch.randn(2, 4, 16, requires_grad=True)
    stack(x).sum().backward()  # the first step is inspected
    with LiveBytes() as live:
        y = stack(x)
        tensors = live.now
        del y
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    y = stack(x)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    gc.collect()
    objects = len(gc.get_objects()) - before
    del y
    return objects / (2 * depth), used / (2 * depth), tensors


def main() -> None:
    print(
        "| blocks | dropout | Python objects per update | Python bytes per update | tensor bytes "
        "per call |"
    )
    print("| ---: | ---: | ---: | ---: | ---: |")
    for depth in (16, 256, 1024):
        for dropout in (0.0, 0.1):
            objects, used, tensors = per_update(depth, dropout)
            print(
                f"| {depth} | {dropout} | {objects:.1f} | {used:,.0f} | {tensors:,} |", flush=True
            )


if __name__ == "__main__":
    main()
