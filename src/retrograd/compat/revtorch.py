"""The reversible layers of revtorch, whose blocks split a tensor along a dimension of their own.

*Same*: names, signatures, defaults, state-dict keys (`reversible_blocks.0.f_block.…`), outputs and
gradients.

*Differs*:

- Random draws are always replayed, and nothing is seeded: `fix_random_seed` changes nothing.
- `eagerly_discard_variables=False` is not needed: `retain_graph=True` always works.
- These work: an input that needs no gradient, several forwards before a backward, `autograd.grad`,
  double backward, DDP and autocast; a block that is called alone has gradients.
- Buffers are updated once.
- Blocks have no `backward_pass`, because autograd runs the backward.
"""

from __future__ import annotations

import itertools
from typing import cast

from torch import Tensor, nn

from retrograd.compat.pairs import Engine, UpdateSpec, run_halves


class ReversibleBlock(nn.Module):
    def __init__(
        self,
        f_block: nn.Module,
        g_block: nn.Module,
        split_along_dim: int = 1,
        fix_random_seed: bool = False,
    ) -> None:
        super().__init__()
        self.f_block = f_block
        self.g_block = g_block
        self.split_along_dim = split_along_dim
        self.fix_random_seed = fix_random_seed
        self.engine = Engine()

    def updates(self) -> list[UpdateSpec]:
        return [
            UpdateSpec("x1", self.f_block, ("x2",), {}),
            UpdateSpec("x2", self.g_block, ("x1",), {}),
        ]

    def forward(self, x: Tensor) -> Tensor:
        return run_halves(self.engine, self.updates(), x, self.split_along_dim)


class ReversibleSequence(nn.Module):
    def __init__(
        self, reversible_blocks: nn.ModuleList, eagerly_discard_variables: bool = True
    ) -> None:
        super().__init__()
        is_list = isinstance(reversible_blocks, nn.ModuleList)
        if not is_list or not all(isinstance(each, ReversibleBlock) for each in reversible_blocks):
            raise TypeError(
                "ReversibleSequence takes a torch.nn.ModuleList of "
                "retrograd.compat.revtorch.ReversibleBlock."
            )
        self.reversible_blocks = reversible_blocks
        self.eagerly_discard_variables = eagerly_discard_variables
        self.engine = Engine()
        self._engines: dict[int, Engine] = {}  # of the parts after the first

    def forward(self, x: Tensor) -> Tensor:
        blocks = cast("list[ReversibleBlock]", list(self.reversible_blocks))
        parts = itertools.groupby(blocks, lambda block: block.split_along_dim)
        for number, (dim, part) in enumerate(parts):
            updates = [update for block in part for update in block.updates()]
            x = run_halves(self._engine(number), updates, x, dim)
        return x

    def _engine(self, number: int) -> Engine:
        """Blocks that split along the same dimension are one program."""
        if number == 0:
            return self.engine
        engine = self._engines.setdefault(number, Engine())
        engine.memory, engine.exact = self.engine.memory, self.engine.exact
        return engine
