"""axial-attention's reversible layers: for images, whose axis 1 is the channels. Both streams start
as the input; the output is their mean.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`), outputs, gradients,
random draws; `arg_route` at the call.

*Differs*: an input that needs no gradient, backward in `eval()`, several forwards before a
backward, `autograd.grad`, double backward, DDP and autocast work; buffers are updated once; the
backward of whatever made a keyword argument runs once, not once a block; blocks have no
`backward_pass`, because autograd walks back itself, and are not called: hooks and `fully_shard`
belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic as Deterministic
from retrograd.compat.pairs import Engine, Line, PlainPair, SplitPair, routed


class ReversibleBlock(SplitPair):
    dim = 1


class IrreversibleBlock(PlainPair):
    dim = 1


class ReversibleSequence(nn.Module):
    def __init__(self, blocks: Iterable[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(
        self, x: Tensor, arg_route: tuple[bool, bool] = (True, True), **kwargs: Any
    ) -> Tensor:
        names = routed(arg_route, kwargs)
        lines: list[Line] = [line for block in self.blocks for line in block.lines(*names)]  # type: ignore[operator]
        state = self.engine(lines, {"x1": x, "x2": x}, kwargs)
        return rg.Duplicate("mean").join(state["x1"], state["x2"])
