"""Random generators: the state of each, and how to put it back.

Kinds: `torch.Generator`, `random.Random` and NumPy's `Generator` and `RandomState`; and the global
ones of torch (on each device), Python and NumPy. NumPy is used only if somebody imported it.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from retrograd.checking.compare import raw_bytes
from retrograd.core.guards.random_state import default_generator

Undo = Callable[[], object]


class GlobalGenerator(NamedTuple):
    """A global generator: its name, its state as a value to compare, and how to restore it."""

    name: str
    state: object
    restore: Undo


def global_generators() -> Iterator[GlobalGenerator]:
    """The global generators, in their present state."""
    cpu = torch.get_rng_state()
    yield GlobalGenerator("torch, cpu", raw_bytes(cpu), functools.partial(torch.set_rng_state, cpu))
    yield from _accelerator_generators()
    python = random.getstate()
    yield GlobalGenerator("Python's random", python, functools.partial(random.setstate, python))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        legacy = numpy.get_state()
        yield GlobalGenerator(
            "NumPy's generator", pickle.dumps(legacy), functools.partial(numpy.set_state, legacy)
        )


def _accelerator_generators() -> Iterator[GlobalGenerator]:
    if not torch.accelerator.is_available():
        return
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    for i in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, i)
        generator = default_generator(device)
        if generator is not None:
            state = generator.get()
            restore = functools.partial(generator.set, state)
            yield GlobalGenerator(f"torch, {device}", raw_bytes(state), restore)


def global_states() -> dict[str, object]:
    """The states of all global generators, by name."""
    return {generator.name: generator.state for generator in global_generators()}


def unreplayed_states() -> dict[str, object]:
    """The states of the global generators that recompute does not replay: Python's and NumPy's."""
    return {name: state for name, state in global_states().items() if not name.startswith("torch")}


def is_generator(value: object) -> bool:
    """Whether it is a random generator of a known kind."""
    return isinstance(value, (torch.Generator, random.Random)) or is_numpy(
        value, "Generator", "RandomState"
    )


def state_of(generator: Any) -> object:
    """Its state, as a value to compare; None if it has none (`random.SystemRandom`)."""
    if isinstance(generator, torch.Generator):
        return raw_bytes(generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state())


def undo_draws(generator: Any) -> list[Undo]:
    """What puts a generator back to its present state."""
    if isinstance(generator, random.SystemRandom):
        return []
    if isinstance(generator, random.Random):
        return [functools.partial(generator.setstate, generator.getstate())]
    if is_numpy(generator, "Generator"):
        bits = generator.bit_generator
        return [functools.partial(setattr, bits, "state", bits.state)]
    return [functools.partial(generator.set_state, generator.get_state())]


def is_numpy(value: object, *names: str) -> bool:
    """Whether its class is one of NumPy's with one of these names. Does not import NumPy."""
    cls = type(value)
    return cls.__module__.split(".")[0] == "numpy" and cls.__name__ in names
