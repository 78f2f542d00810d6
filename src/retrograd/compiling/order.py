"""The order of nodes: forward first, and each update rebuilt right before its backward.

Nothing in a graph says when a value is made. To rebuild all states first would be right, and would
need the memory of plain autograd. So the state before an update waits for the gradients of the
update after it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd.compiling import markers

AnyMark = Any  # a `joint.Mark`: that file imports this one


class Fences:
    """Which nodes of backward come before an update is undone."""

    def __init__(self, graph: fx.Graph, forward: set[fx.Node], made: set[fx.Node]) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.backward = [
            node
            for node in graph.nodes
            if node.op == "call_function" and node not in forward and node not in made
        ]
        self.positions = [self.order[node] for node in self.backward]
        self.arrivals: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.backward:
            if node.target is markers.ORDERED:
                self.arrivals[node.args[2]].append(node)  # type: ignore[index]

    def put(self, marks: Sequence[AnyMark], rebuilt: Mapping[AnyMark, fx.Node]) -> None:
        arrived = self._arrived(marks)
        for mark, before in zip(marks[1:], marks):
            node, begin, end = rebuilt.get(mark), arrived.get(mark), arrived.get(before)
            if node is None or begin is None or end is None:
                continue
            after = [end, *self._ends_between(begin, end)]
            if not is_needed_by(node, after):  # else there would be a cycle
                node.args = (node.args[0], after, node.args[2])

    def _arrived(self, marks: Sequence[AnyMark]) -> dict[AnyMark, fx.Node]:
        """Where the gradient of each mark arrives. Backward has them from last to first."""
        left = {update: list(nodes) for update, nodes in self.arrivals.items()}
        found = {}
        for mark in reversed(marks):
            if left.get(mark.update):
                found[mark] = left[mark.update].pop(0)
        return found

    def _ends_between(self, begin: fx.Node, end: fx.Node) -> list[fx.Node]:
        """Values of backward between these two that nothing in between reads: gradients of
        parameters.
        """
        first = bisect.bisect_right(self.positions, self.order[begin])
        inside = self.backward[first : bisect.bisect_left(self.positions, self.order[end])]
        members = {*inside, end}
        return [
            node
            for node in inside
            if members.isdisjoint(node.users) and isinstance(node.meta.get("val"), torch.Tensor)
        ]


def is_needed_by(node: fx.Node, roots: Iterable[fx.Node]) -> bool:
    """Whether one of these is computed from a node."""
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        one = todo.pop()
        if one is node:
            return True
        if one not in seen:
            seen.add(one)
            todo += one.all_input_nodes
    return False


def sort(graph: fx.Graph, forward: set[fx.Node], made: set[fx.Node]) -> None:
    """Forward first; then what depends on gradients, in its own order; the rest when it is needed.

    The rest are copies above all.
    """
    order = [node for node in graph.nodes if node.op != "output"]
    emit = Emitter(graph)
    for chosen in (forward, of_gradients(order) - made, set(order)):
        for node in order:
            if node in chosen:
                emit.one(node)


def of_gradients(order: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in order:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class Emitter:
    """Moves nodes to the end of a graph, each after its inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.end = graph.find_nodes(op="output")[0]
        self.done = {node for node in graph.nodes if node.op == "placeholder"}

    def one(self, node: fx.Node) -> None:
        todo = [node]
        while todo:
            one = todo[-1]
            waiting = [value for value in one.all_input_nodes if value not in self.done]
            if waiting and one not in self.done:
                todo += waiting[::-1]
                continue
            todo.pop()
            if one not in self.done:
                self.done.add(one)
                self.end.prepend(one)
