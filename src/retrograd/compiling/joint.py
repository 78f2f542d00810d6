"""The pass: backward of a joint graph reads values that it rebuilds, not values of forward.

The joint graph of a compiled function has the nodes of forward and those of backward. This pass
goes through the marked updates from the last to the first and fills `copy`: from a node of forward
to a node that has the same value and exists in backward only.

    copy[old] = the inverse of the coupling, with copy[new] and copies of what the function computed

Then backward reads copies. What has no copy stays what it was, and the partitioner saves it, as it
does for any graph. So a graph that the pass does not understand costs memory, never gradients.
"""

from __future__ import annotations

import bisect
import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from retrograd.compiling import markers
from retrograd.compiling.budgets import bytes_of, bytes_read, kept_by_budget
from retrograd.compiling.drift import COMPARE, SAMPLE, can_compare, sample_like
from retrograd.compiling.order import Fences, sort
from retrograd.compiling.randomness import again, can_replay, draws, saving_state
from retrograd.compiling.regions import is_view
from retrograd.compiling.seams import BACKWARD_ONLY, is_effect_of_forward, must_save
from retrograd.compiling.tracing import INSIDE
from retrograd.core.private import pytree

aten = torch.ops.aten


class Mark(NamedTuple):
    """A marker in the graph."""

    node: fx.Node
    new: fx.Node
    old: fx.Node
    undone: fx.Node
    update: int
    plan: str
    drift: str
    stream: str


class Report(NamedTuple):
    """What the pass did, in numbers."""

    updates: int
    rebuilt: int
    copies: int  # nodes that backward computes again
    replayed: int  # random operations among them


def marks_of(graph: fx.Graph) -> list[Mark]:
    return [
        Mark(node, *node.args[:7])  # type: ignore[arg-type]
        for node in graph.nodes
        if node.target is markers.MARK
    ]


