"""The reversible layers of nuwa-pytorch.

Both streams start as the input; the output is their sum.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`), outputs, gradients and
random draws; `args_route`, which has an entry for each keyword argument: a pair `(to f, to g)` for
each block. A keyword argument that `args_route` leaves out goes to no function.

*Differs*:

- These work: an input that needs no gradient, backward in `eval()`, several forwards before a
  backward, `autograd.grad`, double backward, DDP and autocast.
- Buffers are updated once.
- A context that goes only to g gets gradients.
- The backward of the module that produced the context (an encoder) runs once, not once per block.
- Blocks have no `backward_pass`, because autograd runs the backward. The sequence does not call
  its blocks, so hooks and `fully_shard` belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic as Deterministic
from retrograd.compat.pairs import Engine, Function, SplitBlock

Route = Sequence[tuple[bool, bool]]  # for each block: whether f and whether g gets the argument
T = TypeVar("T")


def route_args(
    router: Mapping[str, Route], args: Mapping[str, T], depth: int
) -> list[tuple[dict[str, T], dict[str, T]]]:
    """For each block, the keyword arguments of f and of g."""
    routed: list[tuple[dict[str, T], dict[str, T]]] = [({}, {}) for _ in range(depth)]
    for name, value in args.items():
        for (f_args, g_args), (to_f, to_g) in zip(routed, router.get(name, ())):
            if to_f:
                f_args[name] = value
            if to_g:
                g_args[name] = value
    return routed


class ReversibleBlock(SplitBlock):
    dim = 2


class ReversibleSequence(nn.Module):
    def __init__(
        self,
        blocks: Iterable[tuple[Function, Function]],
        args_route: Mapping[str, Route] = {},
    ) -> None:
        super().__init__()
        self.args_route = args_route
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        blocks = cast("Iterable[ReversibleBlock]", self.blocks)
        names = {name: name for name in kwargs}
        names_by_block = route_args(self.args_route, names, len(self.blocks))
        updates = []
        for block, (f_names, g_names) in zip(blocks, names_by_block):
            updates += block.updates(f_names, g_names)
        streams = self.engine(updates, {"x1": x, "x2": x}, kwargs)
        return rg.Duplicate("sum").join(streams["x1"], streams["x2"])
