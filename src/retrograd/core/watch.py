"""Watching a function: what it really uses, whatever it is called and wherever it is stored.

A function may use a generator in a dataclass, a module in a closure, a running mean that is a
plain tensor. To search for them is to guess. So a function is watched while it runs:

- a dispatch mode sees every operation: the generators that it is given, whether it draws from a
  default generator, the tensors that it writes and the leaves that it needs a gradient of;
- torch's global hook on modules sees every module that is called.

`guards/watching.py` decides which calls are watched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from retrograd.core.private import (
    UNDECLARED_WRITES,
    UNFILLED,
    DispatchMode,
    identity_of_generator,
    run_in_mode,
)
from retrograd.core.tensors import storage_of


class BufferName(NamedTuple):
    """A buffer, whatever tensor it is at the moment."""

    module: int  # its id
    name: str


class Usage:
    """What a function was seen to use, beyond what its own modules have registered."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.weights: list[Tensor] = []  # leaves that require grad
        self.written: list[Tensor] = []  # tensors that it writes, and that were there before
        self.written_buffers: set[BufferName] = set()
        self.draws = False  # from a default generator, even if it puts the state back
        self.random_devices: set[torch.device] = set()  # whose default generators it may draw from
        self.writes_saved = False  # it writes memory that autograd has saved before
        self.is_watched = False

    @property
    def may_stop_early(self) -> bool:
        """Whether everything that autograd saved is complete when the last tensor is saved."""
        return self.is_watched and not self.writes_saved

    def size(self) -> tuple[int, ...]:
        """Grows with everything that is seen."""
        found = (
            *(self.modules, self.generators, self.weights),
            *(self.written, self.written_buffers, self.random_devices),
        )
        return (*map(len, found), self.draws, self.writes_saved, self.is_watched)


class Known(NamedTuple):
    """What the engine takes care of anyway."""

    modules: set[int]  # by id
    tensors: set[int]  # parameters and arguments, by id
    memory: set[int]  # of these
    buffers: set[int]  # by their memory
    is_compiled: bool  # the function, or a module of it


class Discoveries(Protocol):
    """Who is told of state, just before the function first uses it: its value is still there."""

    def random_states(self) -> list[bytes]: ...  # of the default generators
    def found_random_device(self, device: torch.device) -> None: ...
    def found_module(self, module: nn.Module) -> None: ...
    def found_generator(self, generator: torch.Generator) -> None: ...
    def found_written(self, tensor: Tensor) -> None: ...
    def found_written_buffer(self, memory: int) -> None: ...


