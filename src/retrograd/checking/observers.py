"""How the stacks run during a step: the one file of `checking` that talks to the engine.

An observer (`core.observe`) chooses the memory mode of each stack. Its guards see each call of a
function, and the streams before each update, in forward and in backward. So the network runs as it
is written: nothing is wrapped or replaced.

- `KeepAll`: plain autograd.
- `ReverseAll`: as the stacks are configured.
- `DriftCheck`: every update rebuilt, every rebuilt stream compared with forward.
- `PerUpdateCheck`: the same, but recompute gets the streams that forward saw.
- `MaskCheck`: every update rebuilt, the masks of every function compared with forward.
- `SkipCheck`: plain autograd, and each function is searched for a skip of its own.
- `StackBytes`: plain autograd, and the bytes that the stacks leave for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrograd.checking.compare import Deviation, is_real_valued, largest, largest_difference
from retrograd.checking.functions import FunctionRecord, WatchedFunction
from retrograd.checking.holdings import Holdings
from retrograd.checking.masks import NO_FLIPS, Flips, Mask, Masks, flips_between
from retrograd.checking.report import Stack
from retrograd.checking.runs import Network
from retrograd.checking.skips import contains_skip
from retrograd.core.exact import Grid, Precision
from retrograd.core.guard import Guard
from retrograd.core.guards.drift import Drift
from retrograd.core.guards.modules import ModuleState
from retrograd.core.memory import Keep, MemoryMode, Reverse
from retrograd.core.private import run_in_mode
from retrograd.core.program import Application, Program
from retrograd.core.streams import State
from retrograd.core.structure import StackCache, Structure, VerifyCalls
from retrograd.core.updates import Coupling
from retrograd.core.walk import is_recomputing
from retrograd.measure import Counting
from retrograd.stack import Stack as StackModule

StackDeviations = dict[tuple[str, int], dict[str, Deviation]]  # [stack, update][stream]


class StackRun(NamedTuple):
    """A stack that ran."""

    name: str
    module: StackModule
    update_names: list[str]  # in the network
    couplings: list[Coupling]  # of the updates

    @property
    def depth(self) -> int:
        """The number of blocks."""
        module: Any = self.module
        return len(module) if hasattr(module, "__len__") else -(-len(self.couplings) // 2)

    @property
    def is_exact(self) -> bool:
        return self.module.precision.grid is not None

    def describe(self) -> Stack:
        """The stack in words, for the report."""
        module = self.module
        mode = _reversing(module.memory)
        memory = f"memory={mode!r}"
        if mode is not module.memory:
            memory += f" (the stack's own is {module.memory!r})"
        names = [type(coupling).__name__ for coupling in self.couplings]
        parts = sorted({name.replace("OnGrid", "Additive") for name in names})
        if hasattr(module, "streams"):
            parts.insert(0, repr(module.streams))
        precision = str(module.precision).replace(repr(Grid()), "True")
        streams = ", ".join(parts) + precision
        return Stack(self.name, type(module).__name__, len(self.couplings), memory, streams)


class StackRegistry:
    """All stacks of a network that ran, in any step."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.by_name: dict[str, StackRun] = {}
        self.pieces: set[int] = set()  # ids of `rg.Chunked` that ran
        self._caches: dict[int, StackCache] = {}  # by the stack's id
        self._precisions: dict[int, Precision] = {}  # by the stack's id

    def add(self, name: str, stack: StackModule, program: Program, update_names: list[str]) -> None:
        """A pass of a stack begins. Some stacks are built anew for each call."""
        if name in self.by_name and self.by_name[name].module is stack:
            return
        couplings = [step.coupling for step in program]
        self.by_name[name] = StackRun(name, stack, update_names, couplings)
        for step, update_name in zip(program, update_names):
            for weight_name, weight in _weights_used(step.fn):
                self.network.compare_gradient(f"{update_name}: {weight_name}", weight)

    def have_changed(self) -> bool:
        """Whether a stack has another precision than when this was asked last, or at first."""
        before = self._precisions.copy()
        for run in self.by_name.values():
            self._precisions[id(run.module)] = run.module.precision
        return any(self._precisions[key] is not precision for key, precision in before.items())

    def use_own_cache(self, stack: StackModule) -> None:
        """Give the stack a cache for the duration of the check, so that it remembers nothing."""
        if id(stack) not in self._caches:
            self._precisions[id(stack)] = stack.precision
            self._caches[id(stack)] = StackCache()
            for name in ("_cache", "precision", "chooses_grid"):
                if name in vars(stack):
                    put_back = functools.partial(setattr, stack, name, vars(stack)[name])
                    self.network.on_release(put_back)
        stack._cache = self._caches[id(stack)]


