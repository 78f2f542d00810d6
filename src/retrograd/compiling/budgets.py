"""Budgets inside a compiled graph: which updates are kept.

Here the bytes are known from the graph: what backward reads of each update. Kept are as many of the
last updates as fit, because backward frees them first. What torch's partitioner computes again of
them by itself makes it fewer bytes, not more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd.budget import Budget, human
from retrograd.compiling import markers
from retrograd.core.private import pytree

log = logging.getLogger("retrograd")


def kept_by_budget(
    plans: Sequence[str], wanted: Mapping[int, Sequence[fx.Node]], streams: int
) -> set[int]:
    """The numbers of the marks that are kept, for the plan of each.

    `wanted`: what backward reads of each update. `streams`: bytes of the last states.
    """
    sizes = {number: bytes_of(nodes) for number, nodes in wanted.items()}
    plain = streams + sum(sizes.values())
    kept: set[int] = set()
    for budget in {plan.partition(f" {markers.BUDGET} ")[2] for plan in plans} - {""}:
        mine = [n for n, plan in enumerate(plans) if plan.endswith(f" {markers.BUDGET} {budget}")]
        limit = Budget(int(budget) if budget.isdigit() else budget).bytes_of(plain)
        kept |= _last_that_fit(mine, sizes, limit, streams)
    return kept


def _last_that_fit(
    numbers: Sequence[int], sizes: Mapping[int, int], limit: int, streams: int
) -> set[int]:
    largest = max([sizes.get(number, 0) for number in numbers], default=0)
    if streams + largest > limit:
        log.warning(
            "a budget of %s is less than the %s that the stacks of this graph need in any case, "
            "for their streams and one update at a time: nothing is kept.",
            human(limit),
            human(streams + largest),
        )
        return set()
    kept: set[int] = set()
    left = limit - streams
    for number in reversed(numbers):
        left -= sizes.get(number, 0)
        if left < 0:
            break
        kept.add(number)
    return kept


def bytes_of(nodes: Sequence[fx.Node]) -> int:
    """Bytes of the tensors that these nodes make. Views make none."""
    return sum(_bytes_of_value(node) for node in nodes if not _is_view(node))


def _bytes_of_value(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    tensors = [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    return sum(size_of(tensor) for tensor in tensors)


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; where a size is not known while tracing, of the example."""
    count = 1
    for size in tensor.shape:
        count *= size if isinstance(size, int) else (size.node.hint or 1)
    return count * tensor.element_size()


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False))
