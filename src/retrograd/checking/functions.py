"""Each function by itself: does recompute do what forward did?

Recompute gets the same input as forward. So if the output differs, the function is not
deterministic, or it depends on state that changed; the record shows which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from retrograd.checking.compare import (
    are_same,
    is_real_valued,
    is_same,
    largest,
    largest_difference,
    rounding_limit,
)
from retrograd.checking.crawl import PLAIN_TYPES, crawl
from retrograd.checking.fingerprints import Change, Fingerprint, changes_between, fingerprints
from retrograd.checking.generators import unreplayed_states
from retrograd.core.guards.arguments import OTHER
from retrograd.core.streams import tensors_in
from retrograd.core.updates import WithAux

Given = tuple[Sequence[Any], dict[str, Any]]  # all arguments: what it reads, and by keyword


class ForwardCall(NamedTuple):
    """The tensors that a call in forward got and returned."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class FunctionRecord:
    """What one function did in forward, and when it ran again on the same input."""

    name: str
    fn: Callable[..., Any]
    comparisons: int = 0  # calls in recompute that were compared with forward
    mismatches: int = 0  # those that were not, because they had other arguments
    difference: float = 0.0  # of the output, relative to its size; 0: bit-identical
    excess: float = 0.0  # the difference, relative to what rounding in its dtype explains
    edits_input: bool = False  # without autograd's knowledge
    target_path: str | None = None  # where the function holds the stream that it updates
    draws: set[str] = field(default_factory=set)  # global generators that are not replayed
    changes: list[Change] = field(default_factory=list)  # of Python state, in recompute
    argument_changes: list[Change] = field(default_factory=list)  # of arguments, in forward
    raised: str | None = None  # in recompute

    @property
    def is_spoilt_by_arguments(self) -> bool:
        """Whether it changes an argument, and recompute is not what forward was."""
        is_same = not self.mismatches and not self.difference and self.raised is None
        return bool(self.argument_changes) and not is_same

    def compare(self, again: list[Tensor], first: list[Tensor]) -> None:
        """Note how far the outputs of recompute are from those of forward."""
        self.comparisons += 1
        if not _are_alike(again, first):
            self.difference = math.inf
            self.excess = math.inf
            return
        for a, b in zip(again, first):
            if not is_same(a, b):
                difference, excess = _difference(a, b)
                self.difference = max(self.difference, difference)
                self.excess = max(self.excess, excess)


class WatchedFunction:
    """The function of one update: runs it, and notes in `record` what it did.

    `replayed` has the ids of modules and generators that the engine replays, and the memory of
    tensors.
    """

    def __init__(self, fn: Callable[..., Any], record: FunctionRecord) -> None:
        self.fn = fn
        self.record = record
        self.replayed: Collection[int] = ()
        self.forward_calls: list[ForwardCall] = []

    def forward(self, run: Callable[[], Any], given: Given, target: Sequence[Tensor]) -> Any:
        """Run the function in forward, and remember the call."""
        inputs = _copies(given)
        if self.record.target_path is None:
            self.record.target_path = self._path_to(target, inputs)
        before = _argument_fingerprints(given)
        output = self._run(run, given, inputs)
        _add_new(self.record.argument_changes, before, _argument_fingerprints(given))
        self.forward_calls.append(ForwardCall(inputs, _copies(output)))
        return output

    def recompute(self, run: Callable[[], Any], given: Given) -> Any:
        """Run the function again, and compare with the forward call that had the same input."""
        inputs = _copies(given)
        before = self._fingerprints()
        try:
            output = self._run(run, given, inputs)
        except Exception as error:
            self.record.raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            _add_new(self.record.changes, before, self._fingerprints())
        self._compare(inputs, output)
        return output

    def _compare(self, inputs: list[Tensor], output: Any) -> None:
        """Compare with the forward call that had the same inputs."""
        for i, call in reversed(list(enumerate(self.forward_calls))):
            if are_same(call.inputs, inputs):
                del self.forward_calls[i]
                self.record.compare(_copies(output), call.outputs)
                return
        self.record.mismatches += bool(self.forward_calls)

    def _run(self, run: Callable[[], Any], given: object, inputs: list[Tensor]) -> Any:
        """Call the function; note whether it drew random numbers or wrote to its input."""
        before = unreplayed_states()
        output = run()
        after = unreplayed_states()
        self.record.draws |= {name for name, state in before.items() if after[name] != state}
        self.record.edits_input |= not all(map(is_same, inputs, _tensors(given)))
        return output

    def _fingerprints(self) -> dict[str, Fingerprint]:
        return fingerprints(self.record.name, self.fn, self.replayed)

    def _path_to(self, target: Sequence[Tensor], inputs: list[Tensor]) -> str | None:
        """Where the function holds the stream that it is about to update, if it does."""
        for reference in crawl(self.record.name, self.fn, self.replayed):
            value = reference.value
            if not isinstance(value, Tensor) or value.numel() <= 1:
                continue
            is_target = any(is_same(value, leaf) for leaf in target)
            if is_target and not any(is_same(value, leaf) for leaf in inputs):
                return reference.path
        return None


def _add_new(
    known: list[Change], before: dict[str, Fingerprint], after: dict[str, Fingerprint]
) -> None:
    """Add the changes between two sets of fingerprints that are not known yet."""
    known += [change for change in changes_between(before, after) if change not in known]


def _argument_fingerprints(given: Given) -> dict[str, Fingerprint]:
    """The fingerprints of the objects in keyword arguments. Inputs are compared as tensors."""
    found: dict[str, Fingerprint] = {}
    for name, value in given[1].items():
        if not isinstance(value, (Tensor, *PLAIN_TYPES, *OTHER)):
            found |= fingerprints(name, value)
    return found


def _are_alike(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether they have the same shapes and dtypes."""
    if len(first) != len(second):
        return False
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(first, second))


def _difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The relative difference, and the same relative to what rounding explains."""
    if not is_real_valued(a):
        return math.inf, math.inf
    size = largest(b)
    difference = largest_difference(a, b) / size if size else math.inf
    return difference, difference / rounding_limit(a.dtype)


def _tensors(value: object) -> list[Tensor]:
    """The tensors in a pytree; for a `WithAux`, those of its aux too."""
    tree = (value.output, value.aux) if isinstance(value, WithAux) else value
    return [tensor.detach() for tensor in tensors_in(tree)]


def _copies(value: object) -> list[Tensor]:
    return [tensor.clone() for tensor in _tensors(value)]