class Observer(Counting):
    """Runs the network's stacks in memory modes of its choice, and counts calls of functions."""

    def __init__(self, registry: StackRegistry) -> None:
        super().__init__(registry.network.module)
        self.registry = registry

    def memory(self, stack: nn.Module, memory: MemoryMode) -> MemoryMode:
        if not self.is_mine(stack):
            return memory
        if isinstance(stack, StackModule):
            self.registry.use_own_cache(stack)
        else:  # `rg.Chunked`
            self.registry.pieces.add(id(stack))
        return self.mode(memory)

    def mode(self, memory: MemoryMode) -> MemoryMode:
        """The memory mode for a stack that would use `memory`."""
        raise NotImplementedError

    def verify(self, stack: nn.Module, verify: VerifyCalls) -> VerifyCalls:
        """Never: the check compares more than that."""
        return "never" if self.is_mine(stack) else verify

    def guards(self, stack: nn.Module, program: Program, guards: list[Guard]) -> list[Guard]:
        if not self.is_mine(stack):
            return guards
        assert isinstance(stack, StackModule)
        names = self.names(stack, program)
        name = self.stacks[id(stack)][0] or type(stack).__name__
        self.registry.add(name, stack, program, names)
        guards = super().guards(stack, program, guards)
        return self.watch(name, program, names, guards)

    def watch(
        self, stack: str, program: Program, names: list[str], guards: list[Guard]
    ) -> list[Guard]:
        """The guards for a pass of the stack of this name, whose updates have these names."""
        return [guard for guard in guards if not isinstance(guard, Drift)]


class KeepAll(Observer):
    """Plain autograd."""

    def mode(self, memory: MemoryMode) -> MemoryMode:
        return Keep()


class ReverseAll(Observer):
    """Each stack in its own memory mode, `Reverse()` in place of `Keep()`.

    Without drift guard: the check compares more than that.
    """

    def mode(self, memory: MemoryMode) -> MemoryMode:
        return _reversing(memory)


class DriftCheck(Observer):
    """Everything rebuilt, and compared with forward before each update."""

    resets_streams = False  # whether backward goes on from what forward saw

    def __init__(self, registry: StackRegistry) -> None:
        super().__init__(registry)
        self.deviations: StackDeviations = {}
        self.epsilons: dict[str, float] = {}  # by stack: of the narrowest dtype in its functions

    def mode(self, memory: MemoryMode) -> MemoryMode:
        return Reverse(keep_last=False)

    def watch(
        self, stack: str, program: Program, names: list[str], guards: list[Guard]
    ) -> list[Guard]:
        drift = next((guard for guard in guards if isinstance(guard, Drift)), None)
        guards = super().watch(stack, program, names, guards)
        if drift is None:  # a plain pass: nothing is rebuilt
            return guards
        return [*guards, _CompareStreams(self, stack, drift)]


class PerUpdateCheck(DriftCheck):
    """Each update by itself: recompute gets the streams that forward saw."""

    resets_streams = True

    def __init__(self, registry: StackRegistry) -> None:
        super().__init__(registry)
        self.records: dict[str, FunctionRecord] = {}

    def watch(
        self, stack: str, program: Program, names: list[str], guards: list[Guard]
    ) -> list[Guard]:
        guards = super().watch(stack, program, names, guards)
        modules = next((guard for guard in guards if isinstance(guard, ModuleState)), None)
        structure = None if modules is None else modules.structure
        return [*guards, _WatchFunctions(self, names, structure)]


class MaskCheck(DriftCheck):
    """Everything rebuilt, and the masks of every function compared with forward."""

    def __init__(self, registry: StackRegistry) -> None:
        super().__init__(registry)
        self.flips: dict[str, Flips] = {}  # by function

    def watch(
        self, stack: str, program: Program, names: list[str], guards: list[Guard]
    ) -> list[Guard]:
        guards = [guard for guard in guards if not isinstance(guard, Drift)]
        return [*guards, _CompareMasks(self.flips, names)]


class SkipCheck(KeepAll):
    """Plain autograd; each function is also called with other inputs, to find its own skip."""

    def __init__(self, registry: StackRegistry) -> None:
        super().__init__(registry)
        self.found: dict[str, bool] = {}  # by function

    def watch(
        self, stack: str, program: Program, names: list[str], guards: list[Guard]
    ) -> list[Guard]:
        return [*super().watch(stack, program, names, guards), _FindSkips(self.found, names)]


class StackBytes(KeepAll):
    """Plain autograd; adds up by how much the live bytes grow while stacks run forward."""

    def __init__(self, registry: StackRegistry, now: Callable[[], int]) -> None:
        super().__init__(registry)
        self.now = now  # how many bytes are alive
        self.bytes = 0
        self.depth = 0  # of stacks inside stacks

    def watch(
        self, stack: str, program: Program, names: list[str], guards: list[Guard]
    ) -> list[Guard]:
        return [*super().watch(stack, program, names, guards), _CountBytes(self)]


# --- guards


class _CompareMasks(Guard):
    """Compares the masks of functions in recompute with those in forward."""

    needs_output = True

    def __init__(self, flips: dict[str, Flips], names: list[str]) -> None:
        self.flips = flips
        self.names = names
        self.forward_masks: dict[int, list[Mask]] = {}  # by update
        self.compared: set[int] = set()

    def before_backward(self) -> bool:
        return True  # functions run to their end

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        index = update.index
        if isinstance(update.step.fn, nn.Identity) or index in self.compared:
            return run()
        masks = Masks()
        output = run_in_mode(masks, run)
        if index not in self.forward_masks:
            self.forward_masks[index] = masks.found
            return output
        self.compared.add(index)
        name = self.names[index]
        flips = flips_between(self.forward_masks.pop(index), masks.found)
        self.flips[name] = self.flips.get(name, NO_FLIPS) + flips
        return output


