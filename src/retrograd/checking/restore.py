"""Putting Python state back: a `Snapshot` remembers everything that a network can reach and change.

For each value it keeps a list of undo actions, which write the remembered content back in place:
containers, attributes, closures, globals, tensors, generators, hooks.
"""

from __future__ import annotations

import builtins
import copy
import functools
import types
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.checking.compare import copy_of, has_no_values, is_same
from retrograd.checking.crawl import (
    MAX_VALUES,
    PLAIN_TYPES,
    Reference,
    crawl,
    globals_of,
    is_opaque,
    is_user_code,
)
from retrograd.checking.fingerprints import MUTABLE_CONTAINERS
from retrograd.checking.generators import (
    Undo,
    global_generators,
    is_generator,
    is_numpy,
    undo_draws,
)
from retrograd.core.tensors import storage_of


class _Buffer(NamedTuple):
    """A buffer that steps run on a copy of."""

    buffers: dict[str, Tensor | None]  # the module's
    name: str
    original: Tensor


class Snapshot:
    """The state of everything that a module, and other objects, can reach and change.

    `restore` puts it back, as often as needed, and gives the module fresh copies of its buffers, so
    that the caller's buffers are never written to and a graph that saved them stays valid.
    `release` puts it back and leaves the caller's own buffers in place. Other tensors are written
    in place, without a new version.
    """

    def __init__(self, module: nn.Module, others: Iterable[object]) -> None:
        self._undo: list[Undo] = [generator.restore for generator in global_generators()]
        self._known: set[int] = set()  # ids of values that are remembered
        modules = list(module.modules())
        for part in modules:  # first, so that no limit of the crawler leaves one out
            self._remember(part)
        searches = [list(crawl("", root)) for root in (module, *others)]
        self.is_complete = all(len(found) < MAX_VALUES for found in searches)
        references = [reference for found in searches for reference in found]
        self._buffers = _unshared_buffers(modules, references)
        self._known |= {id(buffer.original) for buffer in self._buffers}
        for reference in references:
            self._remember_place(reference)
            self._remember(reference.value)
        for part in modules:
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    self._remember(tensor)

    def restore(self) -> None:
        """Put everything back, with new copies of the buffers."""
        self.release()
        copies = {id(buffer.original): copy_of(buffer.original) for buffer in self._buffers}
        for buffer in self._buffers:
            buffer.buffers[buffer.name] = copies[id(buffer.original)]

    def release(self) -> None:
        """Put everything back, with the caller's own buffers."""
        first_error = None
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # go on with the rest, then raise
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _remember(self, value: Any) -> None:
        if id(value) in self._known or isinstance(value, (*PLAIN_TYPES, type, types.ModuleType)):
            return
        self._known.add(id(value))
        self._undo += _undo_changes(value)
        if not isinstance(value, types.FunctionType):
            for cls in type(value).__mro__:
                self._remember_class(cls)

    def _remember_class(self, cls: type) -> None:
        """Attributes that the class gets later will be deleted again."""
        if id(cls) not in self._known and is_user_code(cls):
            self._known.add(id(cls))
            self._undo.append(functools.partial(_delete_new, cls, frozenset(vars(cls))))

    def _remember_place(self, reference: Reference) -> None:
        """The place will hold this value again."""
        value = reference.value
        if isinstance(value, type):
            self._remember_class(value)
        if reference.holder is None:
            return
        if type(value).__module__ == "itertools":  # cannot be rewound: a copy takes its place
            self._undo.append(functools.partial(_put_copy, reference, copy.copy(value)))
        else:
            self._undo.append(functools.partial(_put, reference, value))


