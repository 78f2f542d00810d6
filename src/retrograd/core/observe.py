"""Observing stacks: one way to see, or to steer, what every stack does.

An observer is active inside `with observer:`. Every pass of a stack asks all active observers, the
outermost first. Each may replace the memory mode of the stack and what it verifies, and add guards
or take some out: guards see everything that happens in a pass (`guard.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from retrograd.core.guard import Guard
from retrograd.core.memory import MemoryMode
from retrograd.core.program import Program
from retrograd.core.structure import VerifyCalls

if TYPE_CHECKING:
    from torch import nn

AnyObserver = TypeVar("AnyObserver", bound="Observer")


class Observer:
    """The base class: changes nothing. Override what you need."""

    def memory(
        self,
        stack: nn.Module,
        memory: MemoryMode,
    ) -> MemoryMode:
        """The memory mode for a call of `stack`, which would use `memory`."""
        return memory

    def verify(
        self,
        stack: nn.Module,
        verify: VerifyCalls,
    ) -> VerifyCalls:
        """When a call of `stack`, whose setting is `verify`, is verified."""
        return verify

    def guards(
        self,
        stack: nn.Module,
        program: Program,
        guards: list[Guard],
    ) -> list[Guard]:
        """The guards for a pass of `stack`, which would use `guards`. Runs once in a pass."""
        return guards

    def __enter__(self: AnyObserver) -> AnyObserver:
        observers.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        observers.remove(self)


observers: list[Observer] = []  # the active ones


def observed_memory(stack: nn.Module, memory: MemoryMode) -> MemoryMode:
    for observer in observers:
        memory = observer.memory(stack, memory)
    return memory


def observed_verify(stack: nn.Module, verify: VerifyCalls) -> VerifyCalls:
    for observer in observers:
        verify = observer.verify(stack, verify)
    return verify


def observed_guards(
    stack: nn.Module,
    program: Program,
    guards: list[Guard],
) -> list[Guard]:
    for observer in observers:
        guards = observer.guards(stack, program, guards)
    return guards
