"""Measure a training step of each contestant, interleaved in one process; print a table and write JSON lines.

    python -m benchmarks.run [--size large tiny] [--rounds 15] [--out benchmarks/results/step.jsonl]

Bytes and FLOPs are exact. Times are not, on a shared machine: they are medians, given as ratios to plain autograd, of steps
that were run in turn, so that whatever slows one down slows down all.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.cases import SIZES, Size, contestants
from retrograd.measure import Flops, activation_bytes


def example(size: Size) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(size.batch, size.tokens, 2 * size.width, requires_grad=True)


def step(network: nn.Module, x: Tensor) -> None:
    network(x * 1.0).square().mean().backward()  # times one: memcnn frees the memory of its input


def seconds(network: nn.Module, x: Tensor) -> float:
    network.zero_grad(set_to_none=True)
    start = time.perf_counter()
    step(network, x)
    return time.perf_counter() - start


def flops(network: nn.Module, x: Tensor) -> int:
    network.zero_grad(set_to_none=True)
    with Flops() as counter:
        step(network, x)
    return counter.total


def difference(network: nn.Module, reference: nn.Module, x: Tensor) -> float:
    """The largest difference between the input gradients of two networks, relative to the largest gradient."""
    gradients = []
    for net in (reference, network):
        x.grad = None
        step(net, x)
        assert x.grad is not None
        gradients.append(x.grad.clone())
    expected, got = gradients
    return ((expected - got).abs().max() / expected.abs().max()).item()


def measure(size: Size, rounds: int) -> list[dict[str, object]]:
    x, networks = example(size), contestants(size)
    times: dict[str, list[float]] = {name: [] for name in networks}
    for i in range(rounds + 2):
        for name, network in networks.items():
            t = seconds(network, x)
            if i >= 2:
                times[name].append(t)
    plain_flops = flops(networks["plain"], x)
    rows: list[dict[str, object]] = []
    for name, network in networks.items():
        ratios = [a / b for a, b in zip(times[name], times["plain"])]
        rows.append(
            {
                "size": size.name,
                "contestant": name,
                "activation_bytes": activation_bytes(lambda: step(network, x), [*network.parameters(), x]),  # noqa: B023
                "flops_ratio": round(flops(network, x) / plain_flops, 4),
                "time_ratio": round(statistics.median(ratios), 3),
                "milliseconds": round(1e3 * statistics.median(times[name]), 2),
                "gradient_difference": difference(network, networks["plain"], x),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
            }
        )
    return rows


def table(rows: list[dict[str, object]], size: Size) -> str:
    shape = f"{size.blocks} blocks, width {size.width}, {size.batch} x {size.tokens} tokens"
    lines = [
        f"{size.name}: {shape}",
        "| | activations, MiB | FLOPs | time | input gradient differs by |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        mib = f"{row['activation_bytes'] / 2**20:.1f}"  # type: ignore[operator]
        ratios = f"{row['flops_ratio']:.3f} | {row['time_ratio']:.2f}"
        lines.append(f"| {row['contestant']} | {mib} | {ratios} | {row['gradient_difference']:.0e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=sorted(SIZES), default=list(SIZES), help="which networks")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contestant")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/step.jsonl"), help="where the rows go, as JSON lines"
    )
    arguments = parser.parse_args()
    if arguments.out.is_dir():  # before minutes of measuring, not after
        parser.error(f"--out {arguments.out} is a folder; name a file in it")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.size:
        measured = measure(SIZES[name], arguments.rounds)
        print(table(measured, SIZES[name]), end="\n\n", flush=True)
        rows += measured
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows in {arguments.out}")


if __name__ == "__main__":
    main()
