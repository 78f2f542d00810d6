"""Keeping what single operations inside a function returned, so that they need not run again.

This is what selective checkpointing of torch does (`create_selective_checkpoint_contexts`), with
two differences that a recompute inside backward needs. An operation that forward did not run simply
runs (autocast casts a shared weight once in forward and twice in recompute). And a graph may be
walked twice. An operation also runs again if it stands elsewhere in the function than in forward,
if its inputs have other shapes, or if what it had returned was edited since.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, NamedTuple

from torch import Tensor

from retrograd.core.memory import Operation
from retrograd.core.private import DispatchMode
from retrograd.core.saved import Saved, save
from retrograd.core.streams import (
    Spec,
    flatten,
    unflatten,
)
from retrograd.core.tensors import ShapeAndDtype, shape_and_dtype, storage_of
from retrograd.core.watch import written_by


class KeptOperation(NamedTuple):
    position: int  # how many tensors autograd had saved before it: where in the function it was
    inputs: list[ShapeAndDtype]
    leaves: list[Any]  # what it returned, with each tensor as a `Saved`
    spec: Spec


class KeepOperations(DispatchMode):
    """While active, keeps what the chosen operations return."""

    def __init__(
        self,
        chosen: frozenset[Operation],
        saved: Sized,
    ) -> None:
        super().__init__()
        self.chosen = chosen
        self.saved = saved  # what autograd has saved of the function so far
        self.calls: dict[Any, int] = {}
        self.kept: dict[Operation, KeptOperation] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            self._copy_before_write(storage_of(tensor))
        result = func(*args, **(kwargs or {}))
        number = self.calls[func] = self.calls.get(func, -1) + 1
        if (func, number) in self.chosen:
            leaves, spec = flatten(result)
            leaves = [save(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            kept = KeptOperation(len(self.saved), _shapes(args), leaves, spec)
            self.kept[func, number] = kept
        return result

    def _copy_before_write(self, memory: int) -> None:
        """The function edits what an operation returned: keep it as it is now.

        Versions do not tell: inside a mode, aliases count edits for themselves.
        """
        for kept in self.kept.values():
            for i, leaf in enumerate(kept.leaves):
                if _is_saved(leaf) and storage_of(leaf.content) == memory:
                    kept.leaves[i] = save(leaf.content.clone())


class ReuseOperations(DispatchMode):
    """While active, operations that were kept return what they returned then."""

    def __init__(
        self,
        kept: dict[Operation, KeptOperation],
        saved: Sized,
    ) -> None:
        super().__init__()
        self.kept = kept
        self.saved = saved
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        number = self.calls[func] = self.calls.get(func, -1) + 1
        kept = self.kept.get((func, number))
        if kept is None or not self._is_same(kept, args):
            return func(*args, **(kwargs or {}))
        leaves = [leaf.content.detach() if _is_saved(leaf) else leaf for leaf in kept.leaves]
        return unflatten(leaves, kept.spec)

    def _is_same(
        self,
        kept: KeptOperation,
        args: Any,
    ) -> bool:
        """Whether this is the operation that was kept, and what it returned is unchanged."""
        if kept.position != len(self.saved) or kept.inputs != _shapes(args):
            return False
        return not any(leaf.is_edited for leaf in kept.leaves if _is_saved(leaf))


def _is_saved(leaf: Any) -> bool:
    return isinstance(leaf, Saved)


def _shapes(args: Any) -> list[ShapeAndDtype]:
    return [shape_and_dtype(leaf) for leaf in flatten(args)[0] if isinstance(leaf, Tensor)]
