"""Functions as regions: compiled once for all updates that run the same code.

A traced function is a region of its own (`torch.compiler.nested_compile_region`): a graph beside
the joint graph, which calls it. So the time to compile does not grow with the number of equal
blocks, and Inductor does not fuse one function with the next, which makes temporaries larger.

Before the pass, regions have to be put in order:

- A region draws the seeds of its random numbers inside, and its copy would draw others. The seeds
  become inputs.
- A region returns inputs, views and one tensor twice, among what backward needs of it. Inductor
  takes everything that it returns for memory of its own and overwrites it: wrong gradients in
  torch 2.13, with or without this library. Each region returns new tensors only, each once.
- Where random numbers have no seeds, regions are inlined.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import fx

from retrograd.compiling.randomness import body_of, draws
from retrograd.compiling.seams import INVOKE_SUBGRAPH

aten = torch.ops.aten

Region = tuple[fx.GraphModule, list[fx.Node]]  # what it does, and its calls


def regions_of(gm: fx.GraphModule) -> list[Region]:
    """The regions that a graph calls. One may have several names."""
    calls: dict[fx.GraphModule, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH):
        calls[body_of(node)].append(node)
    return list(calls.items())


def prepare_regions(gm: fx.GraphModule, has_seeds: bool) -> None:
    """Let copies of regions compute what the regions computed. `has_seeds`: random numbers come
    from seeds.
    """
    if not has_seeds:
        inline(gm, regions_of(gm))
        return
    hoist_seeds(gm)
    return_new_tensors(gm)
    inline(gm, [region for region in regions_of(gm) if any(map(draws, region[0].graph.nodes))])


# --- inlining


def inline(gm: fx.GraphModule, regions: list[Region]) -> None:
    """Replace calls of regions by what the regions do."""
    for body, calls in regions:
        for call in calls:
            _inline_call(gm.graph, body.graph, call)


def _inline_call(graph: fx.Graph, body: fx.Graph, node: fx.Node) -> None:
    known: dict[fx.Node, Any] = dict(zip(body.find_nodes(op="placeholder"), node.args[2:]))
    custom = node.meta.get("custom")
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            known[inner] = copied = graph.node_copy(inner, known.__getitem__)
            copied.meta = dict(inner.meta)
            if custom is not None:
                copied.meta["custom"] = custom
            if "partitioner_tag" in node.meta:
                copied.meta["partitioner_tag"] = node.meta["partitioner_tag"]
    returned = body.find_nodes(op="output")[0].args[0]
    for user in list(node.users):
        value = returned[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(known.get(value, value))  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(node)


# --- seeds


def hoist_seeds(gm: fx.GraphModule) -> None:
    """Make the seeds that regions draw an input of them.

    All are drawn in one call, as Inductor does: to merge equal nodes takes two draws of as many
    seeds for the same.
    """
    wanted: list[tuple[fx.Node, fx.Node]] = []  # calls, and the node that drew seeds
    for body, calls in regions_of(gm):
        for seeds in [node for node in body.graph.nodes if is_draw_of_seeds(node)]:
            _take_as_input(body, seeds)
            wanted += [(call, seeds) for call in calls]
        body.recompile()
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    wanted.sort(key=lambda pair: order[pair[0]])
    by_device: dict[Any, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for call, seeds in wanted:
        by_device[seeds.args[1]].append((call, seeds))
    for pairs in by_device.values():
        _draw_all(gm.graph, pairs)


def is_draw_of_seeds(node: fx.Node) -> bool:
    return str(node.target) == "prims.inductor_seeds.default"


def _take_as_input(body: fx.GraphModule, seeds: fx.Node) -> None:
    with body.graph.inserting_after(body.graph.find_nodes(op="placeholder")[-1]):
        given = body.graph.placeholder(f"given_{seeds.name}")
    given.meta = dict(seeds.meta)
    seeds.replace_all_uses_with(given)
    body.graph.erase_node(seeds)


def _draw_all(graph: fx.Graph, wanted: list[tuple[fx.Node, fx.Node]]) -> None:
    """Draw all seeds of a device before the first region that needs some."""
    first, seeds = wanted[0]
    total = sum(one.args[0] for _, one in wanted)  # type: ignore[misc]
    with graph.inserting_before(first):
        drawn = graph.call_function(seeds.target, (total, seeds.args[1]))  # type: ignore[arg-type]
    drawn.meta["val"] = seeds.meta["val"].new_empty(total)
    start: Any = 0
    for call, one in wanted:
        end = start + one.args[0]
        with graph.inserting_before(call):
            part = graph.call_function(aten.slice.Tensor, (drawn, 0, start, end))
        part.meta["val"] = one.meta["val"]
        start = end
        call.args = (*call.args, part)
        given = call.meta.get("eager_input_vals")
        if given:
            call.meta["eager_input_vals"] = ((*given[0], part.meta["val"]), given[1])


# --- what regions return


class Alias(NamedTuple):
    """What a region returns that is not a new tensor: views of `base`, the innermost one first."""

    base: fx.Node
    views: list[fx.Node]


def return_new_tensors(gm: fx.GraphModule) -> None:
    """Let each region return each new tensor once, and nothing else."""
    for body, calls in regions_of(gm):
        output = body.graph.find_nodes(op="output")[0]
        inputs = body.graph.find_nodes(op="placeholder")
        returned = list(output.args[0])
        aliases, first = find_aliases(returned, inputs)
        if not aliases:
            continue
        for i, alias in aliases.items():
            returned[i] = alias.base if first.get(alias.base) == i else None
        output.args = (tuple(returned),)
        body.recompile()
        for call in calls:
            _make_aliases_outside(gm.graph, call, aliases, first, inputs)
            values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in returned]
            call.meta["val"] = tuple(values)


def find_aliases(
    returned: list[Any], inputs: list[fx.Node]
) -> tuple[dict[int, Alias], dict[fx.Node, int]]:
    """Which returned values are aliases, and where each new tensor is returned first."""
    aliases: dict[int, Alias] = {}
    first: dict[fx.Node, int] = {}
    for i, value in enumerate(returned):
        if not isinstance(value, fx.Node):
            continue
        alias = alias_of(value)
        is_new = alias.base not in inputs and first.setdefault(alias.base, i) == i
        if not is_new or alias.views:
            aliases[i] = alias
    return aliases, first


def alias_of(value: fx.Node) -> Alias:
    views: list[fx.Node] = []
    while is_view(value):
        views.insert(0, value)
        value = value.args[0]  # type: ignore[assignment]
    return Alias(value, views)


def is_view(node: fx.Node) -> bool:
    target: Any = node.target
    return getattr(target, "is_view", False) and node.all_input_nodes == [node.args[0]]


def _make_aliases_outside(
    graph: fx.Graph,
    call: fx.Node,
    aliases: dict[int, Alias],
    first: dict[fx.Node, int],
    inputs: list[fx.Node],
) -> None:
    """Let the users of a call make the views that the region returned."""
    bases: dict[fx.Node, fx.Node] = {}
    for user in list(call.users):
        alias = aliases.get(user.args[1])  # type: ignore[call-overload, arg-type]
        if alias is None:
            continue
        base = alias.base
        if base in inputs:
            value = call.args[2 + inputs.index(base)]
        else:
            value = bases.get(base) or _item(graph, call, first[base], user, base)
            bases[base] = value
        for view in alias.views:
            with graph.inserting_before(user):
                value = graph.node_copy(view, {view.args[0]: value}.__getitem__)  # type: ignore[dict-item]
            if "custom" in user.meta:
                value.meta["custom"] = user.meta["custom"]
        user.replace_all_uses_with(value)  # type: ignore[arg-type]
        graph.erase_node(user)


def _item(graph: fx.Graph, call: fx.Node, number: int, like: fx.Node, base: fx.Node) -> fx.Node:
    with graph.inserting_after(call):
        item = graph.call_function(operator.getitem, (call, number))
    item.meta = dict(like.meta, val=base.meta["val"])
    return item
