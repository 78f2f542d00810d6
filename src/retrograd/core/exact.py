"""Exact reversal: rebuilt streams that equal what forward saw, to the bit.

Floating-point addition loses bits: `(x + out) - out` is not quite `x`. But multiples of `2**-k` add
without loss as long as the sums stay below `2**(p - k)`, where p is the number of bits in a float's
significand (24 for float32, 53 for float64). So streams live on such a *grid*, and a function's
output is rounded to it before it is added:

    y = x + round(out)            undone by            x = y - round(out)

Rounding has the gradient of the identity. Rebuilt streams, and so recomputed functions, and so
gradients, are then bit-identical to those of the same network with `memory=rg.Keep()`: top-k
routing, hashing and bfloat16 are safe to reverse.

A scaled coupling, `y = a * x + out`, multiplies whole numbers by a ratio. What that loses is stored
digit by digit (`digits.py`), so it is exact, too.

What it costs: three passes over a function's output, twice a step, and one reduction over the
updated stream that sees to it that no value leaves the grid's range; no memory but the rounded
output itself, and the digits of scaled couplings. `docs/decisions/0006` has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.digits import (
    LARGEST,
    Position,
    Ratio,
    Words,
    divide,
    multiply,
    positions,
    ratio_of,
)
from retrograd.core.tensors import dtype_name
from retrograd.core.updates import (
    TRUSTED,
    Additive,
    BdiaUpdate,
    Coupling,
    Mapped,
    Overwrite,
    Scaled,
)

_SIGNIFICAND = {torch.float32: 24, torch.float64: 53}
_DEFAULT_BITS = {torch.float32: 12, torch.float64: 32}
_STREAM_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

ACCURACY = 2.0**-8  # how far off a product may be: what bfloat16 rounds a number near 1 by

AnyStep = Any  # a `program.Step`: that file imports this one

DriftAction = Literal["warn", "raise", "ignore"]


@dataclass(frozen=True)
class Grid:
    """The grid that streams live on when `exact` is asked for: multiples of `2**-bits`.

    Args:
        bits: how fine it is. The finer, the smaller the range: values must stay below `2**(24 -
            bits)` in float32 and below `2**(53 - bits)` in float64. None: 12 in float32 (steps of
            2.4e-4, values below 4,096), 32 in float64 (2.3e-10, 2e6).
        dtype: of the streams; None: that of the input, and at least float32. float64 gives a range
            of millions, at twice the bytes of a stream. Functions always get the dtype of the
            input.

    Example:
        >>> rg.Grid(bits=16).limit(torch.float32)
        256.0
    """

    bits: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _SIGNIFICAND:
            raise ValueError(
                f"Grid(dtype={self.dtype}): streams on a grid are torch.float32 or torch.float64."
            )
        most = _SIGNIFICAND[self.dtype or torch.float32]
        if self.bits is not None and not (type(self.bits) is int and 0 <= self.bits < most):
            more = "" if self.dtype == torch.float64 else "; with dtype=torch.float64, to 52"
            raise ValueError(
                f"Grid(bits={self.bits!r}): bits is a whole number from 0 to {most - 1}{more}. "
                "Try Grid(bits=12)."
            )

    def bits_of(self, dtype: torch.dtype) -> int:
        return _DEFAULT_BITS[dtype] if self.bits is None else self.bits

    def limit(self, dtype: torch.dtype) -> float:
        """What values of streams in `dtype`, float32 or float64, must stay below."""
        if dtype not in _SIGNIFICAND:
            raise ValueError(
                f"limit({dtype}): streams on a grid are torch.float32 or torch.float64."
            )
        return 2.0 ** (_SIGNIFICAND[dtype] - self.bits_of(dtype))

    def round(
        self,
        out: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """`out` in `dtype`, on the grid. With the gradient of the identity."""
        return self.rounded(out, dtype, _Round.apply)

    def rounded(
        self, out: Tensor, dtype: torch.dtype, to_multiples: Callable[..., Any] | None = None
    ) -> Tensor:
        """The same without a gradient."""
        if dtype.is_complex:
            parts = torch.view_as_real(out.to(dtype).resolve_conj())
            return torch.view_as_complex(self.rounded(parts, dtype.to_real(), to_multiples))
        if not dtype.is_floating_point:
            return out  # whole numbers add exactly as they are
        return (to_multiples or _Round.forward)(out.to(dtype), 2.0 ** self.bits_of(dtype))


class _Round(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return value.mul(scale).round_().mul_(1 / scale)  # powers of two: only `round_` rounds

    @staticmethod
    def setup_context(  # type: ignore[override]
        ctx: Any,
        inputs: Any,
        output: Any,
    ) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None

    @staticmethod
    def jvp(  # type: ignore[override]
        ctx: Any,
        tangent: Tensor,
        _: None,
    ) -> Tensor:
        return tangent.clone()


@dataclass(frozen=True)
class OnGrid(Additive):
    """`Additive` with the function's output rounded to a grid: what `exact=True` makes of it."""

    grid: Grid

    def forward(
        self,
        x: Tensor,
        out: Tensor,
    ) -> Tensor:
        return x + self.grid.round(out, x.dtype)

    def inverse(
        self,
        y: Tensor,
        out: Tensor,
    ) -> Tensor:
        return y - self.grid.rounded(out, y.dtype)

    def inverse_(  # type: ignore[override]
        self,
        y: Tensor,
        out: Tensor,
    ) -> Tensor:
        return y.sub_(self.grid.rounded(out, y.dtype))


