"""Measuring the first backward of a profile: the bytes that are alive at each update of the walk.

Formulas of derivatives, functions of the user and the engine of autograd all make tensors of their
own, and free them at their own times. `profile.UpdateProfile` can only bound that. So the first
backward after the watched forward is watched, too. Every node of the graph that an update made gets
two hooks. Between them, a dispatch mode counts bytes. Between nodes it is off: what the rest of the
model does is not ours to watch.

Bytes are counted as tensors are made and freed, so every run and every process finds the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.private import are_transforms_active, begin_in_node, end_in_node
from retrograd.core.tensors import local, nbytes, storage_of
from retrograd.measure import LiveBytes


class MeasuredBackward(NamedTuple):
    """What was alive while backward was at one update, with nothing kept."""

    alive: int  # when it arrived there: streams, their gradients; without gradients of parameters
    peak: int  # the most beyond that, without gradients of parameters that had been added up
    peak_with_gradients: int  # the same with the gradients of the update's own parameters
    are_gradients_new: bool  # these gradients stayed: there were none before


class Own(NamedTuple):
    """The parameters of an update, and the nodes that its functions and its coupling made."""

    parameters: dict[int, Tensor]  # by id
    nodes: int


class BackwardWatch(LiveBytes):
    """Counts the bytes of one backward, and calls `found` with what each update needed."""

    def __init__(self, found: Callable[[dict[int, MeasuredBackward]], None]) -> None:
        super().__init__()
        self.found = found
        self.measured: dict[int, MeasuredBackward] = {}
        self.own: dict[int, Own] = {}
        self.is_over = False
        self.index: int | None = None  # the update at which backward is
        self.alive = 0  # when it arrived there
        self.base = 0  # the same, with gradients of parameters
        self.most = 0
        self.most_with_gradients = 0
        self.own_gradients = 0
        self.own_storages: dict[int, int] = {}  # the update's own: storages, by parameter
        self.had_none = False  # no parameter of the update had a gradient before
        self.nodes_left = 0
        self.node_peak = 0
        self.gradients: dict[int, int] = {}  # of parameters: bytes by storage
        self.gradient_bytes = 0

    # --- in forward

    def follow(
        self,
        index: int,
        results: Iterable[Tensor],
        given: Iterable[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Follow backward through the nodes between what an update was given and its results."""
        before = {tensor.grad_fn for tensor in given}
        own = {id(p): p for p in parameters if p.requires_grad and p.is_leaf}
        nodes = nodes_between(results, before)
        if any("Compiled" in type(node).__name__ for node in nodes):
            self.is_over = True  # compiled code would be compiled anew in a mode
            return
        self.own[index] = Own(own, len(nodes))
        for node in nodes:
            places = [parameter_of(following) for following, _ in node.next_functions]
            leaves = [following in before for following, _ in node.next_functions]
            node.register_prehook(functools.partial(self._enter, index))
            node.register_hook(functools.partial(self._leave, index, places, leaves))

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made outside of the mode."""
        for tensor in tensors:
            if tensor.layout == torch.strided and storage_of(tensor) not in self._sizes:
                self._add(tensor.untyped_storage(), tensor.untyped_storage().nbytes())

    # --- in backward

    def _enter(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        if self.is_over:
            return
        if torch.is_grad_enabled() or are_transforms_active():
            self.is_over = True  # a graph of the backward itself: another kind of step
            return
        self.add(gradient for gradient in gradients if gradient is not None)
        if index != self.index:
            self._arrive(index)
        self.node_peak = self.now
        self.own_gradients = self.gradient_bytes
        begin_in_node(self)

    def _leave(
        self,
        index: int,
        places: Sequence[int | None],
        leaves: Sequence[bool],
        gradients: Sequence[Tensor | None],
        _: object,
    ) -> None:
        if self.is_over or index != self.index:
            return
        end_in_node(self)
        made = list(zip(gradients, places, leaves))
        # Autograd adds the gradient of a stream to the one that it has, in new memory.
        sums = sum(nbytes(g) for g, _, is_leaf in made if g is not None and is_leaf)
        peak = max(self.node_peak, self.now + sums)
        self.most = max(self.most, peak - self.own_gradients)
        self.most_with_gradients = max(self.most_with_gradients, peak)
        for gradient, parameter, _ in made:
            if gradient is not None and parameter is not None:
                self._made_gradient(parameter, gradient)
        self.nodes_left -= 1
        if self.nodes_left == 0:
            self._finish(index)

    def _arrive(self, index: int) -> None:
        self.index = index
        self.base = self.now
        self.alive = self.now - self.gradient_bytes
        self.most = self.alive
        self.most_with_gradients = self.now
        self.own_storages = {}
        self.had_none = all(p.grad is None for p in self.own[index].parameters.values())
        self.nodes_left = self.own[index].nodes

    def _finish(self, index: int) -> None:
        """Backward is done with an update. One that made not all gradients tells nothing."""
        parameters = self.own[index].parameters
        if self.own_storages.keys() >= parameters.keys():
            stayed = sum(
                self.gradients.get(storage, 0) for storage in set(self.own_storages.values())
            )
            own = sum(nbytes(local(parameter)) for parameter in parameters.values())
            self.measured[index] = MeasuredBackward(
                alive=self.alive,
                peak=self.most - self.alive,
                peak_with_gradients=self.most_with_gradients - self.base,
                are_gradients_new=self.had_none and stayed >= own,
            )
        if index == min(self.own):
            self.is_over = True
            self.found(self.measured)

    def _made_gradient(self, parameter: int, gradient: Tensor) -> None:
        key = self.own_storages[parameter] = storage_of(local(gradient))
        if key in self._sizes and key not in self.gradients:
            self.gradients[key] = self._sizes[key]
            self.gradient_bytes += self._sizes[key]

    # --- the count

    def _add(self, storage: Any, size: int) -> None:
        super()._add(storage, size)
        self.node_peak = max(self.node_peak, self.now)

    def _remove(self, key: int) -> None:
        super()._remove(key)
        self.gradient_bytes -= self.gradients.pop(key, 0)


def nodes_between(results: Iterable[Tensor], before: set[Any]) -> list[Any]:
    """The nodes of the graph that lead from `results` to nodes that were there before."""
    found: dict[Any, None] = {}
    ahead = [tensor.grad_fn for tensor in results]
    while ahead:
        node = ahead.pop()
        if node is None or node in found or node in before or is_leaf(node):
            continue
        found[node] = None
        ahead += [following for following, _ in node.next_functions]
    return list(found)


def is_leaf(node: Any) -> bool:
    """Whether a node adds gradients to a leaf."""
    return type(node).__name__ == "AccumulateGrad"


def parameter_of(node: Any) -> int | None:
    """The id of the leaf that a node adds gradients to; None if it is another kind of node."""
    return id(node.variable) if is_leaf(node) else None
