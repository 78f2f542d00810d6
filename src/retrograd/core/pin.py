"""`pin`: a value inside a function that recompute takes from forward.

A rebuilt stream is a little off, and a choice made from it may turn over: the best expert, a hash
bucket, a mask. A pinned value is kept in forward. When the function runs again, `pin` returns what
was kept, whatever it is given.

While a function runs, `boxes.current` is who keeps its values (`tape.ForwardHooks`) or has them
(`walk.Recompute`). A stack inside of a function has boxes of its own, whose `outer` is the
function's: its values are kept, and taken, by both.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from retrograd.core.private import without_compiler
from retrograd.core.saved import Saved, save
from retrograd.core.streams import Spec, flatten, unflatten

Value = TypeVar("Value")


class Box(Protocol):
    @property
    def outer(self) -> Box | None: ...

    def pin(self, value: Any) -> Any: ...


class _Boxes(threading.local):
    current: Box | None = None


boxes = _Boxes()


class Pinned:
    """A value that was kept: a pytree, each tensor of it as a `Saved`."""

    __slots__ = ("leaves", "spec")

    leaves: list[Any]
    spec: Spec

    def __init__(self, value: Any) -> None:
        leaves, self.spec = flatten(value)
        self.leaves = [save(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def tensors(self) -> list[Tensor]:
        return [leaf.content for leaf in self.leaves if isinstance(leaf, Saved)]

    def instead_of(self, value: Any, where: str) -> Any:
        """The value that was kept, at the place in the graph where `value` is."""
        leaves, spec = flatten(value)
        now = leaves if spec == self.spec else [None] * len(self.leaves)
        return unflatten(
            [_leaf(kept, leaf, where) for kept, leaf in zip(self.leaves, now)], self.spec
        )


def _leaf(kept: Any, now: Any, where: str) -> Any:
    if not isinstance(kept, Saved):
        return kept
    tensor = kept.get(where, "a pinned value").detach()
    if isinstance(now, Tensor) and now.requires_grad:
        return _Instead.apply(now, tensor)
    return tensor


class _Instead(torch.autograd.Function):
    """The second argument, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, now: Tensor, kept: Tensor) -> Tensor:
        return kept.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


@without_compiler
def pin(value: Value) -> Value:
    """Keep `value` for the recompute of the function that calls this, and return it.

    For decisions: indices of experts, hash buckets, masks. When a stack runs the function again in
    backward, `pin` returns what forward had, so a decision never turns over, however far the
    rebuilt streams have drifted. A value is a tensor or a pytree; gradients flow through it. Its
    bytes are kept until backward has passed the function. Several calls in one function are told
    apart by their order; another number of calls in recompute raises `RecomputeError`.

    Outside of functions that run again (under `Keep()`, in evaluation, without a stack) it returns
    `value` and does nothing.

    Example:
        >>> class Top(torch.nn.Linear):
        ...     def forward(self, x):
        ...         scores = super().forward(x)
        ...         best = rg.pin(scores.topk(2).indices)
        ...         return torch.zeros_like(x).scatter(-1, best, scores.gather(-1, best))
        >>> stack = rg.ReversibleSequence([(Top(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)])
        >>> stack(torch.randn(2, 8)).sum().backward()
    """
    box = boxes.current
    return value if box is None else pin_in(box, value)


def pin_in(box: Box, value: Any) -> Any:
    """Pin a value in a box, and before that in those around it."""
    if box.outer is not None:
        value = pin_in(box.outer, value)
    return box.pin(value)
