"""One pass of a program over its streams, as ordinary autograd code.

`Run` is plain: forward update by update, or backward with `undo`. `tape.Tape` is the same pass,
recorded. What both need, to call a function, to check its output and to couple it, are the
functions at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.private import are_transforms_active
from retrograd.core.streams import (
    Leaves,
    Spec,
    dense,
    describe,
    flatten,
    flatten_like,
    flatten_stream,
    local,
    unflatten,
)
from retrograd.core.updates import TRUSTED, Coupling, WithAux

Parts = list[tuple[Tensor, ...]]  # for each leaf of the target, what the coupling gets besides it
Dtypes = (
    list["torch.dtype | None"] | None
)  # in which a stream's leaves are read; None: in their own
State = dict[
    str, tuple[Tensor, ...]
]  # each stream's leaves; tuples, so that they change only by being replaced


class Step(NamedTuple):
    """One update, ready to run. `keywords` maps what the function calls an argument to what the
    caller called it.
    """

    name: str
    target: str
    reads: tuple[str, ...]
    fn: Callable[..., Any]
    coupling: Coupling
    keywords: dict[str, str]
    returns: tuple[str, ...]  # what the coupling wants from the function


Program = Sequence[Step]

# Whoever wants to see what every stack does (`measure`, `checking`): the last one is asked which
# memory mode a stack has, told of each pass, and makes each call of a function.
observers: list[Any] = []


class Run:
    """One pass of `program` over `streams`.

    Streams are as wide as `precision` says, and on its grid if it has one; functions read them in
    the dtype that the caller gave.
    """

    def __init__(
        self,
        streams: dict[str, Any],
        keywords: dict[str, Any],
        program: Program,
        precision: Precision,
    ) -> None:
        self.state: State = {}
        self.specs: dict[str, Spec] = {}
        self.given: dict[str, Dtypes] = {}  # by the caller
        self.dtypes: dict[str, Dtypes] = (
            self.given
        )  # in which functions read; others within a block whose hooks cast
        self.casts: State = {}  # and what such hooks made of the streams
        self.grid = precision.grid
        # With a grid: stream, update, dtype, least and largest value after it.
        self.ranges: list[tuple[str, int | None, torch.dtype, Tensor, Tensor]] = []
        self.origin = "the input"
        targets = {step.target for step in program}
        for name, value in streams.items():
            leaves, self.specs[name] = flatten_stream(value, name)
            wide = tuple(map(dense, leaves))
            if name in targets:  # others are only read: nothing will be rebuilt of them
                wide = tuple(map(precision.stream, wide))
            self.state[name] = wide
            dtypes = [
                leaf.dtype if leaf.dtype != stream.dtype else None
                for leaf, stream in zip(leaves, wide)
            ]
            self.given[name] = dtypes if any(dtypes) else None
            if self.grid is not None and name in targets:
                self.note_range(name, None)
        self.keywords = keywords
        self.program = program
        self.index = 0  # of the next update
        self.aux: list[Any] = []

    def streams(self) -> dict[str, Any]:
        """The streams as the caller gets them, in the dtypes that it gave."""
        return {name: self.read(name) for name in self.state}

    def read(self, name: str) -> Any:
        if name in self.casts:
            return unflatten(self.casts[name], self.specs[name])
        return read(self.state[name], self.specs[name], self.dtypes[name])

    def note_range(self, name: str, index: int | None) -> None:
        """Remember what a stream holds after update `index`. Looked at in the end, so that a device
        is waited for only once.
        """
        for leaf in self.state[name]:
            if (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel():
                self.ranges.append((name, index, leaf.dtype.to_real(), *range_of(leaf)))

    def begin_block(self, state: State) -> None:
        """Go on from what a block was called with, after the hooks on it ran.

        [Note: hooks that cast] FSDP's mixed precision casts what a module is called with. The sums
        of a reversible network must stay as wide as they are, so the block's functions read the
        cast streams, and the updates go on with their own.
        """
        casts = {
            n: ts
            for n, ts in state.items()
            if ts is not self.state[n] and any(map(is_cast, ts, self.state[n]))
        }
        if casts:
            state = {
                name: self.state[name] if name in casts else leaves
                for name, leaves in state.items()
            }
            self.casts = casts
            self.dtypes = {
                **self.given,
                **{name: [t.dtype for t in leaves] for name, leaves in casts.items()},
            }
        self.resume(state)

    def end_block(self, state: State) -> None:
        """Go on from what a block returned, after the hooks on it ran."""
        self.casts, self.dtypes = {}, self.given
        self.resume(state)

    def resume(self, state: State) -> None:
        for name, leaves in (
            state.items() if self.grid is not None else ()
        ):  # a stream that was cast is off the grid
            for before, after in zip(self.state[name], leaves):
                if after.dtype != before.dtype:
                    raise self.replaced(name, before, describe(after))
        self.state = state

    def replaced(self, stream: str, before: Tensor, after: str) -> errors.RetrogradError:
        where = f"before update {self.index} of {len(self.program)},"
        return errors.replaced_stream(where, stream, describe(before), after)

    def update(self, step: Step) -> None:
        """Apply one update."""
        state, target = self.state, self.state[step.target]
        leaves: list[Tensor] = []
        if (
            not torch.compiler.is_compiling()
        ):  # a graph that is traced has neither versions nor anything to rebuild
            # Inference tensors count no versions; nothing will ever be rebuilt from them either.
            leaves = [
                leaf
                for name in (step.target, *step.reads)
                for leaf in state[name]
                if not leaf.is_inference()
            ]
        versions = [leaf._version for leaf in leaves]
        reads = [self.read(name) for name in step.reads]
        try:
            parts, aux = fit(
                call(step, reads, self.keywords),
                self.program,
                self.index,
                target,
                self.specs[step.target],
            )
            updated = couple(step, target, parts)
        except Exception as error:
            self.blame(error, leaves)
            raise
        if versions != [leaf._version for leaf in leaves]:
            raise self.edited_input(leaves, versions)
        self.state[step.target] = updated
        self.casts.pop(step.target, None)
        if self.grid is not None:
            self.note_range(step.target, self.index)
        self.aux += aux
        self.index += 1

    def undo(self, step: Step) -> None:
        """Take the last update back.

        The function runs with or without gradients, as its caller does, because modules choose
        their kernels by that, and another kernel rounds otherwise. Its graph is dropped at once.
        """
        self.index -= 1
        state, target = self.state, self.state[step.target]
        reads = [self.read(name) for name in step.reads]
        parts, _ = fit(
            call(step, reads, self.keywords),
            self.program,
            self.index,
            target,
            self.specs[step.target],
        )
        with torch.no_grad():
            state[step.target] = tuple(
                [step.coupling.inverse(y, *out) for y, out in zip(target, parts)]
            )
        self.casts.pop(step.target, None)
        if self.grid is not None:
            self.note_range(step.target, self.index)

    def finish(self) -> None:
        """Called after the last update, before anyone else sees the streams. Raises if a value left
        the grid's range.
        """
        ranges, self.ranges = self.ranges, []
        # Where a graph is traced or transformed there are no values to look at. Nothing is rebuilt
        # there either.
        ranges = [r for r in ranges if type(r[-1]) is Tensor and not r[-1].is_meta]
        if not ranges or are_transforms_active() or torch.compiler.is_compiling():
            return
        device = ranges[0][-1].device
        ends = torch.stack(
            [end.to(device) for *_, low, high in ranges for end in (low, high)]
        ).tolist()
        values = [max(pair, key=abs) for pair in zip(ends[::2], ends[1::2])]
        for (name, index, dtype, *_), value in zip(ranges, values):
            limit = self.grid.limit(dtype)  # type: ignore[union-attr]
            if not abs(value) < limit:
                where = f"{self.origin}:" if index is None else f"{place(self.program, index)}:"
                largest = max(
                    abs(v) for v, (_, _, other, *_) in zip(values, ranges) if other == dtype
                )
                bits = self.grid.bits_of(dtype)  # type: ignore[union-attr]
                raise errors.out_of_range(
                    where, name, value, largest, limit, bits, str(dtype).removeprefix("torch.")
                )

    def blame(self, error: Exception, leaves: Leaves) -> None:
        """Say in which update a function failed: a note on its own error, or ours if torch refused
        to edit a leaf in place.
        """
        for leaf in leaves:
            if (
                "leaf Variable that requires grad" in str(error)
                and leaf.is_leaf
                and leaf.requires_grad
            ):
                raise self.edited_input([leaf], [-1]) from error
        reads = [(name, flatten(self.read(name))[0]) for name in self.program[self.index].reads]
        errors.note(error, place(self.program, self.index), reads)

    def edited_input(self, leaves: Leaves, versions: list[int]) -> errors.RetrogradError:
        edited = next(leaf for leaf, version in zip(leaves, versions) if leaf._version != version)
        step = self.program[
            self.index
        ]  # reads first: at the start of a stack, target and read may be one tensor
        name = next(
            name
            for name in (*step.reads, step.target)
            if any(leaf is edited for leaf in self.state[name])
        )
        return errors.edited_input(place(self.program, self.index), name, describe(edited))


def place(program: Program, index: int) -> str:
    """Where an error is: `update 7 of 48 (blocks.3.g)`."""
    return f"update {index} of {len(program)} ({program[index].name})"


def range_of(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Its least and its largest element; of the local part, if it is sharded. NaN if there
    is one.
    """
    leaf = local(leaf.detach())
    return torch.aminmax(torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf)


