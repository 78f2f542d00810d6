"""What a function holds: the modules, generators and weights that it runs with.

A module has its children registered. But a function may also be a lambda over a module, a partial
over a weight, a method, an object with a generator in a list, or a function that uses a global. All
of that must be replayed, or at least checked. It is searched for wherever a function can refer to
something (`crawl.py`), and in the attributes of the user's own modules.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.checking.crawl import (
    CALLABLE_TYPES,
    CONTAINER_TYPES,
    PLAIN_TYPES,
    Reference,
    references_in,
)

MAX_ITEMS = 64  # a longer container holds data


class Holdings:
    """What one or several callables hold."""

    def __init__(self, functions: Iterable[Any]) -> None:
        functions = list(functions)
        self.modules = [function for function in functions if isinstance(function, nn.Module)]
        self.generators: list[torch.Generator] = []
        self.weights: list[Tensor] = []  # tensors that require grad and belong to no module
        self.references: list[Reference] = []  # that led to any of these
        self._functions = set(map(id, functions))
        self._seen = set(self._functions)
        for function in functions:
            if not isinstance(function, nn.Module):
                self._search(function)
        for module in self.modules:  # grows while it is searched
            self._search_module(module)

    def is_current(self) -> bool:
        """Whether everything is still where it was found. Asked in every call."""
        return all(reference.is_current() for reference in self.references)

    def _search_module(self, module: nn.Module) -> None:
        self.modules.extend(child for child in module._modules.values() if child is not None)
        if not is_user_module(module):
            return
        attributes = module.__dict__
        for name, value in attributes.items():
            if name[0] != "_" and (isinstance(value, _SEARCHED_TYPES) or callable(value)):
                self._follow(Reference("", attributes, name, value))

    def _search(self, value: Any) -> None:
        if isinstance(value, (CALLABLE_TYPES, CONTAINER_TYPES)):
            if not _is_of_torch(value):
                for reference in references_in("", value):
                    self._follow(reference)
            return
        attributes = _attributes(value)  # of an object that can be called
        for name, inner in attributes.items():
            self._follow(Reference("", attributes, name, inner))

    def _follow(self, reference: Reference) -> None:
        """Note the value, or search it. Remember the reference if that led to anything."""
        value = reference.value
        if isinstance(value, _IGNORED_TYPES) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        before = self._count()
        if isinstance(value, nn.Module):
            if not self._is_parent(value):
                self.modules.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                self.weights.append(value)
        else:
            self._follow_object(value)
        if self._count() != before:
            self.references.append(reference)

    def _follow_object(self, value: Any) -> None:
        is_small = isinstance(value, CONTAINER_TYPES) and len(value) <= MAX_ITEMS
        if is_small or callable(value):
            self._search(value)
            return
        # Opaque object: only its generators are replayed.
        inside = _attributes(value).values()
        self.generators += [inner for inner in inside if isinstance(inner, torch.Generator)]

    def _count(self) -> int:
        return len(self.modules) + len(self.generators) + len(self.weights) + len(self.references)

    def _is_parent(self, module: nn.Module) -> bool:
        """Whether the functions are part of a module: modules refer to their parents in lists."""
        for part in module.modules():
            inside = (part, *_attributes(part).values())
            if any(id(inner) in self._functions for inner in inside):
                return True
        return False


_IGNORED_TYPES = (*PLAIN_TYPES, type, types.ModuleType)
_SEARCHED_TYPES = (Tensor, torch.Generator, *CONTAINER_TYPES)


def is_user_module(module: nn.Module) -> bool:
    """Whether the class of a module is not one of torch's, which hold no hidden state."""
    return module.__class__.__module__[:8] != "torch.nn"


def _is_of_torch(value: Any) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return (value.__module__ or "").split(".")[0] == "torch"


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})
