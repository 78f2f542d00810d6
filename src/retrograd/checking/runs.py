"""Running one step of a network again and again, from the same state: reversed, kept, and watched.

The engine lets an observer choose the memory mode of every stack and make every call of a function
(`core.program.observers`), and a plan may bring its own waypoints. So the network runs as it is
written; nothing is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.checking.reach import (
    Change,
    Snapshot,
    changes,
    copy_of,
    is_same,
    look,
    print_of,
    random_states,
    replayed_by_the_engine,
    slots_of,
    visible,
)
from retrograd.core.holdings import Holdings
from retrograd.core.memory import Keep, Reverse
from retrograd.core.private import pytree
from retrograd.core.program import Program, State, Step
from retrograd.core.replay import Backstage, is_recomputing
from retrograd.core.streams import flatten, unflatten
from retrograd.core.updates import WithAux
from retrograd.core.waypoints import Waypoints
from retrograd.measure import Counting, LiveBytes
from retrograd.sequence import Reversible, ReversibleSequence

_STACKS = (Reversible, ReversibleSequence)


class Network:
    """A module and its arguments, ready to take the same step as often as asked."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        paths = pytree.tree_flatten_with_path((args, kwargs))[0]
        leaves, self.spec = flatten((args, kwargs))
        self.leaves = _copies(
            leaves
        )  # and every step gets its own: what a network does to its input, the next does not see
        self.wanted: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in module.named_parameters():
            self.want(name, parameter)
        self.inputs: dict[int, str] = {}
        for i, (path, leaf) in enumerate(paths):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.inputs[i] = self.unique(_input_name(path))
        self.weights: dict[Any, Tensor] = {}  # of the outputs, in the loss
        self.stacks: dict[str, Stack] = {}  # that ran, by name
        self.backstages: dict[
            int, tuple[Any, Backstage, Backstage]
        ] = {}  # of stacks: theirs, and one for the time being
        self.snapshot = Snapshot(module, [leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        self.gradients_before = [(p, p.grad) for p in module.parameters()]

    def want(self, name: str, tensor: Tensor) -> None:
        """Compare its gradient, if it has one."""
        if tensor.requires_grad and id(tensor) not in self.wanted:
            self.wanted[id(tensor)] = self.unique(name), tensor

    def unique(self, name: str) -> str:
        taken = {*(name for name, _ in self.wanted.values()), *getattr(self, "inputs", {}).values()}
        return (
            name
            if name not in taken
            else next(n for i in itertools.count(2) if (n := f"{name} ({i})") not in taken)
        )

    def step(self, watcher: Any = contextlib.nullcontext()) -> Taken:
        """Forward and backward, from the state that everything had in the beginning; under
        `watcher`, a context.
        """
        self.snapshot.restore()
        for parameter, _ in self.gradients_before:
            parameter.grad = None
        leaves = _copies(self.leaves)
        args, kwargs = unflatten(leaves, self.spec)
        taken = Taken()
        with watcher:
            begun = time.perf_counter()
            output = self.module(*args, **kwargs)
            losses = [t for t in _tensors(output) if t.requires_grad]
            taken.output = type(output).__name__
            wanted = {
                name: t for name, t in self.wanted.values() if t.requires_grad
            }  # forward may freeze some
            wanted |= {name: leaves[i] for i, name in self.inputs.items()}
            self.between()
            if losses and wanted:
                weights = [self.weight(i, loss) for i, loss in enumerate(losses)]
                del output, leaves, args, kwargs
                with _no_autocast():
                    found = torch.autograd.grad(
                        losses, list(wanted.values()), weights, allow_unused=True
                    )
                if torch.accelerator.is_available():
                    torch.accelerator.synchronize()
                taken.gradients = {
                    name: _dense(g) for name, g in zip(wanted, found) if g is not None
                }
            taken.seconds = time.perf_counter() - begun
        taken.buffers = {
            name: b.detach().clone() for name, b in self.module.named_buffers() if not b.is_meta
        }
        taken.random = random_states() | _own_generators(self.module)
        return taken

    def weight(self, number: int, output: Tensor) -> Tensor:
        """Of an output in the loss. Made once, so that no step has to."""
        key = number, output.shape, output.dtype
        if key not in self.weights:
            self.weights[key] = _weights(output, number)
        return self.weights[key]

    between: Callable[[], Any] = staticmethod(lambda: None)  # called when forward is over

    def release(self) -> None:
        """Everything as it was in the beginning."""
        try:
            self.snapshot.release()
        finally:
            for parameter, gradient in self.gradients_before:
                parameter.grad = gradient
            for stack, backstage, _ in self.backstages.values():
                stack._backstage = backstage


class Stack(NamedTuple):
    """One that ran."""

    name: str
    module: Any
    program: Program
    names: list[str]  # of its updates, in the network


@dataclass
class Taken:
    """What one step gave."""

    seconds: float = 0.0
    output: str = ""  # of which type
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)


# --- who watches


class Observer(Counting):
    """Every stack in a memory mode of its choosing."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.module)
        self.network = network

    def begin(self, stack: Any, program: Program) -> None:
        if not self.is_mine(stack):
            return
        super().begin(stack, program)
        network, name = self.network, self.stacks[id(stack)][0] or type(stack).__name__
        if (
            name not in network.stacks or network.stacks[name].module is not stack
        ):  # some are made anew for every call
            network.stacks[name] = Stack(
                name, stack, program, [self.names[id(step)] for step in program]
            )
            for step in program:  # weights that are not the network's: in closures, for instance
                for inner, weight in _held(Holdings((step.fn,))):
                    network.want(f"{self.names[id(step)]}: {inner}", weight)
        if id(stack) not in network.backstages:  # what it learns meanwhile, it forgets again
            network.backstages[id(stack)] = stack, stack._backstage, Backstage()
        stack._backstage = network.backstages[id(stack)][2]

    def memory(self, stack: Any) -> Any:
        return self.mode(stack) if self.is_mine(stack) else stack.memory

    def mode(self, stack: Any) -> Any:
        raise NotImplementedError


class Kept(Observer):
    """As plain autograd does it."""

    def mode(self, stack: Any) -> Any:
        return Keep()


class Reversed(Observer):
    """As the stacks say; those that keep everything, reversed all the same. Nobody judges the way
    back but us.
    """

    def mode(self, stack: Any) -> Any:
        return _Planned(reversing(stack.memory), _Silent)


class Drifting(Observer):
    """Everything rebuilt, and compared with what forward saw before every update."""

    reset = False  # go on from what forward saw, so that each update is judged alone

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.streams: dict[
            tuple[str, int], dict[str, Gap]
        ] = {}  # by the stack's name and the update
        self.narrow: dict[
            str, float
        ] = {}  # by the stack: the largest epsilon of what its functions compute in
        self.target: tuple[Tensor, ...] = ()  # of the update that forward is at

    def mode(self, stack: Any) -> Any:
        name = (
            self.stacks[id(stack)][0] if id(stack) in self.stacks else ""
        )  # asked before it begins, too
        return _Planned(
            Reverse(keep_last=False),
            functools.partial(_Everywhere, self, name or type(stack).__name__),
        )


@dataclass
class Gap:
    """How far a rebuilt stream is from what forward saw."""

    error: float
    scale: float  # the largest value here and where the walk began
    dtype: torch.dtype

    @property
    def relative(self) -> float:
        return self.error / self.scale if self.scale else (float("inf") if self.error else 0.0)


class _Everywhere(Waypoints):
    """Whole streams, before every update."""

    def __init__(self, observer: Drifting, stack: str, program: Program, *rest: Any) -> None:
        super().__init__(program, *rest)
        self.observer, self.stack = observer, stack
        self.at = range(len(program))
        self.passed: dict[int, State] = {}

    def note(self, index: int, state: State) -> None:
        self.passed[index] = {
            name: tuple(leaf.detach() for leaf in leaves) for name, leaves in state.items()
        }
        self.observer.target = self.passed[index][self.program[index].target]

    def begin_at(self, state: State) -> None:
        self.scales = {
            name: max(map(largest, leaves), default=0.0) for name, leaves in state.items()
        }
        self.observer.narrow[self.stack] = max(
            self.narrow, self.observer.narrow.get(self.stack, 0.0)
        )

    def compare(self, index: int, state: State) -> None:
        gaps = self.observer.streams.setdefault((self.stack, index), {})
        for name, leaves in self.passed[index].items():
            for now, then in zip(state[name], leaves):
                if (
                    then.numel()
                    and (then.is_floating_point() or then.is_complex())
                    and not then.is_meta
                ):
                    # what became infinite cannot be undone; plain autograd has no use for it either
                    finite = then.isfinite()
                    error = gap_of(now[finite], then[finite])
                    gap = Gap(error, max(largest(then), self.scales[name]), then.dtype)
                    if name not in gaps or not gap.relative <= gaps[name].relative:
                        gaps[name] = gap
            if self.observer.reset:
                state[name] = tuple(then.clone() for then in leaves)


class _Silent(Waypoints):
    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self.at = range(0)


@dataclass(frozen=True)
class _Planned:
    """A memory mode, with other waypoints."""

    mode: Any
    waypoints: Any

    def plan(self, *call: Any) -> Any:
        return dataclasses.replace(self.mode.plan(*call), waypoints=self.waypoints)


def reversing(memory: Any) -> Any:
    return Reverse() if isinstance(memory, Keep) else memory


# --- each function by itself


@dataclass
class Evidence:
    """What was seen of one function, in forward and when it ran again on the very same input."""

    name: str
    fn: Any
    differs: float = 0.0  # its output, relative to its size; 0: the same bits
    excess: float = 0.0  # that, relative to what rounding in its dtype explains
    again: int = 0  # how often it was compared
    edits_input: bool = False  # without autograd's knowledge
    reads_target: str | None = None  # where it found it
    draws: set[str] = field(default_factory=set)  # global generators that nobody replays
    changed: list[Change] = field(default_factory=list)  # Python state that recompute changed
    raised: str | None = None  # in recompute


class Alone(Drifting):
    """Every update judged alone: recompute gets the streams that forward saw."""

    reset = True

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.evidence: dict[str, Evidence] = {}
        self.calls: dict[
            int, list[tuple[list[Tensor], list[Tensor]]]
        ] = {}  # of a step: inputs and outputs in forward
        self.replayed: dict[int, set[int]] = {}

    def call(self, step: Step, reads: list[Any], arguments: dict[str, Any]) -> Any:
        if isinstance(step.fn, nn.Identity):
            return step.fn(*reads, **arguments)
        if id(step) not in self.names:  # another thread's, or an inverse
            return step.fn(*reads, **arguments)
        name, again = self.names[id(step)], is_recomputing()
        evidence = self.evidence.setdefault(name, Evidence(name, step.fn))
        if id(step.fn) not in self.replayed:
            self.replayed[id(step.fn)] = replayed_by_the_engine(step.fn)
        replayed = self.replayed[id(step.fn)]
        before, given = look(name, step.fn, replayed), _values((reads, arguments))
        if not again and evidence.reads_target is None:
            evidence.reads_target = _holder(name, step.fn, replayed, self.target, given)
        generators = _unreplayed()
        try:
            output = step.fn(*reads, **arguments)
        except Exception as error:
            if again:
                evidence.raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            if again:
                evidence.changed += [
                    c
                    for c in changes(before, look(name, step.fn, replayed))
                    if c not in evidence.changed
                ]
        evidence.draws |= {
            source for source, state in _unreplayed().items() if state != generators[source]
        }
        evidence.edits_input |= not all(
            map(is_same, given, _values((reads, arguments), copy=False))
        )
        made = _values(output)
        if not again:
            self.calls.setdefault(id(step), []).append((given, made))
            return output
        for i, (inputs, outputs) in reversed(list(enumerate(self.calls.get(id(step), [])))):
            if len(inputs) == len(given) and all(map(is_same, inputs, given)):
                del self.calls[id(step)][i]
                evidence.again += 1
                self.judge(evidence, made, outputs)
                break
        return output

    def judge(self, evidence: Evidence, now: list[Tensor], then: list[Tensor]) -> None:
        fits = len(now) == len(then) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(now, then)
        )
        for a, b in zip(now, then) if fits else ():
            if not is_same(a, b):
                real = a.is_floating_point() or a.is_complex()
                error, size = (gap_of(a, b), largest(b)) if real else (1.0, 0.0)
                differs = error / size if size else math.inf
                evidence.differs = max(evidence.differs, differs)
                evidence.excess = max(
                    evidence.excess, differs / rounding(a.dtype) if real else math.inf
                )
        if not fits:
            evidence.differs = evidence.excess = math.inf


def _holder(
    path: str, fn: Any, replayed: set[int], target: tuple[Tensor, ...], given: list[Tensor]
) -> str | None:
    """Where the function keeps the stream that it is about to update, if it does."""
    for seen in visible(path, fn, replayed):
        if isinstance(seen.value, Tensor) and seen.value.numel() > 1:
            if any(is_same(seen.value, leaf) for leaf in target) and not any(
                is_same(seen.value, leaf) for leaf in given
            ):
                return seen.path
    return None


def _unreplayed() -> dict[str, Any]:
    """The global generators that are not torch's."""
    return {name: state for name, state in random_states().items() if not name.startswith("torch")}


# --- bytes and time


class Course(LiveBytes):
    """Live bytes after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.forward = 0  # how many of them are of forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.bytes.append(self.now)
        return result


def course(network: Network, observer: Observer) -> tuple[Course, int]:
    """The bytes of a step over its course; and those of the gradients that it leaves."""
    live = Course()

    def between() -> None:
        live.forward = len(live.bytes)

    network.between = between
    try:
        with observer:
            taken = network.step(live)
    finally:
        network.between = lambda: None
    return live, sum(gradient.nbytes for gradient in taken.gradients.values())


def seconds(
    network: Network,
    ways: list[Callable[[Network], Observer]],
    rounds: int = 5,
    enough: float = 10.0,
) -> list[float]:
    """The median time of a step of each, run in turn. Fewer rounds if they take long."""
    times: list[list[float]] = [[] for _ in ways]
    begun = time.perf_counter()
    for _ in range(rounds):
        for way, found in zip(ways, times):
            with way(network):
                found.append(network.step().seconds)
        if time.perf_counter() - begun > enough:
            break
    return [sorted(found)[len(found) // 2] for found in times]


@contextlib.contextmanager
def as_written(module: nn.Module) -> Iterator[None]:
    """With gradients, whatever surrounds the caller, and with stacks outside of any compiler.
    Functions may be compiled.
    """
    compiled = [  # what `module.compile()` leaves
        (part, part._compiled_call_impl)
        for part in module.modules()
        if part._compiled_call_impl is not None
        and any(isinstance(inner, _STACKS) for inner in part.modules())
    ]
    for part, _ in compiled:
        part._compiled_call_impl = None
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for part, implementation in compiled:
            part._compiled_call_impl = implementation


# --- tensors


def _copies(leaves: list[Any]) -> list[Any]:
    """Tensors of their own, one for each: a tensor that is given twice stays one."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    copies = {key: copy_of(leaf) for key, leaf in tensors.items()}
    return [copies.get(id(leaf), leaf) for leaf in leaves]


def _input_name(path: Any) -> str:
    """`args[0]`, or `mask` of a keyword argument."""
    first, *rest = path
    if first.idx == 0:
        return f"args{pytree.keystr(tuple(rest))}"
    return f"{rest[0].key}{pytree.keystr(tuple(rest[1:]))}"


def _tensors(value: Any, depth: int = 4) -> list[Tensor]:
    """The tensors of a pytree, and of objects in it, as some models return."""
    found: list[Tensor] = []
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and not isinstance(leaf, (nn.Module, type, str, types.FunctionType)):
            slots = [name for cls in type(leaf).__mro__ for name in slots_of(cls)]
            inside = {
                **getattr(leaf, "__dict__", {}),
                **{n: getattr(leaf, n) for n in slots if hasattr(leaf, n)},
            }
            found += _tensors(inside, depth - 1) if inside else []
    return found


def _weights(tensor: Tensor, number: int) -> Tensor:
    """A gradient to begin with: 1 for a loss, else random, so that no symmetry hides an error. The
    same each time.
    """
    if not tensor.ndim:
        return torch.ones_like(tensor)
    generator = torch.Generator("cpu").manual_seed(number)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(tensor.device, tensor.dtype) / max(tensor.numel(), 1) ** 0.5


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Backward belongs outside of autocast."""
    kinds = {
        "cpu",
        *(
            [torch.accelerator.current_accelerator().type]
            if torch.accelerator.is_available()
            else []
        ),
    }  # type: ignore[union-attr]
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _own_generators(module: nn.Module) -> dict[str, Any]:
    return {
        seen.path: print_of(seen.value)
        for seen in visible("", module)
        if isinstance(seen.value, torch.Generator)
    }


def _held(holdings: Holdings) -> Iterator[tuple[str, Tensor]]:
    for i, module in enumerate(holdings.modules):
        yield from (
            (f"module {i}, {name}", weight)
            for name, weight in module.named_parameters(recurse=False)
        )
    yield from ((f"tensor {i}", weight) for i, weight in enumerate(holdings.weights))


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def _values(value: Any, copy: bool = True) -> list[Tensor]:
    """The tensors in it; of a `WithAux`, aux too."""
    value = (value.output, value.aux) if isinstance(value, WithAux) else value
    found = [leaf.detach() for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    return [leaf.clone() for leaf in found] if copy else found


def largest(tensor: Tensor) -> float:
    """The largest absolute value that is finite."""
    if not tensor.numel() or tensor.is_meta:
        return 0.0
    size = tensor.abs()
    return torch.where(size.isfinite(), size, 0).max().item()


def gap_of(now: Tensor, then: Tensor) -> float:
    """The largest difference, where they are not both the same infinity or both NaN. NaN if one is
    NaN alone.
    """
    same = (now == then) | ((now != now) & (then != then))
    return torch.where(same, 0, now - then).abs().max().item() if now.numel() else 0.0


def rounding(dtype: torch.dtype) -> float:
    """A relative difference that rounding in this dtype still explains."""
    return torch.finfo(dtype.to_real()).eps ** 0.75
