"""The crawler: the Python values that a function, a module or an object can reach.

It follows what Python code can refer to: attributes, `__slots__`, class attributes, closures,
default and bound arguments, globals that the code loads, hooks, and the containers among these.
Each value has a path, such as `blocks.3.f.cache` or `global model.COUNTER`.

The search does not enter code that holds no state of the user: Python's own, torch's, NumPy's and
that of installed packages. Objects of installed packages are entered, their code is not.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.core.saved import PLAIN_TYPES

MAX_VALUES = 50_000  # visited by one search
MAX_ITEMS = 1000  # a longer container holds data: its items are not visited

CALLABLE_TYPES = (types.FunctionType, types.MethodType, functools.partial)
CONTAINER_TYPES = (dict, list, tuple, deque, set, frozenset)
_LEAF_TYPES = (
    *PLAIN_TYPES,
    *(Tensor, torch.Generator, type, types.ModuleType, random.SystemRandom),
)
_TRUSTED_PACKAGES = ("torch", "numpy", "retrograd", "builtins")
_SEARCHED_STDLIB_CLASSES = ("SimpleNamespace", "UserDict", "UserList", "UserString")
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOK_DICTS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
_EMPTY_CELL = types.CellType()


class Reference(NamedTuple):
    """A value and where it is stored.

    The place is `holder[key]` for a dict, list or deque, `holder.key` for an object or a class, and
    the content of `holder` for a closure cell. `holder` is None if the value cannot be assigned.
    """

    path: str
    holder: Any
    key: Any
    value: Any

    def is_current(self) -> bool:
        """Whether the same value is still there."""
        holder = self.holder
        if holder is None:
            return True
        if isinstance(holder, types.CellType):
            return holder != _EMPTY_CELL and holder.cell_contents is self.value
        if isinstance(holder, dict):
            return holder.get(self.key) is self.value
        if isinstance(holder, (list, deque)):
            return self.key < len(holder) and holder[self.key] is self.value
        return getattr(holder, self.key, None) is self.value


def crawl(
    path: str,
    root: object,
    without_tensors: Collection[int] = (),
) -> Iterator[Reference]:
    """`root` and everything that it can reach, breadth first, at most `MAX_VALUES` values.

    Parameters and buffers are left out for modules whose `id` is in `without_tensors`.
    """
    queue = deque([_read_only(path, root)])
    entered: set[int] = set()
    for _ in range(MAX_VALUES):
        if not queue:
            return
        reference = queue.popleft()
        yield reference
        value = reference.value
        if id(value) in entered:
            continue
        if isinstance(value, type):
            if is_user_code(value):
                entered.add(id(value))
                queue.extend(_in_class(reference.path, value))
        elif not isinstance(value, _LEAF_TYPES):
            entered.add(id(value))
            queue.extend(_inside(reference.path, value, without_tensors))


def _read_only(path: str, value: object) -> Reference:
    return Reference(path, None, None, value)


def _inside(
    path: str,
    value: object,
    without_tensors: Collection[int],
) -> Iterable[Reference]:
    if isinstance(value, nn.Module):
        return _in_module(path, value, id(value) not in without_tensors)
    if isinstance(value, types.FunctionType) and not is_user_code(value):
        return ()
    if isinstance(value, (CALLABLE_TYPES, CONTAINER_TYPES)):
        return references_in(path, value)
    return () if is_opaque(type(value)) else _in_object(path, value)


def references_in(path: str, value: object) -> Iterable[Reference]:
    """What a function, a method, a partial or a container refers to."""
    if isinstance(value, types.FunctionType):
        return _in_function(path, value)
    if isinstance(value, types.MethodType):
        return _read_only(path, value.__self__), _read_only(path, value.__func__)
    if isinstance(value, functools.partial):
        return _in_partial(path, value)
    if isinstance(value, CONTAINER_TYPES):
        return _in_container(path, value)
    return ()


def _in_module(
    path: str,
    module: nn.Module,
    with_tensors: bool,
) -> Iterator[Reference]:
    if with_tensors and not isinstance(module, torch.jit.ScriptModule):
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                yield Reference(_attribute(path, key), tensors, key, tensor)
    for key, child in module._modules.items():
        yield _read_only(_attribute(path, key), child)
    for name in _HOOK_DICTS:
        for hook in getattr(module, name, {}).values():
            yield _read_only(f"{path}: hook", hook)
    yield from _in_object(path, module, _MODULE_ATTRIBUTES)


def _in_function(path: str, function: types.FunctionType) -> Iterator[Reference]:
    keyword_defaults = function.__kwdefaults__ or {}
    defaults = (*(function.__defaults__ or ()), *keyword_defaults.values())
    for i, value in enumerate(defaults):
        yield _read_only(f"{path}: default argument {i}", value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if cell != _EMPTY_CELL:
            yield Reference(f"{path}: variable {name}", cell, None, cell.cell_contents)
    yield from _in_globals(function)
    for key, value in function.__dict__.items():
        yield Reference(f"{path}.{key}", function.__dict__, key, value)


def _in_globals(function: types.FunctionType) -> Iterator[Reference]:
    """The globals that the code loads; of a user's module, the names in it that the code uses."""
    namespace = function.__globals__
    for name in globals_of(function.__code__):
        value = namespace.get(name)
        if not isinstance(value, types.ModuleType):
            if name in namespace:
                yield Reference(f"global {function.__module__}.{name}", namespace, name, value)
        elif is_user_code(value):
            inner = vars(value)
            for used in set(function.__code__.co_names) & inner.keys():
                yield Reference(f"global {value.__name__}.{used}", inner, used, inner[used])