class Watch(DispatchMode):
    """While active, notes in `usage` what the function uses, and tells of new state."""

    def __init__(
        self,
        usage: Usage,
        known: Known,
        saved: Sequence[Tensor],
        tell: Discoveries,
    ) -> None:
        super().__init__()
        self.usage = usage
        self.known = known
        self.tell = tell
        self.saved = saved  # what autograd has saved of the function so far
        self.made: set[int] = set()  # memory that the function itself allocated
        self.unfilled: set[int] = set()  # memory that differs each time
        self.seen = set(known.tensors)
        self.thread = threading.get_ident()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function, watched."""
        handle = None
        try:
            # The compiler would compile the hook, and compile again without it.
            if not self.known.is_compiled:
                handle = register_module_forward_pre_hook(self._sees_module)
            return run_in_mode(self, function)
        finally:  # [Note: interrupts]
            self.usage.is_watched = True
            if handle is not None:
                try:
                    handle.remove()
                finally:
                    handle.remove()

    def _sees_module(
        self,
        module: nn.Module,
        args: Any,
    ) -> None:
        # torch's hook is global: another thread may call modules of its own meanwhile.
        if id(module) not in self.known.modules and threading.get_ident() == self.thread:
            self.known.modules.add(id(module))
            self.usage.modules.append(module)
            self.seen.update(map(id, module._parameters.values()))
            self.tell.found_module(module)
            self.known.buffers.update(map(storage_of, module.buffers(recurse=False)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._see_generators(func, args, kwargs)
        self._see_tensors([*args, *kwargs.values()])
        for tensor in written_by(func, args, kwargs):
            self._see_write(tensor)
        result = self._run(func, args, kwargs)
        self._see_result(func, args, kwargs, result)
        if leaves_memory_unfilled(func):
            values = [*args, *kwargs.values(), result]
            values += result if isinstance(result, tuple) else []
            self.unfilled.update(map(storage_of, tensors_in(values)))
        return result

    def _see_generators(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        known = self.usage.generators
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                if identity_of_generator(value) not in map(identity_of_generator, known):
                    self.usage.generators.append(value)
                    self.tell.found_generator(value)
                return

    def _run(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run an operation, and see whether it draws from a default generator.

        Attention may draw and usually does not, so what it says of itself is not enough.
        """
        if not is_random(func) or has_no_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        for device in devices_of(args, kwargs) - self.usage.random_devices:
            self.usage.random_devices.add(device)
            self.tell.found_random_device(device)
        if self.usage.draws:
            return func(*args, **kwargs)
        before = self.tell.random_states()
        result = func(*args, **kwargs)
        self.usage.draws = self.tell.random_states() != before
        return result

    def _see_tensors(self, values: list[Any]) -> None:
        for tensor in tensors_in(values):
            if not tensor.requires_grad or not tensor.is_leaf or id(tensor) in self.seen:
                continue
            self.seen.add(id(tensor))
            memory = storage_of(tensor)
            is_own = memory in self.made or memory in self.known.memory
            if tensor._base is None and not is_own:  # else a tensor that the function made
                self.usage.weights.append(tensor)

    def _see_write(self, tensor: Tensor) -> None:
        memory = storage_of(tensor)
        if memory in map(storage_of, self.saved):
            self.usage.writes_saved = True
        if memory in self.made:
            return
        if memory in self.known.buffers:
            self.tell.found_written_buffer(memory)
            return
        base = tensor if tensor._base is None else tensor._base
        if memory not in map(storage_of, self.usage.written):
            base = base.detach()
            self.usage.written.append(base)
            self.tell.found_written(base)

    def _see_result(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> None:
        made = set(map(storage_of, tensors_in([result])))
        if may_alias(func):
            made -= set(map(storage_of, tensors_in([*args, *kwargs.values()])))
        self.made |= made


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments of an operation, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


@functools.cache
def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@functools.cache
def dropout_argument(func: Any) -> tuple[int, str] | None:
    """The position and the name of an argument that is the probability of dropout."""
    schema = getattr(func, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return next(((i, name) for i, name in enumerate(names) if name == "dropout_p"), None)


def has_no_dropout(
    func: Any,
    args: Any,
    kwargs: Any,
) -> bool:
    """Whether an operation would draw for its dropout only, and has none: attention."""
    argument = dropout_argument(func)
    if argument is None:
        return False
    position, name = argument
    probability = args[position] if position < len(args) else kwargs.get(name, 0.0)
    return probability == 0


def devices_of(args: Any, kwargs: Any) -> set[torch.device]:
    """The devices whose default generators an operation may draw from.

    That is where its tensors are; if it makes one, where it makes it. None if it was given a
    generator.
    """
    values = [*args, *kwargs.values()]
    if any(isinstance(value, torch.Generator) for value in values):
        return set()
    devices = {tensor.device for tensor in tensors_in(values)}
    return devices | {value for value in values if isinstance(value, torch.device)}


@functools.cache
def may_alias(func: Any) -> bool:
    """Whether what an operation returns may be memory that it was given."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(value.alias_info is not None for value in schema.returns)


@functools.cache
def leaves_memory_unfilled(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name in UNFILLED


class Writes(NamedTuple):
    """Which arguments an operation writes."""

    positions: tuple[int, ...]
    names: tuple[str, ...]


@functools.cache
def writes_of(func: Any) -> Writes:
    schema = getattr(func, "_schema", None)
    # A higher-order operator has no schema. FSDP writes memory of its own, the whole parameters.
    if schema is None or schema.name.startswith("fsdp::"):
        return Writes((), ())
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    positions = tuple(i for i, _ in written) + UNDECLARED_WRITES.get(schema.name, ())
    return Writes(positions, tuple(name for _, name in written))


def written_by(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Iterator[Tensor]:
    """The tensors that this call of an operation writes."""
    positions, names = writes_of(func)
    if not positions:
        return iter(())
    values = [args[i] for i in positions if i < len(args)]
    values += [kwargs[name] for name in names if name in kwargs]
    return tensors_in(values)
