"""The head of a model: what runs after its last stack, such as a projection to words and a loss.

A stack that keeps little leaves the peak of a step to the head. `HeadWatch` counts the bytes of the
head's forward and, when the model has returned, of its backward up to the output of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.guard import Guard
from retrograd.core.program import Application
from retrograd.core.streams import State, tensors_in
from retrograd.core.tensors import describe, nbytes, storage_of
from retrograd.measure import LiveBytes
from retrograd.stack import Total


class Head(NamedTuple):
    """What a model runs after its last stack.

    Attributes:
        name: the parameter that made its largest tensor; the operation and the shape, if none did.
        bytes: the most alive at once, in forward and backward, beyond the output of the stack.
            Gradients of parameters count if forward makes them, as `linear_cross_entropy` does.
        sets_peak: whether the peak of the model is here, and not in its stacks.
    """

    name: str
    bytes: int
    sets_peak: bool = False


class HeadWatch(LiveBytes):
    """While active, measures what runs after the last call of a stack."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.parameters = parameters  # names, by memory
        self.outputs: tuple[Tensor, ...] = ()  # of the last update of the newest stack
        self.is_new = False  # no operation has run after that stack
        self.before = 0  # bytes that were alive then
        self.largest = 0
        self.name = ""

    def begin(self, outputs: Iterable[Tensor]) -> None:
        """A stack is done. What follows is the head, unless another stack runs."""
        self.outputs = tuple([tensor for tensor in outputs if tensor.requires_grad])
        self.is_new = True
        self.largest = 0
        self.name = ""

    def guard(self) -> Guard:
        """A guard that tells when a stack is done."""
        return _BeginsHead(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_new:  # by now, callers have let go of the input of the stack
            self.before = self.peak = self.now
            self.is_new = False
        made = self.made
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = self.made - made
        if made > self.largest:
            self.largest = made
            self.name = self._name(func, args, result)
        return result

    def _name(self, func: Any, args: Any, result: Any) -> str:
        given = [tensor for tensor in tensors_in(args) if storage_of(tensor) in self.parameters]
        if given:
            return self.parameters[storage_of(max(given, key=nbytes))]
        shapes = ", ".join(map(describe, tensors_in(result)))
        return f"{func.__name__.partition('.')[0]}, {shapes}"

    def finish(self, output: Any) -> Head | None:
        """Run the backward of the head. None if there is none, or the model has run it itself."""
        name = self.name
        total = Total.of(output)
        if not name or not self.outputs or not total.requires_grad:
            return None
        try:
            torch.autograd.grad(total, self.outputs, allow_unused=True)
        except RuntimeError:
            return None
        return Head(name, self.peak - self.before)


class _BeginsHead(Guard):
    def __init__(self, watch: HeadWatch) -> None:
        self.watch = watch
        self.outputs: tuple[Tensor, ...] = ()

    def after_update(self, update: Application) -> None:
        # The last update only: the backward of earlier streams leads through later updates.
        self.outputs = update.result

    def after_forward(self, state: State) -> None:
        self.watch.begin(self.outputs)
        self.outputs = ()