def _unshared_buffers(modules: list[nn.Module], references: list[Reference]) -> list[_Buffer]:
    """The buffers that may be replaced by copies.

    A buffer that shares its memory with another value is not among them: a copy would separate the
    two, so such a buffer is restored in place.
    """
    dicts = {
        id(part._buffers): part._buffers
        for part in modules
        if not isinstance(part, torch.jit.ScriptModule)
    }
    users: dict[int, set[Hashable]] = {}
    for reference in references:
        value = reference.value
        if isinstance(value, Tensor) and not has_no_values(value):
            user = id(value) if id(reference.holder) in dicts else reference.path
            users.setdefault(storage_of(value), set()).add(user)
    found = []
    for buffers in dicts.values():
        for name, buffer in buffers.items():
            if buffer is None or has_no_values(buffer):
                continue
            if len(users.get(storage_of(buffer), {0})) == 1:
                found.append(_Buffer(buffers, name, buffer))
    return found


# --- what undoes a change of one value


def _undo_changes(value: Any) -> list[Undo]:
    if isinstance(value, nn.Module):
        return _undo_module(value)
    if isinstance(value, Tensor):
        return _undo_tensor(value)
    if isinstance(value, MUTABLE_CONTAINERS):
        return [functools.partial(_refill, value, value.copy())]
    if is_generator(value):
        return undo_draws(value)
    if is_numpy(value, "ndarray"):
        is_writeable = value.flags.writeable
        return [functools.partial(value.__setitem__, ..., value.copy())] if is_writeable else []
    if isinstance(value, types.FunctionType):
        return _undo_function(value) if is_user_code(value) else []
    if is_opaque(type(value)) or not isinstance(getattr(value, "__dict__", None), dict):
        return []
    return [functools.partial(_refill, vars(value), vars(value).copy())]


def _undo_module(module: nn.Module) -> list[Undo]:
    attributes = vars(module)
    inner = [value for value in attributes.values() if isinstance(value, dict)]  # such as _buffers
    return [functools.partial(_refill, slot, slot.copy()) for slot in (attributes, *inner)]


def _undo_tensor(tensor: Tensor) -> list[Undo]:
    undo: list[Undo] = []
    if not has_no_values(tensor):
        undo.append(functools.partial(_rewrite, tensor, tensor.detach().clone()))
    if tensor.is_leaf:
        undo.append(functools.partial(_set_requires_grad, tensor, tensor.requires_grad))
    return undo


def _undo_function(function: types.FunctionType) -> list[Undo]:
    """Its attributes, and the globals that it may define."""
    undefined = [
        name
        for name in globals_of(function.__code__)
        if name not in function.__globals__ and not hasattr(builtins, name)
    ]
    return [
        functools.partial(_refill, function.__dict__, function.__dict__.copy()),
        functools.partial(_delete_names, function.__globals__, undefined),
    ]


def _put(reference: Reference, value: object) -> None:
    holder = reference.holder
    key = reference.key
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, (list, deque)):
        if key < len(holder):
            holder[key] = value
    else:
        present = vars(holder).get(key) if isinstance(holder, type) else getattr(holder, key, None)
        if present is not value:
            setattr(holder, key, value)


def _put_copy(reference: Reference, value: object) -> None:
    _put(reference, copy.copy(value))


def _delete_names(namespace: dict[str, object], names: list[str]) -> None:
    for name in names:
        namespace.pop(name, None)


def _delete_new(cls: type, names: frozenset[str]) -> None:
    for name in list(vars(cls)):
        if name not in names and not name.startswith("__"):
            delattr(cls, name)


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        if not _is_same_dict(container, before):
            container.clear()
            container.update(before)
    elif isinstance(container, (list, bytearray)):
        container[:] = before
    elif isinstance(container, set):
        container.clear()
        container.update(before)
    else:
        container.clear()
        container.extend(before)


def _is_same_dict(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    """The same keys in the same order, with the same objects."""
    if list(first) != list(second):
        return False
    return all(first[key] is value for key, value in second.items())


@torch.no_grad()
def _rewrite(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape:
        tensor.data = before.clone()
    elif not is_same(tensor.detach(), before):
        tensor.data.copy_(before)


def _set_requires_grad(tensor: Tensor, flag: bool) -> None:
    if tensor.requires_grad != flag and tensor.is_leaf:
        tensor.requires_grad_(flag)