@dataclass(frozen=True)
class OverwriteOnGrid(Overwrite):
    """`Overwrite` for a stream that other updates rebuild."""

    grid: Grid

    def forward(
        self,
        x: Tensor,
        out: Tensor,
    ) -> Tensor:
        # Plus zero: -0.0 would be rebuilt as 0.0, and a function may tell them apart.
        return self.grid.round(out, x.dtype) + 0.0


@dataclass(frozen=True)
class ScaledOnGrid(Coupling):
    """`Scaled`, and what follows from it, on a grid: `y = a * x + round(addend)`.

    Its rules take the words of a store after `x`, and return them after `y`.
    """

    coupling: Scaled
    grid: Grid
    at: Position | None  # of its store; None where a is 1 or -1, and nothing is lost

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        words: Words,
        *out: Tensor,
    ) -> tuple[Tensor, Words]:
        if not (x.is_floating_point() or x.is_complex()):
            raise errors.whole_numbers(repr(self.coupling), dtype_name(x.dtype))
        value, words = self._multiple(x.detach(), words)
        sign = self._sign(x, out)
        # Plus zero: -0.0 would be rebuilt as 0.0, and a function may tell them apart.
        scaled = _Multiple.apply(x, value * sign + 0.0, self.coupling.a * sign)
        return scaled + self.grid.round(self.coupling.addend(*out), x.dtype), words

    def inverse(  # type: ignore[override]
        self,
        y: Tensor,
        words: Words,
        *out: Tensor,
    ) -> tuple[Tensor, Words]:
        return self.inverse_(y.clone(), words, *out)

    def inverse_(  # type: ignore[override]
        self,
        y: Tensor,
        words: Words,
        *out: Tensor,
    ) -> tuple[Tensor, Words]:
        """`inverse` that overwrites `y`: at the peak every stream counts."""
        y.sub_(self.grid.rounded(self.coupling.addend(*out), y.dtype))
        if isinstance(self.coupling, BdiaUpdate):
            y.mul_(self._sign(y, out))
        if self.at is None:
            return y.mul_(self.coupling.a).add_(0.0), words  # its own inverse: 1 or -1
        whole, words = divide(self._to_whole(y), words, self.at)
        return y.copy_(self._from_whole(whole, y)), words

    def _multiple(
        self,
        x: Tensor,
        words: Words,
    ) -> tuple[Tensor, Words]:
        if self.at is None:
            return x * self.coupling.a, words
        self._check_ratio(self.at.ratio, x.dtype.to_real())
        whole, words = multiply(self._to_whole(x), words, self.at)
        return self._from_whole(whole, x), words

    def _check_ratio(
        self,
        ratio: Ratio,
        dtype: torch.dtype,
    ) -> None:
        """Raise if products would be too far off: see `digits`."""
        bits = self.grid.bits_of(dtype)
        off = ratio.n * 2.0**-bits
        if ratio.n > 1 and off > ACCURACY:
            fraction = f"{ratio.sign * ratio.n}/{ratio.d}"
            most = int(ACCURACY * 2**bits)
            raise errors.coarse_ratio(self.coupling.a, fraction, off, most)

    def _sign(
        self,
        x: Tensor,
        out: tuple[Tensor, ...],
    ) -> Any:
        """The sign of each sample, where the coupling draws one: see `BdiaUpdate`."""
        return out[1].to(x.dtype) if isinstance(self.coupling, BdiaUpdate) else 1.0

    def _to_whole(self, x: Tensor) -> Tensor:
        real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        steps = real * 2.0 ** self.grid.bits_of(real.dtype)
        assert self.at is not None
        is_small = real.dtype == torch.float32 and self.at.ratio.n < 64
        return steps.to(torch.int32 if is_small else torch.int64)

    def _from_whole(
        self,
        whole: Tensor,
        like: Tensor,
    ) -> Tensor:
        dtype = like.dtype.to_real()
        real = whole.to(dtype).mul_(2.0 ** -self.grid.bits_of(dtype))
        return torch.view_as_complex(real) if like.is_complex() else real


