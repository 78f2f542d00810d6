"""How far two tensors are apart. NaN equals NaN, and an infinity equals itself."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from retrograd.core.private import is_fake


def has_no_values(tensor: Tensor) -> bool:
    """Whether there is nothing to compare: lazy, fake, meta or sparse."""
    return is_lazy(tensor) or is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided


def is_real_valued(tensor: Tensor) -> bool:
    """Whether differences between its elements have a size: floating point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bit-identical, as far as they have values."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or a.device != b.device:
        return False
    if has_no_values(a) or has_no_values(b):
        return True
    return torch.equal(a, b) or bool(_equal_elements(a, b).all())


def are_same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(is_same, first, second))


def _equal_elements(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def largest(tensor: Tensor) -> float:
    """The largest absolute value among the finite ones."""
    if not tensor.numel() or tensor.is_meta:
        return 0.0
    size = tensor.abs()
    return torch.where(size.isfinite(), size, 0).max().item()


def largest_difference(a: Tensor, b: Tensor) -> float:
    """NaN if an element is NaN in only one of the two."""
    if not a.numel():
        return 0.0
    return torch.where(_equal_elements(a, b), 0, a - b).abs().max().item()


def rounding_limit(dtype: torch.dtype) -> float:
    """The largest relative difference that rounding in this dtype still explains."""
    return torch.finfo(dtype.to_real()).eps ** 0.75


def relative_differences(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float
) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest value or to `floor`, whichever
    is larger. Infinite where one of the two is missing or has another shape.
    """
    differences: dict[str, float] = {}
    for name in {**expected, **actual}:
        a = actual.get(name)
        b = expected.get(name)
        if a is None or b is None or a.shape != b.shape:
            differences[name] = math.inf
        else:
            differences[name] = _relative_difference(a, b, floor)
    return differences


def _relative_difference(a: Tensor, b: Tensor, floor: float) -> float:
    if is_same(a, b):
        return 0.0
    if not is_real_valued(a):
        return math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    a = a.to(wide)
    b = b.to(wide)
    scale = max(largest(b), floor)
    return largest_difference(a, b) / scale if scale else math.inf


def typical_size(tensors: Iterable[Tensor]) -> float:
    """The median of the tensors' largest values, leaving out tensors of zeros."""
    sizes = sorted(size for size in map(largest, tensors) if size)
    return sizes[len(sizes) // 2] if sizes else 0.0


@dataclass(frozen=True)
class Deviation:
    """How far a rebuilt stream is from the one that forward saw."""

    error: float
    scale: float  # the largest value of the stream, here and where backward begins
    dtype: torch.dtype

    @property
    def relative(self) -> float:
        if self.scale:
            return self.error / self.scale
        return math.inf if self.error else 0.0


def copy_of(tensor: Tensor) -> Tensor:
    """A leaf with the same values and the same `requires_grad`."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def raw_bytes(tensor: Tensor) -> bytes:
    """The memory of a contiguous CPU tensor. Bytes compare and hash ten times faster than tensors,
    and `FakeTensorMode` does not intercept them.
    """
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def severity(difference: float) -> float:
    """A key to sort differences by: NaN is as bad as infinity."""
    return math.inf if math.isnan(difference) else difference


def worst(differences: Mapping[str, float]) -> tuple[str, float]:
    """The name and value of the largest difference."""
    return max(differences.items(), key=lambda item: severity(item[1]))
