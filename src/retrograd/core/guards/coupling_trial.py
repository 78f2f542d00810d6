"""Coupling trial: does the inverse of a user's own coupling, or of a `Transform`, undo it?

If it does not, gradients would be wrong. Each is tried on live data, in calls that are inspected:
see [Note: which calls are inspected].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Grid
from retrograd.core.guard import Guard
from retrograd.core.guards.drift import has_values
from retrograd.core.program import Application, Program, inverted_leaves, with_reads
from retrograd.core.streams import unflatten
from retrograd.core.tensors import describe, dtype_name
from retrograd.core.updates import TRUSTED


class CouplingTrial(Guard):
    def __init__(
        self,
        program: Program,
        grid: Grid | None,
    ) -> None:
        self.untried = untrusted(program)
        self.grid = grid

    @torch.no_grad()
    def after_update(self, update: Application) -> None:
        step = update.step
        if step.inverse is not None:
            self._try_transform(update, step.inverse)
        elif id(step.coupling) in self.untried and step.target_from == "output":
            self.untried.remove(id(step.coupling))
            outputs = with_reads(step, update.output, update.state)
            for x, y, out in zip(update.target, update.result, outputs):
                if has_values(x):
                    self._try_coupling(update, x, y, [part.detach() for part in out])

    def _try_coupling(
        self,
        update: Application,
        x: Tensor,
        y: Tensor,
        outputs: list[Tensor],
    ) -> None:
        coupling = update.step.coupling
        name = type(coupling).__name__
        copy = y.clone()
        rebuilt = coupling.inverse(copy, *outputs)
        if copy._version:
            raise errors.inverse_in_place(update.where, name)
        scale = largest([x, y, *outputs])
        off, limit = self._distance(x, rebuilt, scale)
        if off > limit:
            raise errors.wrong_inverse(update.where, name, off, limit, dtype_name(x.dtype))

    def _try_transform(
        self,
        update: Application,
        inverse: Callable[..., object],
    ) -> None:
        copies = [leaf.detach().clone() for leaf in update.result]
        value = inverse(unflatten(copies, update.spec), **update.arguments)
        if any(copy._version for copy in copies):
            raise errors.inverse_in_place(update.where, "the transform")
        specs = {update.step.target: update.spec}
        rebuilt = inverted_leaves(update.program, update.index, value, specs)
        for x, again in zip(update.target, rebuilt):
            if again.shape != x.shape or again.dtype != x.dtype:
                what = f"{describe(again)}, and fn was given {describe(x)}"
                raise errors.wrong_transform(update.where, f"returns {what}")
            if has_values(x):
                off, limit = self._distance(x, again, largest([x]))
                if off > limit:
                    what = f"misses the target by {off:.1e} of its size (limit {limit:.1e})"
                    raise errors.wrong_transform(update.where, what)
        self._check_grid(update)

    def _check_grid(self, update: Application) -> None:
        """With exact reversal, the result of a transform must be on the grid."""
        if self.grid is None:
            return
        for leaf in map(torch.Tensor.detach, update.result):
            if has_values(leaf) and not torch.equal(self.grid.rounded(leaf, leaf.dtype), leaf):
                bits = self.grid.bits_of(leaf.dtype.to_real())
                raise errors.off_grid(update.where, bits)

    def _distance(
        self,
        x: Tensor,
        rebuilt: Tensor,
        scale: float,
    ) -> tuple[float, float]:
        """How far off a rebuilt target is, relative to `scale`, and how far it may be."""
        off = (rebuilt - x).abs().max().item() / (scale or 1.0)
        return off, 0.0 if self.grid is not None else torch.finfo(x.dtype).eps ** 0.5


def largest(tensors: list[Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors if tensor.numel())


def untrusted(program: Program) -> set[int]:
    """The couplings of a program that the tests of retrograd do not prove right."""
    return {id(step.coupling) for step in program if type(step.coupling) not in TRUSTED}


def has_trials(program: Program) -> bool:
    """Whether anything in a program has to be tried."""
    return bool(untrusted(program)) or any(step.inverse is not None for step in program)