def is_cast(after: Tensor, before: Tensor) -> bool:
    return after.dtype != before.dtype and after.is_floating_point() and after.shape == before.shape


def read(leaves: Leaves, spec: Spec, dtypes: Dtypes) -> Any:
    """A stream as functions and callers see it."""
    if dtypes is not None:
        leaves = [leaf if dtype is None else leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes)]
    return leaves[0] if spec is None else unflatten(leaves, spec)


def call(step: Step, reads: list[Any], keywords: dict[str, Any]) -> Any:
    """Run the function, through its `__call__`: hooks are how FSDP, profilers and users attach."""
    if not step.keywords and not observers:
        return step.fn(*reads)
    arguments = {inner: keywords[outer] for inner, outer in step.keywords.items()}
    return observers[-1].call(step, reads, arguments) if observers else step.fn(*reads, **arguments)


def couple(step: Step, target: Leaves, parts: Parts) -> tuple[Tensor, ...]:
    """The target after the update."""
    forward = step.coupling.forward
    if len(parts) == 1:
        return (forward(target[0], *parts[0]),)  # nearly always
    return tuple([forward(x, *out) for x, out in zip(target, parts)])


def fit(
    output: Any, program: Program, index: int, target: Leaves, spec: Spec
) -> tuple[Parts, Sequence[Any]]:
    """A function's output as arguments for the coupling, leaf by leaf, if it fits; and its aux, if
    it has any.
    """
    names, aux = program[index].returns, ()
    if spec is None and isinstance(output, Tensor) and len(names) == 1:
        if output.shape == target[0].shape and output.dtype == target[0].dtype:
            return [(output,)], aux  # nearly always
    if isinstance(output, WithAux):
        output, aux = output.output, (output.aux,)
    if len(names) == 1:
        return [(out,) for out in _fitting(output, program, index, target, spec)], aux
    if not isinstance(output, (tuple, list)) or len(output) != len(names):
        wanted = f"({', '.join(names)})"
        raise errors.misfit(
            place(program, index),
            f"{describe(output)}, not {wanted}",
            f"return the tuple {wanted}.",
        )
    return list(zip(*(_fitting(value, program, index, target, spec) for value in output))), aux


