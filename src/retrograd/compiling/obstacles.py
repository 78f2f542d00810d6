"""What keeps a stack out of a compiled graph, and what its memory mode means inside of one.

Some of these questions are answered while the compiler traces, about the stack itself: the graph
depends on the answers. The compiler traces anew if the stack is another one, and if an attribute
changes that traced code reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from retrograd.budget import Budget
from retrograd.compiling import seams
from retrograd.core.memory import Call, Plan, plan_of
from retrograd.core.streams import flatten
from retrograd.core.updates import is_trusted
from retrograd.shared_budget import SharedBudget

EXACT = (
    "exact=True promises states that are equal to the bit, and compiled kernels round differently "
    "in forward and in backward"
)


@seams.run_while_tracing
def obstacle_to_tracing(stack: Any) -> str | None:
    """Why a stack cannot be a part of a compiled graph; None if it can."""
    stack._prepare()
    if seams.backend().startswith("eager"):
        return "the backend that was asked for does not derive backward, and so cannot change it"
    return _obstacle_of_settings(stack) or _obstacle_of_functions(stack) or seams.ready()


def _obstacle_of_settings(stack: Any) -> str | None:
    if stack.exact is not False:
        return EXACT
    for where, coupling in stack._couplings():
        if not is_trusted(coupling):
            kind = type(coupling).__name__
            return f"{where} is {kind}, whose inverse has to be tried on live data"
    memory = stack.memory
    budget = budget_of(memory)
    if getattr(memory, "needs_profile", False) and budget is None:
        return f"memory={memory!r} plans from a measured call, and a graph is compiled without one"
    if budget is not None and budget.host is not None:
        return f"memory={budget!r} keeps values on the host, and a compiled graph copies none there"
    return None


def _obstacle_of_functions(stack: Any) -> str | None:
    from retrograd.chunked import Chunked  # which imports stacks

    for holder, name in stack._functions():
        if getattr(holder, "inverse", None) is not None:
            return "the inverse of an rg.Transform has to be tried on live data"
        fn = getattr(holder, name)
        modules = fn.modules() if isinstance(fn, nn.Module) else [fn]
        if any(isinstance(module, Chunked) for module in modules):
            return "rg.Chunked runs its function outside the compiler"
    return None


def budget_of(memory: Any) -> Budget | None:
    if isinstance(memory, SharedBudget):
        return memory.budget
    return memory if isinstance(memory, Budget) else None


def limit_of(memory: Any) -> str:
    """The limit of a budget, as text; "" for other memory modes."""
    budget = budget_of(memory)
    return "" if budget is None else str(budget.limit)


@seams.run_while_tracing
def uses_regions() -> bool:
    """Whether functions may be regions: for Inductor, which compiles each once.

    Not with `dynamic=True`: torch cannot trace a float that it takes for a variable into a region.
    Where DDP splits a graph at its buckets, the backend is not Inductor itself.
    """
    return seams.backend() == "inductor" and not seams.is_dynamic()


def plan_to_trace(memory: Any, targets: list[str], limit: str) -> Plan:
    """The plan of a call; with a budget, the pass chooses."""
    return Plan(keep_from=len(targets)) if limit else plan_of(memory, Call(targets))


def has_other_tensors(value: Any) -> bool:
    """Whether there are streams of other classes than `Tensor`: DTensors, for which the markers
    have no rule.
    """
    leaves = flatten(value)[0]
    return any(isinstance(leaf, Tensor) and not _is_plain(leaf) for leaf in leaves)


def _is_plain(leaf: Tensor) -> bool:
    return type(leaf) is Tensor or type(leaf) is nn.Parameter


OTHER_TENSORS = (
    "its streams are not plain tensors (a DTensor, a subclass of torch.Tensor), for which a "
    "compiled graph has no markers"
)
