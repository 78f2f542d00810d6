"""nuwa-pytorch's reversible layers: both streams start as the input, and the output is their sum.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`), outputs, gradients,
random draws; `args_route`, with an entry for each keyword argument and in it a pair `(to f, to g)`
for each block; a keyword argument that it leaves out goes nowhere.

*Differs*: an input that needs no gradient, backward in `eval()`, several forwards before a
backward, `autograd.grad`, double backward, DDP and autocast work; buffers are updated once; context
that only g gets, has gradients; the backward of whatever made the context (an encoder) runs once,
not once a block; blocks have no `backward_pass`, because autograd walks back itself, and are not
called: hooks and `fully_shard` belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic as Deterministic
from retrograd.compat.pairs import Engine, Line, SplitPair


def route_args(
    router: Mapping[str, Any], args: Mapping[str, Any], depth: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each block, the keyword arguments of f and of g: `router[name][block]` is a pair of
    booleans.
    """
    routed: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}) for _ in range(depth)]
    for name in args:
        for functions, wanted in zip(routed, router.get(name, ())):
            for arguments, want in zip(functions, wanted):
                if want:
                    arguments[name] = args[name]
    return routed


class ReversibleBlock(SplitPair):
    dim = 2


class ReversibleSequence(nn.Module):
    def __init__(self, blocks: Iterable[Any], args_route: Mapping[str, Any] = {}) -> None:
        super().__init__()
        self.args_route = args_route
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.engine = Engine()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        names = route_args(self.args_route, {name: name for name in kwargs}, len(self.blocks))
        lines: list[Line] = [
            line for block, routes in zip(self.blocks, names) for line in block.lines(*routes)
        ]  # type: ignore[operator]
        state = self.engine(lines, {"x1": x, "x2": x}, kwargs)
        return rg.Duplicate("sum").join(state["x1"], state["x2"])
