"""The planner: what to keep of each update, so that a step is fastest within a limit of bytes.

It works on the numbers of a `Profile`; no tensors here. The planner ranks four kinds of kept
values by time saved per byte:

- a function's *output*: undoing the update needs it, so without it recompute must run to the end.
  With it, recompute stops as soon as it has all tensors that autograd saved, which is before the
  last matrix product;
- outputs of *operations* inside the function: these operations do not run again. Watching the
  operations costs time, so this pays for large ones only;
- what autograd *saved* of it, and its output: it does not run again;
- *everything*, for the last updates of the program: they run as plain autograd.

An update that reads its target keeps the target's earlier value in any case. Where there is no room
for all of these, every k-th is kept, and backward runs the updates between two of them once more
(`segments`). The planner takes the least k that fits.

What is kept for an update stays alive until backward reaches it. So a byte kept for a late update
takes room from fewer updates than a byte kept for an early one. The limit holds at every update,
because the room differs: backward creates parameter gradients on its way.

What is kept may wait on the *host*. Then it takes room at its own update and at the next one only:
there it leaves in forward, and comes back in backward. It costs what the copies take beyond the
time of that next update, and room on the host. Early updates come first, because on the device
they would wait longest.

Calls of several stacks may share a limit. Then their updates are one list, since backward goes
through all of them, and each call has its own last updates.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from retrograd.core.memory import NOTHING, Choice, Plan
from retrograd.profile import Operation, Profile, UpdateProfile

# Seconds that `core.operations` adds to each operation of a function, in forward and again in
# recompute. Measured: 2e-5 on a CPU of 2023. Doubled, to prefer plans without it if two are close.
WATCHING_SECONDS = 4e-5


# Of the time of a copy: what it costs at least, so that the device is preferred while it has room.
COPY_COST = 0.01


RERUN = Choice(rerun=True)
BASE_ON_HOST = Choice(host=True)  # its target, if that has to be kept


class Level(NamedTuple):
    """One way to treat an update: what it keeps, its bytes, and the time of its recompute."""

    choice: Choice | None  # None: everything
    bytes: int  # kept while backward is at the later updates
    own_bytes: int  # while backward is at this update, beyond what autograd saves there anyway
    seconds: float  # of its recompute, and of waiting for copies
    host: int = 0  # bytes on the host; and more on the device while backward is at the next update


# --- the levels of one update


def everything(update: UpdateProfile) -> Level:
    """The level at which an update runs as plain autograd."""
    return Level(None, update.saved_bytes, 0, 0.0)


def all_levels(update: UpdateProfile, may_rerun: bool = False) -> list[Level]:
    """Every level below `everything`: nothing, the output, the output and some operations.

    With `may_rerun` there is one below nothing: the target's earlier value is not kept.
    """
    if may_rerun:
        return [level_of(update, RERUN), *all_levels(update)]
    nothing = level_of(update, NOTHING)
    if update.coupling_saves:  # only a full recompute gives the tensors that the coupling saved
        return [nothing]
    candidates = sorted(
        (operation for operation in rerun(update) if operation.counted and operation.bytes),
        key=lambda operation: operation.seconds / operation.bytes,
        reverse=True,
    )
    names = [(operation.name, operation.number) for operation in candidates]
    counts = range(len(names) + 1)
    needs_output = update.target_bytes is None
    choices = [Choice(needs_output, frozenset(names[:n])) for n in counts]
    if update.saved_by_fn:
        choices.append(Choice(needs_output, saved=True))
    return [nothing, *(level_of(update, choice) for choice in choices)]


def host_levels(update: UpdateProfile) -> list[Level]:
    """The levels that keep something on the host."""
    if not update.bandwidth:
        return []
    needs_output = update.target_bytes is None
    choices = []
    if not (needs_output and update.coupling_saves):
        choices.append(Choice(needs_output, host=True))
    if update.saved_by_fn and not update.coupling_saves:
        choices.append(Choice(needs_output, saved=True, host=True))
    return [level_of(update, choice) for choice in choices]


def level_of(update: UpdateProfile, choice: Choice, state_bytes: int = 0) -> Level:
    """The level that keeps `choice`. `state_bytes`: of all streams."""
    if choice.host:
        kept = level_of(update, choice._replace(host=False), state_bytes)
        again = recomputed(update, choice)
        moved = kept.bytes - sum(o.bytes for o in again if (o.name, o.number) in choice.operations)
        return kept._replace(
            choice=choice,
            bytes=kept.bytes - moved,
            seconds=kept.seconds + waiting(update, moved),
            host=moved,
        )
    if choice.saved and not update.coupling_saves:
        return _whole(update, choice)
    operations = recomputed(update, choice)
    chosen = [o for o in operations if (o.name, o.number) in choice.operations]
    seconds = sum(operation.seconds for operation in operations)
    if choice.operations:
        seconds += 2 * WATCHING_SECONDS * len(update.operations)
        seconds -= sum(operation.seconds for operation in chosen)
    kept_bytes = update.output_bytes if choice.output else 0
    kept_bytes += state_bytes if choice.streams else 0
    target_bytes = 0
    if choice.rerun:
        seconds += update.seconds
    elif not choice.streams:
        target_bytes = update.target_bytes or 0  # at the update itself it is one of the streams
    return Level(
        choice=choice,
        bytes=kept_bytes + target_bytes + sum(operation.bytes for operation in chosen),
        own_bytes=kept_bytes + sum(o.bytes for o in chosen if not o.is_saved),
        seconds=seconds,
    )


def waiting(update: UpdateProfile, moved: int) -> float:
    """Seconds that the device waits for copies to the host and back, beside the next update."""
    if not update.bandwidth:
        return 0.0
    seconds = moved / update.bandwidth
    beside = update.seconds_beside
    stalls = max(seconds - beside, 0.0) + max(seconds - 2 * beside, 0.0)  # forward and backward
    return stalls + COPY_COST * seconds


def recomputed(update: UpdateProfile, choice: Choice) -> list[Operation]:
    """The operations in a recompute of an update; those that `choice` keeps are among them."""
    is_kept = update.target_bytes is not None
    if (choice.output or choice.streams or is_kept) and not update.coupling_saves:
        return rerun(update)
    return update.operations


def recompute_flops(update: UpdateProfile, choice: Choice | None) -> int:
    """The FLOPs that run once more for an update. None: everything is kept."""
    if choice is None or (choice.saved and not update.coupling_saves):
        return 0
    again = recomputed(update, choice)
    total = sum(o.flops for o in again if (o.name, o.number) not in choice.operations)
    return total + choice.rerun * sum(operation.flops for operation in update.operations)


def _whole(update: UpdateProfile, choice: Choice) -> Level:
    """The level that keeps what autograd saved."""
    kept = update.whole_bytes if choice.output else update.saved_bytes
    target_bytes = update.target_bytes or 0
    # Streams that were kept are there beside those that the walk rebuilds.
    own_bytes = kept - update.saved_bytes + update.saved_streams
    return Level(choice, kept + target_bytes, own_bytes, 0.0)


def rerun(update: UpdateProfile) -> list[Operation]:
    """The operations that run again if recompute stops when it has the last saved tensor."""
    return [o for o in update.operations if o.saves_before < update.saved_by_fn]


def levels(update: UpdateProfile, may_rerun: bool = False, saved_last: bool = False) -> list[Level]:
    """The levels below `everything` that are worth their bytes, in the order of bytes.

    These are the lower convex hull of bytes and seconds: each saves less time per byte than the one
    before it. `saved_last`: without what autograd saved, which is left to fill the room.
    """
    hull: list[Level] = []
    found = all_levels(update, may_rerun)
    if saved_last:
        found = [level for level in found if level.choice is None or not level.choice.saved]
    for level in sorted(found, key=lambda level: (level.bytes, level.seconds)):
        if hull and level.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], level):
            hull.pop()
        hull.append(level)
    return hull


def _is_above(level: Level, before: Level, after: Level) -> bool:
    """Whether a level saves no more time per byte than going to `after` directly."""
    return _saved_per_byte(before, level) <= _saved_per_byte(before, after)


def _saved_per_byte(before: Level, after: Level) -> float:
    """Seconds saved per byte by going from one level to another."""
    if after.bytes <= before.bytes and after.seconds <= before.seconds:
        return math.inf
    return (before.seconds - after.seconds) / max(after.bytes - before.bytes, 1)


def level_in(update: UpdateProfile, choice: Choice | None, state_bytes: int = 0) -> Level:
    """The level of an update in a plan. None: everything is kept."""
    return everything(update) if choice is None else level_of(update, choice, state_bytes)


def choices_of(plan: Plan, length: int) -> list[Choice | None]:
    """What a plan keeps of each update. None: everything."""
    return [
        None if index >= plan.keep_from else plan.choices.get(index, NOTHING)
        for index in range(length)
    ]


def levels_in(plan: Plan, updates: Sequence[UpdateProfile], state_bytes: int) -> list[Level]:
    """The level of each update of a call in a plan."""
    choices = choices_of(plan, len(updates))
    found = [level_in(*pair, state_bytes) for pair in zip(updates, choices)]
    if plan.keep_from < len(updates):
        level = found[plan.keep_from]
        shared = shared_at_cut(updates, plan.keep_from, state_bytes)
        found[plan.keep_from] = level._replace(bytes=level.bytes - shared)
    return found


def shared_at_cut(updates: Sequence[UpdateProfile], cut: int, state_bytes: int) -> int:
    """Bytes of the streams at the cut of a call that need not be counted beside what is kept.

    The walk holds these streams, and the first update after the cut saves some of them. If nothing
    is rebuilt, there is no walk.
    """
    if cut == len(updates):
        return 0
    return updates[cut].saved_streams if cut else state_bytes


def start_of_walk(cut: int, length: int, state_bytes: int) -> dict[int, int]:
    """More bytes at the first updates that the walk undoes, if it does not begin at the end.

    There the streams from which it began are still alive, beside those that it rebuilt. What a
    profile measured of the last updates has that already.
    """
    if cut == length:
        return {}
    extra = {cut - 1: state_bytes, cut - 2: state_bytes // 2}
    return {index: bytes_ for index, bytes_ in extra.items() if index >= 0}


def kept_bytes(plan: Plan, profile: Profile) -> int:
    """The bytes that a plan keeps of a call, until backward gets to it."""
    return sum(level.bytes for level in levels_in(plan, profile.updates, profile.state_bytes))


# --- targets that are kept, and updates that run once more


def segments(updates: Sequence[UpdateProfile], targets: Sequence[str], every: int) -> list[int]:
    """For each update, how many updates before it the nearest kept target is.

    Of consecutive updates that keep the same target, every `every`-th keeps it.
    """
    distances: list[int] = []
    for i, (update, target) in enumerate(zip(updates, targets)):
        follows = i > 0 and targets[i - 1] == target and updates[i - 1].target_bytes is not None
        if update.target_bytes is None or not follows:
            distances.append(0)
        else:
            distances.append((distances[-1] + 1) % every)
    return distances


class Base:
    """What a plan starts from: the least that it keeps."""

    def __init__(self, needs: list[int], distances: list[int], host: int = 0) -> None:
        self.needs = needs  # bytes at each update of the backward pass, and before it begins
        self.distances = distances  # see `segments`
        self.host = host  # bytes of targets that wait on the host; else they are on the device
        self.peak = max(needs, default=0)

    def room(self, limit: int) -> list[int]:
        """The free bytes at these moments."""
        return [limit - need for need in self.needs]


def bases(profile: Profile, needs: Sequence[int]) -> Iterator[Base]:
    """With targets on the device, those that keep most of them first."""
    for distances in all_segments(profile.updates, profile.targets):
        yield Base(base_needs(profile.updates, needs, distances), distances)


def bases_on_host(profile: Profile, needs: Sequence[int], host: int) -> Iterator[Base]:
    """With all targets on the host, if they have room there."""
    moved = [level_of(update, BASE_ON_HOST).host for update in profile.updates]
    if 0 < sum(moved) <= host:
        with_next = list(map(operator.add, needs, [0, *moved]))
        yield Base(with_next, [0] * len(moved), sum(moved))


def base_needs(
    updates: Sequence[UpdateProfile], needs: Sequence[int], distances: Sequence[int]
) -> list[int]:
    """The bytes at each update of the backward pass, and before it begins, if the targets of these
    segments are kept on the device. `needs` are the bytes without them.
    """
    kept = 0
    found = []
    for update, need, distance in zip(updates, needs, distances):
        target_bytes = update.target_bytes or 0
        # Targets of the segment that were made once more, and wait for backward to get there.
        found.append(need + kept + distance * target_bytes)
        if distance == 0:
            kept += target_bytes
    return [*found, needs[-1] + kept]


# --- the plan of all updates


def best_plans(
    profile: Profile, needs: Sequence[int], limit: int, given: Sequence[Plan] = (), host: int = 0
) -> tuple[list[Plan] | None, int]:
    """The plan of each call within `limit`; None if none fits. And the least limit that would do.

    `needs` are the bytes at each update of the backward pass, and before it begins, if nothing is
    kept. The first calls follow the `given` plans. `host`: the limit of bytes on the host.
    """
    floors = []
    found: list[_Purchase] = []
    for base in bases(profile, needs):
        floors.append(base.peak)
        if base.peak <= limit:
            room = base.room(limit)
            found += [_better(profile, room, base, on, given) for on in sorted({0, host})]
            break
    for base in bases_on_host(profile, needs, host):
        floors.append(base.peak)
        if base.peak <= limit:
            found.append(_better(profile, base.room(limit), base, host, given))
    if not found:
        return None, min(floors, default=0)
    return min(found, key=_Purchase.seconds).plans, min(floors)


def _better(
    profile: Profile, room: Sequence[int], base: Base, host: int, given: Sequence[Plan]
) -> _Purchase:
    """The one of two greedy choices that needs fewer FLOPs.

    What autograd saved of an update saves much time, in a large step. Bought by its rank, it may
    leave room that nothing fits; bought last, it may come too late.
    """
    purchases = [_Purchase(profile, room, base, host, last) for last in (False, True)]
    for purchase in purchases:
        purchase.run(given)
    return min(purchases, key=_Purchase.flops)


def least_peak(profile: Profile, needs: Sequence[int], host: int = 0) -> int:
    """The bytes of a step that keeps as little as possible."""
    return best_plans(profile, needs, limit=-1, host=host)[1]


def all_segments(updates: Sequence[UpdateProfile], targets: Sequence[str]) -> Iterator[list[int]]:
    """`segments` of every length that makes a difference, the shortest first."""
    for every in range(1, len(updates) + 1):
        distances = segments(updates, targets, every)
        if max(distances) < every - 1:  # longer than there are such updates in a row
            return
        yield distances


# The most time saved per byte comes first, on the device and then on the host; among equals the
# last update (on the host the first one), then the oldest offer.
_Rank = tuple[float, float, int, int]


class _Offer:
    """An update may go from one level to another."""

    def __init__(self, position: int, before: Level, after: Level) -> None:
        self.position = position  # of the update
        self.before = before
        self.after = after
        # More bytes while backward is at the later updates, and at this one; and on the host (on
        # the device, too, while backward is at the next update).
        self.bytes = after.bytes - before.bytes
        self.own_bytes = after.own_bytes - before.own_bytes
        self.host = after.host - before.host


class _Purchase:
    """The greedy choice: take the best offer that fits, until no offer is left. Then fill up.

    `room` has the free bytes at each update of the backward pass, and before it begins, if nothing
    more is kept.
    """

    def __init__(
        self,
        profile: Profile,
        room: Sequence[int],
        base: Base,
        host: int,
        saved_last: bool,
    ) -> None:
        self.updates = profile.updates
        self.room = list(room)
        self.host_room = host - base.host
        self.plans: list[Plan] = []
        self.options = [
            host_levels(update)
            if base.host and update.target_bytes
            else levels(update, distance > 0, saved_last)
            for update, distance in zip(self.updates, base.distances)
        ]
        self.chosen = [options[0] for options in self.options]
        self.starts = [0, *itertools.accumulate(profile.lengths)]  # of each call, and the end
        places = profile.places()
        self.state_bytes = [places[start].streams for start in self.starts[:-1]]
        self.cuts = self.starts[1:]  # from there on, everything of a call is kept
        self.call_of = [call for call, length in enumerate(profile.lengths) for _ in range(length)]
        self.offers: list[tuple[_Rank, _Offer]] = []  # a heap
        self.is_filling = False
        self.serial = itertools.count()  # numbers the offers

    def run(self, given: Sequence[Plan]) -> None:
        """Make the `plans`."""
        for call, plan in enumerate(given):
            self._follow(call, plan)
        for index in range(self.starts[len(given)], len(self.updates)):
            self._offer_next(index)
            self._offer_host(index)
        for call in range(len(given), len(self.cuts)):
            self._offer_everything(call)
        self._take_offers()
        self._fill(range(self.starts[len(given)], len(self.updates)))
        self.plans = [*given, *map(self._plan, range(len(given), len(self.cuts)))]

    def seconds(self) -> float:
        """Of all recomputes, and of waiting for copies."""
        return sum(
            level.seconds
            for index, level in enumerate(self.chosen)
            if index < self.cuts[self.call_of[index]]
        )

    def flops(self) -> int:
        """The FLOPs of all recomputes."""
        return sum(
            recompute_flops(update, level.choice)
            for index, (update, level) in enumerate(zip(self.updates, self.chosen))
            if index < self.cuts[self.call_of[index]]
        )

    def _take_offers(self) -> None:
        while self.offers:
            _, offer = heapq.heappop(self.offers)
            if offer.before is not self.chosen[offer.position]:
                self._renew(offer)
            elif self._fits(offer):
                self._accept(offer)

    def _fill(self, positions: Iterable[int]) -> None:
        """Use the room that is left: offer the levels that are not the best ones for their bytes,
        too, as long as one fits.
        """
        self.is_filling = True
        self.options = [
            options
            if options[0].host
            else [*all_levels(update, options[0].choice == RERUN), *self._host_levels(update)]
            for update, options in zip(self.updates, self.options)
        ]
        for index in positions:
            if index < self.cuts[self.call_of[index]]:
                self._offer_better(index)
        self._take_offers()

    def _offer_better(self, index: int) -> None:
        """Offer every level that takes less time than the chosen one."""
        before = self.chosen[index]
        for level in self.options[index]:
            if level.seconds < before.seconds:
                self._offer(index, level)

    def _follow(self, call: int, plan: Plan) -> None:
        """Take what a plan keeps, whether there is room or not."""
        start = self.starts[call]
        updates = self.updates[start : self.cuts[call]]
        for index, level in enumerate(levels_in(plan, updates, self.state_bytes[call]), start):
            self._take_room(index, self.chosen[index], level)

    def _take_room(self, index: int, before: Level, after: Level) -> None:
        """An update goes from one level to another."""
        bytes_ = after.bytes - before.bytes
        host = after.host - before.host
        self.room[index + 1 :] = [free - bytes_ for free in self.room[index + 1 :]]
        self.room[index + 1] -= host
        self.host_room -= host

    def _offer(self, index: int, after: Level) -> None:
        before = self.chosen[index]
        on_host = after.host - before.host
        per_host_byte = (before.seconds - after.seconds) / on_host if on_host > 0 else 0.0
        order = index if on_host > 0 else -index
        rank = (-_saved_per_byte(before, after), -per_host_byte, order, next(self.serial))
        heapq.heappush(self.offers, (rank, _Offer(index, before, after)))

    def _host_levels(self, update: UpdateProfile) -> list[Level]:
        """The levels on the host. A target that is kept on the device stays there."""
        return host_levels(update) if self.host_room > 0 and not update.target_bytes else []

    def _offer_host(self, index: int) -> None:
        """Offer every level on the host that saves time."""
        for level in self._host_levels(self.updates[index]):
            if level.seconds < self.chosen[index].seconds:
                self._offer(index, level)

    def _offer_next(self, index: int) -> None:
        """Offer the level after the chosen one."""
        options = self.options[index]
        if self.chosen[index] not in options:  # it is on the host
            self._offer_better(index)
            return
        following = options.index(self.chosen[index]) + 1
        if following < len(options):
            self._offer(index, options[following])

    def _offer_everything(self, call: int) -> None:
        """Offer plain autograd for the last update before the cut of a call, if there is one."""
        start = self.starts[call]
        cut = self.cuts[call] - start
        if cut == 0:
            return
        updates = self.updates[start : self.starts[call + 1]]
        before, after = (
            shared_at_cut(updates, position, self.state_bytes[call]) for position in (cut, cut - 1)
        )
        level = everything(updates[cut - 1])
        self._offer(start + cut - 1, level._replace(bytes=level.bytes + before - after))

    def _renew(self, offer: _Offer) -> None:
        """The update has changed its level since this offer. Everything is still to be had, and so
        is the host.
        """
        is_better = offer.after.seconds < self.chosen[offer.position].seconds
        if offer.after.choice is None or (offer.after.choice.host and is_better):
            self._offer(offer.position, offer.after)

    def _fits(self, offer: _Offer) -> bool:
        if offer.position >= self.cuts[self.call_of[offer.position]]:  # it is kept already
            return False
        if offer.own_bytes > self.room[offer.position]:
            return False
        if offer.after.choice is None and not self._may_begin_at(offer.position):
            return False
        if offer.host > self.host_room:
            return False
        if offer.bytes + offer.host > self.room[offer.position + 1]:
            return False
        return offer.bytes <= min(self.room[offer.position + 1 :])

    def _start_of_walk(self, call: int, cut: int) -> dict[int, int]:
        start = self.starts[call]
        length = self.starts[call + 1] - start
        found = start_of_walk(cut - start, length, self.state_bytes[call])
        return {start + index: bytes_ for index, bytes_ in found.items()}

    def _may_begin_at(self, cut: int) -> bool:
        """Whether there is room for a walk that begins there."""
        call = self.call_of[cut]
        before = self._start_of_walk(call, self.cuts[call])
        after = self._start_of_walk(call, cut)
        return all(
            self.room[index] + before.get(index, 0) >= bytes_ for index, bytes_ in after.items()
        )

    def _begin_at(self, cut: int) -> None:
        """Let the walk of a call begin there."""
        call = self.call_of[cut]
        for index, bytes_ in self._start_of_walk(call, self.cuts[call]).items():
            self.room[index] += bytes_
        for index, bytes_ in self._start_of_walk(call, cut).items():
            self.room[index] -= bytes_
        self.cuts[call] = cut

    def _accept(self, offer: _Offer) -> None:
        index = offer.position
        self.room[index] -= offer.own_bytes
        self._take_room(index, offer.before, offer.after)
        self.chosen[index] = offer.after
        if offer.after.choice is not None and self.is_filling:
            self._offer_better(index)
        elif offer.after.choice is not None:
            self._offer_next(index)
        if offer.after.choice is not None:
            return
        self._begin_at(index)
        self._offer_everything(self.call_of[index])

    def _plan(self, call: int) -> Plan:
        start = self.starts[call]
        cut = self.cuts[call]
        choices = {
            number: level.choice
            for number, level in enumerate(self.chosen[start:cut])
            if level.choice is not None and level.choice != NOTHING
        }
        return Plan(keep_from=cut - start, choices=choices)
