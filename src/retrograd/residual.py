"""`Residual`: a residual network, a list of single layers, under a rule of your choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.exact import DriftAction, Grid
from retrograd.core.memory import Anchor, Keep, MemoryMode, Reverse
from retrograd.core.private import pytree
from retrograd.core.program import Pass, Step, make_step
from retrograd.core.structure import VerifyCalls
from retrograd.core.updates import (
    Additive,
    BdiaUpdate,
    Coupling,
    Overwrite,
    Scaled,
    TwoStepUpdate,
    WithAux,
)
from retrograd.routing import by_update, check_all_taken
from retrograd.rules import ORDINARY, Coefficients, Euler, Rule, growth
from retrograd.stack import Blocks, Stack, check_function, detached, on_grid

ERRORS = 1e3  # how much undoing may enlarge rounding errors between two kept states


class Residual(Stack):
    """A residual network `x = x + f(x)`, a list of single layers, under a rule.

    With `Euler()`, it is the ordinary network, and the input of each layer is kept: checkpointing,
    but with buffers updated once and every random draw replayed. The other rules keep two states
    and rebuild the rest, so activation memory does not grow with depth.

    Args:
        functions: an iterable of modules (or callables), each giving what a layer adds. Parameters
            are named `functions.<i>.…`. One may return a tuple whose first item is that; the rest
            comes back as aux.
        rule: `Euler()`, `Midpoint(h)`, `Leapfrog(h)`, `Blend(a)`, `Bdia(gamma)` or
            `TwoStep(previous, current, scale)`. May be assigned at any time.
        skip: True if each function is a whole layer that adds its input itself. Then
            `f(x) = layer(x) - x`, and under `Euler` the layer just runs.
        route: which keyword arguments go to the functions: a sequence of names, or a dict from the
            name that functions use to the name that the call uses. None: by signature.
        memory, exact, drift, stream_dtype, verify: as for `ReversibleSequence`. Rules that divide
            when they are undone (`Blend`, `Bdia`) need `exact=True`.

    Example:
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(6)]
        >>> net = rg.Residual(layers, rule=rg.Blend(1/4), exact=True)
        >>> net(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        *,
        rule: Rule = Euler(),
        skip: bool = False,
        route: Mapping[str, str] | Sequence[str] | None = None,
        memory: MemoryMode = Reverse(),
        exact: bool | Grid = False,
        drift: DriftAction = "warn",
        stream_dtype: torch.dtype | None = None,
        verify: VerifyCalls = "first",
    ) -> None:
        self._rule: Rule = Euler()
        super().__init__(memory, exact, drift, stream_dtype, verify)
        self.functions = _FunctionList(functions)
        self.skip = skip
        self.route = route
        self.rule = rule

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        if not callable(getattr(rule, "steps", None)) or isinstance(rule, type):
            raise TypeError(
                f"rule={rule!r}: pass rg.Euler(), rg.Midpoint(h), rg.Leapfrog(h), rg.Blend(a), "
                "rg.Bdia(gamma) or rg.TwoStep(previous, current, scale)."
            )
        self._check(rule, self.memory, self.precision.grid is not None)
        self._rule = rule
        self._set_precision(self.precision)

    def _check(self, rule: Rule, memory: MemoryMode, exact: bool) -> None:
        """Raise if rounding errors would grow too much."""
        factor = growth(rule.steps(len(self.functions), True))
        if exact or factor == 1 or isinstance(memory, Keep):
            return
        layers = 2 * memory.every if isinstance(memory, Anchor) else len(self.functions)
        if factor**layers > ERRORS:
            raise ValueError(
                f"rule={rule!r}: undoing a layer divides by {1 / factor:.3g}, so rounding errors "
                f"grow by {factor:.3g} for each layer, and {layers} layers are undone. Build it "
                "with exact=True, which rounds nothing; or with memory=rg.Anchor(every=1) or "
                "rg.Keep()."
            )

    # --- what a stack defines

    def _couplings(self) -> Iterable[tuple[str, Coupling]]:
        steps = self.rule.steps(len(self.functions), True)
        return [(f"rule, layer {i}", self._coupling(step, i)) for i, step in enumerate(steps)]

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        return [(self.functions, name) for name in self.functions.names()]

    def extra_repr(self) -> str:
        skip = ", skip=True" if self.skip else ""
        return f"rule={self.rule!r}{skip}, memory={self.memory!r}{self.precision}"

    def forward(self, x: Any, /, **kwargs: Any) -> Any:
        """The last state, for an input `x`: a tensor or a pytree of tensors.

        `(output, aux)` where functions return more than what a layer adds.
        """
        return super().forward(x, **kwargs)

    def _coupling(self, step: Coefficients, index: int) -> Coupling:
        if step.draws_sign:
            return BdiaUpdate(step.previous)
        if step == ORDINARY:
            return Overwrite() if self.skip else Additive()
        return TwoStepUpdate(previous=step.previous, current=step.current, scale=step.scale)

    def _open(self, value: Any, name: str) -> dict[str, Any]:
        return {"a": value, "b": value} if self._has_two_streams() else {"a": value}