def _in_partial(path: str, partial: functools.partial[Any]) -> Iterator[Reference]:
    for i, value in enumerate((*partial.args, *partial.keywords.values())):
        yield _read_only(f"{path}: bound argument {i}", value)
    yield _read_only(path, partial.func)


def _in_container(path: str, container: Any) -> Iterator[Reference]:
    """Items that are not plain values: a fingerprint of the container covers the plain ones."""
    if len(container) > MAX_ITEMS:
        return
    items = container.items() if isinstance(container, dict) else enumerate(container)
    holder = container if isinstance(container, (dict, list, deque)) else None
    for key, value in list(items):
        if not isinstance(value, PLAIN_TYPES):
            yield Reference(f"{path}[{_key_text(key)}]", holder, key, value)


def _in_object(
    path: str,
    value: object,
    excluded: Collection[str] = (),
) -> Iterator[Reference]:
    """Attributes of an object and of its classes, and what its methods use."""
    attributes = getattr(value, "__dict__", {})
    for key, inner in list(attributes.items()):
        if key not in excluded:
            yield Reference(_attribute(path, key), attributes, key, inner)
    for cls in type(value).__mro__:
        for key in () if is_opaque(cls) else slots_of(cls):
            with contextlib.suppress(AttributeError):
                yield Reference(_attribute(path, key), value, key, getattr(value, key))
        if is_user_code(cls):
            for reference in _in_class(path, cls):
                if reference.key not in attributes:
                    yield reference


def _in_class(path: str, cls: type) -> Iterator[Reference]:
    for key, value in list(vars(cls).items()):
        method = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(method, types.FunctionType):
            yield from _in_function(path, method)
        elif not key.startswith("__") and not hasattr(value, "__get__"):
            yield Reference(_attribute(path, key), cls, key, value)


def _attribute(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _key_text(key: object) -> str:
    try:
        return f"{key!r:.60}"
    except Exception:  # a __repr__ of the user's that fails
        return type(key).__name__


def slots_of(cls: type) -> list[str]:
    """The names in `__slots__` that hold values."""
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals that this code loads."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return tuple({i.argval for i in dis.get_instructions(code) if i.opname in loads})


def is_opaque(cls: type) -> bool:
    """Whether objects of this class are not entered: torch's, NumPy's and most of Python's."""
    package = cls.__module__.split(".")[0]
    if package in ("types", "collections"):
        return cls.__name__ not in _SEARCHED_STDLIB_CLASSES
    return package in sys.stdlib_module_names or package in _TRUSTED_PACKAGES


def is_user_code(value: object) -> bool:
    """Whether a function, class or module is the user's own: not Python's, not torch's, and not
    part of an installed package.
    """
    if isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = getattr(value, "__module__", None) or ""
    package = name.split(".")[0]
    if package in sys.stdlib_module_names or package in _TRUSTED_PACKAGES:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
