"""Tracing a call of a stack: plain equations, with a marker for each update."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from retrograd.compiling import markers, seams
from retrograd.compiling.kinds import is_region, may_be_region
from retrograd.core.exact import Precision
from retrograd.core.memory import NOTHING, Plan
from retrograd.core.program import (
    Application,
    Pass,
    Program,
    Step,
    combine,
    couple,
    with_reads,
)

# Nodes that are traced inside an update have this annotation, even if they use no stream: a
# projection of a keyword argument, a cast of a weight. The pass computes them again, too.
INSIDE = "retrograd"


class TracedPass(Pass):
    """A pass whose updates are marked.

    `budget` is the limit that the pass works out what to keep from; "" if the plan says it.
    `regions`: functions may be regions, compiled once for all updates that run the same code.
    """

    def __init__(
        self,
        program: Program,
        streams: dict[str, Any],
        keywords: dict[str, Any],
        precision: Precision,
        plan: Plan,
        budget: str,
        regions: bool,
    ) -> None:
        super().__init__(program, streams, keywords, precision)
        self.regions = regions
        self.plan = plan
        self.budget = budget
        self.drift = precision.drift
        self.edition = seams.edition()
        self.to_save: list[str] = []  # streams whose next earlier value is saved

    def update(self, step: Step) -> None:
        with seams.annotate({INSIDE: "update"}):
            self._apply(step, self._couple)
        self.index += 1

    def _application(self, step: Step) -> Application:
        update = super()._application(step)
        if self.regions and is_region(step.fn):
            update.step = step._replace(fn=functools.partial(seams.in_region, step.fn))
        return update

    def _couple(self, update: Application) -> None:
        couple(update)
        if self.regions and is_simple(update):
            may_be_region(self.program[update.index].fn)
        plan = self._plan_of(update)
        old, new = update.target, update.result
        undone = old if update.step.target_from == "kept" else self._undone(update)
        settings = (self.index, plan, self.drift, update.step.target, self.edition)
        leaves = zip(new, old, undone)
        update.result = tuple([markers.mark(*values, *settings) for values in leaves])

    def _undone(self, update: Application) -> tuple[Tensor, ...]:
        step = update.step
        with torch.no_grad():
            output = with_reads(step, update.output, update.state)
            return combine(step.coupling.inverse, update.result, output)

    def _plan_of(self, update: Application) -> str:
        """What the pass shall do with an update."""
        target = update.step.target
        if self.plan.choices.get(self.index, NOTHING).streams:
            self.to_save = list(self.state)
        is_saved = target in self.to_save or update.step.target_from == "kept"
        if target in self.to_save:
            self.to_save.remove(target)
        if self.index >= self.plan.keep_from:
            return markers.KEEP
        plan = markers.SAVE_TARGET if is_saved else markers.REBUILD
        return f"{plan} {markers.BUDGET} {self.budget}" if self.budget else plan


def is_simple(update: Application) -> bool:
    """Whether an update gives its function one tensor, and gets a new one from it."""
    if update.aux or len(update.output) != 1 or len(update.output[0]) != 1:
        return False
    out = update.output[0][0]
    return all(out is not value for value in update.inputs)
