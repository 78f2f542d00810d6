"""Measuring a training step of each contestant, in turn, in one process. Rows of figures, and
nothing else.

Bytes and FLOPs are exact. Times are not, on a shared machine: they are medians, given as ratios to
plain autograd, of steps that were run in turn, so that whatever slows one down slows down all.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.bench.cases import Size, contestants
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
    """The largest difference between the input gradients of two networks, relative to the largest
    gradient.
    """
    gradients = []
    for net in (reference, network):
        net.zero_grad(set_to_none=True)
        x.grad = None
        step(net, x)
        assert x.grad is not None
        gradients.append(x.grad.clone())
    expected, got = gradients
    return ((expected - got).abs().max() / expected.abs().max()).item()


def fits(network: nn.Module, x: Tensor) -> bool:
    """Whether it can run at all: a small network may need more than a small budget."""
    try:
        step(network, x)
    except rg.BudgetError:
        return False
    return True


def measure(size: Size, rounds: int, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """A row for each contestant that is installed, or for those named. Plain autograd always takes
    part: ratios are to it.
    """
    x, networks = example(size), contestants(size, names)
    networks = {name: network for name, network in networks.items() if fits(network, x)}
    times: dict[str, list[float]] = {name: [] for name in networks}
    for i in range(rounds + 2):  # the first two warm up
        for name, network in networks.items():
            t = seconds(network, x)
            if i >= 2:
                times[name].append(t)
    plain_flops = flops(networks["plain"], x)
    rows: list[dict[str, Any]] = []
    for name, network in networks.items():
        ratios = [a / b for a, b in zip(times[name], times["plain"])]
        network.zero_grad(set_to_none=True)
        bytes_ = activation_bytes(lambda: step(network, x), [*network.parameters(), x])  # noqa: B023
        rows.append(
            {
                **asdict(size),
                "contestant": name,
                "activation_bytes": bytes_,
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
