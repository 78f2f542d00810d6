"""Tensors that are kept for backward.

Everything that the engine keeps is a `Saved`: the streams from which backward starts, the tensors
in keyword arguments, and what a plan keeps of an update. What autograd saves in a recompute lives
for a moment and has no hooks: a plain pair of tensor and version (`SavedAgain`) is enough for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.private import surrounding_hooks
from retrograd.core.streams import (
    State,
    flatten,
    unflatten,
)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack
SavedState = dict[str, tuple["Saved", ...]]
SavedOutput = list[tuple["Saved", ...]]
SavedAgain = tuple[Tensor, int]


class Saved(NamedTuple):
    """A tensor, and the version that it had when it was saved."""

    content: Any  # the tensor, or what `pack` made of it
    version: int
    unpack: Callable[[Any], Tensor] | None = None  # None: it was not packed

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

    def again(self) -> SavedAgain:
        """The tensor and its version, for autograd to take and to check."""
        if self.unpack is None:
            return self.content, self.version
        tensor = self.unpack(self.content)
        return tensor, tensor._version


def save(tensor: Tensor, hooks: Hooks | None = None) -> Saved:
    """Save a tensor.

    With `hooks`, it is packed by them, as autograd packs what it saves. So hooks around a stack
    apply to what the stack keeps: an outer stack drops and rebuilds it, `save_on_cpu` moves it.
    Then versions are the business of the hooks, as they are in autograd.
    """
    if hooks is None:
        return Saved(tensor, tensor._version)
    pack, unpack = hooks
    return Saved(pack(tensor), tensor._version, unpack)


def save_alias(tensor: Tensor) -> Saved:
    """Save a tensor, outside the graph."""
    return save(tensor.detach())


def save_state(state: State, hooks: Hooks | None = None) -> SavedState:
    """Save all streams, outside the graph.

    Each leaf is saved as an alias of its own, because `is_unshared` counts tensors, not names.
    """
    return {name: save_leaves(leaves, hooks) for name, leaves in state.items()}


def save_leaves(leaves: Iterable[Tensor], hooks: Hooks | None = None) -> tuple[Saved, ...]:
    return tuple([save(leaf.detach(), hooks) for leaf in leaves])


def load_leaves(
    saved: Iterable[Saved],
    where: str,
    what: str,
) -> tuple[Tensor, ...]:
    """The saved leaves of a stream, as new aliases."""
    return tuple([leaf.get(where, what).detach() for leaf in saved])


def load_state(
    saved: SavedState,
    where: str,
    what: str,
) -> State:
    """The saved streams, as new aliases."""
    return {name: load_leaves(leaves, where, what) for name, leaves in saved.items()}


# --- keyword arguments


# Values that refer to nothing else.
PLAIN_TYPES = (
    *(int, float, complex, str, bytes, bool, type(None)),
    *(torch.dtype, torch.device, torch.Size),
)


class Objects(list[Any]):
    """The leaves of keyword arguments that are no tensors; None in place of each tensor."""

    __slots__ = ("__weakref__",)


class KeywordArguments:
    """The keyword arguments of a call: tensors are saved, everything else is held by reference.

    `get` returns fresh containers, so a list that a function appends to grows once, in forward.
    Objects may refer to the output of the call, so only a `ForwardContext` holds them strongly.
    """

    def __init__(self, keywords: dict[str, Any]) -> None:
        leaves, self.spec = flatten(keywords)
        self.slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[tuple[Saved, bool]] = []
        self.duplicates: list[int] = []  # for each slot, the number of its tensor
        numbers: dict[int, int] = {}
        hooks = surrounding_hooks()
        for slot in self.slots:
            tensor = leaves[slot]
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(numbers)
                self.tensors.append((save(tensor.detach(), hooks), tensor.requires_grad))
            self.duplicates.append(numbers[id(tensor)])
            leaves[slot] = None
        self.views: list[Tensor] | None = None
        self._objects: Objects | None = Objects(leaves)
        self.objects = weakref.proxy(self._objects)

    def hand_over_objects(self) -> Objects:
        """The objects, which must be held from now on by whoever asks."""
        objects = self._objects
        assert objects is not None
        self._objects = None
        return objects

    def release(self) -> None:
        """Let go of the tensors that `get` unpacked."""
        self.views = None

    def get(self) -> dict[str, Any]:
        """The arguments for a recompute. Tensors are unpacked once in a walk back."""
        if self.views is None:
            self.views = [self._view(saved, needs_grad) for saved, needs_grad in self.tensors]
        leaves = list(self.objects)
        for slot, number in zip(self.slots, self.duplicates):
            leaves[slot] = self.views[number]
        return unflatten(leaves, self.spec)

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
    if not needs_grad:
        return leaf
    try:
        return leaf.requires_grad_()[...]
    except (RuntimeError, NotImplementedError):  # a sparse or nested tensor has no such view
        return leaf
