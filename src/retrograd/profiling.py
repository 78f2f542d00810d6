"""Measuring a call for its memory mode, and remembering what was measured.

A mode that plans from measured numbers (`Budget`) needs a profile of the call. The first call for
each structure and shape is measured and keeps nothing. Later calls find the profile in the cache of
the stack.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.backward_watch import BackwardWatch
from retrograd.core.errors import RetrogradError
from retrograd.core.guard import Guard
from retrograd.core.guards.autocast import autocast_state
from retrograd.core.memory import Call, MemoryMode, Plan, plan_of
from retrograd.core.private import PassiveMode, run_in_mode, surrounding_hooks
from retrograd.core.program import Application, Program
from retrograd.core.streams import State, flatten, tensors_in
from retrograd.core.structure import StackCache, Structure
from retrograd.core.tape import functions_of, number_of_processes
from retrograd.core.tensors import distinct_bytes, nbytes, shapes_of
from retrograd.profile import OperationRecorder, Profile
from retrograd.recent import Recent

log = logging.getLogger("retrograd")
MAX_INTEGERS = 8
REMEMBERED = 512  # how many profiles a stack remembers


class Profiling(Guard):
    """Fills a profile while a pass runs."""

    def __init__(self, profile: Profile, cache: StackCache) -> None:
        self.profile = profile
        self.cache = weakref.proxy(cache)
        self.measured = 0  # updates
        self.is_over = False
        self.backward: BackwardWatch | None = None
        if number_of_processes() == 1:  # every process must come to the same plan
            self.backward = BackwardWatch(profile.add_backward)

    def _parameters(self, update: Application) -> list[Tensor]:
        assert self.cache.structure is not None
        return self.cache.structure.functions[update.index].parameters

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        if self.is_over:  # this is the recompute
            return run_in_mode(PassiveMode(), run)
        recorder = OperationRecorder(update.saved, self._parameters(update))
        returned = run_in_mode(recorder, run)
        measured = self.profile.updates[update.index]
        measured.forward_bytes = recorder.peak
        measured.operations = recorder.finish()
        return returned

    def after_update(self, update: Application) -> None:
        self.measured += 1
        measured = self.profile.updates[update.index]
        measured.shapes = shapes_of(update.saved)
        if update.step.target_from == "kept":
            measured.target_bytes = sum(map(nbytes, update.target))
        measured.pinned_bytes = distinct_bytes(update.pinned)
        measured.add_saved(
            saved=update.saved,
            saved_by_fn=update.saved_by_function,
            outputs=[tensor for outputs in update.output for tensor in outputs],
            parameters=self._parameters(update),
            streams=update.inputs,
        )
        if self.backward is not None:
            if measured.target_bytes is not None:
                self.backward.add(update.target)
            outputs = [*tensors_in(update.aux), *(out for outs in update.output for out in outs)]
            given = [*update.inputs, *tensors_in(update.arguments)]
            self.backward.follow(
                update.index, [*update.result, *outputs], given, self._parameters(update)
            )

    def after_forward(self, state: State) -> None:
        """The pass is over. One that left out updates shows nothing of them."""
        self.is_over = True
        leaves = [leaf for leaves in state.values() for leaf in leaves]
        if self.measured == len(self.profile.updates):
            self.profile.complete(sum(leaf.nbytes for leaf in leaves))
            log.info("measured a call of %d updates, to plan calls of its shapes", self.measured)
        if self.backward is not None:
            self.backward.add(leaves)

    def add_output(self, output: Any) -> None:
        """What the call returns: callers may hold it while backward runs."""
        if self.backward is not None:
            self.backward.add(tensors_in(output))


class RaiseNow(Guard):
    """Makes the plan as soon as a call is measured, so that a limit too small raises at once."""

    def __init__(self, memory: MemoryMode, call: Call) -> None:
        self.memory = memory
        self.planned = call

    def after_forward(self, state: State) -> None:
        profile = self.planned.profile
        if not profile.is_complete:
            return
        try:
            plan_of(self.memory, self.planned)
        except RetrogradError:
            profile.is_outdated = True  # there will be no backward to measure
            raise


class StillFits(Guard):
    """Notices if an update saves other tensors than when its profile was made.

    That can happen only in calls with numbers that are not part of the key.
    """

    def __init__(self, profile: Profile, cache: StackCache) -> None:
        self.profile = profile
        self.cache = weakref.proxy(cache)

    def after_update(self, update: Application) -> None:
        if shapes_of(update.saved) != self.profile.updates[update.index].shapes:
            self.cache.numbers_matter = True


class LaterArguments(Guard):
    """Notices arguments of other shapes than when the profile was made.

    Where the model passes arguments to each function by itself, only those of the first function
    are part of the key. If others are new, the next call is measured again.
    """

    rebuilt_only = False

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        known = self.profile.updates[update.index].arguments
        signature = _signature(update.arguments)
        if not self.profile.is_complete:
            known.add(signature)
        elif signature not in known:
            self.profile.is_outdated = True
        return run()


def devices_of(streams: Any) -> list[torch.device]:
    """The devices of the tensors in some streams, each once."""
    return list(dict.fromkeys(tensor.device for tensor in tensors_in(streams)))


def _numbers_of_key(cache: StackCache, leaves: list[Any]) -> tuple[tuple[Any, ...], bool]:
    """Those numbers in keyword arguments that are part of the key, and whether these are all.

    A temperature or a step number has another value in each call and changes no shape. So real
    numbers are left out, and integers once they have had many values; unless that was seen to be
    wrong: see `StillFits`.
    """
    numbers = tuple(leaf for leaf in leaves if type(leaf) in (int, float, complex))
    integers = tuple(number for number in numbers if type(number) is int)
    cache.integers.add(integers)
    if cache.numbers_matter:
        return numbers, True
    if len(cache.integers) > MAX_INTEGERS:
        integers = ()
    return integers, integers == numbers


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
    # same graph then.
    if surrounding_hooks() is not None:
        return plan_of(memory, Call(targets)), []
    leaves = flatten(keywords)[0]
    structure = cache.structure_of(functions_of(program, leaves))
    if any(map(is_lazy, structure.lazy)):  # they have no shapes yet
        return plan_of(memory, Call(targets)), []
    if cache.profiled is not structure.usages or structure.attributes.will_be_inspected():
        cache.profiled = structure.usages
        cache.profiles = Recent(REMEMBERED)
    accumulates = any(p.grad is not None for p in structure.parameters if p.is_leaf)
    numbers, are_all = _numbers_of_key(cache, leaves)
    kinds = tuple([(step.target_from, getattr(step.coupling, "at", None)) for step in program])
    key = (kinds, *_call_key(structure, streams, keywords), *numbers)
    known = cache.profiles.find(key)
    takes_later = getattr(stack, "takes_arguments_later", False)
    if known is not None and known.is_complete and not known.is_outdated:
        guards: list[Guard] = [] if are_all else [StillFits(known, cache)]
        guards += [LaterArguments(known)] * takes_later
        return plan_of(memory, Call(targets, known, accumulates)), guards
    profile = cache.profiles.add(key, Profile(targets))
    profile.devices = devices_of(streams)
    profile.least = known
    later = Call(targets, profile, accumulates)
    measuring = [Profiling(profile, cache), RaiseNow(memory, later)]
    return Plan(len(program)), [*measuring, *[LaterArguments(profile)] * takes_later]


def _call_key(structure: Structure, streams: Any, keywords: Any) -> tuple[Any, ...]:
    """Two calls of the same structure with the same key need the same bytes and the same time."""
    training = bytes(map(_training, structure.modules))
    trained = bytes(map(_requires_grad, structure.parameters))
    return (training, trained, _signature(streams), _signature(keywords))


_training = operator.attrgetter("training")
_requires_grad = operator.attrgetter("requires_grad")


def _signature(value: Any) -> tuple[Any, ...]:
    """The shapes, dtypes and requires_grad of all tensors, the values of switches and names, and
    the state of autocast.
    """
    leaves = flatten(value)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors} | {"cpu"}
    autocast = [autocast_state(device) for device in sorted(devices)]
    other = [leaf if isinstance(leaf, (str, bool, type(None))) else type(leaf) for leaf in leaves]
    shapes = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
    return (*autocast, *other, *shapes)
