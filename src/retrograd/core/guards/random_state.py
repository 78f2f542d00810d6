"""Random state: recompute draws the numbers that forward drew, and backward leaves no trace.

The states are compared before every update. They cost 5 KiB on a CPU, so as long as nobody draws,
all updates share one object.

[Note: who draws] A function that left the states as they were may still have used them: it may have
seeded them. So once an update has changed the states, they are put back for every update.

[Note: devices without a generator] A device need not let its generator be read and written. That is
no harm until a function draws from it, and then it raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from ctypes import string_at
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.private import identity_of_generator
from retrograd.core.program import Application
from retrograd.core.streams import State
from retrograd.core.tensors import device_module, is_capturing

CPU = torch.device("cpu")


class Generator(NamedTuple):
    """How to read and write the state of one generator."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]


class RandomState(Guard):
    def __init__(
        self,
        devices: Iterable[torch.device],
        own: Iterable[torch.Generator] = (),
        has_drawn: bool = False,
    ) -> None:
        self.devices = {CPU, *devices}  # whose default generators are among these
        self.generators = generators_for(self.devices, own)
        self.states: list[list[bytes]] = []  # before each update, and after the last one
        self.has_drawn = has_drawn  # some function has, or was seen to draw in an earlier call

    def before_function(self, update: Application | None) -> None:
        now = self.current()
        states = self.states
        if states and states[-1] == now:
            now = states[-1]
        elif states:
            self.has_drawn = True
        states.append(now)

    def found_generator(self, generator: torch.Generator) -> None:
        """A function that runs is about to use this generator, for the first time."""
        found = Generator(generator.get_state, generator.set_state)
        self.generators.append(found)
        self.states[-1] = [*self.states[-1], as_bytes(found.get())]
        self.has_drawn = True

    def found_device(
        self,
        device: torch.device,
        where: str,
    ) -> None:
        """A function that runs is about to draw from the default generator of this device."""
        found = default_generator(device)
        if found is None:
            raise errors.unreadable_generator(where, device)
        if device not in self.devices:
            self.devices.add(device)
            self.generators.append(found)
            self.states[-1] = [*self.states[-1], as_bytes(found.get())]

    def at_cut(self, state: State) -> None:
        self.before_function(None)

    def before_backward(self) -> bool:
        return self.has_drawn

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        undo.add(self.restore, self.current())
        self.restore(self.states[index])

    def current(self) -> list[bytes]:
        states = []
        for get, _ in self.generators:
            state = get()
            states.append(string_at(state.data_ptr(), state.nbytes))
        return states

    def restore(self, states: list[bytes]) -> None:
        for generator, state in zip(self.generators, states):
            generator.set(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def as_bytes(state: Tensor) -> bytes:
    """The state of a generator, which is on the CPU whatever device the generator is for.

    Comparing bytes takes a tenth of comparing tensors, and `FakeTensorMode` allows it.
    """
    return string_at(state.data_ptr(), state.nbytes)


def generators_for(
    devices: Iterable[torch.device],
    own: Iterable[torch.Generator],
) -> list[Generator]:
    """The default generators of `devices` that can be read, and the generators in `own`."""
    defaults = map(default_generator, devices)
    found = [generator for generator in defaults if generator is not None]
    distinct = {identity_of_generator(generator): generator for generator in own}.values()
    found += [Generator(generator.get_state, generator.set_state) for generator in distinct]
    return found


def default_generator(device: torch.device) -> Generator | None:
    """How to read and write a device's generator. None: see [Note: devices without a generator]."""
    if device.type in ("cpu", "meta"):
        return Generator(torch.default_generator.get_state, torch.default_generator.set_state)
    module = device_module(device)
    if not hasattr(module, "get_rng_state") or not hasattr(module, "set_rng_state"):
        return None
    if is_capturing(device):  # [Note: graph capture]
        return None
    get = functools.partial(module.get_rng_state, device)
    return Generator(get, functools.partial(module.set_rng_state, device=device))
