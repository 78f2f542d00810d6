"""Keeping what single operations inside a function returned, so that they need not run again.

As torch's selective checkpointing does
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`), with two differences that a
recompute inside backward needs: an operation that forward did not run simply runs (autocast casts a
shared weight once in forward and twice in recompute), and a graph may be walked twice. Where an
operation stands elsewhere in the function than in forward, has inputs of other shapes, or what it
had returned was written to since, it runs as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from retrograd.core.private import DispatchMode
from retrograd.core.streams import Spec, flatten, unflatten

Operation = tuple[Any, int]  # an operation, and which of its calls


class Kept(NamedTuple):
    saves: int  # how many tensors autograd had saved before: where in the function it was
    inputs: list[Any]  # shapes and dtypes
    leaves: list[Any]  # what it returned, outside the graph
    spec: Spec
    versions: list[int]


class KeepOperations(DispatchMode):
    """While active, keeps what the chosen operations return."""

    supports_higher_order_operators = True

    def __init__(self, chosen: frozenset[Operation], frame: Any) -> None:
        super().__init__()
        self.chosen = chosen
        self.frame = frame
        self.calls: dict[Any, int] = {}
        self.kept: dict[Operation, Kept] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        number = self.calls[func] = self.calls.get(func, -1) + 1
        if (func, number) in self.chosen:
            leaves, spec = flatten(result)
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.kept[func, number] = Kept(
                len(self.frame.store), _shapes(args), leaves, spec, _versions(leaves)
            )
        return result


class ReuseOperations(DispatchMode):
    """While active, operations that were kept return what they did then."""

    supports_higher_order_operators = True

    def __init__(self, kept: dict[Operation, Kept], recount: Any) -> None:
        super().__init__()
        self.kept = kept
        self.recount = recount
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self.calls[func] = self.calls.get(func, -1) + 1
        kept = self.kept.get((func, number))
        if kept is None or kept.saves != len(self.recount.store):
            return func(*args, **(kwargs or {}))
        if kept.inputs != _shapes(args) or kept.versions != _versions(kept.leaves):
            return func(*args, **(kwargs or {}))
        return unflatten(
            [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in kept.leaves], kept.spec
        )


def _shapes(args: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in flatten(args)[0] if isinstance(leaf, Tensor)]


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
