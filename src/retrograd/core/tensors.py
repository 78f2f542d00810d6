"""Facts about single tensors: their memory, their size, their layout, a few words for messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from retrograd.core.private import ONE_TENSOR, pytree, storage_users

# `map` with a getter runs in C. These loops run for every update, over everything a network holds.
version_of = operator.attrgetter("_version")
requires_grad_of = operator.attrgetter("requires_grad")
stride_of = operator.methodcaller("stride")
shape_and_dtype = operator.attrgetter("shape", "dtype")

ShapeAndDtype = tuple[torch.Size, torch.dtype]


def shapes_of(tensors: Sequence[Tensor]) -> list[ShapeAndDtype]:
    """Shapes and dtypes. A nested tensor with strides has no shape, so its size stands for it."""
    return [
        (torch.Size([tensor.numel()]), tensor.dtype)
        if tensor.is_nested and tensor.layout == torch.strided
        else shape_and_dtype(tensor)
        for tensor in tensors
    ]


def dense(leaf: Tensor) -> Tensor:
    """The tensor itself, or a copy if its memory has gaps or overlaps (a slice, an expansion).

    [Note: why streams are dense] What backward rebuilds is dense, in the order of dimensions that
    forward had. If the input were a slice, the function would see other strides in recompute. Some
    kernels round differently then, and `nn.Linear` even saves other tensors. The copy also releases
    the tensor that the slice is part of.
    """
    if leaf.is_contiguous() or type(leaf) is not Tensor or has_dense_strides(leaf):
        return leaf
    return leaf.clone()


def has_dense_strides(tensor: Tensor) -> bool:
    """Whether the memory of a tensor has no gaps and overlaps, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides. Kernels choose by them how to compute, and so how to round."""
    if tensor.stride() == strides or type(tensor) is not Tensor:
        return tensor
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def is_unshared(tensor: Tensor) -> bool:
    """Whether no other tensor (a view, an alias, a saved tensor) uses the same memory."""
    return type(tensor) is Tensor and storage_users(tensor.untyped_storage()._cdata) == ONE_TENSOR


def local(tensor: Any) -> Any:
    """The part of a tensor in this process: the shard of a DTensor, any other tensor as is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def largest_shard(tensor: Any) -> int:
    """Bytes of a tensor; of a DTensor, bytes of the largest shard, so equal in all processes."""
    shape = list(tensor.shape)
    for i, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // tensor.device_mesh.size(i))
    return math.prod(shape) * tensor.element_size()


def storage_of(tensor: Tensor) -> int:
    """An identifier of the memory that a tensor uses."""
    if tensor.layout != torch.strided or tensor.is_nested or is_lazy(tensor):
        return id(tensor)
    return tensor.untyped_storage()._cdata


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor of any layout."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.is_sparse_csr:
        return tensor.values().nbytes
    return math.prod(tensor.shape) * tensor.element_size()


def distinct_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory that these tensors use. Memory that several share counts once."""
    by_storage = {storage_of(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(map(storage_bytes, by_storage.values()))


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the memory that a tensor uses. FSDP frees memory of tensors that live on."""
    if tensor.layout == torch.strided:
        return tensor.untyped_storage().nbytes()
    return nbytes(tensor)


def device_module(device: torch.device) -> Any:
    """`torch.cuda` for a GPU; None for a device that has no such module, and for the CPU."""
    return None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)


def is_capturing(device: torch.device) -> bool:
    """Whether the work on this device is being captured in a graph, not run."""
    ask = getattr(device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """Kind, dtype and shape of a value, for messages: `float32[4, 512]`, `dict of 2 (...)`."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, (dict, list, tuple)):
        leaves = pytree.tree_leaves(value)
        inside = ", ".join(map(describe, leaves[:4]))
        more = ", ..." if len(leaves) > 4 else ""
        return f"{type(value).__name__} of {len(value)} ({inside}{more})"
    return type(value).__name__
