"""`Chunked`: runs a token-wise function in pieces, so that its intermediate tensors never exist for
all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.exact import Precision
from retrograd.core.memory import Call, Reverse
from retrograd.core.observe import observed_memory
from retrograd.core.private import without_compiler
from retrograd.core.program import make_step
from retrograd.core.structure import StackCache
from retrograd.core.tape import Tape
from retrograd.core.updates import TRUSTED, Coupling
from retrograd.stack import is_plain


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
        self._cache = StackCache()

    @property
    def takes_arguments_of(self) -> Callable[..., Tensor]:
        """Keyword arguments of a stack go by the signature of this function."""
        return self.fn

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}, dim={self.dim}"

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if not -x.ndim <= self.dim < x.ndim:
            raise ValueError(
                f"Chunked(dim={self.dim}): the input has {x.ndim} dimensions. Choose dim within "
                "them."
            )
        pieces = x.chunk(self.chunks, self.dim)
        if len(pieces) == 1 or is_plain(observed_memory(self, REBUILD)):
            results = [self.fn(piece, **kwargs) for piece in pieces]
        else:
            results = self._recorded(pieces, kwargs)
        return torch.cat(results, self.dim)

    @without_compiler
    def _recorded(self, pieces: Sequence[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
        """Run the pieces as a program: each is an update that puts a result where nothing was.

        So the engine replays random numbers, buffers and modules, as it does for a stack.
        """
        names = {name: name for name in kwargs}
        program = [
            make_step(f"piece {i}", f"y{i}", (f"x{i}",), self.fn, PUT, names)
            for i in range(len(pieces))
        ]
        streams = {f"x{i}": piece for i, piece in enumerate(pieces)}
        nothing = {f"y{i}": piece.new_empty(0) for i, piece in enumerate(pieces)}
        plan = REBUILD.plan(Call([step.target for step in program]))
        run = Tape(program, streams | nothing, kwargs, PRECISION, plan, self._cache)
        run.start()
        for step in program:
            run.update(step)
        run.finish()
        return run.hand_out([run.state[step.target][0] for step in program])


class Put(Coupling):
    """The result takes the place of an empty stream. Nothing has to be rebuilt but that."""

    changes_shape = True

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        return out

    def inverse(self, y: Tensor, out: Tensor) -> Tensor:
        return out.new_empty(0)


TRUSTED.add(Put)
PUT = Put()
REBUILD = Reverse(keep_last=False)
PRECISION = Precision(exact=False, drift="ignore", stream_dtype=torch.bfloat16)
