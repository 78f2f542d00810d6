"""Budgets inside a compiled graph: which updates are kept.

Here the bytes are known from the graph: what backward reads of each update. Kept are as many of the
last updates as fit, because backward frees them first. What torch's partitioner computes again of
them by itself makes it fewer bytes, not more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd.budget import Budget, human
from retrograd.compiling import markers

log = logging.getLogger("retrograd")


def kept_by_budget(plans: Sequence[str], sizes: Mapping[int, int], streams: int) -> set[int]:
    """The numbers of the marks that are kept, for the plan of each.

    `sizes`: bytes that backward reads of each update. `streams`: bytes of the last states.
    """
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


def bytes_read(nodes: Sequence[fx.Node], forward: Collection[fx.Node]) -> int:
    """Bytes that backward reads of nodes of forward. Views have no bytes of their own."""
    return sum(_bytes_read_of(node, forward) for node in nodes if not _is_view(node))


def _bytes_read_of(node: fx.Node, forward: Collection[fx.Node]) -> int:
    value: Any = node.meta.get("val")
    if isinstance(value, (tuple, list)):  # backward reads some of its items
        return sum(bytes_of(user) for user in node.users if user not in forward)
    return bytes_of(node)


def bytes_of(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    return size_of(value) if isinstance(value, torch.Tensor) else 0


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; where a size is not known while tracing, of the example."""
    count = 1
    for size in tensor.shape:
        count *= size if isinstance(size, int) else (size.node.hint or 1)
    return count * tensor.element_size()


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False))
