"""`Budget`: the memory mode that makes a step as fast as it can be within a limit of bytes.

The first call for each shape of input is watched and gives a `Profile`. All later calls follow the
plan that `retrograd.planner` makes from it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from retrograd.core.errors import RetrogradError
from retrograd.core.memory import Call, Plan
from retrograd.planner import best_plans
from retrograd.profile import Profile
from retrograd.sizes import human

UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}


class BudgetError(RetrogradError, ValueError):
    """A budget that is too small to train the network in."""


@dataclass(frozen=True)
class Budget:
    """Keep what makes a step fastest, as long as the stack's activations fit into `limit`.

    Args:
        limit: a number of bytes, a size such as `"2 GiB"` or `"500 MB"`, or a share of what plain
            autograd needs: `"25%"`.
        host: what is kept may also wait in the memory of the host, up to so many bytes: a number or
            a size. It is copied there in forward, and back ahead of its use, beside the work of an
            accelerator. On a CPU it raises.

    The limit is on the peak of live tensor bytes in a step, without gradients, parameters and
    optimizer state. It counts what the stack makes, not what the rest of the model does. The first
    call for each shape of input is watched and keeps nothing; from the second call on, the plan is
    fixed, and `stack.plan(x)` shows it. A limit below what the stack needs in any case raises
    `BudgetError`, which says how much that is. A limit above what plain autograd needs behaves as
    `Keep`.

    Example:
        >>> rg.Budget("2 GiB").bytes_of(plain=2**40)
        2147483648
        >>> rg.Budget("2 GiB", host="16 GiB")
        Budget(limit='2 GiB', host='16 GiB')
    """

    limit: int | str
    host: int | str | None = None
    needs_profile = True  # no annotation: a fact about the class, not a field

    def __post_init__(self) -> None:
        self.bytes_of(0)  # raises if the limit makes no sense
        _ = self.host_bytes

    def __repr__(self) -> str:
        host = "" if self.host is None else f", host={self.host!r}"
        return f"Budget(limit={self.limit!r}{host})"

    @property
    def host_bytes(self) -> int:
        """The limit on the host in bytes."""
        if self.host is None or (type(self.host) is int and self.host > 0):
            return self.host or 0
        is_size = isinstance(self.host, str) and not self.host.strip().endswith("%")
        bytes_ = _parse(self.host, 0) if is_size else None  # type: ignore[arg-type]
        if bytes_ is None:
            raise ValueError(
                f"Budget({self.limit!r}, host={self.host!r}): host is a number of bytes or a size "
                'such as "16 GiB".'
            )
        return bytes_

    def bytes_of(self, plain: int) -> int:
        """The limit in bytes, where plain autograd needs `plain`."""
        if type(self.limit) is int and self.limit > 0:
            return self.limit
        bytes_ = _parse(self.limit, plain) if isinstance(self.limit, str) else None
        if bytes_ is None:
            raise ValueError(
                f'Budget({self.limit!r}): pass a number of bytes, a size such as "2 GiB", or a '
                'share of plain autograd such as "25%".'
            )
        return bytes_

    def plan(self, call: Call) -> Plan:
        """The plan for a call. Without a profile (the call cannot be measured) it keeps nothing."""
        if call.profile is None:
            return Plan(keep_from=len(call.targets))
        return call.profile.plans(self, fresh=not call.accumulates)[0]

    def plans_for(self, profile: Profile, fresh: bool) -> list[Plan]:
        """The plans for calls like those that `profile` watched. `fresh`: parameters have no
        gradients before the step.
        """
        if self.host_bytes:
            profile.use_host(self)
        plain = profile.plain(fresh)
        limit = self.bytes_of(plain)
        if limit >= plain:
            return [Plan(keep_from=0) for _ in profile.lengths]
        plans, floor = best_plans(profile, profile.needs(fresh), limit, host=self.host_bytes)
        if plans is None:
            raise BudgetError(_too_small(self, limit, floor, plain, fresh))
        return plans


def _parse(limit: str, plain: int) -> int | None:
    """The bytes of a size or of a share of `plain`; None if it is neither."""
    match = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*([a-zA-Z]*|%)\s*", limit)
    if match is None:
        return None
    number = float(match[1])
    unit = match[2].lower()
    if number == 0 or math.isinf(number):  # nothing, or more digits than a float has
        return None
    if unit == "%":
        return int(plain * number / 100)
    if unit in UNITS:
        return int(number * UNITS[unit])
    return None


def _too_small(budget: Budget, limit: int, floor: int, plain: int, fresh: bool) -> str:
    accumulating = "" if fresh else ", while gradients are accumulated"
    return (
        f"{budget!r}: {human(limit)} are less than the {human(floor)} that this stack needs in any "
        f"case, for its streams and one update at a time{accumulating} (plain autograd: "
        f"{human(plain)}).\n"
        f'  Fix: rg.Budget("{human(floor * 1.005)}") or more; rg.Chunked makes a token-wise '
        "function smaller."
    )
