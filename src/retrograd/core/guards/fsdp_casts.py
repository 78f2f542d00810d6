"""Casts of FSDP: mixed precision casts what goes into a module, and what comes out.

Before torch 2.13, FSDP does so in forward only, and not if the module runs again in backward. Then
hooks of our own do it in recompute. Where FSDP casts as well, they find nothing to cast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.guard import Guard, Undo
from retrograd.core.private import fsdp_policy
from retrograd.core.streams import flatten, unflatten
from retrograd.core.structure import Structure


class FsdpCasts(Guard):
    def __init__(self, structure: Structure) -> None:
        self.structure = structure

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        function = self.structure.functions[index]
        for module in (*function.modules, *function.usage.modules[function.known_modules :]):
            for handle in _cast_again(module):
                undo.add(handle.remove)


def _cast_again(module: nn.Module) -> Iterator[Any]:
    policy = fsdp_policy(module)
    if policy is None:
        return
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        hook = functools.partial(_cast_inputs, policy.param_dtype)
        yield module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        yield module.register_forward_hook(functools.partial(_cast_output, policy.output_dtype))


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    leaves, spec = flatten(value)
    cast = [
        leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    return unflatten(cast, spec)
