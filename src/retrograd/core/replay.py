"""Running a function twice the same way.

Between forward and backward the world moves on: generators advance, autocast ends, modules switch between train and eval,
buffers are updated. A `World` remembers what a function saw; `replay` puts that back while the function runs again, and then
puts the present back, so that a step leaves behind exactly what one forward leaves.

Four things are replayed, and only where they differ:

1. random state, of the CPU and of every device that holds a stream (and of generators in keyword arguments);
2. autocast, for the device types of the streams and the CPU;
3. each module's `training` flag;
4. each buffer that the function changed.

Parameters are not replayed but checked: one that changed after forward makes the recompute wrong, so it raises.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.errors import InPlaceError, explain

_local = threading.local()


def is_recomputing() -> bool:
    """True inside a function of a stack while it runs a second time, during backward.

    Example:
        >>> class Counted(torch.nn.Linear):
        ...     calls = 0
        ...     def forward(self, x):
        ...         if not rg.is_recomputing():
        ...             self.calls += 1
        ...         return super().forward(x)
    """
    return getattr(_local, "depth", 0) > 0


class Modes:
    """What holds for a whole forward call: the generators in play and the autocast state."""

    def __init__(self, tensors: Iterable[Tensor], keyword_values: Iterable[Any]) -> None:
        devices = {tensor.device for tensor in tensors}
        generators: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = [
            (torch.default_generator.get_state, torch.default_generator.set_state)
        ]
        for device in devices:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                set_state = functools.partial(_set_device_state, module, device)
                generators.append((functools.partial(module.get_rng_state, device), set_state))
        for value in keyword_values:
            if isinstance(value, torch.Generator):
                generators.append((value.get_state, value.set_state))
        self.generators = generators
        types = {"cpu"} | {device.type for device in devices}
        self.autocast = [(kind, *_autocast(kind)) for kind in sorted(types) if torch.amp.is_autocast_available(kind)]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def random_states(self) -> list[Tensor]:
        return [get() for get, _ in self.generators]

    def set_random_states(self, states: list[Tensor]) -> None:
        for (_, put), state in zip(self.generators, states):
            put(state)


def _set_device_state(module: Any, device: torch.device, state: Tensor) -> None:
    module.set_rng_state(state, device)


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


# [Note: constant buffers] To replay a buffer, its value before the function ran is needed, but whether the function changes it
# shows only afterwards (by its version counter). So a buffer is copied the first time it is seen, and never again once it
# was seen unchanged: masks and rotary tables cost one copy in the life of a module, not one for each call. Should a buffer
# that was constant change after all, `settle` says that the value is lost, and the tape keeps that one update instead.
# Remembered per module, name and training flag, because BatchNorm is constant in eval and not in train.
_constant: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = weakref.WeakKeyDictionary()


class World:
    """What a function sees as it is about to run; after `settle`, what of it has to be put back to run it again."""

    __slots__ = ("buffers", "modes", "modules", "parameters", "random", "training")

    def __init__(self, modes: Modes, *functions: Any) -> None:
        self.modes = modes
        self.modules = modules = modules_of(*functions)
        self.training = [module.training for module in modules]
        self.parameters = [(p, p._version) for m in modules for p in m._parameters.values() if p is not None]
        self.buffers: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = []
        copies: dict[int, Tensor] = {}  # a buffer may be registered in several modules
        for module in modules:
            if module._buffers:
                known = _constant.get(module, ())
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        if (name, module.training) not in known and id(buffer) not in copies:
                            copies[id(buffer)] = buffer.detach().clone()
                        self.buffers.append((module, name, buffer, buffer._version, copies.get(id(buffer))))
        self.random: list[Tensor] | None = modes.random_states()

    def settle(self) -> bool:
        """Forget what the function left alone. False if it changed a buffer whose earlier value was not copied."""
        assert self.random is not None
        if all(_same(before, after) for before, after in zip(self.random, self.modes.random_states())):
            self.random = None
        changed, complete = [], True
        for module, name, buffer, version, copy in self.buffers:
            edited = buffer._version != version
            if edited or module._buffers.get(name) is not buffer:
                complete = complete and not (edited and copy is None)
                _constant.get(module, set()).discard((name, module.training))
                changed.append((module, name, copy if edited and copy is not None else buffer, version, None))
            elif copy is not None:
                _constant.setdefault(module, set()).add((name, module.training))
        self.buffers = changed
        return complete

    def check_parameters(self, where: str) -> None:
        """Raise if a parameter was edited since forward, naming it."""
        now = [p for m in self.modules for p in m._parameters.values() if p is not None]
        for (then, version), parameter in zip(self.parameters, now):
            if parameter is then and parameter._version != version:
                names = {id(p): name for m in self.modules for name, p in m.named_parameters()}
                raise InPlaceError(
                    explain(
                        where,
                        f"needs parameter {names.get(id(parameter), '?')!r} as forward saw it (version {version}), but it is at "
                        f"version {parameter._version}.",
                        "the function would be recomputed with other weights than it ran with.",
                        "call backward() before optimizer.step(), and clip or edit parameters after it.",
                    )
                )


@contextmanager
def replay(world: World, where: str) -> Iterator[None]:
    """The world as `world` remembers it, with gradients on; the present comes back at the end, whatever happens."""
    modes = world.modes
    with ExitStack() as undo:
        _local.depth = getattr(_local, "depth", 0) + 1
        undo.callback(_leave)
        undo.enter_context(torch.enable_grad())
        for kind, enabled, dtype in modes.autocast:
            if (enabled, dtype) != _autocast(kind) or (enabled and modes.autocast_cache != torch.is_autocast_cache_enabled()):
                undo.enter_context(torch.autocast(kind, dtype, enabled, modes.autocast_cache))
        world.check_parameters(where)
        for module, training in zip(world.modules, world.training):
            if module.training != training:
                undo.callback(setattr, module, "training", module.training)
                module.training = training
        # Buffers are swapped, not overwritten: the present object is never touched, so no version counter moves.
        copies: dict[int, Tensor] = {}
        for module, name, value, _, _ in world.buffers:
            undo.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = copies.setdefault(id(value), value.detach().clone())
        if world.random is not None:
            undo.callback(modes.set_random_states, modes.random_states())
            modes.set_random_states(world.random)
        yield


def _leave() -> None:
    _local.depth -= 1


def modules_of(*functions: Any) -> list[nn.Module]:
    """Every module inside the given callables. Written out because `nn.Module.modules()` builds names nobody needs here."""
    found: list[nn.Module] = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        root = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        if isinstance(root, nn.Module):
            found.append(root)
    for module in found:  # grows while it is walked
        if module._modules:
            found.extend(child for child in module._modules.values() if child is not None)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)
