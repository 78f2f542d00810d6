"""`StepPlan`: what a memory mode means for a step, as data to print, compare and draw."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from retrograd.budget import MIB, Level, Measured, Profile, all_levels, everything
from retrograd.core.memory import Choice, Plan


class Row(NamedTuple):
    """One update of a `StepPlan`."""

    name: str
    keeps: str  # nothing, its output, that and operations, everything, the streams before it
    bytes: int  # that this takes, until backward gets there
    again: float  # the share of its forward that runs again
    forward: int  # bytes alive when forward is there
    backward: int  # and when backward is: with the gradients of parameters that it has made by then


@dataclass(frozen=True)
class StepPlan:
    """What a memory mode keeps of each update, and the bytes that a step then needs. Print it,
    compare it, `draw` it.

    Figures are forecasts from one watched forward pass: `peak` is what the step needs, `plain` what
    it would need with everything kept, `floor` with nothing kept, each less all `gradients`; `time`
    is that of the step, plain autograd being 1.
    """

    memory: Any
    rows: tuple[Row, ...]
    peak: int
    plain: int
    floor: int
    gradients: int
    time: float

    def __str__(self) -> str:
        lines = [
            f"{self.memory!r}: {len(self.rows)} updates, {self.peak / MIB:.2f} MiB at the peak "
            "(everything kept: "
            f"{self.plain / MIB:.2f}, nothing: {self.floor / MIB:.2f}), about {self.time:.2f} of "
            "plain autograd's time"
        ]
        runs = [
            (key, list(rows))
            for key, rows in itertools.groupby(
                self._blocks(), key=lambda rows: [r.keeps for r in rows]
            )
        ]
        lines.append(
            f"  {'updates':<32} {'together':>13}   what each keeps until backward is there"
        )
        for keeps, blocks in runs:
            first, last = blocks[0][0].name, blocks[-1][-1].name
            total = sum(row.bytes for rows in blocks for row in rows) / MIB
            where = first if first == last else f"{first} to {last}"
            lines.append(f"  {where:<32} {total:9.2f} MiB   {' | '.join(keeps)}")
        return "\n".join(lines)

    def _blocks(self) -> Iterator[list[Row]]:
        """The rows of each block, by the names that stacks give; else one by one."""
        for _, rows in itertools.groupby(
            self.rows, key=lambda row: re.sub(r"(?<=^blocks\.)(\d+)[.,].*", r"\1", row.name)
        ):
            yield list(rows)

    def draw(self, path: Any, *others: StepPlan) -> None:
        """A picture of bytes over the course of a step, forward and then backward, of this plan and
        of others for comparison.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("StepPlan.draw needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for plan in (self, *others):
            course = [row.forward / MIB for row in plan.rows] + [
                row.backward / MIB for row in reversed(plan.rows)
            ]
            axes.plot(
                range(len(course)),
                course,
                label=f"{plan.memory!r}: {plan.peak / MIB:.1f} MiB, time about {plan.time:.2f}",
            )
        axes.axvline(len(self.rows) - 0.5, color="gray", linewidth=0.5)
        axes.axhline(
            (self.peak + self.gradients) / MIB, color="gray", linewidth=0.5, linestyle="--"
        )
        axes.set(xlabel="updates: forward, then backward", ylim=(0, None))
        axes.set(ylabel="MiB of activations and gradients")
        figure.legend(loc="outside lower center", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def forecast(
    memory: Any, plan: Plan, profile: Profile, names: Sequence[str], fresh: bool
) -> StepPlan:
    """What a plan means for a step."""
    needs, rows, before = profile.needs(fresh), [], 0
    gradients = sum(profile.gradients().values()) if fresh else 0
    for u, (name, measured) in enumerate(zip(names, profile.updates)):
        choice = plan.choices.get(u, Choice())
        level = (
            everything(measured)
            if u >= plan.kept
            else _level(measured, choice, profile.state_bytes)
        )
        again = level.seconds / measured.seconds if measured.seconds else 0.0
        forward = 2 * profile.state_bytes + before + measured.forward
        backward = needs[u] + gradients + before + level.own
        rows.append(Row(name, _words(level.choice), level.bytes, again, forward, backward))
        before += level.bytes
    total = sum(measured.seconds for measured in profile.updates)
    run_again = sum(row.again * measured.seconds for row, measured in zip(rows, profile.updates))
    peak = max((row.backward for row in rows), default=0) - gradients
    time = 1 + run_again / (3 * total) if total else 1.0
    return StepPlan(
        memory, tuple(rows), peak, profile.plain(fresh), max(needs, default=0), gradients, time
    )


def _level(measured: Measured, choice: Choice, state_bytes: int) -> Level:
    if choice.streams:
        return Level(choice, state_bytes, state_bytes, measured.seconds)
    return next(level for level in all_levels(measured) if level.choice == choice)


def _words(choice: Choice | None) -> str:
    if choice is None:
        return "everything"
    if choice.streams:
        return "streams"
    count = len(choice.operations)
    inside = f" + {count} operation{'s' if count > 1 else ''}" if count else ""
    return f"output{inside}" if choice.output else "nothing"
