"""One pass of a program over its streams.

Every pass applies an update in the same way:

    output = fn(*reads, **keywords)              `evaluate`: run the function, check its output
    target = coupling.forward(target, output)    `combine`: the coupling, leaf by leaf

Undoing is the same with `coupling.inverse`. What surrounds an update differs from pass to pass:
these are the guards (`guard.py`). `Pass` is plain autograd; `tape.Tape` is a pass that autograd can
walk back.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import (
    Callable,
    Iterable,
    Sequence,
)
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.guard import (
    NO_GUARDS,
    Guard,
    Guards,
)
from retrograd.core.streams import (
    Dtypes,
    Leaves,
    Spec,
    State,
    flatten,
    flatten_like,
    flatten_stream,
    read,
    unflatten,
)
from retrograd.core.tensors import (
    dense,
    describe,
    dtype_name,
)
from retrograd.core.updates import (
    TRUSTED,
    Coupling,
    WithAux,
    is_trusted,
)

Output = list[tuple[Tensor, ...]]  # for each leaf of the target, what the coupling gets besides it


# Where backward gets the earlier value of a target from: by undoing the coupling, with the output
# of the function; because it was kept; or by the inverse of the function.
TargetFrom = Literal["output", "kept", "inverse"]


class Step(NamedTuple):
    """One update, ready to run. See `make_step`."""

    name: str
    target: str
    reads: tuple[str, ...]
    fn: Callable[..., Any]
    coupling: Coupling
    keywords: dict[str, str]  # from the function's name of an argument to the caller's
    returns: tuple[str, ...]  # what the coupling wants from the function
    gets_reads: bool = False  # the coupling also gets the streams that the function reads
    target_from: TargetFrom = "output"
    inverse: Callable[..., Any] | None = None  # of the function
    stores_digits: bool = False  # see `exact.ScaledOnGrid`


Program = Sequence[Step]


def make_step(
    name: str,
    target: str,
    reads: tuple[str, ...],
    fn: Callable[..., Any],
    coupling: Coupling,
    keywords: dict[str, str],
    inverse: Callable[..., Any] | None = None,
) -> Step:
    target_from: TargetFrom = "output"
    if inverse is not None:
        target_from = "inverse"
    elif target in reads or getattr(coupling, "is_lossy", False):
        target_from = "kept"
    returns = getattr(coupling, "returns", Coupling.returns)
    gets_reads = getattr(coupling, "gets_reads", False)
    return Step(
        *(name, target, reads, fn, coupling, keywords, returns),
        *(gets_reads, target_from, inverse),
    )


def rebuilt_streams(program: Program) -> set[str]:
    """The streams whose earlier values are computed in backward, by at least one update.

    Their sums have to be wide, or on a grid. Other streams are what plain autograd makes them.
    """
    found = {step.target for step in program if step.target_from != "kept"}
    # Streams that a coupling mixes are of one width.
    mixed = {frozenset((step.target, *step.reads)) for step in program if step.gets_reads}
    for _ in mixed:
        for names in mixed:
            if found & names:
                found |= names
    return found


class HeldProgram(list[Step]):
    """A program that weak references can refer to."""

    __slots__ = ("__weakref__",)


class Application:
    """One update being applied: what goes in, and what comes out."""

    __slots__ = (
        "arguments",
        "aux",
        "digits",
        "fits",
        "index",
        "inputs",
        "is_repeatable",
        "output",
        "pinned",
        "program",
        "reads",
        "result",
        "saved",
        "saved_by_function",
        "spec",
        "state",
        "step",
        "target",
    )

    inputs: list[Tensor]  # the leaves of target and reads, in forward
    arguments: dict[str, Any]  # the keyword arguments that the function gets
    output: Output  # what the function returned
    aux: Sequence[Any]  # what it returned besides
    result: tuple[Tensor, ...]  # the new value of the target
    saved: list[Tensor]  # what autograd saved, in forward
    saved_by_function: int  # how many of them the function saved; the coupling saved the rest

    def __init__(
        self, program: Program, index: int, state: State, spec: Spec, reads: list[Any]
    ) -> None:
        self.program = program
        self.index = index
        self.step = step = program[index]
        self.state = state
        self.spec = spec  # of the target
        self.target = state[step.target]
        self.reads = reads  # what the function gets
        self.is_repeatable = True  # a guard says False if the function cannot run again
        self.digits: tuple[Tensor, ...] | None = None  # the new store of the target, if it has one
        self.pinned: Sequence[Tensor] = ()  # what the function pinned, in forward
        self.fits = False  # the result surely has the shape and dtype of the target

    @property
    def where(self) -> str:
        return place(self.program, self.index)


def place(program: Program, index: int) -> str:
    """The position of an update, for messages: `update 7 of 48 (blocks.3.g)`."""
    return f"update {index} of {len(program)} ({program[index].name})"


# --- the one way to apply an update


def evaluate(
    update: Application,
    keywords: dict[str, Any],
    guards: Guards,
) -> None:
    """Run the function of an update, through its `__call__`, so that hooks on it run."""
    step = update.step
    arguments = {}
    if step.keywords:
        arguments = {inner: keywords[outer] for inner, outer in step.keywords.items()}
    if not guards.call:
        check_output(update, step.fn(*update.reads, **arguments))
        return
    update.arguments = arguments
    run: Callable[[], Any] = functools.partial(step.fn, *update.reads, **arguments)
    for call in guards.call:
        run = functools.partial(call, update, run)
    check_output(update, run())


def combine(
    rule: Callable[..., Tensor],
    target: Leaves,
    output: Output,
) -> tuple[Tensor, ...]:
    """Apply a rule of a coupling, `forward` or `inverse`, to each leaf of the target."""
    if len(output) == 1:
        return (rule(target[0], *output[0]),)  # the usual case
    return tuple([rule(leaf, *out) for leaf, out in zip(target, output)])


def with_reads(
    step: Step,
    output: Output,
    state: State,
) -> Output:
    """An output, and the streams that its function reads, for a coupling that gets both."""
    if not step.gets_reads:
        return output
    reads = [state[name] for name in step.reads]
    return [(*out, *leaves) for out, *leaves in zip(output, *reads)]


def couple(update: Application) -> None:
    """Compute the new value of the target, and check that it fits."""
    step = update.step
    output = update.output
    if step.gets_reads:
        output = with_reads(step, output, update.state)
    if update.fits and not step.stores_digits:  # nearly always
        update.result = combine(step.coupling.forward, update.target, output)
        return
    try:
        if step.stores_digits:
            couple_digits(update, step.coupling.forward, output)
        else:
            update.result = combine(step.coupling.forward, update.target, output)
    except errors.RetrogradError:
        raise
    except RuntimeError as error:
        raise misfit_of(update, update.target) or error from error
    if step.target_from == "output" and not getattr(step.coupling, "changes_shape", False):
        check_result(update)


def uncouple(update: Application) -> None:
    """Take the output of the function back out of the target."""
    step = update.step
    output = with_reads(step, update.output, update.state)
    with torch.no_grad():
        if step.stores_digits:
            couple_digits(update, step.coupling.inverse, output)
        else:
            update.result = combine(step.coupling.inverse, update.target, output)


def digits_of(stream: str) -> str:
    """The name under which the state has the store of a stream."""
    return f"digits of {stream}"


def couple_digits(
    update: Application,
    rule: Callable[..., Any],
    output: Output,
) -> None:
    """Apply a rule of a coupling that stores digits."""
    stored = update.state.get(digits_of(update.step.target), ())
    leaves = len(update.target)
    results = []
    words: list[tuple[Tensor, ...]] = []
    for i, (leaf, out) in enumerate(zip(update.target, output)):
        result, changed = rule(leaf, stored[i::leaves], *out)
        results.append(result)
        words.append(changed)
    update.result = tuple(results)
    # Word by word, and of each word leaf by leaf.
    update.digits = tuple([word for same in zip(*words) for word in same])


class Pass:
    """One pass of `program` over `streams`, as plain autograd.

    Streams have the width of `precision`, and its grid. Functions read them in the caller's dtype.
    """

    is_recorded = False

    def __init__(
        self,
        program: Program,
        streams: dict[str, Any],
        keywords: dict[str, Any],
        precision: Precision,
    ) -> None:
        self.program = program
        self.keywords = keywords
        self.grid = precision.grid
        self.index = 0  # of the next update
        self.aux: list[Any] = []
        self.guards = NO_GUARDS
        self.state: State = {}
        self.specs: dict[str, Spec] = {}
        self.caller_dtypes: dict[str, Dtypes] = {}
        self.dtypes = self.caller_dtypes  # in which functions read the streams
        self.casts: State = {}  # streams as hooks on a block cast them: [Note: hooks that cast]
        rebuilt = rebuilt_streams(program)
        for name, value in streams.items():
            self._open(name, value, precision if name in rebuilt else None)

    def _open(
        self,
        name: str,
        value: Any,
        precision: Precision | None,
    ) -> None:
        """Make a stream of `value`. Without `precision`: a stream that no update changes."""
        given, self.specs[name] = flatten_stream(value, name)
        leaves = tuple(given)
        if precision is not None:
            leaves = tuple([precision.stream(dense(leaf)) for leaf in leaves])
        self.state[name] = leaves
        dtypes = [old.dtype if old.dtype != new.dtype else None for old, new in zip(given, leaves)]
        self.caller_dtypes[name] = dtypes if any(dtypes) else None

    def surround(self, guards: Iterable[Guard]) -> None:
        """Use these guards from now on."""
        self.guards = Guards(guards)

    def use_keywords(self, keywords: dict[str, Any]) -> None:
        """Give the next updates these keyword arguments, of the same names."""
        self.keywords = keywords

    def start(self) -> None:
        """Call this before the first update."""
        for before_forward in self.guards.before_forward:
            before_forward(self.state)

    def finish(self) -> None:
        """Call this after the last update, before the streams are handed out."""
        for after_forward in self.guards.after_forward:
            after_forward(self.state)

    def hand_out(self, values: Any) -> Any:
        """The outputs of the pass, as the caller gets them."""
        return values

    def read(self, name: str) -> Any:
        """A stream as functions see it."""
        if name in self.casts:
            return unflatten(self.casts[name], self.specs[name])
        leaves = self.state[name]
        spec = self.specs[name]
        dtypes = self.dtypes[name]
        if spec is None and dtypes is None:
            return leaves[0]  # the usual case
        return read(leaves, spec, dtypes)

    def streams(self) -> dict[str, Any]:
        """The streams as the caller gets them, in the dtypes of the input."""
        return {name: self.read(name) for name in self.specs}

    # --- updates

    def update(self, step: Step) -> None:
        """Apply the next update."""
        self._apply(step, couple)
        self.index += 1

    def undo(self, step: Step) -> None:
        """Take the last update back.

        The function runs with gradients or without, as the caller does: modules choose kernels by
        that, and another kernel rounds differently. Its graph is dropped at once.
        """
        self.index -= 1
        if step.inverse is None:
            self._apply(step, uncouple)
        else:
            arguments = {inner: self.keywords[outer] for inner, outer in step.keywords.items()}
            value = step.inverse(self.read(step.target), **arguments)
            self.state[step.target] = inverted_leaves(self.program, self.index, value, self.specs)

    def _apply(
        self,
        step: Step,
        rule: Callable[[Application], None],
    ) -> None:
        update = self._application(step)
        for before_function in self.guards.before_function:
            before_function(update)
        try:
            evaluate(update, self.keywords, self.guards)
            rule(update)
        except Exception as error:
            self._explain(error, update)
            raise
        for after_update in self.guards.after_update:
            after_update(update)
        self._accept(update)

    def _application(self, step: Step) -> Application:
        state = self.state
        reads = list(map(self.read, step.reads))
        if len(reads) > 1:
            reads = one_value_a_stream(step.reads, reads)
        update = Application(self.program, self.index, state, self.specs[step.target], reads)
        update.inputs = inputs = list(update.target)
        for name in step.reads:
            inputs += state[name]
        return update

    def _accept(self, update: Application) -> None:
        """Replace the target by the result of an update."""
        self.state[update.step.target] = update.result
        if update.digits is not None:
            self.state[digits_of(update.step.target)] = update.digits
        if self.casts:
            self.casts.pop(update.step.target, None)
        if update.aux:
            self.aux += update.aux

    def _explain(
        self,
        error: Exception,
        update: Application,
    ) -> None:
        """Say which update raised: by a note on the error, or by our own for an edited leaf."""
        if "leaf Variable that requires grad" in str(error):
            for leaf in update.inputs:
                if leaf.is_leaf and leaf.requires_grad:
                    raise edited_input(update, leaf) from error
        reads = zip(update.step.reads, update.reads)
        errors.note(error, update.where, [(name, flatten(value)[0]) for name, value in reads])

    # --- hooks on blocks

    def enter_block(self, state: State) -> None:
        """Continue with the streams that a block received, after the hooks on it ran.

        [Note: hooks that cast] FSDP's mixed precision casts the inputs of a module. The sums of a
        reversible network must stay as wide as they are. So the functions of the block read the
        cast streams, and the updates continue with the wide ones.
        """
        if is_same_state(state, self.state):  # nearly always
            self.state = state  # the block refers to it: nothing else may hold what it replaces
            return
        casts = {}
        for name, leaves in state.items():
            if leaves is not self.state[name] and any(map(is_cast, leaves, self.state[name])):
                casts[name] = leaves
        if casts:
            self.check_casts(casts)
            state = {**state, **{name: self.state[name] for name in casts}}
            self.casts = casts
            dtypes = {name: [leaf.dtype for leaf in leaves] for name, leaves in casts.items()}
            self.dtypes = {**self.caller_dtypes, **dtypes}
        self._continue_with(state)

    def leave_block(self, state: State) -> None:
        """Continue with the streams that a block returned, after the hooks on it ran."""
        self.casts = {}
        self.dtypes = self.caller_dtypes
        if not is_same_state(state, self.state):
            self._continue_with(state)

    def check_casts(self, casts: State) -> None:
        """A pass that is walked back checks that a hook cast the streams and did nothing else."""

    def _continue_with(self, state: State) -> None:
        """Take over streams. Raise if a hook replaced one that backward has to rebuild."""
        for name, leaves in state.items():
            if leaves is self.state[name]:
                continue
            for before, after in zip(self.state[name], leaves):
                if after is not before and not self._may_replace(before, after):
                    raise self.replaced_stream(name, before, describe(after))
        self.state = state

    def _may_replace(
        self,
        before: Tensor,
        after: Tensor,
    ) -> bool:
        if after.dtype != before.dtype:
            return self.grid is None and not self.is_recorded
        return not self.is_recorded or after.data_ptr() == before.data_ptr()

    def replaced_stream(
        self,
        stream: str,
        before: Tensor,
        after: str,
    ) -> errors.RetrogradError:
        where = f"before update {self.index} of {len(self.program)},"
        return errors.replaced_stream(where, stream, describe(before), after)


def is_same_state(state: State, other: State) -> bool:
    """Whether no stream was replaced."""
    if len(state) != len(other):
        return False
    return all(map(operator.is_, state.values(), other.values()))


def one_value_a_stream(names: Sequence[str], reads: list[Any]) -> list[Any]:
    """A stream that is read twice is one value; two streams are two, even if they start as one.

    Functions may ask whether two arguments are the same tensor, and recompute must tell the same.
    """
    values: dict[str, Any] = {}
    for name, value in zip(names, reads):
        is_taken = any(value is other for other in values.values())
        if name not in values:
            values[name] = value[...] if is_taken and isinstance(value, Tensor) else value
    return [values[name] for name in names]


def is_cast(after: Tensor, before: Tensor) -> bool:
    same_shape = after.shape == before.shape
    return same_shape and after.dtype != before.dtype and after.is_floating_point()


def edited_input(update: Application, edited: Tensor) -> errors.RetrogradError:
    # Reads first: at the start of a stack, target and read may be one tensor.
    names = (*update.step.reads, update.step.target)
    name = next(n for n in names if any(leaf is edited for leaf in update.state[n]))
    return errors.edited_input(update.where, name, describe(edited))


# --- does an output fit its target?


def check_output(update: Application, returned: Any) -> None:
    """Set the output and aux of an update from what its function returned. Raise on a misfit."""
    update.aux = ()
    names = update.step.returns
    target = update.target
    if update.spec is None and len(names) == 1 and isinstance(returned, Tensor):
        if returned.shape == target[0].shape and returned.dtype == target[0].dtype:
            update.output = [(returned,)]  # the usual case
            update.fits = type(update.step.coupling) in TRUSTED
            return
    if isinstance(returned, WithAux):
        update.aux = (returned.aux,)
        returned = returned.output
    if len(names) == 1:
        update.output = [(out,) for out in _fitting_leaves(update, returned)]
        return
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        wanted = f"({', '.join(names)})"
        what = f"{describe(returned)}, not {wanted}"
        raise errors.misfit(update.where, what, f"return the tuple {wanted}.")
    update.output = list(zip(*(_fitting_leaves(update, value) for value in returned)))


def _fitting_leaves(update: Application, value: Any) -> Leaves:
    """The leaves of an output that has the structure and shapes of the target."""
    leaves = flatten_like(value, update.spec)
    if leaves is None:
        raise _wrong_structure(update, value)
    if update.step.target_from != "output" or getattr(update.step.coupling, "changes_shape", False):
        return leaves
    for target, out in zip(update.target, leaves):
        if not _is_narrower(out.dtype, target.dtype):
            raise _wrong_leaf(update, target, out)
    # Trusted couplings accept narrower outputs, but nothing can subtract a bool.
    keeps = is_trusted(update.step.coupling)
    pairs = zip(leaves, update.target)
    return [
        out if keeps and out.dtype != torch.bool else out.to(target.dtype) for out, target in pairs
    ]


def check_result(update: Application) -> None:
    """Raise unless the new value of the target has its shape and dtype."""
    error = misfit_of(update, update.result)
    if error is not None:
        raise error


def misfit_of(update: Application, result: Leaves) -> errors.RetrogradError | None:
    """What is wrong with a result, or with an output that no result could be made of."""
    for target, new, outputs in zip(update.target, result, update.output):
        misfit = next((out for out in outputs if out.shape != target.shape), None)
        fits = new.shape == target.shape and new.dtype == target.dtype
        if not fits or (new is target and misfit is not None):
            return _wrong_leaf(update, target, new if misfit is None else misfit)
    return None


def inverted_leaves(
    program: Program, index: int, value: Any, specs: dict[str, Spec]
) -> tuple[Tensor, ...]:
    """What the inverse of a function returned, as leaves of its target."""
    step = program[index]
    leaves = flatten_like(value, specs[step.target])
    if leaves is None:
        what = f"{describe(value)} from its inverse; stream {step.target!r} has another structure"
        raise errors.misfit(place(program, index), what, "return what fn was given.")
    return tuple(leaves)


def _is_narrower(dtype: torch.dtype, target: torch.dtype) -> bool:
    return dtype == target or torch.promote_types(dtype, target) == target


def _wrong_structure(update: Application, value: Any) -> errors.RetrogradError:
    stream = f"stream {update.step.target!r}"
    whole = describe(unflatten(update.target, update.spec))
    what = f"{describe(value)}; {stream} is {whole}"
    fix = f"return the structure of {stream}, {whole}; return extras as rg.WithAux(output, aux)."
    return errors.misfit(update.where, what, fix)


def _wrong_leaf(
    update: Application,
    target: Tensor,
    out: Tensor,
) -> errors.RetrogradError:
    what = f"{describe(out)}; stream {update.step.target!r} is {describe(target)}"
    dtype = dtype_name(target.dtype)
    fix = f"return shape {list(target.shape)} and {dtype} or a narrower dtype"
    if not _is_narrower(out.dtype, target.dtype):
        fix += f"; or start from a wider stream, such as x.to({out.dtype})"
    return errors.misfit(update.where, what, f"{fix}.")
