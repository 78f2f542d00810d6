"""Measuring a training step of each contestant, in turn, in one process.

Bytes and FLOPs are exact. Times are not, on a shared machine: they are medians of ratios to plain
autograd. Contestants take steps in turn, so that what slows one down slows all of them down.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import retrograd as rg
from benchmarks.cases import Size
from retrograd.measure import Flops, activation_bytes, flops_of

WARM_UP = 2  # rounds that are not timed


def example(size: Size, streams: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(size.batch, size.tokens, streams * size.width, requires_grad=True)


def step(network: nn.Module, x: Tensor) -> None:
    network(x * 1.0).square().mean().backward()  # times one: memcnn frees the memory of its input


def seconds(network: nn.Module, x: Tensor) -> float:
    network.zero_grad(set_to_none=True)
    start = time.perf_counter()
    step(network, x)
    return time.perf_counter() - start


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class FlopsOfAll(Flops):
    """Counts attention on a CPU, too, for which torch has had a formula since 2.14."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func not in (FLASH, FLASH_BACKWARD) or flops_of(func, args, kwargs or {}, result):
            return result
        if func is FLASH:
            self.total += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        else:
            self.total += sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
        return result


def flops(network: nn.Module, x: Tensor) -> int:
    network.zero_grad(set_to_none=True)
    with FlopsOfAll() as counter:
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
        for _ in range(2):  # the first backward is measured, and the plan is made anew
            network.zero_grad(set_to_none=True)
            step(network, x)
    except rg.BudgetError:
        return False
    return True


def measure(
    size: Size, networks: dict[str, nn.Module], rounds: int, streams: int = 2
) -> list[dict[str, Any]]:
    """A row for each network whose budget is large enough. One of them is "plain"."""
    x = example(size, streams)
    networks = {name: network for name, network in networks.items() if fits(network, x)}
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
            "bus_bytes": bus_bytes(network, x),
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


def bus_bytes(network: nn.Module, x: Tensor) -> int:
    """What a step moves to the host and back."""
    host: Any = getattr(network, "run", None)
    if not hasattr(host, "moved"):
        return 0
    before = host.moved
    step(network, x)
    return host.moved - before


def _activation_bytes(network: nn.Module, x: Tensor) -> int:
    network.zero_grad(set_to_none=True)
    return activation_bytes(lambda: step(network, x), [*network.parameters(), x])
