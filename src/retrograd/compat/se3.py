"""se3-transformer-pytorch's reversible layers: a value is a dict of features by degree. Both
streams start as the input; the output is their mean, degree by degree. Keyword arguments go to f
only.

*Same*: names, signatures, state-dict keys (`blocks.0.f.net.…`), outputs, gradients, random draws;
`SequentialSequence`, the ordinary network of the same blocks.

*Differs*: degrees may have any shapes, not only those that agree in all dimensions but the last;
inputs that need no gradient, backward in `eval()`, several forwards before a backward,
`autograd.grad`, double backward, DDP and autocast work; buffers are updated once; the backward of
whatever made a keyword argument runs once, not once a block; blocks have no `backward_pass`,
because autograd walks back itself, and are not called: hooks and `fully_shard` belong on `f` and
`g`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic as Deterministic
from retrograd.compat.pairs import Engine, Line, Pair

Features = dict[str, Tensor]


class ReversibleBlock(Pair):
    def forward(self, x: Features, **kwargs: Any) -> Features:
        streams = rg.Split(-1)
        halves = {degree: streams.split(features) for degree, features in x.items()}
        x1, x2 = ({degree: pair[i] for degree, pair in halves.items()} for i in (0, 1))
        y1, y2 = self.run(x1, x2, kwargs, {})
        return {degree: streams.join(y1[degree], y2[degree]) for degree in x}


class SequentialSequence(nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Features, **kwargs: Any) -> Features:
        for attention, feed_forward in self.blocks:
            x = feed_forward(attention(x, **kwargs))
        return x


class ReversibleSequence(nn.Module):
    def __init__(self, blocks: Iterable[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(self, x: Features, **kwargs: Any) -> Features:
        names = {name: name for name in kwargs}
        lines: list[Line] = [line for block in self.blocks for line in block.lines(names, {})]  # type: ignore[operator]
        state = self.engine(lines, {"x1": x, "x2": x}, kwargs)
        return {
            degree: rg.Duplicate("mean").join(state["x1"][degree], state["x2"][degree])
            for degree in x
        }
