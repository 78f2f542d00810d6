"""How an input becomes streams, how streams become an output, and how a value becomes leaves.

A *stream* is a tensor or a pytree of tensors. The engine works on its leaves, so every rule here is
for one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import (
    Any,
    Literal,
    Protocol,
)

import torch
from torch import Tensor

from retrograd.core.private import pytree
from retrograd.core.tensors import describe

Leaves = Sequence[Tensor]
State = dict[str, tuple[Tensor, ...]]  # the leaves of each stream, between two updates
Spec = Any  # a TreeSpec, or None for a bare tensor, which needs no tree work
Dtypes = list["torch.dtype | None"] | None  # how functions read a stream; None: as it is


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of `value`, and the spec that puts them together again."""
    if isinstance(value, Tensor):
        return [value], None
    return pytree.tree_flatten(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The leaves of `value` that are tensors."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def flatten_like(value: Any, spec: Spec) -> Leaves | None:
    """The leaves of `value` in the order of `spec`; None if the structure differs."""
    try:
        leaves = [value] if spec is None else spec.flatten_up_to(value)
    except ValueError:
        return None
    return leaves if all(isinstance(leaf, Tensor) for leaf in leaves) else None


def flatten_stream(value: Any, name: str) -> tuple[Leaves, Spec]:
    """`flatten` for a stream, whose leaves must be strided tensors."""
    leaves, spec = flatten(value)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise _not_a_stream(value, name)
    for leaf in leaves:
        if leaf.is_nested or leaf.layout != torch.strided:
            raise _not_strided(leaf, name)
    return leaves, spec


def _not_a_stream(value: Any, name: str) -> TypeError:
    paths = pytree.tree_flatten_with_path(value)[0]
    path, leaf = next((path, leaf) for path, leaf in paths if not isinstance(leaf, Tensor))
    return TypeError(
        f"{name}{pytree.keystr(path)} is {type(leaf).__name__} ({leaf!r:.60}). A stream is a "
        "tensor or a pytree (dict, list, tuple) of tensors; pass anything else as a keyword "
        "argument."
    )


def _not_strided(leaf: Tensor, name: str) -> TypeError:
    layout = str(leaf.layout).removeprefix("torch.")
    kind = "a nested tensor" if leaf.is_nested else f"of layout {layout}"
    return TypeError(
        f"{name} is {kind}. Streams are strided tensors: pad it, or make it dense. Inside a "
        "function, tensors may have any layout."
    )


def read(
    leaves: Leaves,
    spec: Spec,
    dtypes: Dtypes,
) -> Any:
    """A stream as functions and callers see it: in its own structure and in `dtypes`."""
    if dtypes is not None:
        pairs = zip(leaves, dtypes)
        leaves = [leaf if dtype is None else leaf.to(dtype) for leaf, dtype in pairs]
    return leaves[0] if spec is None else unflatten(leaves, spec)


class StreamRule(Protocol):
    """How one input tensor becomes two streams, and two streams one output tensor."""

    def split(self, x: Tensor, /) -> tuple[Tensor, ...]: ...
    def join(self, y1: Tensor, y2: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Duplicate:
    """Both streams start as the input; the output is their mean, their sum, or both of them.

    The network is as wide as the input. Mean and sum are not invertible, so `stack.inverse` needs
    `merge="cat"`, which concatenates the streams along `dim`, or `Split`.
    """

    merge: Literal["mean", "sum", "cat"] = "mean"
    dim: int = -1

    def __post_init__(self) -> None:
        if self.merge not in ("mean", "sum", "cat"):
            raise ValueError(
                f'Duplicate(merge={self.merge!r}): merge must be "mean", "sum" or "cat".'
            )

    @property
    def invertible(self) -> bool:
        return self.merge == "cat"

    def unjoin(self, y: Tensor) -> tuple[Tensor, ...]:
        """The streams that an output consists of, for `inverse`."""
        return Split(self.dim).split(y)

    def rejoin(
        self,
        x1: Tensor,
        x2: Tensor,
    ) -> Tensor:
        """The input that two streams started as, for `inverse`."""
        return x1

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def join(
        self,
        y1: Tensor,
        y2: Tensor,
    ) -> Tensor:
        if self.merge == "cat":
            return torch.cat((y1, y2), self.dim)
        return (y1 + y2) / 2 if self.merge == "mean" else y1 + y2


@dataclass(frozen=True)
class Split:
    """The streams are parts of the input along `dim`; the output concatenates them.

    Args:
        dim: the dimension that is split.
        parts: how many equal parts: 2 for a stack of pairs. Or the size of each part.

    Example:
        >>> [part.shape[-1] for part in rg.Split(parts=(2, 6)).split(torch.zeros(3, 8))]
        [2, 6]
    """

    dim: int = -1
    parts: int | tuple[int, ...] = 2
    invertible = True  # no annotation: a fact about the class, not a field

    def __post_init__(self) -> None:
        sizes = self.parts if isinstance(self.parts, tuple) else (self.parts,)
        if type(self.dim) is not int:
            raise TypeError(f"Split(dim={self.dim!r}): dim is a whole number.")
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"Split(parts={self.parts!r}): pass a number of equal parts, or a tuple with the "
                "size of each."
            )

    @property
    def count(self) -> int:
        """How many streams there are."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        if not -x.ndim <= self.dim < x.ndim:
            raise ValueError(
                f"Split(dim={self.dim}): the input has {x.ndim} dimensions ({describe(x)}). "
                "Choose dim within them."
            )
        parts = x.split(self._sizes(x), self.dim)
        # Cloned even where a part is dense: as a view it would keep all of the input alive.
        return tuple([part.clone() for part in parts])

    def _sizes(self, x: Tensor) -> list[int]:
        size = x.shape[self.dim]
        if not isinstance(self.parts, int):
            if sum(self.parts) != size:
                raise ValueError(
                    f"Split(parts={self.parts}): the parts have {sum(self.parts)} elements, and "
                    f"{describe(x)} has {size} along dim {self.dim}."
                )
            return list(self.parts)
        if size % self.parts:
            larger = -(-size // self.parts) * self.parts
            what = "is odd and has no two" if self.parts == 2 else f"has no {self.parts}"
            halves = "halves" if self.parts == 2 else "parts"
            raise ValueError(
                f"Split(dim={self.dim}): size {size} of {describe(x)} {what} equal {halves}. Pad "
                f"it to {larger}, choose another dim, or use streams=rg.Duplicate()."
            )
        return [size // self.parts] * self.parts

    def join(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)


@dataclass(frozen=True)
class AtRest:
    """For `Momentum`: the velocity starts at zero, the position starts as the input.

    The output is the position.
    """

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x

    def join(
        self,
        y1: Tensor,
        y2: Tensor,
    ) -> Tensor:
        return y2
