"""Buffers: each is updated once, and recompute sees the values that forward saw.

[Note: constant buffers] To replay a buffer, its value before the function ran is needed, but only
afterwards it shows whether the function changed it. So every buffer is copied and compared; by
value, because BatchNorm changes its statistics without moving their version counters. A large
buffer that stayed the same is not copied again: masks and rotary tables cost one copy in the life
of a module, not one in each call. If the version of such a buffer shows a change after all, its
earlier value is lost, the function cannot run again, and the tape keeps that one update.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.guards.modules import MISSING, put_member
from retrograd.core.private import NormWithStatistics, is_fake
from retrograd.core.program import (
    Application,
    Program,
    place,
)
from retrograd.core.structure import FunctionState, Structure
from retrograd.core.tensors import nbytes

LARGE = 1 << 16  # bytes; more than any channel statistics, less than any table that hurts

# The large buffers that were seen unchanged: by module, their names and the training flag.
_constant: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = weakref.WeakKeyDictionary()


class Seen(NamedTuple):
    """A buffer before the function ran."""

    module: nn.Module
    name: str
    buffer: Tensor | None  # None: it has no values yet
    version: int
    copy: Tensor | None  # None: it is known to be constant


class Replay(NamedTuple):
    """What a buffer has to be when the function runs again."""

    buffers: dict[str, Tensor | None]  # of its module
    name: str
    value: Any  # a tensor, None, or MISSING
    version: int | None  # of a buffer that was not copied; None: the value is a copy of ours


class Buffers(Guard):
    def __init__(
        self,
        structure: Structure,
        program: Program,
    ) -> None:
        self.structure = structure
        self.program = program
        self.has_buffers = any(structure.buffers)
        self.seen: list[Seen] = []  # by the update that is running
        self.replays: dict[int, list[Replay]] = {}  # by update

    def before_function(self, update: Application) -> None:
        if self.has_buffers:
            self.seen = look_at_buffers(self.structure.functions[update.index].modules)

    def found_module(self, module: nn.Module) -> None:
        """A function that runs is about to call this module, for the first time."""
        self.seen += look_at_buffers([module])

    def after_update(self, update: Application) -> None:
        function = self.structure.functions[update.index]
        replays: list[Replay] = []
        for seen in self.seen:
            if seen.buffer is None:
                replays += _replay_of_new(seen)
            elif _is_lost(seen, seen.buffer):
                update.is_repeatable = False
            else:
                replays.append(_replay_of(seen, seen.buffer))
        if any(function.user_buffers):
            replays += self._registered_meanwhile(function)
            self.has_buffers = True
        self.seen = []
        if replays:
            self.replays[update.index] = replays

    def _registered_meanwhile(self, function: FunctionState) -> list[Replay]:
        """A function of the user's own may register buffers while it runs."""
        known = {(seen.module, seen.name) for seen in self.seen}
        return [
            Replay(module._buffers, name, MISSING, None)
            for module in function.user_modules
            for name in module._buffers
            if (module, name) not in known
        ]

    def before_backward(self) -> bool:
        return bool(self.replays)

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        replays = self.replays.get(index)
        if replays is None:
            return
        for replay in replays:
            if replay.version is not None and replay.value._version != replay.version:
                versions = (replay.version, replay.value._version)
                raise errors.edited_buffer(place(self.program, index), replay.name, versions)
        # Buffers are replaced, not overwritten: the present object keeps its version counter.
        copies: dict[int, Tensor] = {}
        for buffers, name, value, version in replays:
            if version is None and isinstance(value, Tensor):
                value = copies.setdefault(id(value), value.clone())
            now = buffers.get(name, MISSING)
            if now is not value:
                undo.add(put_member, buffers, name, now)
                put_member(buffers, name, value)


def look_at_buffers(modules: Sequence[nn.Module]) -> list[Seen]:
    """The buffers that a function is about to use, with copies of those that may change."""
    found: list[Seen] = []
    copies: dict[int, Tensor] = {}  # a buffer may be registered in several modules
    for module in modules:
        if not module._buffers:
            continue
        known = _constant.get(module, ())
        for name, buffer in module._buffers.items():
            if buffer is None or is_lazy(buffer) or buffer.is_inference():
                found.append(Seen(module, name, None, 0, None))
                continue
            if (name, module.training) not in known and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            found.append(Seen(module, name, buffer, buffer._version, copies.get(id(buffer))))
    return found


def _replay_of_new(seen: Seen) -> list[Replay]:
    """A buffer that had no values before the function ran, and may have some now."""
    now = seen.module._buffers.get(seen.name, MISSING)
    if now is None or now is MISSING or now.is_inference():
        return []
    return [Replay(seen.module._buffers, seen.name, None, None)]


def _replay_of(seen: Seen, buffer: Tensor) -> Replay:
    """A buffer that the function used, and perhaps changed."""
    module = seen.module
    name = seen.name
    is_replaced = module._buffers.get(name, MISSING) is not buffer
    is_edited = buffer._version != seen.version or not _has_value(seen.copy, buffer)
    if is_edited or is_replaced:
        _constant.get(module, set()).discard((name, module.training))
    elif seen.copy is not None and nbytes(seen.copy) > LARGE:
        _constant.setdefault(module, set()).add((name, module.training))
    # Statistics of a norm are copied even if unchanged: another forward may change them.
    needs_copy = is_edited or is_replaced or isinstance(module, NormWithStatistics)
    if seen.copy is not None and needs_copy:
        return Replay(module._buffers, name, seen.copy, None)
    return Replay(module._buffers, name, buffer, seen.version)


def _is_lost(seen: Seen, buffer: Tensor) -> bool:
    """Whether the function changed a buffer that was taken for constant and not copied."""
    if seen.copy is not None or buffer._version == seen.version:
        return False
    _constant.get(seen.module, set()).discard((seen.name, seen.module.training))
    return True


def _has_value(copy: Tensor | None, buffer: Tensor) -> bool:
    return copy is None or is_equal(copy, buffer)


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, as far as values can be compared."""
    if a.is_meta or is_fake(a) or a.layout != torch.strided:
        return True
    return torch.equal(a, b)