class _Multiple(torch.autograd.Function):
    """`value`, with the gradient of `factor * x`, which it equals but for rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        value: Tensor,
        factor: Any,
    ) -> Tensor:
        return value

    @staticmethod
    def setup_context(  # type: ignore[override]
        ctx: Any,
        inputs: Any,
        output: Any,
    ) -> None:
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad * ctx.factor, None, None

    @staticmethod
    def jvp(  # type: ignore[override]
        ctx: Any,
        tangent: Tensor,
        *others: None,
    ) -> Tensor:
        return tangent * ctx.factor


@dataclass(frozen=True)
class RoundedOnGrid(Coupling):
    """Any coupling whose target is kept, for a stream that other updates rebuild."""

    coupling: Coupling
    grid: Grid

    def forward(
        self,
        x: Tensor,
        *out: Tensor,
    ) -> Tensor:
        # Plus zero: -0.0 would be rebuilt as 0.0, and a function may tell them apart.
        return self.grid.round(self.coupling.forward(x, *out), x.dtype) + 0.0

    def inverse(
        self,
        y: Tensor,
        *out: Tensor,
    ) -> Tensor:
        raise AssertionError("the target is kept, not rebuilt")


TRUSTED.update((OnGrid, OverwriteOnGrid, ScaledOnGrid, RoundedOnGrid))


class Precision:
    """How exactly a stack rebuilds its streams: `exact`, `drift` and `stream_dtype`, checked."""

    def __init__(
        self,
        exact: bool | Grid,
        drift: DriftAction,
        stream_dtype: torch.dtype | None,
    ) -> None:
        _check_arguments(exact, drift, stream_dtype)
        self.exact = exact
        self.drift: DriftAction = drift
        self.stream_dtype = stream_dtype
        self.grid = Grid() if exact is True else exact or None
        self.width = stream_dtype or torch.float32  # streams are at least this wide
        if self.grid is not None:
            self._check_grid(self.grid)
            self.width = self.grid.dtype or self.width

    def _check_grid(self, grid: Grid) -> None:
        is_other = self.stream_dtype is not None and grid.dtype not in (None, self.stream_dtype)
        if self.width not in _SIGNIFICAND or is_other:
            raise ValueError(
                f"stream_dtype={self.stream_dtype} with exact={self.exact!r}: streams on a grid "
                "are float32 or float64, not both."
            )

    def __str__(self) -> str:
        """The settings that are not the default, for `repr` of a stack."""
        text = ""
        if self.grid is not None:
            text += f", exact={self.grid!r}"
        elif self.width != torch.float32:
            text += f", stream_dtype={self.width}"
        if self.drift != "warn":
            text += f", drift={self.drift!r}"
        return text

    def check(
        self,
        coupling: Any,
        where: str,
    ) -> None:
        """Raise for a coupling that cannot be exact, if it is to be."""
        if self.grid is None or type(coupling) in (Additive, Overwrite, Mapped):
            return
        if not isinstance(coupling, Scaled) or type(coupling) not in TRUSTED:
            raise ValueError(
                f"{where}: exact reversal needs additive or scaled couplings, and this one is "
                f"{coupling!r}. Multiplying a stream by what a function returns loses bits that no "
                "later step brings back. Use rg.Additive() or rg.Scaled(a), or exact=False with "
                "drift='raise' to be told when rounding errors grow."
            )
        if coupling.a and ratio_of(coupling.a) is None:
            raise ValueError(
                f"{where}: exact reversal multiplies by ratios of whole numbers up to {LARGEST}, "
                f"and {coupling.a!r} is none. Round it, for instance to {round(coupling.a, 2)!r}."
            )

    def on_grid(
        self,
        program: Sequence[AnyStep],
        rebuilt: set[str],
    ) -> list[AnyStep]:
        """The program with couplings on the grid, if there is one.

        `rebuilt` are the streams that live on the grid: see `program.rebuilt_streams`.
        """
        if self.grid is None:
            return list(program)
        stores = {target: iter(self._positions(program, target)) for target in rebuilt}
        steps = []
        for step in program:
            if step.target in rebuilt:
                coupling = self._coupling(step, stores[step.target])
                stores_digits = isinstance(coupling, ScaledOnGrid)
                step = step._replace(coupling=coupling, stores_digits=stores_digits)
            steps.append(step)
        return steps

    def _positions(
        self,
        program: Sequence[AnyStep],
        target: str,
    ) -> list[Position]:
        """Of the store of a stream, at each update that loses digits.

        A map of the stream may change its shape, so that a new word follows.
        """
        steps = [step for step in program if step.target == target]
        is_mapped = [step.inverse is not None for step in steps]
        return positions(
            None if mapped else ratio_of(step.coupling.a)
            for step, mapped in zip(steps, is_mapped)
            if mapped or _loses(step)
        )

    def _coupling(
        self,
        step: AnyStep,
        store: Iterator[Position],
    ) -> Any:
        assert self.grid is not None
        coupling = step.coupling
        if step.target_from == "kept" and isinstance(coupling, Scaled):
            return RoundedOnGrid(coupling, self.grid)
        if type(coupling) is Additive:
            return OnGrid(self.grid)
        if type(coupling) is Mapped:
            return coupling  # tried, and refused if it is not exact
        if type(coupling) is Overwrite:
            return OverwriteOnGrid(self.grid)
        return ScaledOnGrid(coupling, self.grid, next(store) if _loses(step) else None)

    def stream(self, leaf: Tensor) -> Tensor:
        """An input leaf as a stream: no narrower than `width`, and on the grid."""
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        dtype = torch.promote_types(leaf.dtype, self.width)
        if self.grid is None:
            return leaf.to(dtype)
        # Plus zero: -0.0 would be rebuilt as 0.0, and a function may tell them apart.
        return self.grid.round(leaf, dtype) + 0.0


def _loses(step: AnyStep) -> bool:
    """Whether an update multiplies its target by something else than 1 and -1, and loses it."""
    is_scaled = isinstance(step.coupling, Scaled) and step.target_from != "kept"
    return is_scaled and step.coupling.a not in (1, -1)


def _check_arguments(
    exact: object,
    drift: object,
    stream_dtype: object,
) -> None:
    if not isinstance(exact, (bool, Grid)):
        raise TypeError(f"exact={exact!r}: pass True, False or rg.Grid(bits=..., dtype=...).")
    if drift not in ("warn", "raise", "ignore"):
        raise ValueError(f'drift={drift!r}: choose "warn", "raise" or "ignore".')
    if stream_dtype is not None and stream_dtype not in _STREAM_DTYPES:
        raise TypeError(
            f"stream_dtype={stream_dtype!r}: pass a floating-point dtype, such as torch.float32."
        )
