"""Measuring a call for its memory mode, and remembering what was measured.

A mode that plans from measured numbers (`Budget`) needs a profile of the call. The first call for
each structure and shape is measured and keeps nothing. Later calls find the profile in the cache of
the stack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core.guard import Guard
from retrograd.core.memory import Call, MemoryMode, Plan, plan_of
from retrograd.core.private import PassiveMode, surrounding_hooks
from retrograd.core.program import Application, Program
from retrograd.core.streams import State, flatten
from retrograd.core.structure import StackCache
from retrograd.profile import OperationRecorder, Profile

REMEMBERED = 64  # how many profiles a stack remembers


class Profiling(Guard):
    """Fills a profile while a pass runs."""

    def __init__(self, profile: Profile, cache: StackCache) -> None:
        self.profile = profile
        self.cache = weakref.proxy(cache)

    def _parameters(self, update: Application) -> list[Tensor]:
        assert self.cache.structure is not None
        return self.cache.structure.functions[update.index].parameters

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        if self.profile.is_complete:  # this is the recompute
            with PassiveMode():
                return run()
        with OperationRecorder(update.saved, self._parameters(update)) as recorder:
            returned = run()
        measured = self.profile.updates[update.index]
        measured.forward_bytes = recorder.peak
        measured.operations = recorder.finish()
        return returned

    def after_update(self, update: Application) -> None:
        self.profile.updates[update.index].add_saved(
            saved=update.saved,
            saved_by_fn=update.saved_by_function,
            outputs=[tensor for outputs in update.output for tensor in outputs],
            parameters=self._parameters(update),
            streams=update.inputs,
        )

    def after_forward(self, state: State) -> None:
        self.profile.state_bytes = sum(leaf.nbytes for ts in state.values() for leaf in ts)
        self.profile.is_complete = True


class RaiseNow(Guard):
    """Makes the plan as soon as a call is measured, so that a limit too small raises at once."""

    def __init__(self, memory: MemoryMode, call: Call) -> None:
        self.memory = memory
        self.planned = call

    def after_forward(self, state: State) -> None:
        plan_of(self.memory, self.planned)


def plan_call(
    stack: nn.Module,
    cache: StackCache,
    memory: MemoryMode,
    program: Program,
    streams: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> tuple[Plan, list[Guard]]:
    """The plan of a call, and the guards that measure it."""
    targets = [step.target for step in program]
    if not getattr(memory, "needs_profile", False):
        return plan_of(memory, Call(targets)), []
    # Hooks around the stack (checkpoint, an outer stack) run this forward again, and must find the
    # same graph then. Lazy modules have no shapes yet.
    if surrounding_hooks() is not None or any(map(is_lazy, stack.parameters())):
        return plan_of(memory, Call(targets)), []
    parameters = _parameters(stack, cache, program)
    accumulates = any(p.grad is not None for p in parameters if p.is_leaf)
    key = _call_key(stack, program, parameters, streams, keywords)
    profile = cache.profiles.get(key)
    if profile is not None and profile.is_complete:
        return plan_of(memory, Call(targets, profile, accumulates)), []
    while len(cache.profiles) >= REMEMBERED:
        oldest = next(iter(cache.profiles))
        del cache.profiles[oldest]
    cache.profiles[key] = profile = Profile(len(program))
    later = Call(targets, profile, accumulates)
    return Plan(len(program)), [Profiling(profile, cache), RaiseNow(memory, later)]


def _parameters(stack: nn.Module, cache: StackCache, program: Program) -> list[Tensor]:
    """The parameters of the stack. Those of the last call, if it ran the same functions, because
    collecting them takes time.
    """
    structure = cache.structure
    if structure is not None:
        last = [id(functions[0]) for functions in structure.key]
        if last == [id(step.fn) for step in program]:
            return structure.parameters
    return list(stack.parameters())


def _call_key(
    stack: nn.Module, program: Program, parameters: Sequence[Tensor], streams: Any, keywords: Any
) -> tuple[Any, ...]:
    """Two calls with the same key need the same bytes and the same time."""
    functions = [(step.target, id(step.fn)) for step in program]
    trained = sum(parameter.requires_grad for parameter in parameters)
    return (
        stack.training,
        len(parameters),
        trained,
        *functions,
        _signature(streams),
        _signature(keywords),
    )


def _signature(value: Any) -> tuple[Any, ...]:
    """The shapes, dtypes and requires_grad of all tensors, the values of other arguments, and the
    state of autocast.
    """
    leaves = flatten(value)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors} | {"cpu"}
    autocast = [_autocast_dtype(device) for device in sorted(devices - {"meta"})]
    other = [
        leaf if isinstance(leaf, (int, float, str, bool, type(None))) else None for leaf in leaves
    ]
    shapes = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
    return (*autocast, *other, *shapes)


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
