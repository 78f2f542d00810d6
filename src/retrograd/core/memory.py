"""Which updates are kept and which are rebuilt: a plan, as data. No tensors here.

A plan cuts the program once. Updates before the cut are rebuilt in backward; those from the cut on
are *kept*: they run as ordinary autograd code, whose saved tensors backward needs first and frees
first, so that is where kept bytes are best spent. Before the cut, a plan may choose to keep
something of an update, so that less of it has to run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Choice(NamedTuple):
    """What is kept of an update that is rebuilt."""

    # what its function returned: the recompute may stop when all that autograd needs is there
    output: bool = False
    operations: frozenset[tuple[Any, int]] = (
        frozenset()
    )  # outputs of these, each the n-th call of its kind: not run again
    # all streams before it: the walk back takes them up, and whatever drifted is right again
    streams: bool = False


class Watcher(Protocol):
    """Looks at a forward pass, to plan the next one."""

    def watch(self, index: int, frame: Any, parameters: Sequence[Any]) -> Any: ...
    def note(
        self,
        index: int,
        saved: Sequence[Any],
        by_fn: int,
        parts: Any,
        parameters: Sequence[Any],
        streams: Sequence[Any],
    ) -> None: ...
    def finish(self, state: Mapping[str, Sequence[Any]]) -> None: ...


@dataclass(frozen=True)
class Plan:
    """A program's cut: rebuilt up to `spare`; kept from `kept` on; in between kept if that does not
    raise the peak.
    """

    spare: int
    kept: int
    choices: Mapping[int, Choice] = field(
        default_factory=dict
    )  # by update, before the cut; others keep nothing
    watcher: Watcher | None = None
    waypoints: Callable[..., Any] | None = None  # in place of `waypoints.Waypoints`

    @property
    def sample(self) -> range:
        """The updates just before `spare`, as many as lie between the cuts: they tell what keeping
        those would cost.
        """
        first = self.spare - (self.kept + 1 - self.spare)
        return range(first, self.spare) if first >= 0 else range(0)


@dataclass(frozen=True)
class Keep:
    """Plain autograd: store everything. Fastest, and the oracle that every other mode is tested
    against.
    """


@dataclass(frozen=True)
class Reverse:
    """Rebuild everything: activation memory does not grow with depth; a step costs 4/3 - 1/(3L) of
    plain autograd.

    The last block is free, because backward needs its graph first thing: it is kept, not rebuilt.
    Its last update is always kept. The others of the block are kept as long as their bytes are at
    most those of the gradients that backward is still going to create, for then they are gone
    before the step reaches its peak (`keep_last=False` keeps nothing, for a model whose loss, not
    its stack, sets the peak).
    """

    keep_last: bool = True

    def plan(self, targets: Sequence[str], *_: Any) -> Plan:
        """The cut for a program, given the target of each of its updates."""
        n = len(targets)
        if not self.keep_last:
            return Plan(n, n)
        return Plan(last_block(targets), max(n - 1, 0))


@dataclass(frozen=True)
class Anchor:
    """`Reverse`, and the streams are kept before every `every`-th block: the walk back takes them
    up there.

    So rounding errors add up over `every` blocks at most, however deep the stack is. It costs one
    state, two streams for a stack of pairs, every so many blocks; recompute stays as it is.
    """

    every: int
    keep_last: bool = True

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(
                f"Anchor(every={self.every!r}): every is a number of blocks, 1 or more, for "
                "instance Anchor(every=16)."
            )

    def plan(self, targets: Sequence[str], *_: Any) -> Plan:
        plan = Reverse(self.keep_last).plan(targets)
        at = [
            start for start in block_starts(targets)[self.every :: self.every] if start < plan.kept
        ]
        return Plan(plan.spare, plan.kept, dict.fromkeys(at, Choice(streams=True)))


def block_starts(targets: Sequence[str]) -> list[int]:
    """Where blocks start: a block is as long as no stream is updated twice."""
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


def is_spare(sample: Sequence[int], gradients_to_come: int) -> bool:
    """Whether keeping a block that saves these bytes per update leaves the peak where it is.

    Rebuilding holds the largest update's bytes anyway, when all gradients exist. Keeping the block
    holds the others' too, but before the first gradient exists.
    """
    return bool(sample) and sum(sample) - max(sample) <= gradients_to_come
