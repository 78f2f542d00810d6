"""How many bytes the backward of one operation needs: measured on tensors without values.

Formulas of derivatives have intermediate tensors of their own: `x.square()` has two of the size of
`x`. To know them all by heart is to guess. So the operation and its backward run once on tensors of
the device `meta`, which have shapes and no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.streams import flatten, unflatten
from retrograd.core.tensors import nbytes
from retrograd.measure import LiveBytes


class Shape(NamedTuple):
    """A tensor without values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool  # the bytes of its gradient do not count


class Arguments:
    """The arguments of an operation, with a `Shape` for each tensor. Compares by value."""

    def __init__(self, args: Any, kwargs: Any, is_parameter: Callable[[Tensor], bool]) -> None:
        leaves, self.spec = flatten((args, kwargs))
        self.leaves = [
            Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype, is_parameter(leaf))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self.key = (repr(self.leaves), self.spec)

    def __hash__(self) -> int:
        return hash(self.key[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arguments) and self.key == other.key


@functools.lru_cache(maxsize=4096)
def peak_of_backward(func: Any, arguments: Arguments) -> int:
    """The most bytes that are alive while the backward of an operation runs: gradients of inputs,
    and what the formula needs beside them. 0 if it cannot be run without values.
    """
    if func._schema.is_mutable:
        return 0
    leaves = [_without_values(leaf) for leaf in arguments.leaves]
    inputs = [leaf for leaf in leaves if _needs_grad(leaf)]
    if not inputs:
        return 0
    shapes = [leaf for leaf in arguments.leaves if isinstance(leaf, Shape)]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            args, kwargs = unflatten(leaves, arguments.spec)
            results = [leaf for leaf in flatten(func(*args, **kwargs))[0] if _needs_grad(leaf)]
            gradients = [torch.empty_like(result) for result in results]
            with LiveBytes() as live:
                torch.autograd.grad(results, inputs, gradients, allow_unused=True)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0
    of_parameters = [
        tensor for tensor, shape in zip(_tensors(leaves), shapes) if shape.is_parameter
    ]
    return live.peak - sum(map(nbytes, of_parameters))


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Shape):
        return leaf
    empty = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device="meta")
    is_differentiable = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return empty.requires_grad_() if is_differentiable else empty


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _same(tensor: Tensor) -> Tensor:
    return tensor
