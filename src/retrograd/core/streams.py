"""How an input becomes two streams and two streams an output, and how a value becomes leaves.

A *stream* is a tensor or a pytree of tensors. The engine works on its leaves, so every rule here is
for one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from retrograd.core.private import pytree

Leaves = Sequence[Tensor]
Spec = Any  # a TreeSpec, or None for a bare tensor (the usual case, kept free of tree work)


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of `value` and what puts them together again."""
    if isinstance(value, Tensor):
        return [value], None
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def flatten_like(value: Any, spec: Spec) -> Leaves | None:
    """The leaves of `value` if it is made like `spec`, in its order of keys, and all are
    tensors.
    """
    try:
        leaves = [value] if spec is None else spec.flatten_up_to(value)
    except ValueError:
        return None
    return leaves if all(isinstance(leaf, Tensor) for leaf in leaves) else None


def flatten_stream(value: Any, name: str) -> tuple[Leaves, Spec]:
    """`flatten` for a stream, whose leaves must be tensors."""
    leaves, spec = flatten(value)
    for path, leaf in (
        zip(leaf_names(value), leaves)
        if not all(isinstance(leaf, Tensor) for leaf in leaves)
        else ()
    ):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name}{path} is {type(leaf).__name__} ({leaf!r:.60}). A stream is a tensor or a "
                "pytree (dict, list, tuple) of "
                "tensors; pass anything else as a keyword argument."
            )
    for leaf in leaves:
        if leaf.is_nested or leaf.layout != torch.strided:
            kind = (
                "a nested tensor"
                if leaf.is_nested
                else f"of layout {str(leaf.layout).removeprefix('torch.')}"
            )
            raise TypeError(
                f"{name} is {kind}. Streams are strided tensors: pad it, or make it dense; "
                "functions may use any."
            )
    return leaves, spec


def dense(leaf: Tensor) -> Tensor:
    """The tensor itself, or a copy if its memory has gaps or overlaps (a slice, an expanded
    tensor).

    [Note: why streams are dense] What backward rebuilds is dense, in the order of dimensions that
    forward had. Were the input a slice, the function would see other strides the second time, and
    kernels may round differently on them; `nn.Linear` even saves other tensors. The copy also lets
    go of the tensor that the slice is of.
    """
    if (
        leaf.is_contiguous()
        or type(leaf) is not Tensor
        or torch.empty_like(leaf, device="meta").stride() == leaf.stride()
    ):
        return leaf
    return leaf.clone()


def local(tensor: Any) -> Any:
    """What this process has of a tensor: its shard of a distributed one, any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def largest_shard(tensor: Any) -> int:
    """Bytes of a tensor: of the largest shard that any process has, if it is distributed. So the
    same in every process.
    """
    shape = list(tensor.shape)
    for i, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // tensor.device_mesh.size(i))
    return math.prod(shape) * tensor.element_size()


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor is in."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def nbytes(tensor: Tensor) -> int:
    """Of the tensor itself, of whatever layout."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return (
        tensor.values().nbytes
        if tensor.is_sparse_csr
        else math.prod(tensor.shape) * tensor.element_size()
    )


def distinct_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory that these tensors are in, each piece counted once."""
    memory = {storage_of(t): t for t in tensors if t is not None}.values()
    return sum(
        t.untyped_storage().nbytes() if t.layout == torch.strided else nbytes(t) for t in memory
    )


def leaf_names(value: Any) -> list[str]:
    """How each leaf is reached, for messages: `['0']`, `[1]`, or nothing for a bare tensor."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]


def describe(value: Any) -> str:
    """A value's kind, dtype and shape in a few words, for messages: `float32[4, 512]`,
    `dict of 2`.
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    leaves, _ = flatten(value)
    if isinstance(value, (dict, list, tuple)):
        inside = ", ".join(describe(leaf) for leaf in leaves[:4]) + (
            ", ..." if len(leaves) > 4 else ""
        )
        return f"{type(value).__name__} of {len(value)} ({inside})"
    return type(value).__name__


@dataclass(frozen=True)
class Duplicate:
    """Both streams start as the input; the output is their mean, or their sum.

    The width of the network stays that of the input. What went in cannot be told from what comes
    out, so `stack.inverse` needs `Split` instead.
    """

    merge: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.merge not in ("mean", "sum"):
            raise ValueError(f'Duplicate(merge={self.merge!r}): merge must be "mean" or "sum".')

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def join(self, y1: Tensor, y2: Tensor) -> Tensor:
        return (y1 + y2) / 2 if self.merge == "mean" else y1 + y2


@dataclass(frozen=True)
class Split:
    """The streams are the two halves of the input along `dim`; the output is their concatenation,
    of the input's shape.
    """

    dim: int = -1
    invertible = True  # no annotation: a fact about the class, not a field

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not -x.ndim <= self.dim < x.ndim:
            raise ValueError(
                f"Split(dim={self.dim}): the input has {x.ndim} dimensions ({describe(x)}). Choose "
                "dim within them."
            )
        if x.shape[self.dim] % 2:
            raise ValueError(
                f"Split(dim={self.dim}): size {x.shape[self.dim]} of {describe(x)} is odd and has "
                "no two equal halves. Pad it to "
                f"{x.shape[self.dim] + 1}, choose another dim, or use streams=rg.Duplicate()."
            )
        x1, x2 = x.chunk(2, self.dim)
        return (
            x1.clone(),
            x2.clone(),
        )  # even where a half is dense: it would keep all of the input alive

    def join(self, y1: Tensor, y2: Tensor) -> Tensor:
        return torch.cat((y1, y2), self.dim)


@dataclass(frozen=True)
class AtRest:
    """For `Momentum`: the position starts as the input and the velocity as zero; the output is the
    position.
    """

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x

    def join(self, y1: Tensor, y2: Tensor) -> Tensor:
        return y2
