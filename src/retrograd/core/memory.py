"""Which updates are kept and which are rebuilt: a plan, as data. No tensors here.

A plan cuts the program once. Updates before the cut are rebuilt in backward; those from the cut on are *kept*: they run as
ordinary autograd code, whose saved tensors backward needs first and frees first, so that is where kept bytes are best spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A program's cut: rebuilt up to `spare`; kept from `kept` on; in between kept if that does not raise the peak."""

    spare: int
    kept: int

    @property
    def sample(self) -> range:
        """The updates just before `spare`, as many as lie between the cuts: they tell what keeping those would cost."""
        first = self.spare - (self.kept + 1 - self.spare)
        return range(first, self.spare) if first >= 0 else range(0)


@dataclass(frozen=True)
class Keep:
    """Plain autograd: store everything. Fastest, and the oracle that every other mode is tested against."""


@dataclass(frozen=True)
class Reverse:
    """Rebuild everything: activation memory does not grow with depth; a step costs 4/3 - 1/(3L) of plain autograd.

    The last block is free, because backward needs its graph first thing: it is kept, not rebuilt. Its last update is always
    kept. The others of the block are kept as long as their bytes are at most those of the gradients that backward is
    still going to create, for then they are gone before the step reaches its peak (`keep_last=False` keeps nothing, for a
    model whose loss, not its stack, sets the peak).
    """

    keep_last: bool = True

    def plan(self, targets: Sequence[str]) -> Plan:
        """The cut for a program, given the target of each of its updates."""
        n = len(targets)
        if not self.keep_last:
            return Plan(n, n)
        return Plan(last_block(targets), max(n - 1, 0))


def last_block(targets: Sequence[str]) -> int:
    """Where the last block starts: the longest tail in which no stream is updated twice."""
    start = len(targets)
    while start and targets[start - 1] not in targets[start:]:
        start -= 1
    return start


def is_spare(sample: Sequence[int], gradients_to_come: int) -> bool:
    """Whether keeping a block that saves these bytes per update leaves the peak where it is.

    Rebuilding holds the largest update's bytes anyway, when all gradients exist. Keeping the block holds the others' too,
    but before the first gradient exists.
    """
    return bool(sample) and sum(sample) - max(sample) <= gradients_to_come
