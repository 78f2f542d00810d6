"""Running a function twice the same way.

Between forward and backward the world moves on: generators advance, autocast ends, modules switch between train and eval,
buffers are updated. A `Scene` remembers what a call saw; `Replay` puts that back while a function runs again, and then puts
the present back, so that a step leaves behind exactly what one forward leaves.

Four things are replayed, and only where they differ:

1. random state, of the CPU and of every device that holds a stream (and of generators in keyword arguments);
2. autocast, for the device types of the streams and the CPU;
3. each module's `training` flag;
4. each buffer that the function changed.

Parameters are not replayed but checked: one that changed after forward makes the recompute wrong, so it raises.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core import errors
from retrograd.core.program import Program, place


class _Local(threading.local):
    depth = 0  # recomputes under way in this thread, one inside the other


_local = _Local()


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
    return _local.depth > 0


# [Note: constant buffers] To replay a buffer, its value before the function ran is needed, but whether the function changes it
# shows only afterwards. So every buffer is copied and compared; by value, because BatchNorm changes its statistics without
# moving their version counters. But a large one that was seen unchanged is not copied again: masks and rotary tables cost one
# copy in the life of a module, not one for each call. Should its version show that it changed after all, `changed_buffers`
# says that the value is lost, and the tape keeps that one update. Remembered per module, name and training flag.
LARGE = 1 << 16  # bytes; beyond any channel statistics, below any table that hurts
_constant: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = weakref.WeakKeyDictionary()

Buffers = list[tuple[nn.Module, str, Tensor]]  # whose, under which name, and the value that the function saw


class Scene:
    """What one forward call sees: modes and module states, taken once; random states and buffers, at each update."""

    def __init__(self, tensors: Iterable[Tensor], keyword_values: Iterable[Any], functions: Iterable[tuple[Any, ...]]) -> None:
        devices = {tensor.device for tensor in tensors}
        self.generators: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = [
            (torch.default_generator.get_state, torch.default_generator.set_state)
        ]
        for device in devices:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                put = functools.partial(module.set_rng_state, device=device)
                self.generators.append((functools.partial(module.get_rng_state, device), put))
        self.generators += [(g.get_state, g.set_state) for g in keyword_values if isinstance(g, torch.Generator)]
        kinds = sorted({"cpu", *(device.type for device in devices)})
        self.kinds = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
        self.autocast = self.autocast_now()
        # One list for each update. Taken in one go: a tight loop here costs a tenth of the same work between the updates.
        self.modules = [modules_of(*fns) for fns in functions]
        self.training = [[m.training for m in modules] for modules in self.modules]
        self.parameters = [
            [p for m in ms if m._parameters for p in m._parameters.values() if p is not None] for ms in self.modules
        ]
        self.versions = [[p._version for p in parameters] for parameters in self.parameters]
        # Whether a parameter may be stepped as soon as its gradient is there: [Note: an optimizer inside backward]. The
        # attribute is private; a public `Tensor.has_post_accumulate_grad_hook()` would replace it.
        self.steps_in_backward = [any(p._post_accumulate_grad_hooks for p in parameters) for parameters in self.parameters]
        self.owners = [[m for m in modules if m._buffers] for modules in self.modules]  # of buffers

    def autocast_now(self) -> list[tuple[torch.dtype, bool] | None]:
        """For each kind of device: None, or the dtype and whether casts of weights are cached."""
        return [
            (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) if torch.is_autocast_enabled(kind) else None
            for kind in self.kinds
        ]

    def random_states(self) -> list[bytes]:
        """The state of each generator. As bytes, because comparing them takes a tenth of comparing tensors."""
        states = [get() for get, _ in self.generators]  # on the CPU, whatever device the generator is for
        return [ctypes.string_at(state.data_ptr(), state.nbytes) for state in states]

    def set_random_states(self, states: list[bytes]) -> None:
        for (_, put), state in zip(self.generators, states):
            put(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def buffers(self, index: int) -> list[tuple[nn.Module, str, Tensor, int, Tensor | None]]:
        """The buffers that update `index` is about to see: whose, name, object, version, and a copy unless it is constant."""
        seen = []
        copies: dict[int, Tensor] = {}  # a buffer may be registered in several modules
        for module in self.owners[index]:
            known = _constant.get(module, ())
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if (name, module.training) not in known and id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    seen.append((module, name, buffer, buffer._version, copies.get(id(buffer))))
        return seen


def changed_buffers(seen: list[tuple[nn.Module, str, Tensor, int, Tensor | None]]) -> tuple[Buffers, bool]:
    """Those that a function changed, with the values it saw; and whether all of these values are still known."""
    changed: Buffers = []
    complete = True
    for module, name, buffer, version, copy in seen:
        edited = buffer._version != version or (copy is not None and not torch.equal(copy, buffer))
        if edited or module._buffers.get(name) is not buffer:
            complete = complete and not (edited and copy is None)
            _constant.get(module, set()).discard((name, module.training))
            changed.append((module, name, copy if edited and copy is not None else buffer))
        elif copy is not None and copy.nbytes > LARGE:
            _constant.setdefault(module, set()).add((name, module.training))
    return changed, complete


class Replay:
    """While entered: what update `index` saw, gradients on, `is_recomputing()` true. The present comes back whatever happens.

    Written out, not as a generator, because it is entered for every update of every backward; and usually nothing differs.
    """

    __slots__ = ("gradients", "undo")

    def __init__(self, scene: Scene, index: int, random: list[bytes] | None, buffers: Buffers, program: Program) -> None:
        modules, training, parameters = scene.modules[index], scene.training[index], scene.parameters[index]
        if [parameter._version for parameter in parameters] != scene.versions[index]:
            check_parameters(modules, parameters, scene.versions[index], place(program, index))
        autocast = scene.autocast_now()
        self.undo = None
        if random is None and not buffers and autocast == scene.autocast and [m.training for m in modules] == training:
            return
        with ExitStack() as undo:
            for kind, then, now in zip(scene.kinds, scene.autocast, autocast):
                if then != now:
                    dtype, cache = then or (None, None)
                    undo.enter_context(torch.autocast(kind, enabled=then is not None, dtype=dtype, cache_enabled=cache))
            for module, flag in zip(modules, training):
                if module.training != flag:
                    undo.callback(setattr, module, "training", module.training)
                    module.training = flag
            # Buffers are swapped, not overwritten: the present object is never touched, so no version counter moves.
            copies: dict[int, Tensor] = {}
            for module, name, value in buffers:
                undo.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = copies.setdefault(id(value), value.detach().clone())
            if random is not None:
                undo.callback(scene.set_random_states, scene.random_states())
                scene.set_random_states(random)
            self.undo = undo.pop_all()

    def __enter__(self) -> None:
        self.gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        _local.depth += 1

    def __exit__(self, *error: object) -> None:
        _local.depth -= 1
        torch.set_grad_enabled(self.gradients)
        if self.undo is not None:
            self.undo.close()


def check_parameters(modules: list[nn.Module], then: list[nn.Parameter], versions: list[int], where: str) -> None:
    """Raise if a parameter that the function still uses was edited since forward, naming it."""
    names = {id(p): name for module in reversed(modules) for name, p in module.named_parameters()}
    for parameter, version in zip(then, versions):
        if parameter._version != version and id(parameter) in names:
            raise errors.edited_parameter(where, names[id(parameter)], (version, parameter._version))


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
