"""`Budget`: the fastest step whose activations fit into so many bytes.

The first forward of a stack, for each shape of input, is watched: which operations each function
runs, what each costs and makes, and what autograd saves of it. From that, a plan for all later
calls. Three things can be bought with memory, best value first:

- a function's *output*: then its recompute may stop as soon as everything that autograd saved is
  there again, before the last product; undoing it needs the output, and here it is;
- outputs of *operations* inside it: they are not run again (looking at each operation costs some
  time itself);
- *everything*, for the last updates of the program: they run as plain autograd.

What is kept for update i is there until backward gets to i, and parameter gradients come into being
on the way: the limit holds at every update, and a byte kept for a late update is in the way of
fewer of them than one kept for an early one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from retrograd.core.errors import RetrogradError
from retrograd.core.memory import Choice, Plan, Reverse
from retrograd.core.private import CPU_ATTENTION, surrounding_hooks
from retrograd.core.replay import as_bytes
from retrograd.core.streams import distinct_bytes, flatten, largest_shard, local, nbytes, storage_of
from retrograd.measure import LiveBytes, flops_of

# What a device does in a second: operations, bytes. Rough, because only ratios matter, and fixed,
# because every process of a group must come to the same plan.
SPEED = {"cpu": (1e11, 1e10), "cuda": (1e14, 1e12)}
REMEMBERED = 64  # profiles: shapes of input that a stack knows at a time
MIB = 2**20
# Seconds that an operation costs more while `core.operations` looks at it: 2e-5 on a CPU of 2023,
# and some more, because what needs no such help is to be preferred where the two come close.
DISPATCH = 4e-5


class BudgetError(RetrogradError, ValueError):
    """A budget that the network cannot be trained in."""


# --- what is measured


class Operation(NamedTuple):
    """One operation inside a function."""

    name: Any
    number: int  # among the calls of the same name
    seconds: float
    bytes: int  # of what it made
    gradients: int  # bytes of the gradients of what it read and of what it made
    saves_before: int  # how many tensors autograd had saved when it began
    # has a formula for its FLOPs: one of the expensive kinds; and what it made was not written to
    counted: bool
    made: frozenset[int]  # which memory


@dataclass
class Measured:
    """What forward saw of one update."""

    operations: list[Operation] = field(default_factory=list)
    forward: int = 0  # bytes alive at once while the function runs
    backward: int = 0  # and in its backward: an estimate
    saved: int = 0  # bytes that autograd saved, parameters aside
    output: int = 0
    saves: int = 0  # how many tensors the function saved
    coupling_saves: bool = False
    gradients: dict[int, int] = field(
        default_factory=dict
    )  # bytes of each parameter's, by its identity

    @property
    def seconds(self) -> float:
        return sum(operation.seconds for operation in self.operations)


class _Watch(LiveBytes):
    """Lists the operations of a function, and counts live bytes."""

    def __init__(self, measured: Measured, frame: Any, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.measured = measured
        self.frame = frame
        self.parameters = {storage_of(local(p)) for p in parameters}
        self.calls: dict[Any, int] = {}
        self.edited: set[int] = set()  # memory that was written to again, and so cannot be kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        saves, before, random = len(self.frame.store), self.now, as_bytes(torch.get_rng_state())
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # One that draws must run again: whatever draws after it would draw something else.
        draws = (
            torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
            or as_bytes(torch.get_rng_state()) != random
        )
        if hasattr(func, "_schema") and func._schema.is_mutable:
            self.edited |= set(map(storage_of, _tensors((*args[:1], *(kwargs or {}).values()))))
        number = self.calls[func] = self.calls.get(func, -1) + 1
        made = distinct_bytes(_tensors(result)) if self.now != before else 0
        flops = _flops(func, args, kwargs or {}, result)
        kind = next((t.device.type for t in _tensors((args, kwargs))), "cpu")
        per_second, bandwidth = SPEED.get(kind, SPEED["cuda"])
        inputs, outputs = list(_tensors(args)), list(_tensors(result))
        moved = sum(map(nbytes, inputs + outputs)) if made else 0
        seconds = (flops or 0) / per_second + moved / bandwidth
        # The gradients of parameters are counted elsewhere; those of a view take no memory.
        given = (
            [t for t in inputs if t.is_floating_point() and storage_of(t) not in self.parameters]
            if made
            else []
        )
        gradients = sum(map(nbytes, given + outputs)) if made else 0
        memory = frozenset(map(storage_of, outputs)) if made else frozenset()
        self.measured.operations.append(
            Operation(
                func,
                number,
                seconds,
                made,
                gradients,
                saves,
                flops is not None and not draws,
                memory,
            )
        )
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """torch's own formulas; and one for attention on a CPU, which torch does not count."""
    if getattr(func, "_overloadpacket", None) is CPU_ATTENTION:
        *batch, queries, channels = args[0].shape
        return 4 * math.prod(batch) * queries * args[1].shape[-2] * channels
    return flops_of(func, args, kwargs, result)


