"""One budget for all stacks of a model.

Backward goes through the last stack first. What earlier stacks keep, their last streams included,
is alive until it gets to them. So the calls of one forward of the model are planned together, as
one list of updates: a `JointProfile`.

Which calls belong together is known from the forward before: hooks on the model say where one
begins and ends. The first forward for each shape of input keeps nothing and is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from retrograd.budget import Budget, BudgetError
from retrograd.core.host_memory import HostMemory
from retrograd.core.memory import Call, MemoryMode, Plan, Reverse
from retrograd.planner import best_plans, kept_bytes
from retrograd.profile import PLANS, Place, Profile
from retrograd.recent import Recent

FORWARDS = 32  # how many are remembered: one for each combination of shapes

Calls = tuple[Profile, ...]  # of the stacks in one forward of the model, in order


def share_memory(model: nn.Module, stacks: Mapping[str, HasMemory], memory: MemoryMode) -> None:
    """Give the stacks of a model, by path and in the order of the model, one memory mode.

    A budget is one for all of them. Where a mode keeps the last block, only the last stack does:
    those before it would hold theirs while backward is at later stacks.
    """
    shared = SharedBudget(memory) if isinstance(memory, Budget) else None
    modes = modes_of(list(stacks), shared or memory)
    before = [(stack, stack.memory) for stack in stacks.values()]
    try:
        for stack, mode in zip(stacks.values(), modes):
            stack.memory = mode
    except Exception:
        for stack, mode in before:
            stack.memory = mode
        raise
    for _, mode in before:
        release(mode)
    if shared is not None:
        shared.install(model)


def modes_of(paths: Sequence[str], memory: MemoryMode) -> list[MemoryMode]:
    """The mode of each stack. A budget plans outer stacks; those inside of them are rebuilt."""
    outer = [path for path in paths if not any(is_inside(path, other) for other in paths)]
    inner = Reverse(keep_last=False) if isinstance(memory, SharedBudget) else memory
    modes = [memory if path in outer else inner for path in paths]
    return [
        mode if path == outer[-1] else without_last_block(mode) for path, mode in zip(paths, modes)
    ]


def is_inside(path: str, other: str) -> bool:
    """Whether a path leads to a part of what is at the other one."""
    return path != other and (not other or path.startswith(f"{other}."))


def without_last_block(memory: MemoryMode) -> MemoryMode:
    """The same mode, which keeps no block because it is the last one."""
    if dataclasses.is_dataclass(memory) and getattr(memory, "keep_last", False):
        return dataclasses.replace(memory, keep_last=False)  # type: ignore[type-var]
    return memory


def release(memory: MemoryMode | None) -> None:
    """Take the hooks of a shared budget off its model."""
    if isinstance(memory, SharedBudget):
        memory.remove()


class HasMemory(Protocol):
    """A stack, or what builds one."""

    memory: Any


class PlansAfter(NamedTuple):
    """Plans of calls, of which the first were given."""

    given: Sequence[Plan]  # held, because they are found by identity
    plans: list[Plan]


class JointProfile(Profile):
    """The calls of several stacks, one after the other, as one list of updates."""

    def __init__(self, calls: Sequence[Profile]) -> None:
        targets = [f"{i} {target}" for i, call in enumerate(calls) for target in call.targets]
        super().__init__(targets)
        self.devices = list(dict.fromkeys(device for call in calls for device in call.devices))
        self.calls = list(calls)
        self.updates = [update for call in calls for update in call.updates]
        self.is_complete = True
        self.after: Recent[tuple[int, ...], PlansAfter] = Recent(PLANS)

    @property
    def lengths(self) -> list[int]:
        return [len(call.updates) for call in self.calls]

    @property
    def measurements(self) -> int:
        return sum(call.is_measured for call in self.calls)

    def places(self) -> list[Place]:
        held = [0, *itertools.accumulate(call.state_bytes for call in self.calls)]
        return [
            place._replace(others=others)
            for call, others in zip(self.calls, held)
            for place in call.places()
        ]

    def plans_after(self, given: Sequence[Plan], budget: Budget, fresh: bool) -> list[Plan]:
        """The plan of each call under a budget, where the first ones follow these plans."""
        plans = self.plans(budget, fresh)
        if all(map(operator.is_, given, plans)):
            return plans
        key = (*map(id, given), fresh, self.measurements)
        found = self.after.find(key) or self.after.add(key, self._made_after(given, budget, fresh))
        return found.plans

    def _made_after(self, given: Sequence[Plan], budget: Budget, fresh: bool) -> PlansAfter:
        limit = budget.bytes_of(self.plain(fresh))
        plans, _ = best_plans(self, self.needs(fresh), limit, given, budget.host_bytes)
        nothing = [Plan(keep_from=length) for length in self.lengths[len(given) :]]
        return PlansAfter(given, [*given, *nothing] if plans is None else plans)


class SharedBudget:
    """The memory mode of several stacks that share a budget. `rg.set_memory` makes it."""

    needs_profile = True

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.host_memory = HostMemory(budget.host_bytes)
        self.handles: list[Any] = []  # of the hooks on the model
        self.forwards: Recent[Calls, JointProfile] = Recent(FORWARDS)
        self.under_way: dict[int, Forward] = {}  # by thread

    def __repr__(self) -> str:
        return repr(self.budget)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, measures anew."""
        return {**self.__dict__, "forwards": Recent(FORWARDS), "under_way": {}}

    # --- where a forward of the model begins and ends

    def install(self, model: nn.Module) -> None:
        self.handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, model: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            accumulates = any(p.grad is not None for p in model.parameters())
            self.under_way[threading.get_ident()] = Forward(True, accumulates)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._finish()

    def _finish(self) -> None:
        """Remember which calls a forward has. Raises now if the budget is too small for them."""
        forward = self.under_way.pop(threading.get_ident(), None)
        if forward is not None and forward.calls:
            calls = tuple(forward.calls)
            joint = self.forwards.find(calls) or self.forwards.add(calls, JointProfile(calls))
            joint.plans(self.budget, not forward.accumulates)

    # --- the plan of a call

    def plan(self, call: Call) -> Plan:
        nothing = Plan(keep_from=len(call.targets))
        if call.profile is None:
            return nothing
        forward = self._forward(call)
        forward.calls.append(call.profile)
        plan = self._least(forward) or nothing
        forward.plans.append(plan)
        return plan

    def _least(self, forward: Forward) -> Plan | None:
        """The plan of the newest call. Of the forwards that began like this one, the one that
        leaves it least counts: it is not known yet which of them this is.
        """
        number = len(forward.plans)
        found = []
        error: BudgetError | None = None
        for joint in self._expected(forward.calls):
            try:
                plans = joint.plans_after(forward.plans, self.budget, not forward.accumulates)
                found.append(plans[number])
            except BudgetError as too_small:
                error = too_small
        if error is not None and not found:
            raise error
        profile = forward.calls[number]
        return min(found, key=lambda plan: kept_bytes(plan, profile), default=None)

    def _forward(self, call: Call) -> Forward:
        """The forward that a call belongs to. Without hooks, one ends where a call comes again."""
        thread = threading.get_ident()
        forward = self.under_way.get(thread)
        if forward is not None and not forward.is_hooked and call.profile in forward.calls:
            self._finish()
            forward = None
        if forward is None:
            forward = self.under_way[thread] = Forward(False, call.accumulates)
        return forward

    def _expected(self, begun: list[Profile]) -> list[JointProfile]:
        """The forwards that began with these calls."""
        known = self.forwards.items()
        return [joint for calls, joint in known if list(calls[: len(begun)]) == begun]

    def plans_of(self, calls: Sequence[Profile]) -> list[Plan]:
        """The plans of calls of which nothing else is remembered."""
        return JointProfile(calls).plans(self.budget, True)


class Forward:
    """A forward of the model that is under way."""

    def __init__(self, is_hooked: bool, accumulates: bool) -> None:
        self.is_hooked = is_hooked  # its end will be told
        self.accumulates = accumulates  # parameters have gradients already
        self.calls: list[Profile] = []
        self.plans: list[Plan] = []  # of these calls
