"""`Chunked`: a token-wise function in pieces, so that what it has inside is never there for all
tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Chunked(nn.Module):
    """`fn`, run on `chunks` pieces of its input along `dim`, one after the other. For functions
    that treat each position alone.

    The result is that of `fn` (up to how matrix products round for other shapes). What `fn` makes
    inside, four times the width in a feed-forward function, exists for one piece at a time: in
    forward, in recompute, and in backward, where each piece is run once more just before its
    gradient is taken. That is its price: in a reversible stack `fn` runs three times a step, not
    two.

    Args:
        fn: a module or callable of one tensor; keyword arguments go to every piece whole.
        chunks: how many pieces. The last may be smaller; a short input may give fewer.
        dim: along which they are cut. 1 is tokens in `(batch, tokens, channels)`.

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
        # `use_reentrant=False` remembers its inputs through autograd, so a stack around it drops
        # and rebuilds them like all else.
        return torch.cat(
            [checkpoint(self.fn, piece, use_reentrant=False, **kwargs) for piece in pieces],
            self.dim,
        )
