"""reformer-pytorch's reversible layers: the caller doubles the input, blocks split it along axis 2,
and the output stays doubled.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`, and `irrev_blocks.0.f.…`
for the same functions), outputs, gradients, random draws; `layer_dropout` (at least one block
survives), `reverse_thres` (inputs up to that length take the ordinary path), `send_signal`
(functions get `_reverse`, true when recomputed, and `_depth`), `arg_route` at the call.

*Differs*: an input that needs no gradient, backward in `eval()`, several forwards before a
backward, `autograd.grad`, double backward, DDP and autocast work; buffers are updated once; layer
dropout on short inputs has gradients; the backward of whatever made a keyword argument runs once,
not once a block; g of the last block is not recomputed, so it gets no `_reverse=True`; blocks have
no `backward_pass`, because autograd walks back itself, and are not called: hooks and `fully_shard`
belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic as Deterministic
from retrograd.compat.pairs import Engine, Line, PlainPair, Signalled, SplitPair, routed


class ReversibleBlock(SplitPair):
    dim = 2

    def __init__(
        self,
        f: Callable[..., Any],
        g: Callable[..., Any],
        depth: int | None = None,
        send_signal: bool = False,
    ) -> None:
        super().__init__(f, g)
        self.depth = depth
        self.send_signal = send_signal

    def lines(self, f_names: Any, g_names: Any) -> list[Line]:
        lines = super().lines(f_names, g_names)
        return (
            [line._replace(fn=Signalled(line.fn, self.depth)) for line in lines]
            if self.send_signal
            else lines
        )


class IrreversibleBlock(PlainPair):
    dim = 2


class ReversibleSequence(nn.Module):
    def __init__(
        self,
        blocks: Iterable[Any],
        layer_dropout: float = 0.0,
        reverse_thres: int = 0,
        send_signal: bool = False,
    ) -> None:
        super().__init__()
        blocks = list(blocks)
        self.layer_dropout = layer_dropout
        self.reverse_thres = reverse_thres
        self.blocks = nn.ModuleList(
            [ReversibleBlock(f, g, depth, send_signal) for depth, (f, g) in enumerate(blocks)]
        )
        self.irrev_blocks = nn.ModuleList([IrreversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(
        self, x: Tensor, arg_route: tuple[bool, bool] = (True, False), **kwargs: Any
    ) -> Tensor:
        reverse = x.shape[1] > self.reverse_thres
        dropping = self.training and self.layer_dropout > 0
        if not reverse and not dropping:
            f_args, g_args = (kwargs if route else {} for route in arg_route)
            for block in self.irrev_blocks:
                x = block(x, f_args, g_args)
            return x
        blocks: list[Any] = list(self.blocks)
        if dropping:
            drop = (torch.empty(len(blocks)).uniform_(0, 1) < self.layer_dropout).tolist()
            blocks = [block for block, dropped in zip(blocks, drop) if not dropped] or blocks[:1]
        streams, names = rg.Split(2), routed(arg_route, kwargs)
        x1, x2 = streams.split(x)
        lines = [line for block in blocks for line in block.lines(*names)]
        state = self.engine(lines, {"x1": x1, "x2": x2}, kwargs, reverse)
        return streams.join(state["x1"], state["x2"])
