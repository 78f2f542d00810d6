"""`StepPlan`: what a memory mode means for a step, as data to print, compare and draw."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from retrograd.core.memory import Choice, Plan
from retrograd.files import save_figure
from retrograd.html_tables import escape, html_table
from retrograd.line_labels import LineLabel, label_lines
from retrograd.planner import Level, least_peak, levels_in, start_of_walk
from retrograd.profile import Profile, UpdateProfile
from retrograd.sizes import MIB

if TYPE_CHECKING:
    from retrograd.head import Head


class Row(NamedTuple):
    """One update of a `StepPlan`.

    Attributes:
        name: of the update, such as `blocks.3.g`.
        keeps: what is kept of it: `nothing`, `output`, `output + 2 operations`, its target,
            `streams` or `everything`.
        bytes: that this takes, until backward reaches the update.
        again: the share of its forward that runs again, with the time that copies are waited for.
        forward: bytes alive when forward is at the update.
        backward: bytes alive when backward is, with the parameter gradients made by then.
        host: bytes that wait in the memory of the host.
    """

    name: str
    keeps: str
    bytes: int
    again: float
    forward: int
    backward: int
    host: int = 0


@dataclass(frozen=True)
class StepPlan:
    """What a memory mode keeps of each update, and the bytes that a step then needs. Print it,
    compare it, `draw` it.

    The figures are forecasts from one watched forward pass. `peak` is what the step needs, `plain`
    what it needs if everything is kept, `floor` if nothing is kept; `gradients` are not part of
    these three. `time` is relative to a step of plain autograd. `head` is what the model runs after
    its last stack, in a plan of `rg.plan`.
    """

    memory: Any
    rows: tuple[Row, ...]
    peak: int
    plain: int
    floor: int
    gradients: int
    time: float
    head: Head | None = None

    @property
    def host(self) -> int:
        """Bytes that wait in the memory of the host."""
        return sum(row.host for row in self.rows)

    def __str__(self) -> str:
        head = f"  {'updates':<32} {'together':>13}   what each keeps until backward is there"
        rows = (f"  {where:<32} {size:>13}   {keeps}" for where, size, keeps in self._table())
        return "\n".join([self._summary(), head, *rows])

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = ("updates", "together", "what each keeps until backward is there")
        summary = f"<p>{escape(self._summary())}</p>"
        return summary + html_table([head, *self._table()], has_head=True)

    def _summary(self) -> str:
        on_host = f", {self.host / MIB:.2f} MiB on the host" if self.host else ""
        return (
            f"{self.memory!r}: {len(self.rows)} updates, {self.peak / MIB:.2f} MiB at the peak"
            f"{on_host} (everything kept: {self.plain / MIB:.2f}, nothing: "
            f"{self.floor / MIB:.2f}), about {self.time:.2f} of plain autograd's time{self._head()}"
        )

    def _head(self) -> str:
        if self.head is None or not self.head.sets_peak:
            return ""
        return (
            f". The head ({self.head.name}) sets the peak of the model: it needs "
            f"{self.head.bytes / MIB:.2f} MiB beside what the stacks keep"
        )

    def _table(self) -> Iterator[tuple[str, str, str]]:
        """Neighbours that keep the same, together: which updates, their bytes, what they keep."""
        same = itertools.groupby(self._blocks(), key=lambda block: [row.keeps for row in block])
        for keeps, blocks in same:
            rows = [row for block in blocks for row in block]
            first = rows[0].name
            last = rows[-1].name
            where = first if first == last else f"{first} to {last}"
            total = sum(row.bytes + row.host for row in rows) / MIB
            yield where, f"{total:.2f} MiB", " | ".join(keeps)

    def _blocks(self) -> list[list[Row]]:
        """The rows of each block, if names are those of a `ReversibleSequence`; else one by one."""

        def block(row: Row) -> str:
            return re.sub(r"^((?:.*\.)?blocks\.\d+)[.,].*", r"\1", row.name)

        return [list(rows) for _, rows in itertools.groupby(self.rows, key=block)]

    def draw(self, path: Any, *others: StepPlan) -> None:
        """Draw the bytes over the course of a step, forward and then backward, of this plan and of
        others for comparison.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("StepPlan.draw needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        labels = []
        for plan in (self, *others):
            forward = [row.forward / MIB for row in plan.rows]
            backward = [row.backward / MIB for row in reversed(plan.rows)]
            (line,) = axes.plot(range(2 * len(plan.rows)), forward + backward)
            text = f"{plan.memory!r}: {plan.peak / MIB:.1f} MiB, time {plan.time:.2f}"
            labels.append(LineLabel(len(plan.rows), backward[0], text, line.get_color()))
        peak = (self.peak + self.gradients) / MIB
        axes.axvline(len(self.rows) - 0.5, color="gray", linewidth=0.5)
        axes.axhline(peak, color="gray", linewidth=0.5, linestyle="--")
        axes.set(xlabel="updates: forward, then backward", ylim=(0, None))
        axes.set(ylabel="MiB of activations and gradients")
        axes.spines[["top", "right"]].set_visible(False)
        label_lines(axes, labels, rise=0.05)
        save_figure(figure, path)


def forecast(
    memory: Any,
    plans: Sequence[Plan],
    profile: Profile,
    names: Sequence[str],
    fresh: bool,
    head: Head | None = None,
) -> StepPlan:
    """What the plans of the calls in a profile mean for a step."""
    needs = profile.needs(fresh)
    gradients = sum(profile.gradients().values()) if fresh else 0
    kept_before = 0
    waiting = 0  # targets that were made once more, and wait for backward to get there
    moving = 0  # on its way to the host, or back
    rows = []
    starting = _starts_of_walks(plans, profile)
    each = zip(names, profile.updates, profile.places(), _levels(plans, profile), needs, starting)
    for name, update, place, level, need, extra in each:
        is_rerun = level.choice is not None and level.choice.rerun
        waiting = waiting + (update.target_bytes or 0) if is_rerun else 0
        row = Row(
            name=name,
            keeps=_describe(level.choice, update),
            bytes=level.bytes,
            again=level.seconds / update.seconds if update.seconds else 0.0,
            forward=place.others + 2 * place.streams + kept_before + moving + update.forward_bytes,
            backward=need + gradients + kept_before + moving + level.own_bytes + waiting + extra,
            host=level.host,
        )
        rows.append(row)
        kept_before += level.bytes
        moving = level.host
    most = max((row.backward - gradients for row in rows), default=0)
    if head is not None:
        at_head = needs[-1] + kept_before + head.bytes - profile.loss_bytes()
        head = head._replace(sets_peak=at_head > most)
    return StepPlan(
        memory=memory,
        rows=tuple(rows),
        peak=max(needs[-1] + kept_before + moving, most),
        plain=profile.plain(fresh),
        floor=least_peak(profile, needs),
        gradients=gradients,
        time=_time(rows, profile.updates),
        head=head,
    )


def _levels(plans: Sequence[Plan], profile: Profile) -> list[Level]:
    """The level of each update."""
    places = profile.places()
    found: list[Level] = []
    for plan, length in zip(plans, profile.lengths):
        start = len(found)
        updates = profile.updates[start : start + length]
        found += levels_in(plan, updates, places[start].streams if length else 0)
    return found


def _starts_of_walks(plans: Sequence[Plan], profile: Profile) -> list[int]:
    """The bytes at each update that are there because a walk has just begun."""
    places = profile.places()
    found: list[int] = []
    for plan, length in zip(plans, profile.lengths):
        streams = places[len(found)].streams if length else 0
        extra = start_of_walk(plan.keep_from, length, streams)
        found += [extra.get(index, 0) for index in range(length)]
    return found


def _time(rows: Sequence[Row], updates: Sequence[UpdateProfile]) -> float:
    """Of a step, relative to plain autograd, whose backward takes twice the time of forward."""
    forward = sum(update.seconds for update in updates)
    again = sum(row.again * update.seconds for row, update in zip(rows, updates))
    return 1 + again / (3 * forward) if forward else 1.0


def _describe(choice: Choice | None, update: UpdateProfile) -> str:
    if choice is None:
        return "everything"
    if choice.rerun:
        return "nothing, and runs twice"
    count = len(choice.operations)
    on_host = ", on the host" * choice.host
    if choice.saved:
        return f"everything{on_host}"
    parts = ["streams"] * choice.streams + ["output"] * choice.output
    if update.target_bytes is not None and not choice.streams:
        parts.append("its target")
    if count:
        parts.append(f"{count} operation{'s' if count > 1 else ''}")
    return (" + ".join(parts) or "nothing") + on_host * bool(parts)