class JointGraph:
    """A joint graph while it is rewritten."""

    def __init__(self, gm: fx.GraphModule, num_fwd_outputs: int) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.num_fwd_outputs = num_fwd_outputs
        self.output = self.graph.find_nodes(op="output")[0]
        outputs = pytree.arg_tree_leaves(*self.output.args)[:num_fwd_outputs]
        self.effects = [node for node in self.graph.nodes if is_effect_of_forward(node)]
        self.forward = ancestors([*filter(is_node, outputs), *self.effects])
        self.marks = [mark for mark in marks_of(self.graph) if mark.node in self.forward]
        self.streams = {value for mark in self.marks for value in (mark.node, mark.old)}
        self.copy: dict[fx.Node, fx.Node] = {}
        self.made: set[fx.Node] = set()
        self.rebuilt: dict[Mark, fx.Node] = {}
        self.replayed = 0
        self.recomputable = self._recomputable()
        self.wanted = self._wanted()
        self.kept = self._kept()

    def _recomputable(self) -> set[fx.Node]:
        """Nodes that may be computed again: those traced inside of an update, apart from
        parameters and views of them.
        """
        given = {node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")}
        found = set()
        for node in self.graph.nodes:
            if is_view(node) and node.args[0] in given:
                given.add(node)
            elif node.op == "call_function" and INSIDE in (node.meta.get("custom") or ()):
                found.add(node)
        return (found & self.forward) - self.streams

    def _wanted(self) -> dict[int, list[fx.Node]]:
        """Nodes of updates that backward reads, by the number of the next mark in the graph."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        positions = [order[mark.node] for mark in self.marks]
        wanted = defaultdict(list)
        for node in self.recomputable:
            if any(user not in self.forward for user in node.users):
                wanted[bisect.bisect(positions, order[node])].append(node)
        return {number: sorted(nodes, key=order.__getitem__) for number, nodes in wanted.items()}

    def _kept(self) -> set[int]:
        """The marks, by number, whose updates are left to the partitioner."""
        plans = [mark.plan for mark in self.marks]
        ends = self.streams - {mark.old for mark in self.marks}
        sizes = {number: bytes_read(nodes, self.forward) for number, nodes in self.wanted.items()}
        kept = kept_by_budget(plans, sizes, sum(map(bytes_of, ends)))
        return kept | {number for number, plan in enumerate(plans) if plan == markers.KEEP}

    # --- copies

    def rebuild(self) -> Report:
        """Fill `copy`, and let backward read copies."""
        self._read_buffers_before_writes()
        for number in reversed(range(len(self.marks))):
            self._rebuild_one(number)
        self._read_copies()
        self._compare_starts()
        return Report(len(self.marks), len(self.rebuilt), len(self.made), self.replayed)

    def _rebuild_one(self, number: int) -> None:
        mark = self.marks[number]
        if number in self.kept:
            self._save(mark.old)
            return
        if mark.node not in self.copy:  # the last value of a stream is saved
            self._save(mark.node)
        self.copy[mark.new] = self.copy[mark.node]
        if mark.plan.startswith(markers.SAVE_TARGET):
            self._save(mark.old)
        elif mark.old not in self.copy:
            undone = self._copied(mark.undone)
            with self.graph.inserting_before(self.output):
                value = self.graph.call_function(markers.ORDERED, (undone, [], mark.update))
            self.rebuilt[mark] = self.copy[mark.old] = self._of_backward(value, mark.old)
        for node in self.wanted.get(number, ()):
            self._copied(node)

    def _save(self, value: fx.Node) -> None:
        """Leave a value to the partitioner, which saves it and does not compute it again."""
        if self.copy.setdefault(value, value) is value and value.op == "call_function":
            value.meta["recompute"] = must_save()

    def _copied(self, wanted: fx.Node) -> fx.Node:
        """A copy of a node, made of copies of what it reads."""
        todo = [wanted]
        while todo:  # not by recursion: functions may be deep
            node = todo[-1]
            waiting = self._inputs_without_copy(node)
            if waiting:
                todo += waiting
                continue
            todo.pop()
            if node not in self.copy:
                self.copy[node] = self._copy_of(node)
        return self.copy[wanted]

    def _inputs_without_copy(self, node: fx.Node) -> list[fx.Node]:
        if node in self.copy or node not in self.recomputable:
            return []
        return [value for value in node.all_input_nodes if value not in self.copy]

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self.recomputable:
            return node  # saved, if it is no input of the graph
        if node.target is operator.getitem and self.copy[node.args[0]] is node.args[0]:  # type: ignore[index]
            return node  # an item of what is saved: a tuple itself cannot be
        if not draws(node):
            with self.graph.inserting_before(self.output):
                copied = self.graph.node_copy(node, self.copy.__getitem__)
            return self._of_backward(copied, node)
        return self._replayed(node) if can_replay(node) else node

    def _replayed(self, node: fx.Node) -> fx.Node:
        """A random operation, run again with the state that its generator had."""
        both, state, value = saving_state(node)
        self.forward |= {both, state, value}
        for drawn in (both, state, value):
            drawn.meta["recompute"] = must_save()  # or the partitioner might draw once more
        with self.graph.inserting_before(self.output):
            copied = self._of_backward(again(node, state, self.copy), node)
        self.copy |= {both: both, state: state, value: copied}
        self.recomputable.add(value)
        self.graph.erase_node(node)
        self.replayed += 1
        return copied

    def _of_backward(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Tell the partitioner that a node belongs to backward: it must not save it in forward."""
        left_out = ("recompute", "ac_graph_id")
        node.meta = {key: value for key, value in like.meta.items() if key not in left_out}
        node.meta["partitioner_tag"] = BACKWARD_ONLY
        self.made.add(node)
        return node

    # --- drift

    def _compare_starts(self) -> None:
        """Compare where undoing ends with where forward began."""
        later = {mark.node for mark in self.marks}
        starts = [mark for mark in self.marks if mark.old not in later and mark in self.rebuilt]
        settings = {mark.drift for mark in starts}
        ends = [node for node in later if self.copy.get(node) is node]
        if not starts or "ignore" in settings or not can_compare(starts):
            return
        olds = [mark.old for mark in starts]
        with self.graph.inserting_before(self.output):
            seen = self.graph.call_function(SAMPLE, ([*olds, *ends],))
            now = self.graph.call_function(SAMPLE, ([self.copy[old] for old in olds],))
            names, epsilon = ",".join(mark.stream for mark in starts), self._epsilon()
            args = (now, seen, names, epsilon, "raise" if "raise" in settings else "warn")
            compared = self.graph.call_function(COMPARE, args)
        seen.meta = {"val": sample_like(olds[0], len(olds) + len(ends)), "recompute": must_save()}
        self.forward.add(seen)
        for node in (now, compared):
            self._of_backward(node, now)
        now.meta["val"] = sample_like(olds[0], len(olds))

    def _epsilon(self) -> float:
        """The largest epsilon of the dtypes that updates compute in."""
        values = [node.meta.get("val") for node in [*self.recomputable, *self.streams]]
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)

    # --- what reads and writes

    def _read_buffers_before_writes(self) -> None:
        """Forward writes some inputs: running statistics. Backward must read what was there."""
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for buffer in written_inputs(self.effects):
            with self.graph.inserting_before(first):
                before = self.graph.call_function(aten.clone.default, (buffer,))
            before.meta = {"val": buffer.meta["val"], "recompute": must_save()}
            readers = [user for user in buffer.users if user in self.forward]
            for user in set(readers) - {*self.effects, before}:
                user.replace_input_with(buffer, before)
            self.forward.add(before)
            self.copy[buffer] = before

    def _read_copies(self) -> None:
        def copy_of(node: fx.Node) -> fx.Node:
            return self.copy.get(node, node)

        for node in self.graph.nodes:
            if node in self.forward or node in self.made or node is self.output:
                continue
            node.args = fx.map_arg(node.args, copy_of)
            node.kwargs = fx.map_arg(node.kwargs, copy_of)
        leaves, spec = pytree.tree_flatten(self.output.args)
        for i in range(self.num_fwd_outputs, len(leaves)):
            if is_node(leaves[i]):
                leaves[i] = copy_of(leaves[i])
        self.output.args = pytree.tree_unflatten(leaves, spec)

    # --- the end

    def finish(self, keep_order: bool) -> None:
        """Put the nodes in order, and remove the markers.

        `keep_order`: the backend reorders nodes, so what is ordered stays as an operator.
        """
        Fences(self.graph, self.forward, self.made).put(self.marks, self.rebuilt)
        sort(self.graph, self.forward, self.made)
        remove_markers(self.graph, keep_order)
        self.graph.lint()
        self.gm.recompile()


def remove_markers(graph: fx.Graph, keep_order: bool) -> None:
    """Replace each marker by its value."""
    for node in list(graph.nodes):
        if node.target is markers.MARK:
            _replace_mark(node, keep_order)
        elif node.target is markers.ORDERED and not keep_order:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _replace_mark(node: fx.Node, keep_order: bool) -> None:
    new: Any = node.args[0]
    update = node.args[3]
    if keep_order:
        with node.graph.inserting_before(node):
            value = node.graph.call_function(markers.ORDERED, (new, [], update))
        value.meta = dict(node.meta)
        new = value
    elif "recompute" in node.meta:
        new.meta["recompute"] = node.meta["recompute"]
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def written_inputs(effects: Iterable[fx.Node]) -> list[fx.Node]:
    """The inputs of the graph that these nodes write to."""
    found: dict[fx.Node, None] = {}
    for node in effects:
        schema: Any = getattr(node.target, "_schema", None)
        for value, argument in zip(node.args, schema.arguments if schema else ()):
            if argument.is_write and is_node(value) and value.op == "placeholder":  # type: ignore[union-attr]
                found[value] = None  # type: ignore[index]
    return list(found)


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)
