"""Markers: operators that tell the pass where the updates of a traced graph are.

While a model is traced, each update leaves one marker for each leaf of its target:

    stream = mark(new, old, undone, ...)

`new` is the value after the update and `old` the one before. `undone` is the inverse of the
coupling, computed from `new`: it shows the pass how to rebuild `old`, and the pass removes it from
forward. The value of a marker is `new`. Its gradient goes to `new`, through `ordered`, so that the
pass sees where the gradient of an update arrives.

If a graph runs without the pass, markers change nothing: the graph is plain autograd.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("retrograd")

# What a marker says of its update, besides that it is one.
REBUILD = "rebuild"  # backward rebuilds the target and runs the function again
SAVE_TARGET = "save target"  # the earlier value is saved; the function runs again
KEEP = "keep"  # what autograd saves of it is left to the partitioner
BUDGET = "budget"  # either of them, or kept if a limit allows it: "rebuild budget 25%"

_NOTICED: set[str] = set()


@torch.library.custom_op("retrograd::mark", mutates_args=())
def mark(
    new: Tensor,
    old: Tensor,
    undone: Tensor,
    update: int,
    plan: str,
    drift: str,
    stream: str,
    edition: str,
) -> Tensor:
    """`new`, marked as the value of a stream after an update."""
    if edition not in _NOTICED:
        _NOTICED.add(edition)
        log.warning(
            "a compiled graph with a stack runs without retrograd's pass: its gradients are right, "
            "and its activation memory grows with depth. The backends inductor and aot_eager run "
            "the pass; for others, compile the functions with stack.compile()."
        )
    return new.clone()


@mark.register_fake
def _(
    new: Tensor,
    old: Tensor,
    undone: Tensor,
    update: int,
    plan: str,
    drift: str,
    stream: str,
    edition: str,
) -> Tensor:
    return torch.empty_like(new)


@torch.library.custom_op("retrograd::ordered", mutates_args=())
def ordered(value: Tensor, after: list[Tensor], update: int) -> Tensor:
    """`value`, computed on its own, and not before `after` is."""
    return value.clone()


@ordered.register_fake
def _(value: Tensor, after: list[Tensor], update: int) -> Tensor:
    return torch.empty_like(value)


def _remember_update(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.update = inputs[3]


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ordered(grad, [], ctx.update), *[None] * 7


mark.register_autograd(_pass_gradient, setup_context=_remember_update)

MARK = torch.ops.retrograd.mark.default
ORDERED = torch.ops.retrograd.ordered.default
