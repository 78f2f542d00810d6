"""What all stacks have in common: their settings, and how a call runs.

A stack is a program of updates. A call runs as plain autograd (`core.program.Pass`), or it is
recorded so that backward can walk back (`core.tape.Tape`). Subclasses say what the program is, how
an input becomes streams, and how streams become an output.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from retrograd.budget import Budget
from retrograd.compiling.obstacles import (
    OTHER_TENSORS,
    has_other_tensors,
    limit_of,
    obstacle_to_tracing,
    plan_to_trace,
    uses_regions,
)
from retrograd.compiling.seams import TOO_OLD, say
from retrograd.core.exact import DriftAction, Grid, Precision
from retrograd.core.guard import Guard
from retrograd.core.guards import guards_of_plain_pass
from retrograd.core.guards.versions import OutputVersions
from retrograd.core.host_memory import HostMemory
from retrograd.core.memory import Call, Keep, MemoryMode, Plan, plan_of
from retrograd.core.observe import observed_guards, observed_memory, observed_verify
from retrograd.core.private import (
    are_transforms_active,
    break_graph,
    is_exporting,
    never_compiled,
    pytree,
    without_compiler,
)
from retrograd.core.program import Pass, Program, Step, rebuilt_streams
from retrograd.core.readback import ReadAtOnce, Readback
from retrograd.core.streams import flatten, flatten_stream, unflatten
from retrograd.core.structure import StackCache, VerifyCalls
from retrograd.core.tape import Tape
from retrograd.core.updates import Additive, Coupling
from retrograd.profile import Profile
from retrograd.profiling import Profiling, devices_of, plan_call
from retrograd.shared_budget import SharedBudget
from retrograd.stepplan import StepPlan, forecast
from retrograd.trace import TakeBack

ADD = Additive()

Blocks = Sequence[Sequence[Step]]  # the updates of a program, block by block


class Stack(nn.Module):
    """The base class of `ReversibleSequence` and `Reversible`."""

    precision: Precision
    _hands_out_streams = False
    _lookers: tuple[Callable[[int, Pass], None], ...] = ()

    def __init__(
        self,
        memory: MemoryMode | str,
        exact: bool | Grid,
        drift: DriftAction,
        stream_dtype: torch.dtype | None,
        verify: VerifyCalls,
    ) -> None:
        super().__init__()
        self._memory = checked_memory(memory)
        self.verify = verify
        self.precision = Precision(exact, drift, stream_dtype)
        self._cache = StackCache()

    # --- settings, which may be assigned at any time

    @property
    def memory(self) -> MemoryMode:
        return self._memory

    @memory.setter
    def memory(self, memory: MemoryMode | str) -> None:
        memory = checked_memory(memory)
        self._check(memory, self.precision)
        self._memory = memory
        self._cache.host = None

    @property
    def verify(self) -> VerifyCalls:
        return self._verify

    @verify.setter
    def verify(self, verify: VerifyCalls) -> None:
        if verify not in ("first", "always", "never"):
            raise ValueError(f'verify={verify!r}: choose "first", "always" or "never".')
        self._verify: VerifyCalls = verify

    @property
    def exact(self) -> bool | Grid:
        return self.precision.exact

    @exact.setter
    def exact(self, exact: bool | Grid) -> None:
        self._set_precision(Precision(exact, self.drift, self.stream_dtype))

    @property
    def drift(self) -> DriftAction:
        return self.precision.drift

    @drift.setter
    def drift(self, drift: DriftAction) -> None:
        self._set_precision(Precision(self.exact, drift, self.stream_dtype))

    @property
    def stream_dtype(self) -> torch.dtype | None:
        return self.precision.stream_dtype

    @stream_dtype.setter
    def stream_dtype(self, stream_dtype: torch.dtype | None) -> None:
        self._set_precision(Precision(self.exact, self.drift, stream_dtype))

    def _set_precision(self, precision: Precision) -> None:
        self._check(self.memory, precision)
        self.precision = precision

    def _check(self, memory: MemoryMode, precision: Precision) -> None:
        """Raise if the program cannot run with these settings."""
        for where, coupling in self._couplings():
            precision.check(coupling, where)

    def _settings(self) -> dict[str, Any]:
        """The settings that all stacks have, by name."""
        names = ("memory", "exact", "drift", "stream_dtype", "verify")
        return {name: getattr(self, name) for name in names}

    # --- what a subclass defines

    def _couplings(self) -> Iterable[tuple[str, Coupling]]:
        """The couplings, and where each is, for messages."""
        raise NotImplementedError

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        """Where each function is: an attribute of a module."""
        raise NotImplementedError

    def _blocks(self, value: Any, kwargs: dict[str, Any]) -> Blocks:
        """The program of a call."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Check and make what does not depend on a call. The compiler does this before it traces
        one.
        """

    def _open(self, value: Any, name: str) -> dict[str, Any]:
        """The streams that an input, or an output, consists of."""
        raise NotImplementedError

    def _close(self, run: Pass) -> Any:
        """The output that the streams of a pass make."""
        raise NotImplementedError

    def _run_blocks(self, run: Pass, blocks: Blocks, undo: bool = False) -> None:
        """Apply all updates, or take them back, the last one first."""
        raise NotImplementedError

    # --- a call

    @never_compiled  # by itself: only as a part of what calls it. [Note: torch.compile]
    def forward(self, value: Any, /, **kwargs: Any) -> Any:
        memory = observed_memory(self, self.memory)
        if is_plain(memory):
            return self._plain(value, kwargs)
        # [Note: torch.compile] A compiled model has the equations of a stack in its graph, and
        # `retrograd.compiling` lets backward rebuild the streams. Where that cannot be, a stack
        # runs outside the compiler: forward and recompute must call the same callable, compiled or
        # not, or they save different tensors. Then functions that were compiled themselves stay
        # compiled both times. If the compiler breaks the graph inside of a stack, it comes here
        # again with this function as its first one, and leaves it alone.
        if torch.compiler.is_compiling():
            obstacle = TOO_OLD or obstacle_to_tracing(self)
            if obstacle is None and has_other_tensors(value):
                obstacle = OTHER_TENSORS
            if obstacle is None:
                return self._traced(value, kwargs, memory)
            say(obstacle)
            break_graph(
                f"retrograd runs a stack outside the compiler, because {obstacle}: compile its "
                "functions with stack.compile(), and the model around them without fullgraph=True."
            )
        return self._recorded(value, kwargs, memory)

    def _traced(self, value: Any, kwargs: dict[str, Any], memory: MemoryMode) -> Any:
        """A call inside of a compiled graph."""
        from retrograd.compiling.tracing import TracedPass  # it registers operators

        blocks = self._blocks(value, kwargs)
        program = flat(blocks)
        targets = [step.target for step in program]
        budget = limit_of(memory)
        plan = plan_to_trace(memory, targets, budget)
        streams = self._open(value, "the input")
        run = TracedPass(
            program, streams, kwargs, self.precision, plan, budget, regions=uses_regions()
        )
        return self._output(run, blocks)

    def _plain(self, value: Any, kwargs: dict[str, Any]) -> Any:
        """A call as plain autograd."""
        blocks = self._blocks(value, kwargs)
        run = self._pass(flat(blocks), self._open(value, "the input"), kwargs)
        return self._output(run, blocks)

    @without_compiler
    def _recorded(self, value: Any, kwargs: dict[str, Any], memory: MemoryMode) -> Any:
        """A call that backward can walk back."""
        blocks = self._blocks(value, kwargs)
        run = self._tape(flat(blocks), self._open(value, "the input"), kwargs, memory)
        return self._output(run, blocks)

    def _output(self, run: Pass, blocks: Blocks) -> Any:
        run.start()
        self._run_blocks(run, blocks)
        output = self._close(run)
        run.finish()
        output, aux = run.hand_out((output, run.aux))
        return (output, aux) if aux else output

    def _pass(
        self,
        program: Program,
        streams: dict[str, Any],
        kwargs: dict[str, Any],
        is_inverse: bool = False,
    ) -> Pass:
        run = Pass(program, streams, kwargs, self.precision)
        if not torch.compiler.is_compiling():  # a traced graph has no versions and no values
            readback = ReadAtOnce() if is_inverse else Readback()
            start = "the output" if is_inverse else "the input"
            guards = guards_of_plain_pass(program, self.precision, readback, start)
            run.surround(observed_guards(self, program, guards))
        return run

    def _tape(
        self,
        program: Program,
        streams: dict[str, Any],
        kwargs: dict[str, Any],
        memory: MemoryMode,
    ) -> Tape:
        plan, measuring = plan_call(self, self._cache, memory, program, streams, kwargs)
        choose = functools.partial(self._guards, program, measuring)
        verify = observed_verify(self, self.verify)
        host = self._host_memory(memory)
        tape = Tape(
            program, streams, kwargs, self.precision, plan, self._cache, choose, verify, host
        )
        tape.told_output = [g.add_output for g in measuring if isinstance(g, Profiling)]
        return tape

    def _host_memory(self, memory: MemoryMode) -> HostMemory:
        """Where plans of this mode keep what waits on the host."""
        if isinstance(memory, SharedBudget):
            return memory.host_memory
        limit = memory.host_bytes if isinstance(memory, Budget) else None
        return self._cache.host_memory(limit)

    def _guards(self, program: Program, own: list[Guard], guards: list[Guard]) -> list[Guard]:
        """The guards of a recorded call: those of the engine, of the stack and of observers."""
        if self._hands_out_streams:
            own = [*own, OutputVersions(program)]
        return observed_guards(self, program, [*guards, *own])

    def _inverse(self, value: Any, kwargs: dict[str, Any]) -> Any:
        """The input that gave `value`."""
        blocks = self._blocks(value, kwargs)
        check_invertible(flat(blocks))
        with torch.no_grad():
            streams = self._open(value, "the output")
            run = self._pass(flat(blocks), streams, kwargs, is_inverse=True)
        run.index = len(run.program)
        run.start()
        self._run_blocks(run, blocks, undo=True)
        run.finish()
        with torch.no_grad():
            return self._close_inverse(run)

    def _close_inverse(self, run: Pass) -> Any:
        """The input that the streams of a pass make, after all updates were taken back."""
        return self._close(run)

    def _states(
        self, x: Any, kwargs: dict[str, Any], after: Any, state_of: Callable[[int, Pass], Any]
    ) -> tuple[Any, list[Any]]:
        """The output, and `state_of` each of these blocks, right after it has run."""
        wanted = positions_of(after, len(self))  # type: ignore[arg-type]
        found: dict[int, Any] = {}

        def look(block: int, run: Pass) -> None:
            if block in wanted:
                # A node of its own: it holds what backward needs, and no later function builds on
                # it. See `ForwardContext`.
                found[block] = run.hand_out(pytree.tree_map(alias, state_of(block, run)))

        with self._looking(look):
            output = self(x, **kwargs)
        return output, [found[number] for number in wanted]

    @contextlib.contextmanager
    def _looking(self, look: Callable[[int, Pass], None]) -> Iterator[None]:
        """Inside, `look` is called with the number of each block, after it has run."""
        thread = threading.get_ident()

        def look_here(block: int, run: Pass) -> None:
            if threading.get_ident() == thread:
                look(block, run)

        self._lookers = (*self._lookers, look_here)
        try:
            yield
        finally:
            self._lookers = tuple(other for other in self._lookers if other is not look_here)

    # --- tools

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the functions, each by itself and in place; arguments as of `torch.compile`.

        What surrounds them stays as it is, because backward runs them again and must run what
        forward ran. Functions of the same code share what is compiled, and recompute compiles
        nothing. If they differ in Python attributes, torch stops after 8 variants, with a warning;
        `isolate_recompiles=True` compiles each for itself.

        Example:
            >>> pairs = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
            >>> stack = rg.ReversibleSequence(pairs)
            >>> stack.compile(backend="aot_eager")
        """
        compiled: dict[int, Any] = {}  # a function that is used twice stays one
        for holder, name in self._functions():
            fn = getattr(holder, name)
            if id(fn) not in compiled:
                compiled[id(fn)] = fn, compiled_function(fn, args, kwargs)
            setattr(holder, name, compiled[id(fn)][1])

    @without_compiler
    def plan(self, value: Any, /, **kwargs: Any) -> StepPlan:
        """What `memory` keeps of each update for such an input, and the bytes of a step then.

        Runs forward once and measures it. Random states, buffers and whatever else the functions
        were seen to change are left as they were.

        Example:
            >>> from torch.nn import GELU, Linear, Sequential
            >>> mlp = lambda: Sequential(Linear(64, 256), GELU(), Linear(256, 64))
            >>> pairs = [(mlp(), mlp()) for _ in range(8)]
            >>> stack = rg.ReversibleSequence(pairs, memory=rg.Budget("50%"))
            >>> plan = stack.plan(torch.randn(512, 64))
            >>> plan.peak <= plan.plain / 2
            True
        """
        if isinstance(self.memory, SharedBudget):
            raise ValueError(
                f"{type(self).__name__}.plan: the stack shares {self.memory!r} with the other "
                "stacks of its model. rg.plan(model, ...) shows what all of them keep."
            )
        blocks = self._blocks(value, kwargs)
        program = flat(blocks)
        targets = [step.target for step in program]
        profile = Profile(targets)
        profile.devices = devices_of(value)
        take_back = TakeBack([self, *(step.fn for step in program), *flatten(kwargs)[0]])
        try:
            with torch.enable_grad():
                self._measure(value, kwargs, blocks, profile, take_back)
        finally:
            take_back.run()
        plan = plan_of(self.memory, Call(targets, profile))
        return forecast(self.memory, [plan], profile, [step.name for step in program], fresh=True)

    def _measure(
        self,
        value: Any,
        kwargs: dict[str, Any],
        blocks: Blocks,
        profile: Profile,
        take_back: TakeBack,
    ) -> None:
        """Run forward once, with nothing kept, and fill the profile."""
        program = flat(blocks)
        streams = self._open(value, "the input")
        cache = StackCache()
        nothing = Plan(keep_from=len(program))

        def choose(guards: list[Guard]) -> list[Guard]:
            return [*guards, Profiling(profile, cache), take_back]

        tape = Tape(program, streams, kwargs, self.precision, nothing, cache, choose)
        total = Total.of(self._output(tape, blocks))
        given = flatten([value, kwargs])[0]
        leaves = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        wanted = [leaf for leaf in (*leaves, *tape.structure.parameters) if leaf.requires_grad]
        if total.requires_grad and wanted:
            torch.autograd.grad(total, wanted, allow_unused=True)


