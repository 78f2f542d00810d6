"""Random operations in a joint graph: what draws, and how it draws the same again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from retrograd.compiling.seams import INVOKE_SUBGRAPH, run_and_save_rng_state, run_with_rng_state
from retrograd.core.private import pytree

REPLAYED = ("cpu", "cuda")  # devices whose generators a graph can save and set


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or has effects: it may not just run twice."""
    if node.target is INVOKE_SUBGRAPH:
        return any(map(draws, body_of(node).graph.nodes))
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    if schema.is_mutable or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return schema.is_mutable
    return _dropout_of(node, schema) != 0


def _dropout_of(node: fx.Node, schema: Any) -> Any:
    """Attention has the tag of random operations, but draws with dropout only."""
    for i, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return node.args[i] if i < len(node.args) else default
    return None


def body_of(node: fx.Node) -> fx.GraphModule:
    """The graph that a call of a region runs."""
    owner: Any = node.graph.owning_module
    return getattr(owner, node.args[0].target)  # type: ignore[union-attr]


def can_replay(node: fx.Node) -> bool:
    """Whether a random operation can run again with the state of its generator. Those that cannot
    are saved: draws of seeds (a number each), regions, generators of other devices.
    """
    if node.target is INVOKE_SUBGRAPH or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return False
    if "inductor_seed" in str(node.target):
        return False
    values = pytree.tree_leaves(node.meta.get("val"))
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return len(devices) == 1 and devices <= set(REPLAYED) and "generator" not in node.kwargs


def saving_state(node: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The same operation, with the state that its generator had. Replaces the node.

    Returned: the call, the state, and the value.
    """
    graph = node.graph
    with graph.inserting_before(node):
        both = graph.call_function(
            run_and_save_rng_state(), (node.target, *node.args), dict(node.kwargs)
        )
        state = graph.call_function(operator.getitem, (both, 0))
        value = graph.call_function(operator.getitem, (both, 1))
    state.meta["val"] = _fake_state(node)
    value.meta = dict(node.meta)
    both.meta["val"] = (state.meta["val"], node.meta["val"])
    node.replace_all_uses_with(value)
    return both, state, value


def again(node: Any, state: Any, copy: dict[fx.Node, fx.Node]) -> fx.Node:
    """The operation once more, with a saved state and with other inputs."""
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda value: copy.get(value, value), (node.args, dict(node.kwargs))
    )
    return node.graph.call_function(run_with_rng_state(), (state, node.target, *args), kwargs)


def _fake_state(node: fx.Node) -> torch.Tensor:
    values = [v for v in pytree.tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor)]
    device = values[0].device
    size = torch.get_rng_state().numel()
    if device.type == "cuda":
        size = torch.cuda.get_rng_state(device).numel()
    with values[0].fake_mode:  # type: ignore[attr-defined]
        return torch.empty(size, dtype=torch.uint8)
