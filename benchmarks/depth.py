"""Activation memory against depth: plain autograd, checkpointing per block, retrograd. Bytes are
exact.

python -m benchmarks.depth [--depths 8 32 128]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.cases import CONTESTANTS, SIZES, pairs
from benchmarks.steps import example, step
from retrograd.measure import activation_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[8, 32, 128], help="numbers of blocks"
    )
    depths = parser.parse_args().depths
    size = replace(SIZES["tiny"], tokens=256)
    print(f"MiB of activations; width {size.width}, {size.batch} x {size.tokens} tokens")
    print(f"| blocks | {' | '.join(map(str, depths))} |\n| --- |{' ---: |' * len(depths)}")
    for name in ("plain", "checkpoint", "retrograd"):
        row = []
        for depth in depths:
            network = CONTESTANTS[name](pairs(replace(size, blocks=depth)))
            x = example(size)
            bytes_ = activation_bytes(lambda: step(network, x), [*network.parameters(), x])  # noqa: B023
            row.append(f"{bytes_ / 2**20:.1f}")
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
