"""Tensors that are kept for backward, and the hooks by which autograd hands them over.

Everything that the engine keeps is a `Saved`: the streams from which backward starts, the tensors
in keyword arguments, what a plan keeps of an update, and what autograd saves in a recompute.

In forward, autograd hands each tensor that it wants to save to `ForwardHooks.pack` and stores the
number that `pack` returns. In backward it hands the number to `ForwardHooks.unpack`. In between the
tensors are gone. In recompute, autograd saves the same tensors in the same order, and
`RecomputeHooks` collects them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from retrograd.core import errors
from retrograd.core.private import never_compiled, surrounding_hooks
from retrograd.core.program import place
from retrograd.core.streams import (
    State,
    flatten,
    unflatten,
)
from retrograd.core.tensors import describe

if TYPE_CHECKING:
    from retrograd.core.memory import Operation
    from retrograd.core.operations import KeptOperation
    from retrograd.core.walk import Walk

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack
SavedState = dict[str, tuple["Saved", ...]]
SavedOutput = list[tuple["Saved", ...]]


content_of = operator.attrgetter("content")


class Saved:
    """A tensor, and the version that it had when it was saved.

    With `hooks`, the tensor is packed by them, as autograd packs what it saves. So hooks around a
    stack apply to what the stack keeps: an outer stack drops and rebuilds it, `save_on_cpu` moves
    it. Then versions are the business of the hooks, as they are in autograd.
    """

    __slots__ = ("content", "unpack", "version")

    @never_compiled  # hooks call it while a compiled function runs
    def __init__(
        self,
        tensor: Tensor,
        hooks: Hooks | None = None,
    ) -> None:
        self.version = tensor._version
        if hooks is None:
            self.content: Any = tensor
            self.unpack = None
        else:
            self.content = hooks[0](tensor)
            self.unpack = hooks[1]

    @property
    def is_edited(self) -> bool:
        """Whether the tensor was edited in place since it was saved."""
        return self.unpack is None and self.content._version != self.version

    def get(
        self,
        where: str,
        what: str,
    ) -> Tensor:
        """The tensor. Raises an error that names `what` was edited, and `where` it is needed."""
        if self.unpack is not None:
            return self.unpack(self.content)
        if self.content._version != self.version:
            raise errors.edited_output(where, what)
        return self.content


def save_state(state: State, hooks: Hooks | None = None) -> SavedState:
    """Save all streams, outside the graph.

    Each leaf is saved as an alias of its own, because `is_unshared` counts tensors, not names.
    """
    return {
        name: tuple([Saved(leaf.detach(), hooks) for leaf in leaves])
        for name, leaves in state.items()
    }


def load_state(
    saved: SavedState,
    where: str,
    what: str,
) -> State:
    """The saved streams, as new aliases."""
    return {
        name: tuple([leaf.get(where, what).detach() for leaf in leaves])
        for name, leaves in saved.items()
    }


# --- hooks


class ForwardHooks:
    """The hooks of one update in forward.

    The graph holds them. As long as they live, backward may still ask for a tensor of the update.
    """

    __slots__ = (
        "__weakref__",
        "index",
        "is_kept",
        "is_recording",
        "operations",
        "output",
        "recording",
        "saved",
        "streams",
        "walk",
    )

    def __init__(self, walk: Walk, index: int) -> None:
        self.walk = walk
        self.index = index
        self.recording: list[Tensor] = []  # what autograd saves while the function runs
        self.is_recording = True
        self.saved: list[Saved | None] | None = None  # the same tensors again, in backward
        self.is_kept = False  # `saved` serves more than one request
        # What the plan keeps. It is here and not in the walk, so that it goes as backward goes.
        self.output: SavedOutput | None = None
        self.operations: dict[Operation, KeptOperation] = {}
        self.streams: SavedState | None = None

    @never_compiled
    def pack(self, tensor: Tensor) -> int:
        self.recording.append(tensor)
        return len(self.recording) - 1

    @never_compiled
    def unpack(self, slot: int) -> Tensor:
        if self.is_recording:  # the function is still running and calls autograd.grad
            return self.recording[slot]
        saved = None if self.saved is None else self.saved[slot]
        if saved is None:
            saved = self.walk.saved_tensor(self, slot)
        tensor: Tensor = saved.content
        if tensor._version != saved.version:
            versions = (saved.version, tensor._version)
            where = place(self.walk.program, self.index)
            raise errors.edited_after_save(where, describe(tensor), versions)
        if not self.is_kept:
            # Autograd asks once. So the tensor is freed now, not when the update is over.
            self.saved[slot] = None  # type: ignore[index]
        return tensor

    def end_recording(self) -> None:
        """Let go of the tensors: they refer to the graph, and the graph refers to these hooks."""
        self.is_recording = False
        self.recording = []

    def keep(self, tensors: list[Tensor]) -> None:
        """Keep what autograd saved until the graph is freed."""
        self.saved = [Saved(tensor.detach()) for tensor in tensors]
        self.is_kept = True


class RecomputeHooks:
    """The hooks of one recompute. They collect what autograd saves."""

    __slots__ = ("saved", "stop_at")

    def __init__(self, stop_at: int | None) -> None:
        self.saved: list[Saved] = []
        self.stop_at = stop_at  # with so many tensors the function need not go on; None: it must

    @never_compiled
    def pack(self, tensor: Tensor) -> int:
        saved = self.saved
        saved.append(Saved(tensor))
        if len(saved) == self.stop_at:
            raise StopRecompute
        return len(saved) - 1

    @never_compiled
    def unpack(self, slot: int) -> Tensor:
        if slot >= len(self.saved):
            raise errors.stale_activation()
        return self.saved[slot].content

    def release(self) -> list[Saved]:
        """Hand over the tensors. They refer to the recomputed graph, and that to these hooks."""
        saved = self.saved
        self.saved = []
        return saved


class StopRecompute(BaseException):
    """Ends a recompute whose output is kept, once autograd has saved what it saved in forward.

    Not an `Exception`, because functions catch those.
    """


# --- keyword arguments


class KeywordArguments:
    """The keyword arguments of a call: tensors are saved, everything else is held by reference.

    `get` returns fresh containers, so a list that a function appends to grows once, in forward.
    """

    def __init__(self, keywords: dict[str, Any]) -> None:
        self.leaves, self.spec = flatten(keywords)
        self.slots = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[tuple[Saved, bool]] = []
        self.duplicates: list[int] = []  # for each slot, the number of its tensor
        numbers: dict[int, int] = {}
        hooks = surrounding_hooks()
        for slot in self.slots:
            tensor = self.leaves[slot]
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(numbers)
                self.tensors.append((Saved(tensor.detach(), hooks), tensor.requires_grad))
            self.duplicates.append(numbers[id(tensor)])
        self.values = [leaf for leaf in self.leaves if not isinstance(leaf, Tensor)]
        self.release()

    def release(self) -> None:
        """Let go of the tensors that `get` unpacked."""
        self.is_unpacked = not self.slots
        for slot in self.slots:
            self.leaves[slot] = None

    def get(self) -> dict[str, Any]:
        """The arguments for a recompute. Tensors are unpacked once in a walk back."""
        if not self.is_unpacked:
            views = [self._view(saved, needs_grad) for saved, needs_grad in self.tensors]
            for slot, number in zip(self.slots, self.duplicates):
                self.leaves[slot] = views[number]
            self.is_unpacked = True
        return unflatten(self.leaves, self.spec)

    @staticmethod
    def _view(saved: Saved, needs_grad: bool) -> Tensor:
        tensor = saved.get("backward", "a tensor in a keyword argument")
        return leaf_view(tensor, needs_grad)


def leaf_view(tensor: Tensor, needs_grad: bool) -> Tensor:
    """A saved or rebuilt tensor as a function gets it in recompute.

    [Note: why reads keep requires_grad] Autograd saves only what some gradient needs. With another
    `requires_grad` than in forward it would save other tensors, and their numbers would no longer
    match those in the graph.

    [Note: why a view] Tools that hook the inputs of a module (FlopCounterMode, FSDP) treat leaves
    differently from other tensors. In forward the inputs were not leaves, so in recompute they are
    views of a leaf. Not by `view_as`, which may change strides of dimensions of size 1.
    """
    leaf = tensor.detach()
    return leaf.requires_grad_()[...] if needs_grad else leaf