class Profile:
    """What one forward pass of a program needs: watches it (a `memory.Watcher`), then plans the
    next ones.
    """

    def __init__(self, updates: int, budget: Budget | None = None, fresh: bool = True) -> None:
        self.updates = [Measured() for _ in range(updates)]
        self.budget = budget
        self.fresh = fresh
        self.state_bytes = 0
        self.is_complete = False
        self.plans: dict[tuple[Budget, bool], Plan] = {}

    @contextmanager
    def watch(self, index: int, frame: Any, parameters: Sequence[Any]) -> Iterator[None]:
        with _Watch(self.updates[index], frame, parameters) as live:
            yield
        measured = self.updates[index]
        measured.forward = live.peak
        measured.operations = [
            o._replace(counted=o.counted and not o.made & live.edited) for o in measured.operations
        ]

    def note(
        self,
        index: int,
        saved: Sequence[Any],
        by_fn: int,
        parts: Any,
        parameters: Sequence[Any],
        streams: Sequence[Any],
    ) -> None:
        measured = self.updates[index]
        measured.saves, measured.coupling_saves = by_fn, by_fn < len(saved)
        weights = {
            storage_of(local(parameter)) for parameter in parameters
        }  # `Linear` saves a view of its weight
        activations = [None if storage_of(tensor) in weights else tensor for tensor in saved]
        measured.saved = distinct_bytes(activations)
        measured.output = distinct_bytes(tensor for outputs in parts for tensor in outputs)
        # Backward frees what an operation saved when it is through with it. The streams are there
        # anyway, and so are their gradients: that of the output is one of them.
        there = {storage_of(stream) for stream in streams}
        own = [None if t is None or storage_of(t) in there else t for t in activations]
        returned = {storage_of(tensor): tensor.nbytes for outputs in parts for tensor in outputs}
        ends = [*(operation.saves_before for operation in measured.operations[1:]), len(saved)]
        held = [
            distinct_bytes(own[:end])
            + o.gradients
            - sum(returned.get(memory, 0) for memory in o.made)
            for o, end in zip(measured.operations, ends)
        ]
        measured.backward = max([distinct_bytes(own), *held])
        saved_memory = {storage_of(tensor) for tensor in own if tensor is not None}
        measured.operations = [o._replace(made=o.made - saved_memory) for o in measured.operations]
        measured.gradients = {id(p): largest_shard(p) for p in parameters if p.requires_grad}

    def finish(self, state: Mapping[str, Sequence[Any]]) -> None:
        self.state_bytes = sum(leaf.nbytes for leaves in state.values() for leaf in leaves)
        self.is_complete = True
        if self.budget is not None:
            self.plan(self.budget, self.fresh)  # raises now, not a step later, if it cannot be

    def gradients(self) -> dict[int, int]:
        """The bytes of each parameter's gradient; a parameter may be used by several updates."""
        return {
            parameter: bytes_
            for measured in self.updates
            for parameter, bytes_ in measured.gradients.items()
        }

    def needs(self, fresh: bool) -> list[int]:
        """Bytes at each update of the backward pass, if nothing is kept, less all gradients:
        `fresh` if they are yet to come.

        Alive are the streams and their gradients; and the most that the update itself needs, when
        it runs again, in its backward, or when both streams and gradients are made anew. At the
        last update, the output of the stack, too. And a parameter's gradient that is added to
        another exists beside it.
        """
        to_come = self.gradients()
        total, done, seen, needs = sum(to_come.values()), 0, set(), []
        for measured in reversed(self.updates):
            for parameter in measured.gradients.keys() - seen:
                done += to_come[parameter]
            seen |= measured.gradients.keys()
            work = 2 * self.state_bytes + max(
                measured.forward, measured.backward, 2 * self.state_bytes
            )
            work += self.state_bytes if not needs else 0
            needs.append(
                work + (done - total if fresh else max(measured.gradients.values(), default=0))
            )
        return needs[::-1]

    def plain(self, fresh: bool) -> int:
        """Bytes of plain autograd."""
        before = itertools.accumulate((measured.saved for measured in self.updates), initial=0)
        return max((need + kept for need, kept in zip(self.needs(fresh), before)), default=0)

    def plan(self, budget: Budget, fresh: bool) -> Plan:
        if (budget, fresh) not in self.plans:
            self.plans[budget, fresh] = self._plan(budget, fresh)
        return self.plans[budget, fresh]

    def _plan(self, budget: Budget, fresh: bool) -> Plan:
        """Buy what saves most time a byte, as long as there is room at every update from there on;
        late updates first.
        """
        n, needs = len(self.updates), self.needs(fresh)
        limit = budget.bytes_of(self.plain(fresh))
        if not any(measured.saves for measured in self.updates):  # nothing will ever be rebuilt
            return Plan(n, n)
        if limit < max(needs, default=0):
            raise BudgetError(too_small(budget, limit, max(needs), self.plain(fresh), fresh))
        room = [limit - need for need in needs]
        ways = [levels(measured) for measured in self.updates]
        has = [way[0] for way in ways]
        kept = n  # where the cut is: from there on, everything
        heap: list[tuple[float, int, int, Level, Level]] = []
        number = itertools.count()  # levels have no order

        def offer(u: int, after: Level) -> None:
            heapq.heappush(heap, (-_value(has[u], after), -u, next(number), has[u], after))

        for u in range(n):
            if len(ways[u]) > 1:
                offer(u, ways[u][1])
        if n:
            offer(n - 1, everything(self.updates[-1]))
        while heap:
            _, u, _, before, after = heapq.heappop(heap)
            u = -u
            if before is not has[u]:  # it has got another since
                if after.choice is None:
                    offer(u, after)
                continue
            more, own = after.bytes - before.bytes, after.own - before.own
            later = room[u + 1 :]
            if u >= kept or own > room[u] or (later and more > min(later)):
                continue
            room[u:] = [room[u] - own, *[free - more for free in later]]
            has[u] = after
            if after.choice is None:
                kept = u
                if u:
                    offer(u - 1, everything(self.updates[u - 1]))
            elif ways[u].index(after) + 1 < len(ways[u]):
                offer(u, ways[u][ways[u].index(after) + 1])
        choices = {
            u: choice for u in range(kept) if (choice := has[u].choice) and choice != Choice()
        }
        return Plan(kept, kept, choices)


