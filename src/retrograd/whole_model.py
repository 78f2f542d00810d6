"""All stacks of a model: their memory mode, and what a step of the whole model keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from retrograd.budget import Budget
from retrograd.compat.installing import engines_of as installed_engines
from retrograd.compat.pairs import Engine
from retrograd.converting.conversion import ATTRIBUTE, Conversion
from retrograd.core.guard import Guard, Undo
from retrograd.core.memory import Call, MemoryMode, Plan, plan_of
from retrograd.core.private import without_compiler
from retrograd.core.program import Program
from retrograd.core.streams import flatten
from retrograd.core.structure import StackCache
from retrograd.core.tensors import local, storage_of
from retrograd.measure import Counting
from retrograd.profile import Profile
from retrograd.shared_budget import HasMemory, JointProfile, SharedBudget, is_inside, share_memory
from retrograd.stack import Stack, checked_memory
from retrograd.stepplan import StepPlan, forecast
from retrograd.trace import TakeBack

if TYPE_CHECKING:
    from retrograd.head import Head, HeadWatch

BATCHES = 3  # of a converted model, until its stacks and their grids are settled

Model = TypeVar("Model", bound=nn.Module)


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """All stacks of a model by their paths, those of converted layers included.

    Example:
        >>> model = torch.nn.Sequential(rg.Residual([torch.nn.Linear(8, 8) for _ in range(4)]))
        >>> list(rg.stacks_of(model))
        ['0']
    """
    found: dict[str, Stack] = {}
    for path, module in model.named_modules():
        if isinstance(module, Stack):
            found[path] = module
        conversion = vars(module).get(ATTRIBUTE)
        if isinstance(conversion, Conversion):
            found.update(conversion.stacks_by_path(path))
    return found


def set_memory(model: Model, memory: MemoryMode | str) -> Model:
    """Set the memory mode of every stack in a model, and return the model.

    A budget is one for all stacks together: `rg.set_memory(model, "2 GiB")`. A step is then one
    forward of `model`, and its backward. The limit counts what the stacks make, as `Budget` does.
    `Reverse` and `Anchor` keep the last block of the last stack only.

    Example:
        >>> stage = lambda: rg.Residual([torch.nn.Linear(8, 8) for _ in range(4)])
        >>> model = rg.set_memory(torch.nn.Sequential(stage(), stage()), "1 MiB")
        >>> model[1].memory
        Budget(limit='1 MiB')
    """
    memory = checked_memory(memory)
    stacks = memory_holders(model)
    if not stacks:
        raise ValueError(
            f"set_memory: {type(model).__name__} has no stack of retrograd. rg.convert(model) "
            "makes the layers of a model one."
        )
    share_memory(model, stacks, memory)
    return model


def memory_holders(model: nn.Module) -> Mapping[str, HasMemory]:
    """The stacks of a model, and what builds stacks in `retrograd.compat`, by path. Models of an
    installed package have the latter, too.
    """
    stacks: Mapping[str, HasMemory] = stacks_of(model)
    engines: dict[str, HasMemory] = {}
    for path, module in model.named_modules():
        engine = vars(module).get("engine")
        # The engines of blocks inside of a sequence do not run: the sequence has one for all.
        if isinstance(engine, Engine) and not any(is_inside(path, other) for other in engines):
            engines[path] = engine
    return {**stacks, **engines, **installed_engines(model)}


def plan(model: nn.Module | Callable[..., Any], /, *args: Any, **kwargs: Any) -> StepPlan:
    """What a step of the whole model keeps, in all of its stacks, and the bytes of a step then.

    Runs `model(*args, **kwargs)` once and measures it. Random states, buffers and whatever else the
    model was seen to change are left as they were. What runs after the last stack is measured, too,
    with its backward: `plan.head` says whether it sets the peak. Pass a function that returns the
    loss, and the loss is part of that.

    Example:
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(6)]
        >>> model = torch.nn.Sequential(rg.Residual(layers), torch.nn.Linear(8, 2))
        >>> [row.name for row in rg.plan(model, torch.randn(4, 8)).rows][:2]
        ['0.functions.0', '0.functions.1']
    """
    calls, head = measured_calls(model, args, kwargs)
    if not calls:
        raise ValueError(
            f"plan: no stack of retrograd ran in {type(model).__name__}. rg.convert(model) makes "
            "the layers of a model one."
        )
    return plan_in(None, calls, head)


def plan_in(
    memory: MemoryMode | None, calls: Sequence[StackCall], head: Head | None = None
) -> StepPlan:
    """What a step with these calls keeps. None: in the memory modes that the stacks have."""
    if memory is not None:
        shared = SharedBudget(memory) if isinstance(memory, Budget) else memory
        calls = [call._replace(memory=shared) for call in calls]
    modes = list({repr(call.memory): shown_mode(call.memory) for call in calls}.values())
    joint = JointProfile([call.profile for call in calls])
    names = [name for call in calls for name in call.names]
    shown = modes[0] if len(modes) == 1 else modes
    return forecast(shown, plans_of(calls), joint, names, fresh=True, head=head)


def shown_mode(memory: Any) -> Any:
    """The mode as users write it."""
    return memory.budget if isinstance(memory, SharedBudget) else memory


def plans_of(calls: Sequence[StackCall]) -> list[Plan]:
    """The plan of each call. Those with a shared budget are planned together."""
    shared: dict[int, list[StackCall]] = {}
    for call in calls:
        if isinstance(call.memory, SharedBudget):
            shared.setdefault(id(call.memory), []).append(call)
    together = {
        id(call): plan
        for members in shared.values()
        for call, plan in zip(members, members[0].memory.plans_of([c.profile for c in members]))
    }
    return [together.get(id(call)) or call.plan() for call in calls]


# --- measuring


class StackCall(NamedTuple):
    """A call of a stack that was measured."""

    names: list[str]  # of its updates
    memory: Any  # the mode that the stack has
    profile: Profile

    def plan(self) -> Plan:
        return plan_of(self.memory, Call(self.profile.targets, self.profile))


@without_compiler
def measured_calls(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[StackCall], Head | None]:
    """All calls of stacks in one forward of a model, which is left as it was; and its head."""
    from retrograd.head import HeadWatch  # only plans need it

    module = model if isinstance(model, nn.Module) else nn.Module()
    names = {storage_of(local(p)): name for name, p in module.named_parameters()}
    undo = Undo()
    take_back = TakeBack([model, *flatten((args, kwargs))[0]])
    remember_conversions(module, undo)
    watch = HeadWatch(names)
    recorder = CallRecorder(module, undo, watch)
    head = None
    try:
        for _ in range(BATCHES):
            before = settings_of(module)
            watch = HeadWatch(names)
            recorder = CallRecorder(module, undo, watch)
            with torch.enable_grad(), recorder, watch:
                output = take_back.watched(lambda: model(*args, **kwargs))
                head = take_back.watched(functools.partial(watch.finish, output))
                del output
            if settings_of(module) == before:
                break
    finally:
        take_back.run()
        undo.run()
    return recorder.stack_calls(), head


def settings_of(model: nn.Module) -> list[Any]:
    """What the first batches of a converted model change: which stacks it has, and their grids."""
    return [(id(stack), stack.precision) for stack in stacks_of(model).values()]


def remember_conversions(model: nn.Module, undo: Undo) -> None:
    """Register how to take back what the first batches of a converted model change."""
    for module in model.modules():
        conversion = vars(module).get(ATTRIBUTE)
        if not isinstance(conversion, Conversion):
            continue
        before = {name: value for name, value in vars(conversion).items() if name != "runs"}
        before["unchecked"] = conversion.unchecked.copy()
        undo.add(vars(conversion).update, before)
        for stack in conversion.stacks:
            names = ("precision", "chooses_grid")
            undo.add(vars(stack).update, {name: vars(stack)[name] for name in names})


class CallRecorder(Counting):
    """Measures every call of a stack, with nothing kept."""

    def __init__(self, module: nn.Module, undo: Undo, head: HeadWatch) -> None:
        super().__init__(module)
        self.head = head
        self.undo = undo  # puts the caches of all stacks back
        self.own: dict[int, tuple[nn.Module, Any]] = {}  # each stack, and its memory mode
        self.found_names: dict[int, list[str]] = {}
        self.calls: list[tuple[int, Profile]] = []  # which stack, and what it needs

    def memory(self, stack: nn.Module, memory: MemoryMode) -> MemoryMode:
        if not self.is_mine(stack):
            return memory
        assert isinstance(stack, Stack)
        if id(stack) not in self.own:
            self.own[id(stack)] = stack, memory
            self.undo.add(setattr, stack, "_cache", stack._cache)
            stack._cache = StackCache()
        return Recording(self, id(stack))

    def guards(self, stack: nn.Module, program: Program, guards: list[Guard]) -> list[Guard]:
        if self.is_mine(stack):
            self.found_names[id(stack)] = self.names(stack, program)
            return [*guards, self.head.guard()]
        return guards

    def stack_calls(self) -> list[StackCall]:
        return [
            StackCall(self.found_names[i], self.own[i][1], profile) for i, profile in self.calls
        ]


class Recording:
    """A memory mode that keeps nothing and remembers what a call needs."""

    needs_profile = True

    def __init__(self, recorder: CallRecorder, stack: int) -> None:
        self.recorder = recorder
        self.stack = stack

    def plan(self, call: Call) -> Plan:
        if call.profile is not None:
            self.recorder.calls.append((self.stack, call.profile))
        return Plan(keep_from=len(call.targets))
