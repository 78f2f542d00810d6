"""What an attack found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How often something was tried, and a line for each time that something was lost."""

    tried: int
    lost: tuple[str, ...]

    @classmethod
    def of(cls, found: Iterable[str | None]) -> Outcome:
        """The outcome of trials, each of which gave None or what was lost."""
        results = list(found)
        return cls(len(results), tuple(line for line in results if line is not None))