class Total(torch.autograd.Function):
    """A number whose backward gives gradients of the outputs, and holds nothing of them."""

    @classmethod
    def of(cls, output: Any) -> Any:
        leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        return cls.apply(*[leaf for leaf in leaves if leaf.requires_grad])

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        return tuple(
            [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds]
        )


def on_grid(blocks: Blocks, precision: Precision) -> Blocks:
    """The blocks, with the couplings that `precision` asks for."""
    if precision.grid is None:
        return blocks
    program = flat(blocks)
    steps = iter(precision.on_grid(program, rebuilt_streams(program)))
    return [list(itertools.islice(steps, len(block))) for block in blocks]


def flat(blocks: Blocks) -> list[Step]:
    return [step for steps in blocks for step in steps]


def is_plain(memory: MemoryMode) -> bool:
    """Whether a call runs as plain autograd.

    It does where nothing is rebuilt, and where saved-tensor hooks are not allowed or not followed:
    inside torch.func transforms, in forward-mode differentiation, and while a graph is traced or
    exported.
    """
    if isinstance(memory, Keep) or not torch.is_grad_enabled():
        return True
    if is_exporting() or torch.jit.is_tracing():
        return True
    return are_transforms_active()


def compiled_function(fn: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(fn, nn.Module):
        fn.compile(*args, **kwargs)
        return fn
    return torch.compile(fn, *args, **kwargs)


def positions_of(after: Any, count: int) -> list[int]:
    """Numbers of blocks, counted from the front. Raises for those that do not exist."""
    if not isinstance(after, Sequence) or not all(isinstance(one, int) for one in after):
        raise TypeError(f"after={after!r}: pass a sequence of numbers, such as after=(3, 7).")
    for number in after:
        if not -count <= number < count:
            raise IndexError(f"after={after!r}: there are {count}, from 0 to {count - 1}.")
    return [number % count for number in after]


def alias(leaf: torch.Tensor) -> torch.Tensor:
    return leaf[...] if leaf.requires_grad else leaf


def detached(value: Any) -> Any:
    leaves, spec = flatten_stream(value, "the output")
    return unflatten([leaf.detach() for leaf in leaves], spec)


# --- checks of arguments


def check_invertible(program: Program) -> None:
    """Raise if an update of the program cannot be undone from the streams alone."""
    for step in program:
        if step.target_from == "kept":
            raise ValueError(
                f"inverse: {step.name} reads or overwrites its own target {step.target!r}, whose "
                "earlier value cannot be computed. Read another stream, or use rg.Transform."
            )
        if getattr(step.coupling, "at", None) is not None:
            raise ValueError(
                f"inverse: {step.name} multiplies its target, and with exact=True the digits that "
                "this loses are known in backward only. Use exact=False."
            )


def checked_memory(memory: Any) -> MemoryMode:
    if isinstance(memory, str):
        return budget_of(memory)
    if callable(getattr(memory, "plan", None)) and not isinstance(memory, type):
        return memory
    what = f"the class {memory.__name__}" if isinstance(memory, type) else repr(memory)
    raise TypeError(
        f"memory is {what}: pass rg.Reverse(), rg.Anchor(...), rg.Keep(), a budget such as "
        '"2 GiB" or "25%", or an object of your own with a method plan(call).'
    )


def budget_of(text: str) -> Budget:
    try:
        return Budget(text)
    except ValueError:
        raise ValueError(
            f'memory={text!r}: a string is a budget, such as "2 GiB" or a share of plain autograd '
            'such as "25%". Other modes are objects: rg.Reverse(), rg.Anchor(...), rg.Keep().'
        ) from None


def checked_coupling(coupling: Any) -> Coupling:
    """`coupling`, or a `TypeError` that says what a coupling is."""
    names = ("forward", "inverse")
    if getattr(coupling, "is_lossy", False):
        names = ("forward",)
    if isinstance(coupling, type):
        what = f"the class {coupling.__name__}"
    elif all(callable(getattr(coupling, name, None)) for name in names):
        return coupling
    else:
        what = f"{coupling!r}, without forward and inverse"
    raise TypeError(
        f"coupling is {what}. A coupling is an instance with forward(x, out) and inverse(y, out): "
        "rg.Additive(), rg.Affine(), rg.Momentum(0.9) or your own subclass of rg.Coupling."
    )


def check_function(fn: Any, where: str) -> None:
    if callable(fn) and not isinstance(fn, type):
        return
    if isinstance(fn, type):
        what = f"the class {fn.__name__}; pass an instance"
    else:
        what = f"{fn!r:.80}, which is not callable"
    raise TypeError(f"{where} is {what}. Pass a module or a function.")