def too_small(budget: Budget, limit: int, floor: int, plain: int, fresh: bool) -> str:
    return (
        f"{budget!r}: {human(limit)} are less than the {human(floor)} that this stack needs in any "
        "case, for its streams and one "
        f"update at a time{'' if fresh else ', while gradients are accumulated'} (plain autograd: "
        f"{human(plain)}).\n"
        f'  Fix: rg.Budget("{human(floor * 1.005)}") or more; rg.Chunked makes a token-wise '
        "function smaller."
    )


def human(bytes_: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.3g} GiB"


# --- what is decided


@dataclass(frozen=True)
class Budget:
    """Keep what makes a step fastest, as long as the stack's activations fit into `limit`.

    Args:
        limit: a number of bytes, a size such as `"2 GiB"` or `"500 MB"`, or a share of what plain
            autograd needs: `"25%"`.

    The limit is on the peak of live tensor bytes in a step, less gradients (and parameters and
    optimizer state): what the stack itself makes, and not what the rest of the model does. The
    first call for each shape of input is watched and keeps nothing; from the second on its plan is
    settled. `stack.plan(x)` shows it. A limit below what the stack needs in any case raises
    `BudgetError`, which says how much that is; one above what plain autograd needs behaves as
    `Keep`.

    Example:
        >>> rg.Budget("2 GiB").bytes_of(plain=2**40)
        2147483648
    """

    limit: int | str

    def __post_init__(self) -> None:
        self.bytes_of(0)  # raises for what cannot be

    def bytes_of(self, plain: int) -> int:
        """The limit in bytes, where plain autograd needs `plain`."""
        units = {"": 1, "b": 1} | {
            f"{p}{b}": n**i for i, p in enumerate("kmgt", 1) for b, n in (("b", 1000), ("ib", 1024))
        }
        if isinstance(self.limit, str):
            match = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*([a-zA-Z]*|%)\s*", self.limit)
            if match and float(match[1]) > 0:
                if match[2] == "%":
                    return int(plain * float(match[1]) / 100)
                if match[2].lower() in units:
                    return int(float(match[1]) * units[match[2].lower()])
        elif type(self.limit) is int and self.limit > 0:
            return self.limit
        raise ValueError(
            f'Budget({self.limit!r}): pass a number of bytes, a size such as "2 GiB", or a share '
            'of plain autograd such as "25%".'
        )

    def plan(
        self, targets: Sequence[str], streams: Any, keywords: Any, module: Any, program: Any
    ) -> Plan:
        """The plan for a call of `module`; on the first one of its kind, to watch."""
        # What surrounds us runs this forward again, and must find the same graph; lazy modules have
        # no shapes yet.
        if surrounding_hooks() or any(map(is_lazy, module.parameters())):
            return Reverse(keep_last=False).plan(targets)
        profiles, structure = module._backstage.profiles, module._backstage.structure
        same = structure is not None and [fns[0] for fns in structure.functions] == [
            step.fn for step in program
        ]
        parameters = (
            structure.parameters if same else list(module.parameters())
        )  # those of the last call, if it was alike
        functions = [(step.target, id(step.fn)) for step in program]
        trained = sum(parameter.requires_grad for parameter in parameters)
        key = (
            module.training,
            len(parameters),
            trained,
            *functions,
            *map(_signature, (streams, keywords)),
        )
        fresh = all(parameter.grad is None for parameter in parameters if parameter.is_leaf)
        if key not in profiles or not profiles[key].is_complete:
            while len(profiles) >= REMEMBERED:
                profiles.pop(next(iter(profiles)))
            profiles[key] = Profile(len(targets), self, fresh)
            return Plan(len(targets), len(targets), watcher=profiles[key])
        return profiles[key].plan(self, fresh)


