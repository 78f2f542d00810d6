"""Modules: functions run again with the flags and members that their modules had in forward.

Members are parameters and submodules. `functional_call` and adapters replace them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.structure import (
    FunctionState,
    Members,
    Structure,
)
from retrograd.core.tensors import requires_grad_of

MISSING: Any = object()

_training = operator.attrgetter("training")


class Found(NamedTuple):
    """A module as it was when a function first called it."""

    module: nn.Module
    training: bool
    members: Members
    requires_grad: Sequence[tuple[Tensor, bool]]


class ModuleState(Guard):
    """`training` of each module, its members, and `requires_grad` of each parameter."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        # Taken in two loops over everything: the same work between updates costs several times it.
        self.training = list(map(_training, structure.modules))
        self.requires_grad = list(map(requires_grad_of, structure.parameters))
        self.found: list[Found] = []  # modules that were seen in this call for the first time

    def found_module(self, module: nn.Module) -> None:
        """A function that runs is about to call this module, for the first time."""
        flags = [(p, p.requires_grad) for p in module.parameters(recurse=False)]
        self.found.append(Found(module, module.training, Members(module), flags))

    def before_backward(self) -> bool:
        structure = self.structure
        return (
            list(map(_training, structure.modules)) != self.training
            or list(map(requires_grad_of, structure.parameters)) != self.requires_grad
            or not structure.is_current()
            or bool(self.found)
        )

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        function = self.structure.functions[index]
        self._restore_training(function, undo)
        for members in function.members:
            _restore_members(members, undo)
        self._restore_requires_grad(function, undo)
        for found in self.found:
            _set_training(found.module, found.training, undo)
            _restore_members(found.members, undo)
            for parameter, flag in found.requires_grad:
                _set_requires_grad(parameter, flag, undo)

    def _restore_training(
        self,
        function: FunctionState,
        undo: Undo,
    ) -> None:
        first = function.first_module
        flags = self.training[first : first + len(function.modules)]
        for module, flag in zip(function.modules, flags):
            _set_training(module, flag, undo)

    def _restore_requires_grad(
        self,
        function: FunctionState,
        undo: Undo,
    ) -> None:
        first = function.first_parameter
        flags = self.requires_grad[first : first + len(function.parameters)]
        for parameter, flag in zip(function.parameters, flags):
            _set_requires_grad(parameter, flag, undo)


def _set_training(
    module: nn.Module,
    flag: bool,
    undo: Undo,
) -> None:
    if module.training != flag:
        undo.add(setattr, module, "training", module.training)
        module.training = flag


def _set_requires_grad(
    parameter: Tensor,
    flag: bool,
    undo: Undo,
) -> None:
    if parameter.requires_grad != flag and parameter.is_leaf:
        undo.add(parameter.requires_grad_, not flag)
        parameter.requires_grad_(flag)


def _restore_members(members: Members, undo: Undo) -> None:
    """Put parameters and submodules back, by name."""
    for name, value in members.values.items():
        slot = members.submodules if isinstance(value, nn.Module) else members.parameters
        now = slot.get(name, MISSING)
        if now is MISSING and isinstance(value, Tensor):
            raise errors.lost_parameter(name)
        if now is not value and _may_swap(value, now):
            undo.add(put_member, slot, name, now)
            slot[name] = value


def _may_swap(value: Any, now: Any) -> bool:
    """FSDP swaps sharded and unsharded parameters and has the right ones in place already."""
    if isinstance(value, nn.Module):
        return True
    return {type(value), type(now)} <= {Tensor, nn.Parameter}


def put_member(
    slot: dict[str, Any],
    name: str,
    value: Any,
) -> None:
    """Set an entry of a module's dict, or remove it if it was missing."""
    if value is MISSING:
        slot.pop(name, None)
    else:
        slot[name] = value
