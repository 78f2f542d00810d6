"""`Chunked`: runs a token-wise function in pieces, so that its intermediate tensors never exist for
all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Chunked(nn.Module):
    """Runs `fn` on `chunks` pieces of its input along `dim`, one after the other. For functions
    that treat each position by itself.

    The result is that of `fn`, up to the rounding of matrix products of other shapes. The
    intermediate tensors of `fn` (four times the width in a feed-forward function) exist for one
    piece at a time: in forward, in recompute, and in backward, which runs each piece once more
    just before it takes its gradient. That is the price: in a reversible stack `fn` runs three
    times a step, not two.

    Args:
        fn: a module or callable of one tensor. Every piece gets all keyword arguments uncut.
        chunks: how many pieces. The last may be smaller; a short input may give fewer.
        dim: the dimension that is cut: 1 for the tokens of `(batch, tokens, channels)`.

    Example:
        >>> from torch.nn import GELU, Linear, Sequential
        >>> mlp = Sequential(Linear(64, 256), GELU(), Linear(256, 64))
        >>> chunked, x = rg.Chunked(mlp, chunks=8), torch.randn(2, 1024, 64)
        >>> torch.allclose(chunked(x), mlp(x), atol=1e-6)
        True
    """

    def __init__(self, fn: Callable[..., Tensor], chunks: int, dim: int = 1) -> None:
        super().__init__()
        if type(chunks) is not int or chunks < 1:
            raise ValueError(
                f"Chunked(chunks={chunks!r}): chunks is a whole number, 1 or more, for instance "
                "Chunked(fn, chunks=8)."
            )
        if not callable(fn):
            raise TypeError(f"Chunked(fn={fn!r}): fn is a module or a function of one tensor.")
        self.fn = fn
        self.chunks = chunks
        self.dim = dim

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}, dim={self.dim}"

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if not -x.ndim <= self.dim < x.ndim:
            raise ValueError(
                f"Chunked(dim={self.dim}): the input has {x.ndim} dimensions. Choose dim within "
                "them."
            )
        pieces = x.chunk(self.chunks, self.dim)
        if not torch.is_grad_enabled() or len(pieces) == 1:
            return torch.cat([self.fn(piece, **kwargs) for piece in pieces], self.dim)
        # `use_reentrant=False` saves its inputs through autograd, so a stack around it drops and
        # rebuilds them like all other saved tensors.
        results = [checkpoint(self.fn, piece, use_reentrant=False, **kwargs) for piece in pieces]
        return torch.cat(results, self.dim)
