"""Home streams: on an accelerator, the walk runs where forward ran.

(This file is about streams of a device, the queues of CUDA, not about streams of a network.)

Autograd runs each backward node on the device stream of its forward, and waits between them where
gradients pass from one to another. It does not know that the walk passes rebuilt values from node
to node as well. So the walk always runs on the *home* streams: those that were current when the
stack was called. If backward asks from another one, both wait for each other, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class HomeStreams:
    """The device streams that were current when the stack was called."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.streams = [torch.accelerator.current_stream(device) for device in devices]

    def are_current(self) -> bool:
        """Whether they are current in this thread."""
        return all(stream == _current(stream) for stream in self.streams)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function with these streams as the current ones."""
        before = [_current(stream) for stream in self.streams]
        index = torch.accelerator.current_device_index()
        for home, other in zip(self.streams, before):
            home.wait_stream(other)
        try:
            for home in self.streams:
                torch.accelerator.set_stream(home)
            return function()
        finally:
            for other in before:
                torch.accelerator.set_stream(other)
            torch.accelerator.set_device_index(index)
            for home, other in zip(self.streams, before):
                other.wait_stream(home)


def used_elsewhere(tensor: Tensor) -> None:
    """Tell the allocator that the current stream, which is not its home, uses this tensor."""
    if not tensor.is_cpu:
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def home_streams(devices: Iterable[torch.device]) -> HomeStreams | None:
    """None if none of the devices has streams."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    found = [device for device in devices if device.type == accelerator.type]
    return HomeStreams(found) if found else None


def _current(stream: torch.Stream) -> torch.Stream:
    return torch.accelerator.current_stream(stream.device)
