"""The modules: a stack of `(f, g)` pairs, and a program of updates over any streams. Both are a few
lines over the core.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from retrograd.budget import Budget, Profile
from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.memory import Keep, Plan, Reverse
from retrograd.core.private import are_transforms_active, break_graph, without_compiler
from retrograd.core.program import Run, State, Step, observers, place, read
from retrograd.core.replay import Backstage
from retrograd.core.streams import Duplicate, flatten_stream, unflatten
from retrograd.core.tape import Tape
from retrograd.core.updates import Additive, Coupling
from retrograd.routing import PairRoute, Route, by_update, check_all_taken
from retrograd.stepplan import StepPlan, forecast

_ADD = Additive()
_IDENTITY = nn.Identity()


class _Stack(nn.Module):
    """What both have in common: how exactly they rebuild. May be assigned at any time, like
    `memory`.
    """

    precision: Precision
    _forward: Callable[..., Any]

    @property
    def exact(self) -> Any:
        return self.precision.exact

    @exact.setter
    def exact(self, exact: Any) -> None:
        self._set_precision(Precision(exact, self.drift, self.stream_dtype))

    @property
    def drift(self) -> str:
        return self.precision.drift

    @drift.setter
    def drift(self, drift: str) -> None:
        self._set_precision(Precision(self.exact, drift, self.stream_dtype))

    @property
    def stream_dtype(self) -> torch.dtype | None:
        return self.precision.stream_dtype

    @stream_dtype.setter
    def stream_dtype(self, stream_dtype: torch.dtype | None) -> None:
        self._set_precision(Precision(self.exact, self.drift, stream_dtype))

    def _set_precision(self, precision: Precision) -> None:
        for where, coupling in self._couplings():
            precision.coupling(coupling, where)  # raises for one that cannot be
        self.precision = precision

    def _couplings(self) -> Iterable[tuple[str, Any]]:
        raise NotImplementedError

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        """Where each function is: an attribute of a module."""
        raise NotImplementedError

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the functions, each by itself and in place; arguments are those of
        `torch.compile`.

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
                if isinstance(fn, nn.Module):
                    fn.compile(*args, **kwargs)
                compiled[id(fn)] = (
                    fn,
                    fn if isinstance(fn, nn.Module) else torch.compile(fn, *args, **kwargs),
                )
            setattr(holder, name, compiled[id(fn)][1])

    @without_compiler
    def plan(self, value: Any, /, **kwargs: Any) -> StepPlan:
        """What `memory` keeps of each update for such an input, and the bytes that a step then
        needs.

        Runs forward once, watched; random states and buffers are left as they were.

        Example:
            >>> from torch.nn import GELU, Linear, Sequential
            >>> mlp = lambda: Sequential(Linear(64, 256), GELU(), Linear(256, 64))
            >>> pairs = [(mlp(), mlp()) for _ in range(8)]
            >>> stack = rg.ReversibleSequence(pairs, memory=rg.Budget("50%"))
            >>> plan = stack.plan(torch.randn(512, 64))
            >>> plan.peak <= plan.plain / 2
            True
        """
        watched: list[tuple[Profile, list[Step], Plan]] = []
        memory: Any = self.memory

        def new_run(
            module: Any, streams: dict[str, Any], keywords: dict[str, Any], program: list[Step]
        ) -> Run:
            targets, profile = [step.target for step in program], Profile(len(program))
            watched.append(
                (
                    profile,
                    program,
                    Plan(0, 0) if isinstance(memory, (Keep, Budget)) else memory.plan(targets),
                )
            )
            nothing = Plan(len(program), len(program), watcher=profile)
            return Tape(streams, keywords, program, module.precision, nothing, Backstage())

        buffers = [(buffer, buffer.detach().clone()) for buffer in self.buffers()]
        kind = next(
            (p.device.type for p in self.parameters() if p.device.type not in ("cpu", "meta")), None
        )
        try:
            with (
                torch.random.fork_rng([] if kind is None else None, device_type=kind or "cuda"),
                torch.enable_grad(),
            ):
                self._forward(new_run, value, kwargs)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):  # a copy would count as an edit
                        buffer.copy_(before)
        profile, program, plan = watched[0]
        if isinstance(memory, Budget):
            plan = profile.plan(memory, fresh=True)
        return forecast(memory, plan, profile, [step.name for step in program], fresh=True)


class ReversibleSequence(_Stack):
    """A stack of blocks `(f, g)`, each computing `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`.

    Backward rebuilds each block's input from its output, so activation memory does not grow with
    depth; a step costs 4/3 of plain autograd, less the last block. Gradients, random draws, buffers
    and hooks are those of the same equations in plain autograd. The output is a tensor of its own,
    which the caller may edit in place.

    Args:
        blocks: an iterable of pairs of modules (or callables). Parameters are named
            `blocks.<i>.f.…` and `blocks.<i>.g.…`.
        streams: how the input becomes `x1, x2`, and these one output: `Duplicate()`, `Split()` or
            `AtRest()`.
        memory: `Reverse()` rebuilds; `Budget("2 GiB")` keeps what makes a step fastest within so
            many bytes; `Anchor(every)` rebuilds from states that it keeps; `Keep()` stores
            everything, as plain autograd does. May be assigned at any time.
        coupling: how a function's output enters its stream: `Additive()`, `Affine()`,
            `Momentum(0.9)` or your own.
        route: which keyword argument goes to which function, e.g. `{"mask": "f", "context": "fg"}`,
            or a list of such dicts, one for each block. What it leaves out goes to every function
            whose signature accepts it.
        exact: True makes gradients bit-identical to those of `memory=Keep()`: streams live on a
            grid, see `rg.Grid`.
        drift: what happens when rebuilt streams are further off than their dtype explains: "warn"
            or "raise". With "ignore", nobody looks, and a function that does something else in
            recompute may go unnoticed.
        stream_dtype: streams are at least this wide, float32 if not given; functions read them in
            the input's dtype. With `torch.bfloat16`, bfloat16 inputs stay as they are, and drift
            ten times as much.

    Example:
        >>> blocks = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence(blocks, streams=rg.Split())
        >>> x = torch.randn(2, 16)
        >>> torch.allclose(stack.inverse(stack(x)), x, atol=1e-5)
        True
    """

    def __init__(
        self,
        blocks: Iterable[tuple[Callable[..., Any], Callable[..., Any]]],
        *,
        streams: Any = Duplicate(merge="mean"),
        memory: Any = Reverse(),
        coupling: Any = Additive(),
        route: Route | None = None,
        exact: Any = False,
        drift: str = "warn",
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_pair(pair, i) for i, pair in enumerate(blocks)])
        if isinstance(streams, (type, str)) or not (
            hasattr(streams, "split") and hasattr(streams, "join")
        ):
            raise TypeError(f"streams={streams!r}: pass rg.Duplicate(), rg.Split() or rg.AtRest().")
        self.streams = streams
        self.memory = _checked_memory(memory)
        self._backstage = Backstage()
        self.coupling = _checked_coupling(coupling)
        self._set_precision(Precision(exact, drift, stream_dtype))
        self.route = PairRoute(route, len(self.blocks))

    def _couplings(self) -> Iterable[tuple[str, Any]]:
        return [("coupling", self.coupling)]

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        return [(block, name) for block in self.blocks for name in "fg"]

    def extra_repr(self) -> str:
        return (
            f"streams={self.streams!r}, memory={self.memory!r}, "
            f"coupling={self.coupling!r}{self.precision}"
        )

    def forward(self, x: Any, /, **kwargs: Any) -> Any:
        """The output for `x`, a tensor or a pytree of tensors; `(output, aux)` where functions
        return `WithAux`.
        """
        return (_recorded if _is_recorded(memory_of(self)) else _plain)(self._forward, x, kwargs)

    def _forward(self, new_run: Callable[..., Run], x: Any, kwargs: dict[str, Any]) -> Any:
        program = self._program(kwargs)
        run = new_run(
            self, self._open(x, "the input"), kwargs, [step for steps in program for step in steps]
        )
        x = None  # from here on the run alone decides what stays alive
        for block, steps in zip(self.blocks, program):
            run.end_block(block(dict(run.state), run, steps))
        joined = self._close(run)
        run.finish()
        return _with_aux(joined, run)

    def inverse(self, y: Any, /, **kwargs: Any) -> Any:
        """The input that gave `y`, detached. Needs `streams=Split()`: a merged output has lost its
        streams (`ValueError`).

        Runs each function once. Functions that draw random numbers or use batch statistics do
        something else each time; call `eval()` first. With `exact`, it is the input to the bit if
        that was on the grid, and if `y` has the streams' dtype (a narrower input has a narrower
        output, which has lost bits).
        """
        if not getattr(self.streams, "invertible", False):
            raise ValueError(
                f"inverse needs both streams, and with {self.streams!r} the output does not have "
                "them. Build the stack with "
                "streams=rg.Split(), or use rg.Reversible, whose output is its streams."
            )
        program = self._program(kwargs)
        with torch.no_grad():
            run = Run(
                self._open(y, "the output"),
                kwargs,
                [step for steps in program for step in steps],
                self.precision,
            )
        run.index, run.origin = len(run.program), "the output"
        for block, steps in zip(reversed(self.blocks), reversed(program)):
            run.end_block(block(dict(run.state), run, steps, undo=True))
        run.finish()
        with torch.no_grad():
            return self._close(run)

    def _open(self, value: Any, name: str) -> dict[str, Any]:
        """A value as two streams."""
        leaves, spec = flatten_stream(value, name)
        halves = [self.streams.split(leaf) for leaf in leaves]
        return {
            stream: unflatten([half[i] for half in halves], spec)
            for i, stream in enumerate(("x1", "x2"))
        }

    def _close(self, run: Run) -> Any:
        """Two streams as a value."""
        joined = [self.streams.join(y1, y2) for y1, y2 in zip(run.state["x1"], run.state["x2"])]
        return read(joined, run.specs["x1"], run.dtypes["x1"])

    def _program(self, kwargs: dict[str, Any]) -> list[list[Step]]:
        """The updates of each block. Looked up at each call, because users replace and wrap
        modules.
        """
        functions: list[Any] = [fn for block in self.blocks for fn in (block.f, block.g)]
        coupling = self.precision.coupling(self.coupling, "coupling")
        made_of, last = [*functions, coupling], self._backstage.program_of
        if not kwargs and len(made_of) == len(last) and all(map(operator.is_, made_of, last)):
            return self._backstage.program
        route = self.route
        pair = coupling.pair() if hasattr(coupling, "pair") else _ADD.pair()
        returns = getattr(coupling, "returns", _ADD.returns)
        program, taken = [], set()
        for i in range(len(self.blocks)):
            steps = []
            for target, function, reads in pair:
                if function is None:
                    steps.append(
                        Step(
                            f"blocks.{i}, the step of {target}",
                            target,
                            reads,
                            _IDENTITY,
                            _ADD,
                            {},
                            _ADD.returns,
                        )
                    )
                    continue
                fn, keywords = functions[2 * i + (function == "g")], {}
                if kwargs:
                    keywords = route.keywords(i, function, fn, kwargs)
                    taken.update(keywords)
                steps.append(
                    Step(f"blocks.{i}.{function}", target, reads, fn, coupling, keywords, returns)
                )
            program.append(steps)
        if kwargs and program:
            check_all_taken(
                kwargs,
                taken | route.mentioned(),
                [step for steps in program for step in steps],
                'route={{{!r}: "f"}}',
            )
        if not kwargs:
            self._backstage.program_of, self._backstage.program = made_of, program
        return program


class Block(nn.Module):
    """One pair of functions. Called by its stack, so that hooks on it (FSDP's among them) run; it
    is no use alone.
    """

    def __init__(self, f: Callable[..., Any], g: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={fn!r}"
            for name in "fg"
            if not isinstance(fn := getattr(self, name), nn.Module)
        )

    def forward(self, state: State, run: Run, steps: list[Step], undo: bool = False) -> State:
        run.begin_block(state)
        for step in reversed(steps) if undo else steps:
            (run.undo if undo else run.update)(step)
        return dict(
            run.state
        )  # a copy goes in and a copy comes out: whatever a hook does to it shows


class Update(nn.Module):
    """One update of a `Reversible` program: `target = coupling.forward(target, fn(*reads,
    **kwargs))`.

    Args:
        target: name of the stream that changes.
        fn: a module or any callable. It must not change its inputs, and must not look at the
            target.
        reads: names of the streams that `fn` gets, in order. Never the target itself.
        coupling: how the output enters the target; `Additive()` by default.
        route: which keyword arguments of the call `fn` gets. None: those its signature accepts. A
            sequence of names: just those. A dict: from the name `fn` uses to the name the call
            uses, e.g. `{"mask": "video_mask"}`.

    Example:
        >>> update = rg.Update("v1", torch.nn.Linear(8, 8), reads=("v2",))
        >>> update
        Update(
          target='v1', reads=('v2',), coupling=Additive()
          (fn): Linear(in_features=8, out_features=8, bias=True)
        )
    """

    def __init__(
        self,
        target: str,
        fn: Callable[..., Any],
        reads: tuple[str, ...] | list[str] = (),
        *,
        coupling: Any = Additive(),
        route: dict[str, str] | tuple[str, ...] | list[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(reads, str):
            raise TypeError(
                f"Update({target!r}, reads={reads!r}): reads is a tuple of names; write "
                f"reads=({reads!r},)."
            )
        _check_function(fn, f"Update({target!r}), fn")
        if target in reads:
            raise ValueError(
                f"Update({target!r}, reads={tuple(reads)!r}): a function may not read its own "
                "target, because the target's "
                "earlier value is what backward has to rebuild. Read another stream, or put the "
                "value into one of its own."
            )
        self.target = target
        self.fn = fn
        self.reads = tuple(reads)
        self.coupling = _checked_coupling(coupling)
        self.route = route

    def extra_repr(self) -> str:
        route = "" if self.route is None else f", route={self.route!r}"
        return f"target={self.target!r}, reads={self.reads!r}, coupling={self.coupling!r}{route}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` gives; the program couples it."""
        return self.fn(*args, **kwargs)


class Reversible(_Stack):
    """A program of updates over any number of named streams: a dict of streams in, a dict of
    streams out.

    Each update changes one stream, `stream[target] = coupling.forward(stream[target], fn(*reads,
    **kwargs))`, and backward undoes the updates one by one. What is kept: the streams at the end.
    The streams that come out are backward's starting point, so they must not be edited in place.

    Args:
        updates: an iterable of `Update`. Parameters are named `updates.<i>.fn.…`.
        memory: `Reverse()` rebuilds; `Budget("2 GiB")` keeps what makes a step fastest within so
            many bytes; `Anchor(every)` rebuilds from states that it keeps; `Keep()` stores
            everything, as plain autograd does. May be assigned at any time.
        exact, drift, stream_dtype: as for `ReversibleSequence`.

    Example:
        >>> f, g = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> net = rg.Reversible([rg.Update("a", f, reads=("b",)), rg.Update("b", g, reads=("a",))])
        >>> streams = net({"a": torch.zeros(2, 8), "b": torch.ones(2, 8)})
        >>> sorted(streams)
        ['a', 'b']
    """

    def __init__(
        self,
        updates: Iterable[Update],
        *,
        memory: Any = Reverse(),
        exact: Any = False,
        drift: str = "warn",
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        updates = list(updates)
        for i, update in enumerate(updates):
            if not isinstance(update, Update):
                raise TypeError(
                    f"updates[{i}] is {update!r:.80}; write rg.Update(target, fn, reads=(...))."
                )
        self.updates = nn.ModuleList(updates)
        self._set_precision(Precision(exact, drift, stream_dtype))
        self.memory = _checked_memory(memory)
        self._backstage = Backstage()

    def _couplings(self) -> Iterable[tuple[str, Any]]:
        return [(f"updates[{i}]", update.coupling) for i, update in enumerate(self.updates)]

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        return [(update, "fn") for update in self.updates]

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}{self.precision}"

    def forward(self, streams: dict[str, Any], /, **kwargs: Any) -> Any:
        """The streams after all updates; `(streams, aux)` where functions return `WithAux`."""
        return (_recorded if _is_recorded(memory_of(self)) else _plain)(
            self._forward, streams, kwargs
        )

    def _forward(
        self, new_run: Callable[..., Run], streams: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        program = self._program(streams, kwargs)
        run = new_run(self, streams, kwargs, program)
        for step in program:
            run.update(step)
        result, state = run.streams(), run.state
        run.finish()
        if isinstance(run, Tape):
            _guard(state, program)
        return _with_aux(result, run)

    def inverse(self, streams: dict[str, Any], /, **kwargs: Any) -> dict[str, Any]:
        """The streams that gave these, detached. See `ReversibleSequence.inverse` on randomness and
        exactness.
        """
        program = self._program(streams, kwargs)
        with torch.no_grad():
            run = Run(
                {name: _detached(value) for name, value in streams.items()},
                kwargs,
                program,
                self.precision,
            )
        run.index, run.origin = len(program), "the output"
        for step in reversed(program):
            run.undo(step)
        run.finish()
        return run.streams()

    def _program(self, streams: dict[str, Any], kwargs: dict[str, Any]) -> list[Step]:
        if not isinstance(streams, dict):
            raise TypeError(
                f"Reversible takes a dict from stream name to value, not {type(streams).__name__}."
            )
        updates: list[Update] = list(self.updates)  # type: ignore[arg-type]
        wanted = {name for update in updates for name in (update.target, *update.reads)}
        missing, unknown = (
            sorted(wanted - set(streams)),
            sorted(set(streams) - wanted) if updates else [],
        )
        if missing or unknown:
            faults = " and ".join(
                f"{what} {names}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            )
            raise ValueError(
                f"the streams do not fit the program: {faults}. Updates use {sorted(wanted)}; the "
                f"call gave {sorted(streams)}."
            )
        program, taken = [], set()
        for i, u in enumerate(updates):
            keywords = by_update(u.route, u.fn, len(u.reads), kwargs)
            taken.update(keywords.values())
            returns = getattr(u.coupling, "returns", _ADD.returns)
            coupling = self.precision.coupling(u.coupling, f"updates[{i}]")
            # Through the update, not to its function: hooks on it run, FSDP's among them.
            program.append(Step(f"updates.{i}", u.target, u.reads, u, coupling, keywords, returns))
        if program:
            check_all_taken(kwargs, taken, program, "rg.Update(..., route=({!r},))")
        return program


# --- what both share


def _detached(value: Any) -> Any:
    leaves, spec = flatten_stream(value, "the output")
    return unflatten([leaf.detach() for leaf in leaves], spec)


def memory_of(stack: Any) -> Any:
    """The memory mode of a call: the stack's own, unless someone observes it in another."""
    return observers[-1].memory(stack) if observers else stack.memory


def _is_recorded(memory: Any) -> bool:
    """Whether a call leaves a tape. Where saved-tensor hooks are not allowed or not followed, the
    same updates run plain.

    That is inside torch.func transforms, under forward-mode differentiation, and while a graph is
    traced or exported.
    """
    if (
        isinstance(_checked_memory(memory), Keep)
        or not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
        or torch.jit.is_tracing()
    ):
        return False
    return not are_transforms_active()


def _plain(forward: Callable[..., Any], value: Any, kwargs: dict[str, Any]) -> Any:
    def new_run(
        module: Any, streams: dict[str, Any], keywords: dict[str, Any], program: list[Step]
    ) -> Run:
        if observers:
            observers[-1].begin(module, program)
        return Run(streams, keywords, program, module.precision)

    return forward(new_run, value, kwargs)


# [Note: torch.compile] Forward and recompute must call the same callable, compiled or not, or they
# save different tensors. A compiled model would compile the functions in forward, but not in
# backward, where the tape calls them. So a recorded call runs outside the compiler; functions that
# were compiled themselves stay compiled both times.
def _recorded(forward: Callable[..., Any], value: Any, kwargs: dict[str, Any]) -> Any:
    break_graph(
        "retrograd runs a stack outside the compiler, because backward must run the functions that "
        "forward ran: compile them "
        "with stack.compile(), and the model around them without fullgraph=True."
    )
    return _taped(forward, value, kwargs)


@without_compiler
def _taped(forward: Callable[..., Any], value: Any, kwargs: dict[str, Any]) -> Any:
    def new_run(
        module: Any, streams: dict[str, Any], keywords: dict[str, Any], program: list[Step]
    ) -> Run:
        if observers:
            observers[-1].begin(module, program)
        plan = memory_of(module).plan(
            [step.target for step in program], streams, keywords, module, program
        )
        return Tape(streams, keywords, program, module.precision, plan, module._backstage)

    return forward(new_run, value, kwargs)


def _with_aux(result: Any, run: Run) -> Any:
    return (result, run.aux) if run.aux else result


def _guard(state: State, program: list[Step]) -> None:
    """Raise, first thing in backward, if a stream that was handed out has been edited in place
    since.
    """
    last = {step.target: index for index, step in enumerate(program)}
    outputs = [(name, weakref.ref(leaf), leaf._version) for name in last for leaf in state[name]]
    wheres = {name: place(program, index) for name, index in last.items()}

    def check(_: Any) -> None:
        for name, ref, version in outputs:
            leaf = ref()
            if leaf is not None and leaf._version != version:
                raise errors.edited_output(
                    f"backward through {wheres[name]}", f"stream {name!r} as it was returned"
                )

    for name in last:
        for leaf in state[name]:
            if leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(check)


def _checked_coupling(coupling: Any) -> Coupling:
    """`coupling`, or a `TypeError` that says what a coupling is."""
    if not isinstance(coupling, type) and all(
        callable(getattr(coupling, name, None)) for name in ("forward", "inverse")
    ):
        return coupling
    what = (
        f"the class {coupling.__name__}"
        if isinstance(coupling, type)
        else f"{coupling!r}, without forward and inverse"
    )
    raise TypeError(
        f"coupling is {what}. A coupling is an instance with forward(x, out) and inverse(y, out): "
        "rg.Additive(), rg.Affine(), "
        "rg.Momentum(0.9) or your own subclass of rg.Coupling."
    )


def _checked_memory(memory: Any) -> Any:
    if isinstance(memory, Keep) or (hasattr(memory, "plan") and not isinstance(memory, type)):
        return memory
    what = f"the class {memory.__name__}" if isinstance(memory, type) else repr(memory)
    raise TypeError(
        f"memory is {what}: pass rg.Reverse(), rg.Budget(...), rg.Anchor(...) or rg.Keep()."
    )


def _pair(pair: Any, index: int) -> Block:
    """`pair` as a block, or an error that says what a block is."""
    if not isinstance(pair, (tuple, list, nn.ModuleList)):
        kind = type(pair).__name__
        raise TypeError(
            f"blocks[{index}] is {kind}, not a pair. Pass an iterable of (f, g), such as [(f0, "
            "g0), (f1, g1)]."
        )
    if len(pair) != 2:
        raise ValueError(
            f"blocks[{index}] has {len(pair)} functions, not a pair. Pass an iterable of (f, g)."
        )
    for name, fn in zip("fg", pair):
        _check_function(fn, f"blocks[{index}].{name}")
    return Block(*pair)


def _check_function(fn: Any, where: str) -> None:
    if not callable(fn) or isinstance(fn, type):
        what = (
            f"the class {fn.__name__}; pass an instance"
            if isinstance(fn, type)
            else f"{fn!r:.80}, which is not callable"
        )
        raise TypeError(f"{where} is {what}. Pass a module or a function.")
