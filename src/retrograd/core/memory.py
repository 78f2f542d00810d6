"""Memory modes: what a call keeps for backward. A plan is data; there are no tensors here.

A plan cuts the program once. Updates before the cut are rebuilt in backward. Updates from the cut
on are *kept*: they run as plain autograd. Backward needs their tensors first and frees them first,
so that is where kept bytes are best spent. Before the cut, a plan may keep parts of an update, so
that less of it has to run again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Any,
    NamedTuple,
    Protocol,
)

Operation = tuple[Any, int]  # an operation, and which of its calls inside a function


class Choice(NamedTuple):
    """What is kept of an update that is rebuilt.

    - `output`: what its function returned. Recompute may stop as soon as autograd has its tensors.
    - `operations`: what these operations inside the function returned. They do not run again.
    - `streams`: all streams before it. Backward continues with them, so drift starts from zero.
    - `saved`: what autograd saved of its function, and what undoing needs. It does not run again.
    - `host`: the rest of this choice, apart from `operations`, waits in the host's memory; and so
      does the target's earlier value, where that has to be kept.
    - `rerun`: less than usual. The update reads its target (or overwrites it), and the target's
      earlier value is not kept. Backward runs the updates before it once more, from the nearest one
      that keeps its target. All of these must have the same target.
    """

    output: bool = False
    operations: frozenset[Operation] = frozenset()
    streams: bool = False
    rerun: bool = False
    saved: bool = False
    host: bool = False


NOTHING = Choice()


@dataclass(frozen=True)
class Plan:
    """What one call keeps.

    Args:
        keep_from: the number of the first update that is kept. 0 keeps everything; the number of
            updates keeps nothing.
        choices: what is kept of single updates before that.
        keep_if_free_from: updates from here to `keep_from` are kept too, if that leaves the peak of
            the step where it is. None: they are rebuilt.
    """

    keep_from: int
    choices: Mapping[int, Choice] = field(default_factory=dict)
    keep_if_free_from: int | None = None

    @functools.cached_property
    def may_keep_from(self) -> int:
        """The first update that may be kept."""
        return self.keep_from if self.keep_if_free_from is None else self.keep_if_free_from

    @property
    def sample(self) -> range:
        """The updates that tell what keeping those of `keep_if_free_from` would cost.

        They are the updates just before, as many as those are.
        """
        if self.keep_if_free_from is None:
            return range(0)
        first = 2 * self.keep_if_free_from - self.keep_from - 1
        return range(first, self.keep_if_free_from) if first >= 0 else range(0)


@dataclass(frozen=True)
class Call:
    """One call of a stack, as a memory mode sees it."""

    targets: Sequence[str]  # the stream that each update changes
    profile: Any = None  # a `retrograd.profile.Profile` of such a call, for modes that ask for it
    accumulates: bool = False  # parameters have gradients already, of an earlier backward


class MemoryMode(Protocol):
    """What `memory=` takes: an object that plans each call. Write your own with this method.

    A mode with an attribute `needs_profile = True` finds the measured bytes and times of such a
    call in `call.profile`. For that, the first call of each shape keeps nothing and is measured.
    Where a call cannot be measured, `call.profile` is None.

    Example:
        >>> class KeepSecondHalf:
        ...     def plan(self, call):
        ...         return rg.Plan(keep_from=len(call.targets) // 2)
        >>> pairs = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence(pairs, memory=KeepSecondHalf())
        >>> stack(torch.randn(2, 8)).sum().backward()
    """

    def plan(self, call: Call, /) -> Plan:
        """The plan of one call."""
        ...


@dataclass(frozen=True)
class Keep:
    """Plain autograd: store everything. Fastest, and what every other mode is tested against."""

    def plan(self, call: Call) -> Plan:
        return Plan(keep_from=0)


@dataclass(frozen=True)
class Reverse:
    """Rebuild everything: activation memory does not grow with depth.

    A step costs 4/3 - 1/(3L) of plain autograd, because the last block is kept: backward needs its
    graph first thing. The last update is always kept. The other updates of the block are kept as
    long as their bytes are at most those of the gradients that backward is still going to create,
    because then they are gone before the step reaches its peak. `keep_last=False` keeps nothing,
    for a model whose loss sets the peak, not its stack.
    """

    keep_last: bool = True

    def plan(self, call: Call) -> Plan:
        updates = len(call.targets)
        if not self.keep_last:
            return Plan(keep_from=updates)
        return Plan(max(updates - 1, 0), keep_if_free_from=last_block(call.targets))


@dataclass(frozen=True)
class Anchor:
    """`Reverse`, and the streams are kept before every `every`-th block.

    Backward continues with them there, so rounding errors add up over `every` blocks at most,
    however deep the stack is. It costs one state (two streams of a stack of pairs) every so many
    blocks. Recompute stays as it is.
    """

    every: int
    keep_last: bool = True

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(
                f"Anchor(every={self.every!r}): every is a number of blocks, 1 or more, for "
                "instance Anchor(every=16)."
            )

    def plan(self, call: Call) -> Plan:
        plan = Reverse(self.keep_last).plan(call)
        starts = block_starts(call.targets)[self.every :: self.every]
        anchors = [start for start in starts if start < plan.keep_from]
        choices = dict.fromkeys(anchors, Choice(streams=True))
        return Plan(plan.keep_from, choices, plan.keep_if_free_from)


def plan_of(memory: MemoryMode, call: Call) -> Plan:
    """The plan that a memory mode makes for a call. Raises if it does not fit the program."""
    plan = memory.plan(call)
    if not isinstance(plan, Plan):
        raise TypeError(f"{memory!r}.plan(call) returned {plan!r:.80}; it must return an rg.Plan.")
    updates = len(call.targets)
    numbers = [*plan.choices, plan.keep_from]
    if plan.keep_if_free_from is not None:
        numbers.append(plan.keep_if_free_from)
    wrong = [number for number in numbers if not 0 <= number <= updates]
    if wrong:
        raise ValueError(
            f"{memory!r}.plan(call) returned {plan!r:.200}: update {wrong[0]} does not exist, the "
            f"program has updates 0 to {updates - 1}."
        )
    return plan


def block_starts(targets: Sequence[str]) -> list[int]:
    """Where blocks start. A block goes on as long as no stream is updated twice."""
    starts: list[int] = []
    seen: set[str] = set()
    for i, target in enumerate(targets):
        if not starts or target in seen:
            starts.append(i)
            seen = set()
        seen.add(target)
    return starts


def last_block(targets: Sequence[str]) -> int:
    """Where the last block starts: the longest tail in which no stream is updated twice."""
    start = len(targets)
    while start and targets[start - 1] not in targets[start:]:
        start -= 1
    return start


def is_free(sample: Sequence[int], gradients_to_come: int) -> bool:
    """Whether keeping a block whose updates save these bytes leaves the peak where it is.

    Rebuilding holds the bytes of the largest update anyway, when all gradients exist. Keeping the
    block holds the bytes of the others too, but before the first gradient exists.
    """
    return bool(sample) and sum(sample) - max(sample) <= gradients_to_come
