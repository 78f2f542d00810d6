"""The contestants: one transformer, run by retrograd, plain autograd, checkpointing and peers.

All share the same modules f and g and the same two streams, so they compute the same numbers. They
differ in what they store.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg


@dataclass(frozen=True)
class Size:
    name: str
    blocks: int
    width: int
    batch: int
    tokens: int
    heads: int = 4


SIZES = {
    "large": Size("large", blocks=8, width=256, batch=2, tokens=512),
    "shown": Size("shown", blocks=24, width=128, batch=4, tokens=256),
    "tiny": Size("tiny", blocks=24, width=64, batch=2, tokens=64),
    "deep": Size("deep", blocks=48, width=64, batch=2, tokens=256),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm(x)).view(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: b, heads, n, d / heads
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, n, d))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class FeedForward(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )


Pairs = list[tuple[nn.Module, nn.Module]]


def pairs(size: Size) -> Pairs:
    """The functions f and g of each block, with the same weights every time."""
    torch.manual_seed(0)
    return [
        (Attention(size.width, size.heads), FeedForward(size.width)) for _ in range(size.blocks)
    ]


class PlainBlock(nn.Module):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), where x1 and x2 are the halves of the last dimension."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        x1 = x1 + self.f(x2)
        return torch.cat((x1, x2 + self.g(x1)), -1)


class Plain(nn.Module):
    """Blocks in plain autograd. If `checkpointed` is given, each block runs through it."""

    def __init__(self, blocks: Pairs, checkpointed: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock(f, g) for f, g in blocks)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = self.checkpointed(block, x, use_reentrant=False)
        return x


def _revtorch(blocks: Pairs, **options: Any) -> nn.Module:
    import revtorch  # type: ignore[import-not-found]

    reversible = (revtorch.ReversibleBlock(f, g, split_along_dim=-1, **options) for f, g in blocks)
    return revtorch.ReversibleSequence(nn.ModuleList(reversible))


def _revlib(blocks: Pairs) -> nn.Module:
    import revlib  # type: ignore[import-not-found]

    return revlib.ReversibleSequential(*(fn for pair in blocks for fn in pair), split_dim=-1)


def _memcnn(blocks: Pairs, **options: Any) -> nn.Module:
    import memcnn  # type: ignore[import-not-found]

    couple = (memcnn.AdditiveCoupling(f, g, split_dim=-1) for f, g in blocks)
    return nn.Sequential(
        *(memcnn.InvertibleModuleWrapper(c, keep_input=False, **options) for c in couple)
    )


def _reformer(blocks: Pairs) -> nn.Module:
    from reformer_pytorch.reversible import ReversibleSequence  # type: ignore[import-not-found]

    return ReversibleSequence(nn.ModuleList(nn.ModuleList(pair) for pair in blocks))


def _retrograd(**options: Any) -> Callable[[Pairs], nn.Module]:
    return lambda blocks: rg.ReversibleSequence(blocks, streams=rg.Split(), **options)


CONTESTANTS: dict[str, Callable[..., nn.Module]] = {
    "plain": Plain,
    "checkpoint": lambda blocks: Plain(blocks, checkpoint),
    "retrograd": _retrograd(),
    "retrograd, exact": _retrograd(exact=True),
    "retrograd, 12.5%": _retrograd(memory=rg.Budget("12.5%")),
    "retrograd, 25%": _retrograd(memory=rg.Budget("25%")),
    "retrograd, 50%": _retrograd(memory=rg.Budget("50%")),
    "reformer-pytorch": _reformer,
    "revtorch": _revtorch,
    "revlib": _revlib,
    "memcnn": _memcnn,
}


def contestants(
    size: Size,
    names: Collection[str] | None = None,
    among: Mapping[str, Callable[[Pairs], nn.Module]] = CONTESTANTS,
) -> dict[str, nn.Module]:
    """A network for each contestant that is installed, all with equal weights.

    With `names`, only for those and for plain autograd.
    """
    blocks = pairs(size)
    networks = {}
    for name, build in among.items():
        if names is not None and name not in names and name != "plain":
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                networks[name] = build(copy.deepcopy(blocks)).train()
        except ImportError:
            continue
    return networks
