"""The reversible layers of axial-attention, for images whose axis 1 is the channels.

Both streams start as the input; the output is their mean.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`), outputs, gradients and
random draws; `arg_route` at the call.

*Differs*:

- These work: an input that needs no gradient, backward in `eval()`, several forwards before a
  backward, `autograd.grad`, double backward, DDP and autocast.
- Buffers are updated once.
- The backward of the module that produced a keyword argument runs once, not once per block.
- Blocks have no `backward_pass`, because autograd runs the backward. The sequence does not call
  its blocks, so hooks and `fully_shard` belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic as Deterministic
from retrograd.compat.pairs import Engine, Function, PlainBlock, SplitBlock, route_names


class ReversibleBlock(SplitBlock):
    dim = 1


class IrreversibleBlock(PlainBlock):
    dim = 1


class ReversibleSequence(nn.Module):
    def __init__(self, blocks: Iterable[tuple[Function, Function]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(
        self, x: Tensor, arg_route: tuple[bool, bool] = (True, True), **kwargs: Any
    ) -> Tensor:
        f_names, g_names = route_names(arg_route, kwargs)
        updates = []
        for block in cast("Iterable[ReversibleBlock]", self.blocks):
            updates += block.updates(f_names, g_names)
        streams = self.engine(updates, {"x1": x, "x2": x}, kwargs)
        return rg.Duplicate("mean").join(streams["x1"], streams["x2"])
