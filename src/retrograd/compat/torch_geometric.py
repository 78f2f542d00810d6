"""`GroupAddRev` of PyTorch Geometric: N groups of features, each updated by a convolution.

    x[0] += conv[0](x[1] + ... + x[N - 1]),    x[i] += conv[i](x[i - 1])

*Same*: name, signature, state-dict keys (`convs.0.…`), outputs, gradients; `num_groups`; further
arguments of the call, split into groups where they are as wide as the features.

*Differs*:

- `num_bwd_passes` changes nothing: any number of backwards works.
- Dropout and every other random draw replay. The caller's tensor is never freed.
- `run_layers(layers, x, edge_index)` runs many layers as one program, so memory is flat in depth. A
  layer that is called by itself keeps its output.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.compat.pairs import Engine, UpdateSpec


@dataclass(frozen=True)
class OnSum:
    """A convolution of the sum of what it reads."""

    conv: nn.Module
    names: tuple[str, ...]  # of its arguments after the features, in order

    def __call__(self, *reads: Tensor, **kwargs: Any) -> Any:
        return self.conv(sum(reads[1:], reads[0]), *(kwargs[name] for name in self.names))


class GroupAddRev(nn.Module):
    def __init__(
        self,
        conv: nn.Module | nn.ModuleList,
        split_dim: int = -1,
        num_groups: int | None = None,
        disable: bool = False,
        num_bwd_passes: int = 1,
    ) -> None:
        super().__init__()
        self.split_dim = split_dim
        self.disable = disable
        self.convs = conv if isinstance(conv, nn.ModuleList) else copies(conv, num_groups)
        if len(self.convs) < 2:
            raise ValueError(f"num_groups={len(self.convs)}: there must be at least 2 groups.")
        self.engine = Engine()

    @property
    def num_groups(self) -> int:
        return len(self.convs)

    def reset_parameters(self) -> None:
        for conv in self.convs:
            conv.reset_parameters()  # type: ignore[operator]

    def updates(self, names: Sequence[Mapping[str, str]]) -> list[UpdateSpec]:
        """The updates of a layer, given the names of the arguments of each convolution."""
        streams = [f"x{i}" for i in range(self.num_groups)]
        reads = [tuple(streams[1:]), *((stream,) for stream in streams[:-1])]
        return [
            UpdateSpec(streams[i], OnSum(conv, tuple(names[i])), reads[i], names[i])
            for i, conv in enumerate(self.convs)
        ]

    def forward(self, x: Tensor, edge_index: Any, *args: Any) -> Tensor:
        return run_layers([self], x, edge_index, *args)

    def inverse(self, y: Tensor, edge_index: Any, *args: Any) -> Tensor:
        """The input, with gradients, in plain autograd."""
        names, given = group_arguments(self, y, edge_index, args)
        streams = split_groups(self, y)
        for update in reversed(self.updates(names)):
            reads = [streams[read] for read in update.reads]
            kwargs = {inner: given[outer] for inner, outer in update.names.items()}
            streams[update.target] = streams[update.target] - update.fn(*reads, **kwargs)
        return torch.cat(list(streams.values()), self.split_dim)


def run_layers(layers: Sequence[GroupAddRev], x: Tensor, edge_index: Any, *args: Any) -> Tensor:
    """All layers one after another, as one program. They have the same number of groups."""
    first = layers[0]
    names, given = group_arguments(first, x, edge_index, args)
    updates = [update for layer in layers for update in layer.updates(names)]
    streams = first.engine(updates, split_groups(first, x), given, reverse=not first.disable)
    return torch.cat(list(streams.values()), first.split_dim)


def copies(conv: nn.Module, num_groups: int | None) -> nn.ModuleList:
    if num_groups is None:
        raise ValueError("GroupAddRev(conv): give num_groups=, or a ModuleList of convolutions.")
    convs = nn.ModuleList([conv])
    for _ in range(num_groups - 1):
        again = copy.deepcopy(conv)
        if hasattr(again, "reset_parameters"):
            again.reset_parameters()  # type: ignore[operator]
        convs.append(again)
    return convs


def split_groups(layer: GroupAddRev, x: Tensor) -> dict[str, Tensor]:
    groups = x.chunk(layer.num_groups, layer.split_dim)
    return {f"x{i}": group for i, group in enumerate(groups)}


def group_arguments(
    layer: GroupAddRev, x: Tensor, edge_index: Any, args: Sequence[Any]
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """For each group, from the name of an argument to that in the call; and the call's values."""
    given = {"edge_index": edge_index}
    names = [{"edge_index": "edge_index"} for _ in layer.convs]
    for place, value in enumerate(args):
        inner = f"argument_{place}"
        parts = parts_of(layer, x, value)
        for group, part in enumerate(parts):
            outer = f"{inner}_{group}" if len(parts) > 1 else inner
            given[outer] = part
            names[group][inner] = outer
        if len(parts) == 1:
            for each in names:
                each[inner] = inner
    return names, given


def parts_of(layer: GroupAddRev, x: Tensor, value: Any) -> Sequence[Any]:
    """A value for each group where the argument is as wide as the features, or one for all."""
    dim = layer.split_dim
    if not isinstance(value, Tensor) or not -value.ndim <= dim < value.ndim:
        return [value]
    return value.chunk(layer.num_groups, dim) if value.size(dim) == x.size(dim) else [value]
