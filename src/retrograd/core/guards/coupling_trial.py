"""Coupling trial: does the inverse of a user's own coupling undo its forward?

If it does not, gradients would be wrong. Each coupling is tried on live data, in calls that are
inspected: see [Note: which calls are inspected].
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.guard import Guard
from retrograd.core.guards.drift import has_values
from retrograd.core.program import Application, Program
from retrograd.core.tensors import dtype_name
from retrograd.core.updates import TRUSTED


class CouplingTrial(Guard):
    def __init__(self, program: Program) -> None:
        self.untried = untrusted(program)

    @torch.no_grad()
    def after_update(self, update: Application) -> None:
        coupling = update.step.coupling
        if id(coupling) not in self.untried:
            return
        self.untried.remove(id(coupling))
        for x, y, outputs in zip(update.target, update.result, update.output):
            if has_values(x):
                _try(update, x, y, [out.detach() for out in outputs])


def untrusted(program: Program) -> set[int]:
    """The couplings of a program that the tests of retrograd do not prove right."""
    return {id(step.coupling) for step in program if type(step.coupling) not in TRUSTED}


def _try(
    update: Application,
    x: Tensor,
    y: Tensor,
    outputs: list[Tensor],
) -> None:
    coupling = update.step.coupling
    name = type(coupling).__name__
    copy = y.clone()
    error = (coupling.inverse(copy, *outputs) - x).abs().max().item()
    if copy._version:
        raise errors.inverse_in_place(update.where, name)
    scale = max(tensor.abs().max().item() for tensor in (x, y, *outputs))
    limit = torch.finfo(x.dtype).eps ** 0.5
    if error > limit * scale:
        dtype = dtype_name(x.dtype)
        raise errors.wrong_inverse(update.where, name, error / scale, limit, dtype)
