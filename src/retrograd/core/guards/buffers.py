"""Buffers: each is updated once, and recompute sees the values that forward saw.

[Note: which buffers are copied] To replay a buffer that a function changes, its value before the
function ran is needed. To copy every buffer would cost memory, and to compare values would wait for
an accelerator. So a buffer is copied only if the function was seen to write it (`watch.py`), or
belongs to a norm with running statistics: BatchNorm changes these without moving their version
counters. In the call that is watched, the copy is made just before the first write. Every other
buffer is held by reference, and its version tells whether it has changed. If it did after all, its
earlier value is lost: the tape keeps that one update, and later calls copy the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.guards.modules import MISSING, put_member
from retrograd.core.private import NormWithStatistics
from retrograd.core.program import (
    Application,
    Program,
    place,
)
from retrograd.core.structure import FunctionState, Structure
from retrograd.core.tensors import storage_of
from retrograd.core.watch import BufferName


class Seen(NamedTuple):
    """A buffer before the function ran."""

    module: nn.Module
    name: str
    buffer: Tensor | None  # None: it has no values yet
    version: int
    copy: Tensor | None  # None: the function is not known to write it

    @property
    def is_lost(self) -> bool:
        """Whether the function wrote the buffer, and there is no copy of what it was before."""
        return (
            self.buffer is not None and self.copy is None and self.buffer._version != self.version
        )


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
            function = self.structure.functions[update.index]
            self.seen = look_at_buffers(function.modules, function.usage.written_buffers)

    def found_module(
        self,
        module: nn.Module,
        written: set[BufferName],
    ) -> None:
        """A function that runs is about to call this module, for the first time."""
        self.seen += look_at_buffers([module], written)

    def found_write(self, memory: int) -> list[BufferName]:
        """A function that runs is about to write a buffer: copy it. Returns its names."""
        names = []
        copy: Tensor | None = None  # a buffer may be registered in several modules
        for i, seen in enumerate(self.seen):
            if seen.buffer is not None and storage_of(seen.buffer) == memory:
                names.append(BufferName(id(seen.module), seen.name))
                if seen.copy is None and seen.buffer._version == seen.version:
                    copy = seen.buffer.detach().clone() if copy is None else copy
                    self.seen[i] = seen._replace(copy=copy)
        return names

    def after_update(self, update: Application) -> None:
        function = self.structure.functions[update.index]
        replays: list[Replay] = []
        for seen in self.seen:
            if seen.buffer is None:
                replays += _replay_of_new(seen)
            elif seen.is_lost:
                update.is_repeatable = False
                function.usage.written_buffers.add(BufferName(id(seen.module), seen.name))
            elif seen.copy is not None:
                replays.append(Replay(seen.module._buffers, seen.name, seen.copy, None))
            else:
                replays.append(Replay(seen.module._buffers, seen.name, seen.buffer, seen.version))
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


def look_at_buffers(modules: Sequence[nn.Module], written: set[BufferName]) -> list[Seen]:
    """The buffers that a function may use, with copies of those that it is known to write."""
    found: list[Seen] = []
    copies: dict[int, Tensor] = {}  # a buffer may be registered in several modules
    for module in modules:
        if not module._buffers:
            continue
        is_norm = isinstance(module, NormWithStatistics)
        for name, buffer in module._buffers.items():
            if buffer is None or is_lazy(buffer) or buffer.is_inference():
                found.append(Seen(module, name, None, 0, None))
                continue
            is_written = is_norm or BufferName(id(module), name) in written
            if is_written and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            found.append(Seen(module, name, buffer, buffer._version, copies.get(id(buffer))))
    return found


def _replay_of_new(seen: Seen) -> list[Replay]:
    """A buffer that had no values before the function ran, and may have some now."""
    now = seen.module._buffers.get(seen.name, MISSING)
    if now is None or now is MISSING or now.is_inference():
        return []
    return [Replay(seen.module._buffers, seen.name, None, None)]