def _signature(value: Any) -> tuple[Any, ...]:
    """What of a call decides what it needs: shapes, dtypes, whether gradients are wanted, autocast,
    and other arguments.
    """
    leaves = flatten(value)[0]
    kinds = sorted({leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)} | {"cpu"})
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in kinds
        if kind != "meta"
    ]
    other = [
        leaf if isinstance(leaf, (int, float, str, bool, type(None))) else None for leaf in leaves
    ]
    return (
        *autocast,
        *other,
        *((t.shape, t.dtype, t.requires_grad) for t in leaves if isinstance(t, Tensor)),
    )


# --- what can be bought


class Level(NamedTuple):
    """One way to treat an update: what it keeps, its bytes, and what recomputing it then costs."""

    choice: Choice | None  # None: everything
    bytes: int  # while later updates are walked
    own: int  # beyond what autograd saves, while it is walked itself
    seconds: float


def levels(measured: Measured) -> list[Level]:
    """The ways short of everything that are worth it, by bytes; each saves less time a byte than
    the one before.
    """
    return _hull(all_levels(measured))


def all_levels(measured: Measured) -> list[Level]:
    operations = measured.operations
    found = [Level(Choice(), 0, 0, measured.seconds)]
    if not measured.coupling_saves:
        rest = [operation for operation in operations if operation.saves_before < measured.saves]
        seconds = sum(operation.seconds for operation in rest)
        found.append(Level(Choice(output=True), measured.output, measured.output, seconds))
        overhead = 2 * DISPATCH * len(operations)
        worth = sorted(
            (o for o in rest if o.counted and o.bytes),
            key=lambda o: o.seconds / o.bytes,
            reverse=True,
        )
        for count in range(1, len(worth) + 1):
            kept = worth[:count]
            choice = Choice(output=True, operations=frozenset((o.name, o.number) for o in kept))
            bytes_, own = (
                measured.output + sum(o.bytes for o in some)
                for some in (kept, [o for o in kept if o.made])
            )
            found.append(
                Level(choice, bytes_, own, seconds + overhead - sum(o.seconds for o in kept))
            )
    return found


def everything(measured: Measured) -> Level:
    return Level(None, measured.saved, 0, 0.0)


def _hull(found: list[Level]) -> list[Level]:
    """Those on the lower convex hull of bytes and seconds."""
    hull: list[Level] = []
    for level in sorted(found, key=lambda level: (level.bytes, level.seconds)):
        if hull and level.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _value(hull[-2], hull[-1]) <= _value(hull[-2], level):
            hull.pop()
        hull.append(level)
    return hull


def _value(before: Level, after: Level) -> float:
    return (before.seconds - after.seconds) / max(after.bytes - before.bytes, 1)
