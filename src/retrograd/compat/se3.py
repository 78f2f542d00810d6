"""The reversible layers of se3-transformer-pytorch, whose values are dicts of features by degree.

Both streams start as the input; the output is their mean, degree by degree. Keyword arguments go
to f only.

*Same*: names, signatures, state-dict keys (`blocks.0.f.net.…`), outputs, gradients and random
draws; `SequentialSequence`, the ordinary network of the same blocks.

*Differs*:

- Degrees may have any shapes. In the original, they must agree in all dimensions but the last.
- These work: inputs that need no gradient, backward in `eval()`, several forwards before a
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
from retrograd.compat.pairs import Engine, Function, PairBlock

Features = dict[str, Tensor]


class ReversibleBlock(PairBlock):
    def forward(self, x: Features, **kwargs: Any) -> Features:
        streams = rg.Split(-1)
        x1: Features = {}
        x2: Features = {}
        for degree, features in x.items():
            x1[degree], x2[degree] = streams.split(features)
        y1, y2 = self.run(x1, x2, kwargs, {})
        return {degree: streams.join(y1[degree], y2[degree]) for degree in x}


class SequentialSequence(nn.Module):
    def __init__(self, blocks: Iterable[tuple[Function, Function]]) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Features, **kwargs: Any) -> Features:
        for attention, feed_forward in self.blocks:
            x = attention(x, **kwargs)
            x = feed_forward(x)
        return x


class ReversibleSequence(nn.Module):
    def __init__(self, blocks: Iterable[tuple[Function, Function]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(self, x: Features, **kwargs: Any) -> Features:
        f_names = {name: name for name in kwargs}
        updates = []
        for block in cast("Iterable[ReversibleBlock]", self.blocks):
            updates += block.updates(f_names, {})
        streams = self.engine(updates, {"x1": x, "x2": x}, kwargs)
        y1: Features = streams["x1"]
        y2: Features = streams["x2"]
        mean = rg.Duplicate("mean").join
        return {degree: mean(y1[degree], y2[degree]) for degree in x}
