"""The couplings of memcnn, and its wrapper.

*Same*: names, signatures, defaults, state-dict keys (`_fn.Gm.…`, `_fn.Fm.…`), outputs, gradients,
`inverse`.

*Differs*:

- Random draws are always replayed: `preserve_rng_state` changes nothing. `num_bwd_passes` neither:
  any number of backwards works. `keep_input` neither: the caller's tensor is never freed.
- A wrapper of `torch.nn.Sequential(coupling, coupling, ...)` is one program, so memory is flat in
  depth. A sequence of wrappers keeps the output of each.
- Any other invertible module is an `rg.Transform`.
- `implementation_fwd` and `implementation_bwd` are taken, and change nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Engine, UpdateSpec, run_halves


class ScaleShift(rg.Coupling):
    """`y = x * scale + shift`; the function returns both."""

    returns = ("scale", "shift")

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * scale + shift

    def inverse(self, y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (y - shift) / scale


SCALE_SHIFT = ScaleShift()


class AffineAdapterNaive(nn.Module):
    """The scale is the exponential of the shift."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shift = self.f(x)
        return shift.exp(), shift


class AffineAdapterSigmoid(nn.Module):
    """Odd channels of the function's output make the scale, even ones are the shift."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = self.f(x)
        return torch.sigmoid(both[:, 1::2] + 2.0), both[:, 0::2]


class PairCoupling(nn.Module):
    """What both couplings share: `Fm` updates the first half, `Gm` the second one."""

    coupling: rg.Coupling = rg.Additive()

    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None,
        adapter: Callable[[nn.Module], nn.Module] | None,
        split_dim: int,
    ) -> None:
        super().__init__()
        Gm = copy.deepcopy(Fm) if Gm is None else Gm
        self.Gm = Gm if adapter is None else adapter(Gm)
        self.Fm = Fm if adapter is None else adapter(Fm)
        self.split_dim = split_dim
        self.engine = Engine()

    def updates(self) -> list[UpdateSpec]:
        return [
            UpdateSpec("x1", self.Fm, ("x2",), {}, self.coupling),
            UpdateSpec("x2", self.Gm, ("x1",), {}, self.coupling),
        ]

    def forward(self, x: Tensor) -> Tensor:
        return run_couplings(self.engine, [self], x)

    def inverse(self, y: Tensor) -> Tensor:
        return undo_couplings([self], y)


class AdditiveCoupling(PairCoupling):
    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None = None,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        split_dim: int = 1,
    ) -> None:
        super().__init__(Fm, Gm, None, split_dim)


class AffineCoupling(PairCoupling):
    coupling = SCALE_SHIFT

    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None = None,
        adapter: Callable[[nn.Module], nn.Module] | None = None,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        split_dim: int = 1,
    ) -> None:
        super().__init__(Fm, Gm, adapter, split_dim)


class InvertibleModuleWrapper(nn.Module):
    def __init__(
        self,
        fn: nn.Module,
        keep_input: bool = False,
        keep_input_inverse: bool = False,
        num_bwd_passes: int = 1,
        disable: bool = False,
        preserve_rng_state: bool = False,
    ) -> None:
        super().__init__()
        self._fn = fn
        self.disable = disable
        self.engine = Engine()

    def forward(self, x: Tensor) -> Any:
        self.engine.memory = rg.Keep() if self.disable else self.engine.memory
        couplings = couplings_of(self._fn)
        if couplings:
            return run_couplings(self.engine, couplings, x)
        if self.disable:
            return self._fn(x)
        inverse = self._fn.inverse
        program = rg.Reversible([rg.Transform("x", self._fn, inverse=inverse)])  # type: ignore[arg-type]
        return program({"x": x})["x"]

    def inverse(self, y: Tensor) -> Any:
        couplings = couplings_of(self._fn)
        return undo_couplings(couplings, y) if couplings else self._fn.inverse(y)  # type: ignore[operator]


def couplings_of(fn: nn.Module) -> list[PairCoupling]:
    """The couplings that a module consists of; none if it is something else."""
    parts = list(fn) if isinstance(fn, nn.Sequential) else [fn]
    couplings = [part for part in parts if isinstance(part, PairCoupling)]
    is_one_program = len({part.split_dim for part in couplings}) == 1
    return couplings if len(couplings) == len(parts) and is_one_program else []


def run_couplings(engine: Engine, couplings: list[PairCoupling], x: Tensor) -> Tensor:
    updates = [update for each in couplings for update in each.updates()]
    return run_halves(engine, updates, x, couplings[0].split_dim)


def undo_couplings(couplings: list[PairCoupling], y: Tensor) -> Any:
    """The input, with gradients, in plain autograd."""
    halves = rg.Split(couplings[0].split_dim)
    x1, x2 = halves.split(y)
    streams: dict[str, Any] = {"x1": x1, "x2": x2}
    for each in reversed(couplings):
        for update in reversed(each.updates()):
            out = update.fn(streams[update.reads[0]])
            out = out if isinstance(out, tuple) else (out,)
            streams[update.target] = update.coupling.inverse(streams[update.target], *out)
    return halves.join(streams["x1"], streams["x2"])
