"""Measuring a training step of each contestant, in turn, in one process.

Bytes and FLOPs are exact. Times are not, on a shared machine: they are medians of ratios to plain
autograd. Contestants take steps in turn, so that what slows one down slows all of them down.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.cases import Size, contestants
from retrograd.measure import Flops, activation_bytes

WARM_UP = 2  # rounds that are not timed


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
    """The largest difference of the input gradients, relative to the largest gradient."""
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
    """Whether its budget is large enough for this network."""
    try:
        step(network, x)
    except rg.BudgetError:
        return False
    return True


def measure(size: Size, rounds: int, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """A row for each contestant that is installed, or for those named and plain autograd."""
    x = example(size)
    networks = {
        name: network for name, network in contestants(size, names).items() if fits(network, x)
    }
    times = in_turn({name: partial(seconds, net, x) for name, net in networks.items()}, rounds)
    plain = networks["plain"]
    plain_flops = flops(plain, x)
    rows: list[dict[str, Any]] = []
    for name, network in networks.items():
        ratios = [own / of_plain for own, of_plain in zip(times[name], times["plain"])]
        row = {
            **asdict(size),
            "contestant": name,
            "activation_bytes": _activation_bytes(network, x),
            "flops_ratio": round(flops(network, x) / plain_flops, 4),
            "time_ratio": round(statistics.median(ratios), 3),
            "milliseconds": round(1e3 * statistics.median(times[name]), 2),
            "gradient_difference": difference(network, plain, x),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }
        rows.append(row)
    return rows


def in_turn(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each timer returns in each round. They run in turn; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for i in range(WARM_UP + rounds):
        for name, timer in timers.items():
            taken = timer()
            if i >= WARM_UP:
                times[name].append(taken)
    return times


def _activation_bytes(network: nn.Module, x: Tensor) -> int:
    network.zero_grad(set_to_none=True)
    return activation_bytes(lambda: step(network, x), [*network.parameters(), x])
