"""Activation memory against depth: plain autograd, checkpointing per block, retrograd. Bytes are
exact.

    python -m benchmarks.depth [--depths 8 32 128] [--write]

`--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.cases import CONTESTANTS, SIZES, pairs
from benchmarks.matrix import title
from benchmarks.page import write_table
from benchmarks.steps import example, step
from retrograd.measure import activation_bytes

SIZE = replace(SIZES["tiny"], tokens=256)


def table(depths: list[int]) -> str:
    lines = [
        f"| blocks | {' | '.join(map(str, depths))} |",
        f"| --- |{' ---: |' * len(depths)}",
    ]
    for name in ("plain", "checkpoint", "retrograd"):
        cells = [f"{needed(name, depth) / 2**20:.1f}" for depth in depths]
        lines.append(f"| {title(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def needed(name: str, depth: int) -> int:
    size = replace(SIZE, blocks=depth)
    network = CONTESTANTS[name](pairs(size))
    x = example(size)
    return activation_bytes(lambda: step(network, x), [*network.parameters(), x])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[8, 32, 128], help="numbers of blocks"
    )
    parser.add_argument("--write", action="store_true", help="write the table to the page")
    options = parser.parse_args()
    print(f"MiB of activations; width {SIZE.width}, {SIZE.batch} x {SIZE.tokens} tokens")
    text = table(options.depths)
    print(text)
    if options.write:
        write_table("narrow", text, "benchmarks.md")


if __name__ == "__main__":
    main()
