"""What a function holds: modules, generators and weights, wherever it keeps them.

A module has its children registered. But a function may also be a lambda over a module, a partial
over a weight, a method, an object with a generator in a list, or a function that uses a global. All
of that is what it runs with, and must be replayed or at least checked. Looked for wherever
functions can refer to something: closures, defaults, `__self__`, attributes, partials, globals that
its code loads, and containers of these; and in attributes of users' own modules. torch's functions
are not searched.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Where something was found: how to look again, and what was there. `Structure.is_current` looks
# again at every call.
Reference = tuple[Any, Any, Any]  # a dict, list or cell; a key in it; the value

_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type,
    torch.dtype,
    torch.device,
    types.ModuleType,
)
_NOTHING: Any = object()
MANY = 64  # a container with more in it holds data


class Holdings:
    """Of one or several callables."""

    def __init__(self, functions: Iterable[Any]) -> None:
        functions = list(functions)
        self.modules: list[nn.Module] = [
            function for function in functions if isinstance(function, nn.Module)
        ]
        self.generators: list[torch.Generator] = []
        self.weights: list[Tensor] = []  # tensors that want gradients and are no module's
        self.references: list[Reference] = []
        self._roots = set(map(id, functions))
        self._seen: set[int] = set(self._roots)
        for function in functions:
            if not isinstance(function, nn.Module):
                self._search(function)
        for module in self.modules:  # grows while it is walked
            if module._modules:
                self.modules.extend(
                    [child for child in module._modules.values() if child is not None]
                )
            if is_users(module):
                for name, value in module.__dict__.items():
                    if name[0] != "_" and (
                        isinstance(value, (Tensor, torch.Generator, *_CONTAINERS))
                        or callable(value)
                    ):
                        self._follow(module.__dict__, name, value)

    def is_current(self) -> bool:
        return all(_at(place, key) is value for place, key, value in self.references)

    def _search(self, value: Any) -> None:
        for place, key, inner in _references(value):
            self._follow(place, key, inner)

    def _follow(self, place: Any, key: Any, value: Any) -> None:
        """Note what was found, or look into it; and where it was, if that led to anything."""
        before = self._count()
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            if not self._is_parent(value):
                self.modules.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                self.weights.append(value)
        elif callable(value) or (isinstance(value, _CONTAINERS) and len(value) <= MANY):
            self._search(value)
        else:  # some object that it uses: what of it, nobody knows
            self.generators += [
                inner for inner in _attributes(value).values() if isinstance(inner, torch.Generator)
            ]
        if self._count() != before:
            self.references.append((place, key, value))

    def _count(self) -> int:
        return len(self.modules) + len(self.generators) + len(self.weights) + len(self.references)

    def _is_parent(self, module: nn.Module) -> bool:
        """Whether the functions are part of it: modules refer to their parents through lists, and
        scripts to the whole model.
        """
        parts = (
            inner for part in module.modules() for inner in (part, *_attributes(part).values())
        )
        return any(id(inner) in self._roots for inner in parts)


def is_users(module: nn.Module) -> bool:
    """Whether its class is a user's own: torch's hold no surprises."""
    return module.__class__.__module__[:8] != "torch.nn"


def _references(value: Any) -> Iterator[Reference]:
    """What a callable, or a container of what it refers to, refers to itself."""
    if isinstance(value, dict):
        yield from ((value, key, inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((value, i, inner) for i, inner in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (((inner,), 0, inner) for inner in value)
    elif isinstance(value, functools.partial):
        yield from (
            ((inner,), 0, inner) for inner in (value.func, *value.args, *value.keywords.values())
        )
    elif isinstance(value, types.MethodType):
        yield from (((inner,), 0, inner) for inner in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        if (value.__module__ or "").split(".")[0] == "torch":
            return
        yield from (
            (value.__defaults__, i, inner) for i, inner in enumerate(value.__defaults__ or ())
        )
        yield from (
            (value.__kwdefaults__, key, inner)
            for key, inner in (value.__kwdefaults__ or {}).items()
        )
        for cell in value.__closure__ or ():
            if cell != _EMPTY:
                yield cell, None, cell.cell_contents
        for name in globals_of(value.__code__):
            if name in value.__globals__:
                yield value.__globals__, name, value.__globals__[name]
        yield from ((value.__dict__, key, inner) for key, inner in value.__dict__.items())
    else:  # an object that can be called
        yield from ((value.__dict__, key, inner) for key, inner in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    return tuple(
        {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    )


def _at(place: Any, key: Any) -> Any:
    if isinstance(place, types.CellType):
        return _NOTHING if place == _EMPTY else place.cell_contents
    if isinstance(place, dict):
        return place.get(key, _NOTHING)
    return place[key] if place is not None and key < len(place) else _NOTHING


_EMPTY = types.CellType()
