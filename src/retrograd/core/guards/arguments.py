"""Objects in keyword arguments: a function that runs again must leave them as they are.

Tensors in keyword arguments are saved, and containers are made anew for each recompute. Any other
object (a cache of keys and values) is the caller's own. A function that appends to it in forward
and again in recompute would leave it in a state that plain autograd does not have.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.program import Output, Program, place
from retrograd.core.saved import PLAIN_TYPES, SavedAgain
from retrograd.core.streams import State

MAX_DEPTH = 6
# Taken care of elsewhere, or without contents that a function changes.
OTHER = (nn.Module, torch.Generator, type, types.ModuleType, types.FunctionType, types.MethodType)


class ArgumentObjects(Guard):
    def __init__(
        self,
        objects: Sequence[Any],
        program: Program,
    ) -> None:
        self.objects = objects
        self.program = program
        self.before: list[list[Any]] = []  # of each object, what it consists of

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        if self.program[index].keywords:
            undo.add(self.before.clear)
            self.before.extend(map(parts_of, self.objects))

    def after_recompute(
        self,
        index: int,
        saved: list[SavedAgain],
        output: Output | None,
        state: State,
    ) -> None:
        for value, before in zip(self.objects, self.before):
            now = parts_of(value)
            if not are_same(now, before):
                where = place(self.program, index)
                raise errors.changed_argument(where, type(value).__name__)


def are_opaque(objects: Sequence[Any]) -> bool:
    """Whether any of these has contents that a function may change."""
    return not all(isinstance(value, (*PLAIN_TYPES, *OTHER)) for value in objects)


def are_same(first: list[Any], second: list[Any]) -> bool:
    """Whether these are the same objects, or equal numbers and names."""
    return len(first) == len(second) and all(map(is_same, first, second))


def is_same(first: Any, second: Any) -> bool:
    return first is second or (isinstance(first, (int, float, str)) and first == second)


def parts_of(value: Any, depth: int = 0) -> list[Any]:
    """Everything that an object consists of; the version of each tensor, too."""
    parts = [value]
    if isinstance(value, (*PLAIN_TYPES, *OTHER)) or depth == MAX_DEPTH:
        return parts
    if isinstance(value, Tensor):
        return [value, None if value.is_inference() else value._version]
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, deque, Set)):
        inner = value
    elif isinstance(getattr(value, "__dict__", None), dict):
        inner = (vars(value),)
    for part in inner:
        parts += parts_of(part, depth + 1)
    return parts