def _fitting(output: Any, program: Program, index: int, target: Leaves, spec: Spec) -> Leaves:
    """The leaves of `output`, if they have the target's structure and shapes and do not widen its
    dtypes.
    """
    leaves = flatten_like(output, spec)
    stream = f"stream {program[index].target!r}"
    if leaves is None:
        whole = describe(unflatten(target, spec))
        fix = (
            f"return the structure of {stream}, {whole}; for anything besides, return "
            "rg.WithAux(output, aux)."
        )
        raise errors.misfit(place(program, index), f"{describe(output)}; {stream} is {whole}", fix)
    for x, out in zip(target, leaves):
        narrow = out.dtype == x.dtype or torch.promote_types(out.dtype, x.dtype) == x.dtype
        if out.shape != x.shape or not narrow:
            fix = (
                f"return shape {list(x.shape)} and {str(x.dtype).removeprefix('torch.')} or a "
                "narrower dtype"
            )
            fix += "." if narrow else f"; or start from a wider stream, such as x.to({out.dtype})."
            raise errors.misfit(
                place(program, index), f"{describe(out)}; {stream} is {describe(x)}", fix
            )
    # A coupling of ours adds what is narrower; a user's own need not know that there is such a
    # thing.
    return (
        leaves
        if isinstance(program[index].coupling, TRUSTED)
        else [out.to(x.dtype) for x, out in zip(target, leaves)]
    )
