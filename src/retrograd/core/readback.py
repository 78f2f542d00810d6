"""Reading values from accelerators: once, at the end of backward.

The host runs ahead of an accelerator. To look at a value, it has to wait until the device has
computed it, and then the device waits for the host. So guards leave the few values that they want
to look at on the device. One copy brings all of them to the host when backward has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.private import at_end_of_backward, current_backward

Numbers = list[Any]  # real or complex
Look = Callable[[list[Numbers]], None]


class Pending(NamedTuple):
    """Tensors, and who looks at their values."""

    tensors: Sequence[Tensor]
    look: Look


class Readback:
    """The values of one call that somebody wants to look at."""

    def __init__(self) -> None:
        self.pending: list[Pending] = []
        self.scheduled_in = -1  # the run of backward at whose end they are read

    def add(
        self,
        tensors: Sequence[Tensor],
        look: Look,
    ) -> None:
        """Call `look` with the values of these tensors, once they are read."""
        self.pending.append(Pending(tensors, look))

    def schedule(self) -> None:
        """Read at the end of the backward that is under way; at once if there is none."""
        backward = current_backward()
        if backward < 0:
            self.read()
        elif backward != self.scheduled_in:
            self.scheduled_in = backward
            at_end_of_backward(self.read)

    def read(self) -> None:
        pending = self.pending
        self.pending = []
        self.scheduled_in = -1
        values = iter(to_host([tensor for tensors, _ in pending for tensor in tensors]))
        for tensors, look in pending:
            look(list(itertools.islice(values, len(tensors))))


class ReadAtOnce(Readback):
    """Reads whatever is added, at once."""

    def add(
        self,
        tensors: Sequence[Tensor],
        look: Look,
    ) -> None:
        super().add(tensors, look)
        self.read()


def to_host(tensors: Sequence[Tensor]) -> list[Numbers]:
    """The values of each tensor. Waits once for each device."""
    values: dict[int, Numbers] = {}  # by position among the tensors
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        there = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        for i, numbers in zip(there, _read_one_device([tensors[i] for i in there])):
            values[i] = numbers
    return [values[i] for i in range(len(tensors))]


def _read_one_device(tensors: Iterable[Tensor]) -> list[Numbers]:
    """One copy: the tensors go as bytes, because they may differ in dtype."""
    flat = [tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors]
    parts = [tensor.contiguous().view(torch.uint8) for tensor in flat]
    host = torch.cat(parts).cpu().split([part.numel() for part in parts])
    # A copy of each part: a view in another dtype must be aligned.
    return [part.clone().view(tensor.dtype).tolist() for part, tensor in zip(host, flat)]
