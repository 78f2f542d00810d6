"""What a step costs: live bytes after every operation, and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from retrograd.checking.runs import Network
from retrograd.measure import LiveBytes

ROUNDS = 5


class MemoryTrace(LiveBytes):
    """Live bytes after every operation of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.forward = 0  # how many of the entries belong to forward
        self.gradient_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.bytes.append(self.now)
        return result

    def end_forward(self) -> None:
        self.forward = len(self.bytes)

    @property
    def activation_peak(self) -> int:
        return self.peak - self.gradient_bytes


def memory_trace(
    network: Network, observer: AbstractContextManager[object], trace: MemoryTrace
) -> MemoryTrace:
    """Fill `trace` with the live bytes over one step."""
    with observer:
        result = network.step(trace, trace.end_forward)
    trace.gradient_bytes = sum(gradient.nbytes for gradient in result.gradients.values())
    return trace


def median_seconds(
    network: Network,
    observers: Sequence[Callable[[], AbstractContextManager[object]]],
    rounds: int = ROUNDS,
    time_limit: float = 10.0,
) -> list[float]:
    """The median time of a step under each observer. They take turns; after `time_limit` seconds no
    further round begins.
    """
    times: list[list[float]] = [[] for _ in observers]
    begun = time.perf_counter()
    for _ in range(rounds):
        for new_observer, measured in zip(observers, times):
            with new_observer():
                measured.append(network.step().seconds)
        if time.perf_counter() - begun > time_limit:
            break
    return [sorted(measured)[len(measured) // 2] for measured in times]
