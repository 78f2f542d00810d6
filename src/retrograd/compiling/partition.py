"""Where the pass is called: before a joint graph is split into forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from retrograd.compiling import markers
from retrograd.compiling.joint import JointGraph, Mark, Report, marks_of, remove_markers
from retrograd.compiling.regions import prepare_regions
from retrograd.compiling.seams import merge_equal_nodes, without_merging

Observer = Callable[[Report, fx.GraphModule, fx.GraphModule, int], None]

# Called with what the pass did, and with the two graphs: for tests and measurements.
observers: list[Observer] = []


class Partitioner:
    """The pass, and then another partitioner.

    `reorders`: the backend chooses the order of nodes, so order has to be asked for.
    """

    def __init__(self, split: Callable[..., Any], reorders: bool) -> None:
        self.split = split
        self.reorders = reorders

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if not has_marks(gm):
            return self.split(gm, inputs, **kwargs)
        count = kwargs["num_fwd_outputs"]
        report = run(gm, count, self.reorders)
        with without_merging():
            forward, backward = self.split(gm, inputs, **kwargs)
        for observe in observers:
            observe(report, forward, backward, count)
        return forward, backward


def is_checkpointed(mark: Mark) -> bool:
    """Whether torch.utils.checkpoint surrounds an update. Then it says what is kept."""
    return "recompute" in mark.node.meta


def has_marks(gm: fx.GraphModule) -> bool:
    return any(node.target is markers.MARK for node in gm.graph.nodes)


def run(gm: fx.GraphModule, num_fwd_outputs: int, reorders: bool) -> Report:
    """Rewrite a joint graph in place."""
    prepare_regions(gm, has_seeds=reorders)
    gm.graph.eliminate_dead_code()
    marks = marks_of(gm.graph)
    if all(mark.plan == markers.KEEP for mark in marks) or any(map(is_checkpointed, marks)):
        remove_markers(gm.graph, keep_order=False)
        gm.recompile()
        return Report(0, 0, 0, 0)
    merge_equal_nodes(gm)
    joint = JointGraph(gm, num_fwd_outputs)
    report = joint.rebuild()
    joint.finish(keep_order=reorders)
    return report