class _FindSkips(Guard):
    """Looks at each function once."""

    rebuilt_only = False

    def __init__(self, found: dict[str, bool], names: list[str]) -> None:
        self.found = found
        self.names = names

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        output = run()
        step = update.step
        name = self.names[update.index]
        # With a lossy coupling, the function is a whole layer: `rg.Residual` with `rg.Euler()`.
        is_layer = getattr(step.coupling, "is_lossy", False)
        if name not in self.found and not is_layer and not isinstance(step.fn, nn.Identity):
            self.found[name] = contains_skip(step.fn, update.reads, update.arguments)
        return output


class _CountBytes(Guard):
    """Live bytes before and after the forward of a stack."""

    rebuilt_only = False

    def __init__(self, observer: StackBytes) -> None:
        self.observer = observer
        self.begun = 0

    def before_forward(self, state: State) -> None:
        self.begun = self.observer.now()
        self.observer.depth += 1

    def after_forward(self, state: State) -> None:
        self.observer.depth -= 1
        if not self.observer.depth:
            self.observer.bytes += self.observer.now() - self.begun


class _CompareStreams(Guard):
    """Compares whole streams before every update."""

    def __init__(self, observer: DriftCheck, stack: str, drift: Drift) -> None:
        self.observer = observer
        self.stack = stack
        self.drift = drift  # it knows the dtypes that functions compute in
        self.forward_states: dict[int, State] = {}
        self.scales: dict[str, float] = {}

    def before_function(self, update: Application) -> None:
        self.forward_states[update.index] = {
            name: tuple(leaf.detach() for leaf in leaves) for name, leaves in update.state.items()
        }

    def after_update(self, update: Application) -> None:
        self.drift.after_update(update)

    def at_cut(self, state: State) -> None:
        self.scales = {
            name: max(map(largest, leaves), default=0.0) for name, leaves in state.items()
        }
        epsilons = self.observer.epsilons
        epsilons[self.stack] = max(self.drift.epsilon, epsilons.get(self.stack, 0.0))

    def after_undo(self, index: int, state: State) -> None:
        worst = self.observer.deviations.setdefault((self.stack, index), {})
        for name, leaves in self.forward_states[index].items():
            for rebuilt, original in zip(state[name], leaves):
                deviation = _deviation(rebuilt, original, self.scales[name])
                if deviation is None:
                    continue
                if name not in worst or not deviation.relative <= worst[name].relative:
                    worst[name] = deviation
            if self.observer.resets_streams:
                state[name] = tuple(leaf.clone() for leaf in leaves)


class _WatchFunctions(Guard):
    """Compares what functions do in recompute with what they did in forward."""

    rebuilt_only = False
    needs_output = True

    def __init__(
        self, observer: PerUpdateCheck, names: list[str], structure: Structure | None
    ) -> None:
        self.observer = observer
        self.structure = structure  # it knows what the engine replays
        self.names = names
        self.functions: dict[int, WatchedFunction] = {}  # by update

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        if isinstance(update.step.fn, nn.Identity):
            return run()
        function = self._watched(update)
        given = update.reads, update.arguments
        if is_recomputing():
            return function.recompute(run, given)
        target = tuple(leaf.detach() for leaf in update.target)
        return function.forward(run, given, target)

    def before_backward(self) -> bool:
        return True  # functions run to their end

    def _watched(self, update: Application) -> WatchedFunction:
        if update.index not in self.functions:
            fn = update.step.fn
            name = self.names[update.index]
            record = self.observer.records.setdefault(name, FunctionRecord(name, fn))
            self.functions[update.index] = WatchedFunction(fn, record)
        function = self.functions[update.index]
        if self.structure is not None:
            function.replayed = self.structure.functions[update.index].replayed()
        return function


def _deviation(rebuilt: Tensor, original: Tensor, scale: float) -> Deviation | None:
    """None if the stream has no values to compare."""
    if not original.numel() or not is_real_valued(original) or original.is_meta:
        return None
    # A value that became infinite cannot be undone; plain autograd has no use for it either.
    finite = original.isfinite()
    error = largest_difference(rebuilt[finite], original[finite])
    return Deviation(error, max(largest(original), scale), original.dtype)


def _reversing(memory: MemoryMode) -> MemoryMode:
    return Reverse() if isinstance(memory, Keep) else memory


# --- what the engine knows about a function


def _weights_used(function: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a function that may not be parameters of the network, such as those in closures,
    with a name for each.
    """
    holdings = Holdings((function,))
    for i, module in enumerate(holdings.modules):
        for name, weight in module.named_parameters(recurse=False):
            yield f"module {i}, {name}", weight
    for i, weight in enumerate(holdings.weights):
        yield f"tensor {i}", weight
