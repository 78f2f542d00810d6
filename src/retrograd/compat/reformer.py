"""The reversible layers of reformer-pytorch.

The caller doubles the input, blocks split it along axis 2, and the output stays doubled.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`, and `irrev_blocks.0.f.…`
for the same functions), outputs, gradients and random draws; `layer_dropout` (at least one block
survives); `reverse_thres` (inputs up to that length run in plain autograd); `send_signal`
(functions get `_reverse`, true in recompute, and `_depth`); `arg_route` at the call.

*Differs*:

- These work: an input that needs no gradient, backward in `eval()`, several forwards before a
  backward, `autograd.grad`, double backward, DDP and autocast.
- Buffers are updated once.
- Layer dropout on short inputs has gradients.
- The backward of the module that produced a keyword argument runs once, not once per block.
- g of the last block is not recomputed, so it gets no `_reverse=True`.
- Blocks have no `backward_pass`, because autograd runs the backward. The sequence does not call
  its blocks, so hooks and `fully_shard` belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import (
    ArgumentNames,
    Engine,
    Function,
    PlainBlock,
    SplitBlock,
    UpdateSpec,
    WithSignal,
    route_names,
)
from retrograd.compat.pairs import Deterministic as Deterministic


class ReversibleBlock(SplitBlock):
    dim = 2

    def __init__(
        self, f: Function, g: Function, depth: int | None = None, send_signal: bool = False
    ) -> None:
        super().__init__(f, g)
        self.depth = depth
        self.send_signal = send_signal

    def updates(self, f_names: ArgumentNames, g_names: ArgumentNames) -> list[UpdateSpec]:
        updates = super().updates(f_names, g_names)
        if not self.send_signal:
            return updates
        return [update._replace(fn=WithSignal(update.fn, self.depth)) for update in updates]


class IrreversibleBlock(PlainBlock):
    dim = 2


class ReversibleSequence(nn.Module):
    def __init__(
        self,
        blocks: Iterable[tuple[Function, Function]],
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
        drop_layers = self.training and self.layer_dropout > 0
        if not reverse and not drop_layers:
            return self._plain_forward(x, arg_route, kwargs)
        blocks = cast("Sequence[ReversibleBlock]", list(self.blocks))
        if drop_layers:
            blocks = self._without_dropped(blocks)
        f_names, g_names = route_names(arg_route, kwargs)
        updates = []
        for block in blocks:
            updates += block.updates(f_names, g_names)
        halves = rg.Split(2)
        x1, x2 = halves.split(x)
        streams = self.engine(updates, {"x1": x1, "x2": x2}, kwargs, reverse)
        return halves.join(streams["x1"], streams["x2"])

    def _plain_forward(
        self, x: Tensor, arg_route: tuple[bool, bool], kwargs: dict[str, Any]
    ) -> Tensor:
        to_f, to_g = arg_route
        f_args = kwargs if to_f else {}
        g_args = kwargs if to_g else {}
        for block in self.irrev_blocks:
            x = block(x, f_args, g_args)
        return x

    def _without_dropped(self, blocks: Sequence[ReversibleBlock]) -> Sequence[ReversibleBlock]:
        """The blocks that layer dropout leaves, at least one."""
        dropped = (torch.empty(len(blocks)).uniform_(0, 1) < self.layer_dropout).tolist()
        kept = [block for block, is_dropped in zip(blocks, dropped) if not is_dropped]
        return kept or blocks[:1]
