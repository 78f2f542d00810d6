"""One pass of a program over its streams, as ordinary autograd code.

`Run` is plain: forward update by update, or backward with `undo`. `tape.Tape` is the same pass, recorded, so that what is
checked here (outputs that fit, inputs left alone) is checked once for every memory mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.errors import InPlaceError, OutputError, explain
from retrograd.core.streams import Leaves, Spec, describe, flatten, flatten_stream, unflatten
from retrograd.core.updates import Coupling, WithAux

Parts = list[tuple[Tensor, ...]]  # for each leaf of the target, what the coupling gets besides it


class Step(NamedTuple):
    """One update, ready to run. `keywords` maps what the function calls an argument to what the caller called it."""

    name: str
    target: str
    reads: tuple[str, ...]
    fn: Callable[..., Any]
    coupling: Coupling
    keywords: dict[str, str]
    returns: tuple[str, ...]  # what the coupling wants from the function


class Run:
    """One pass of `program` over `streams`."""

    def __init__(self, streams: dict[str, Any], keywords: dict[str, Any], program: Sequence[Step]) -> None:
        self.state: dict[str, Leaves] = {}
        self.specs: dict[str, Spec] = {}
        for name, value in streams.items():
            self.state[name], self.specs[name] = flatten_stream(value, name)
        self.keywords = keywords
        self.program = program
        self.index = 0  # of the next update
        self.aux: list[Any] = []

    def streams(self) -> dict[str, Any]:
        return {name: unflatten(leaves, self.specs[name]) for name, leaves in self.state.items()}

    def enter(self, state: dict[str, Leaves]) -> None:
        """Go on from `state`: what a block was called with, or returned, after the hooks on it ran."""
        self.state = state

    def update(self, step: Step) -> None:
        """Apply one update."""
        state, specs = self.state, self.specs
        # Inference tensors count no versions; nothing will ever be rebuilt from them either.
        leaves = [leaf for name in (step.target, *step.reads) for leaf in state[name] if not leaf.is_inference()]
        versions = [leaf._version for leaf in leaves]
        reads = [unflatten(state[name], specs[name]) for name in step.reads]
        parts, aux = self.parts(step, self.index, call(step, reads, self.keywords), state[step.target])
        updated = couple(step, state[step.target], parts)
        if versions != [leaf._version for leaf in leaves]:
            raise self.edited_input(step, leaves, versions)
        self.state[step.target] = updated
        self.aux += aux
        self.index += 1

    @torch.no_grad()
    def undo(self, step: Step) -> None:
        """Take the last update back, without autograd."""
        self.index -= 1
        reads = [unflatten(self.state[name], self.specs[name]) for name in step.reads]
        target = self.state[step.target]
        parts, _ = self.parts(step, self.index, call(step, reads, self.keywords), target)
        self.state[step.target] = [step.coupling.inverse(y, *out) for y, out in zip(target, parts)]

    def finish(self) -> None:
        """Called after the last update, before anyone else sees the streams."""

    def where(self, index: int) -> str:
        return f"update {index} of {len(self.program)} ({self.program[index].name})"

    # --- a function's output, checked against the stream that it enters

    def parts(self, step: Step, index: int, output: Any, target: Leaves) -> tuple[Parts, Sequence[Any]]:
        """The output as arguments for the coupling, leaf by leaf; and its aux, if it has any, in a list."""
        spec, names, aux = self.specs[step.target], step.returns, ()
        if spec is None and isinstance(output, Tensor) and len(names) == 1:
            if output.shape == target[0].shape and output.dtype == target[0].dtype:
                return [(output,)], aux  # nearly always
        if isinstance(output, WithAux):
            output, aux = output.output, (output.aux,)
        if len(names) == 1:
            return [(out,) for out in self.fitting(step, index, output, target, spec)], aux
        if not isinstance(output, (tuple, list)) or len(output) != len(names):
            wanted = f"({', '.join(names)})"
            raise self.misfit(index, f"{describe(output)}, not {wanted}", f"return the tuple {wanted}.")
        return list(zip(*(self.fitting(step, index, value, target, spec) for value in output))), aux

    def fitting(self, step: Step, index: int, output: Any, target: Leaves, spec: Spec) -> Sequence[Tensor]:
        """The leaves of `output`, if they have the target's structure and shapes and do not widen its dtypes."""
        leaves, output_spec = flatten(output)
        stream = f"stream {step.target!r}"
        if output_spec != spec or not all(isinstance(leaf, Tensor) for leaf in leaves):
            whole = describe(unflatten(target, spec))
            raise self.misfit(index, f"{describe(output)}; {stream} is {whole}", f"return the structure of {stream}.")
        for x, out in zip(target, leaves):
            narrow = out.dtype == x.dtype or torch.promote_types(out.dtype, x.dtype) == x.dtype
            if out.shape != x.shape or not narrow:
                dtype = str(x.dtype).removeprefix("torch.")
                fix = f"return shape {list(x.shape)} and {dtype} or a narrower dtype"
                fix += "." if narrow else f"; or start from a wider stream, such as x.to({out.dtype})."
                raise self.misfit(index, f"{describe(out)}; {stream} is {describe(x)}", fix)
        return leaves

    def misfit(self, index: int, what: str, fix: str) -> OutputError:
        why = "an output can be taken back out of its target only if it has the target's structure, shape and dtype."
        return OutputError(explain(self.where(index), f"returned {what}.", why, fix))

    def edited_input(self, step: Step, leaves: Leaves, versions: list[int]) -> InPlaceError:
        edited = next(leaf for leaf, version in zip(leaves, versions) if leaf._version != version)
        name = next(name for name, values in self.state.items() if any(value is edited for value in values))
        return InPlaceError(
            explain(
                self.where(self.index),
                f"changed its input in place: stream {name!r}, {describe(edited)}.",
                "backward runs the function again and must find the input that forward found.",
                "use the out-of-place operation (x + 1, not x.add_(1); inplace=False), or start the function with x.clone().",
            )
        )


def couple(step: Step, target: Leaves, parts: Parts) -> Leaves:
    """The target after the update."""
    forward = step.coupling.forward
    return [forward(x, *out) for x, out in zip(target, parts)]


def call(step: Step, reads: list[Any], keywords: dict[str, Any]) -> Any:
    """Run the function, through its `__call__`: hooks are how FSDP, profilers and users attach."""
    if not step.keywords:
        return step.fn(*reads)
    return step.fn(*reads, **{inner: keywords[outer] for inner, outer in step.keywords.items()})
