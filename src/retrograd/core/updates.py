"""Updates and couplings: the arithmetic of a reversible program.

One update replaces one stream, its *target*, by a value that depends on other streams, its *reads*:

    stream[target] = coupling.forward(stream[target], fn(*[stream[r] for r in reads], **kwargs))

If `fn` does not read its target, then `fn` can run again on the same reads, given the streams
afterwards, and `coupling.inverse` takes its output back out of the target. Any list of such updates
runs backwards. If `fn` reads its target, or the coupling overwrites it, the target's earlier value
cannot be rebuilt. It is kept: one stream, as checkpointing keeps the input of a layer.

This file is arithmetic only. Gradients are never written by hand: autograd derives them from
`forward`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

PairProgram = tuple[tuple[str, "str | None", tuple[str, ...]], ...]


class Coupling:
    """How a function's output enters its target.

    Subclass it, or write any class with `forward` and `inverse`. Both work on one tensor at a
    time; a stream that is a pytree is coupled leaf by leaf.

    - `forward(x, out)` returns the new value of the target, of the shape and dtype of `x`;
    - `inverse(y, out)` returns `x` again, given the same `out`;
    - `returns` names what the function must return. More than one name means a tuple, passed as
      further arguments: with `returns = ("log_scale", "shift")` the calls are `forward(x,
      log_scale, shift)` and `inverse(y, log_scale, shift)`.

    Example:
        >>> class Doubling(rg.Coupling):
        ...     def forward(self, x, out):
        ...         return 2 * x + out
        ...     def inverse(self, y, out):
        ...         return (y - out) / 2
    """

    returns: tuple[str, ...] = ("out",)
    is_lossy = False  # True: `forward` forgets the target, and there is no `inverse`
    gets_reads = False  # True: it also gets the streams that the function reads
    changes_shape = False  # True: the new value of the target may have another shape

    if TYPE_CHECKING:  # a type cannot say how many `out` arguments there are
        forward: Callable[..., Tensor]
        inverse: Callable[..., Tensor]

    def inverse_(
        self,
        y: Tensor,
        *out: Tensor,
    ) -> Tensor:
        """`inverse` that may overwrite `y`, which nobody else uses.

        Optional; saves one stream at the peak.
        """
        return self.inverse(y, *out)

    def pair(self) -> PairProgram:
        """The updates of one block of `(f, g)`: target, function and reads of each.

        The function None stands for the identity: the read itself is added.
        """
        return (("x1", "f", ("x2",)), ("x2", "g", ("x1",)))


@dataclass(frozen=True)
class Additive(Coupling):
    """`y = x + out`, undone by `x = y - out`. The default.

    The cheapest coupling, and the only one whose backward does not need the target.
    Kept: nothing. Rebuilt: the target, in place where no one else sees it.
    """

    def forward(
        self,
        x: Tensor,
        out: Tensor,
    ) -> Tensor:
        return x + out

    def inverse(
        self,
        y: Tensor,
        out: Tensor,
    ) -> Tensor:
        return y - out

    def inverse_(  # type: ignore[override]
        self,
        y: Tensor,
        out: Tensor,
    ) -> Tensor:
        return y.sub_(out)


@dataclass(frozen=True)
class Affine(Coupling):
    """`y = x * exp(s) + shift`, undone by `x = (y - shift) * exp(-s)`.

    The function returns `(log_scale, shift)`. The scale is bounded smoothly:
    `s = limit * tanh(log_scale / limit)`. So one update multiplies by a factor between
    `exp(-limit)` and `exp(limit)` (0.37 to 2.72 by default), and undoing it enlarges rounding
    errors by at most `exp(limit)`. For a small `log_scale`, `s = log_scale` up to third order.

    Kept: nothing. Rebuilt: the target. Costs a few element-wise operations more than `Additive`.
    """

    limit: float = 1.0
    returns = ("log_scale", "shift")

    def __post_init__(self) -> None:
        if not (self.limit > 0 and math.isfinite(self.limit)):
            raise ValueError(
                f"Affine(limit={self.limit!r}): limit must be a positive number, for instance "
                "Affine(1.0)."
            )

    def _bounded(self, log_scale: Tensor) -> Tensor:
        return self.limit * (log_scale / self.limit).tanh()

    def forward(
        self,
        x: Tensor,
        log_scale: Tensor,
        shift: Tensor,
    ) -> Tensor:
        # In the dtype of the stream, which may be wider than that of the function's output.
        scale = self._bounded(log_scale.to(x.dtype)).exp()
        return x * scale + shift

    def inverse(
        self,
        y: Tensor,
        log_scale: Tensor,
        shift: Tensor,
    ) -> Tensor:
        inverse_scale = (-self._bounded(log_scale.to(y.dtype))).exp()
        return (y - shift) * inverse_scale


@dataclass(frozen=True)
class Scaled(Coupling):
    """`y = a * x + out`, undone by `x = (y - out) / a`.

    Undoing divides by `a`, so with `|a| < 1` rounding errors grow by `1 / |a|` for each update
    walked back. `exact=True` has none, if `a` is a ratio of small whole numbers: what the
    multiplication loses is stored, `log2(1 / |a|)` bits for each element (see `rg.Grid`).

    Kept: nothing. Rebuilt: the target, in place where no one else sees it.
    """

    a: float

    def __post_init__(self) -> None:
        if not is_number(self.a) or self.a == 0:
            raise ValueError(
                f"Scaled({self.a!r}): a must be a number other than zero, because undoing an "
                "update divides by it. Try Scaled(0.9)."
            )

    def addend(self, out: Tensor) -> Tensor:
        """What is added to the scaled target."""
        return out

    def forward(
        self,
        x: Tensor,
        *out: Tensor,
    ) -> Tensor:
        return self.a * x + self.addend(*out)

    def inverse(
        self,
        y: Tensor,
        *out: Tensor,
    ) -> Tensor:
        return (y - self.addend(*out)) / self.a

    def inverse_(
        self,
        y: Tensor,
        *out: Tensor,
    ) -> Tensor:
        return y.sub_(self.addend(*out)).div_(self.a)


@dataclass(frozen=True)
class Momentum(Scaled):
    """A residual network with momentum. Each function updates a velocity `v` and a position `x`:

        v = gamma * v + (1 - gamma) * f(x)
        x = x + v

    On an `Update`, it is the first line alone (target `v`, reads `x`); the second is an update of
    its own, `Update("x", nn.Identity(), reads=("v",))`. In a `ReversibleSequence` of `(f, g)`, each
    function is followed by its step of the position; stream 1 is the velocity and stream 2 the
    position. Start at rest with `streams=rg.AtRest()`.

    The first line is `Scaled(gamma)` with `(1 - gamma) * f(x)` added: rounding errors grow by
    `1 / gamma` for each function walked back, and `exact=True` has none.
    """

    a: float = field(init=False, repr=False)
    gamma: float

    def __init__(self, gamma: float) -> None:
        if not is_number(gamma) or not 0 < gamma < 1:
            raise ValueError(
                f"Momentum(gamma={gamma!r}): gamma must lie strictly between 0 and 1, because "
                "undoing an update divides by it and 1 would leave the functions out. Try "
                "Momentum(0.9)."
            )
        object.__setattr__(self, "gamma", gamma)
        object.__setattr__(self, "a", gamma)

    def addend(self, out: Tensor) -> Tensor:
        return (1 - self.gamma) * out

    def pair(self) -> PairProgram:
        f, g = ("x1", "f", ("x2",)), ("x1", "g", ("x2",))
        move = ("x2", None, ("x1",))
        return (f, move, g, move)


@dataclass(frozen=True)
class TwoStepUpdate(Scaled):
    """`y = previous * x + current * b + scale * out`, where b is what the function reads.

    One step of a rule (`retrograd.rules`): x is the state before b, and y the one after it. The
    coupling gets b itself, in the width of the streams; the function may have read a narrower copy.
    """

    a: float = field(init=False, repr=False)
    previous: float = 1.0
    current: float = 0.0
    scale: float = 1.0
    gets_reads = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "a", self.previous)

    @property
    def is_lossy(self) -> bool:  # type: ignore[override]
        return self.a == 0

    def addend(  # type: ignore[override]
        self,
        out: Tensor,
        b: Tensor,
    ) -> Tensor:
        added = out.to(b.dtype)
        if self.scale != 1:
            added = self.scale * added
        return torch.add(added, b, alpha=self.current) if self.current else added

    def forward(
        self,
        x: Tensor,
        *out: Tensor,
    ) -> Tensor:
        if self.a == 0:
            return self.addend(*out)
        return (x if self.a == 1 else self.a * x) + self.addend(*out)


class _TimesConstant(torch.autograd.Function):
    """`x * factor`, where factor gets no gradient. Autograd saves no tensor for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # type: ignore[override]
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # type: ignore[override]
        return tangent * ctx.factor


def times_constant(x: Tensor, factor: Tensor) -> Tensor:
    """The product. Backward needs the factor only, a number for each sample."""
    return _TimesConstant.apply(x, factor)  # type: ignore[return-value]


@dataclass(frozen=True)
class BdiaUpdate(Scaled):
    """`y = s * a * x + (1 - s * a) * b + (1 + s * a) * out`, where s is a sign for each sample."""

    returns = ("out", "sign")
    gets_reads = True

    def addend(  # type: ignore[override]
        self,
        out: Tensor,
        sign: Tensor,
        b: Tensor,
    ) -> Tensor:
        gamma = (self.a * sign).to(b.dtype)
        added = times_constant(b, 1 - gamma)
        return added.add_(times_constant(out.to(b.dtype), 1 + gamma))

    def forward(
        self,
        x: Tensor,
        *out: Tensor,
    ) -> Tensor:
        return times_constant(x, (self.a * out[1]).to(x.dtype)) + self.addend(*out)

    def inverse(
        self,
        y: Tensor,
        *out: Tensor,
    ) -> Tensor:
        return (y - self.addend(*out)) * out[1].to(y.dtype) / self.a

    def inverse_(
        self,
        y: Tensor,
        *out: Tensor,
    ) -> Tensor:
        return y.sub_(self.addend(*out)).mul_(out[1]).div_(self.a)


@dataclass(frozen=True)
class Overwrite(Coupling):
    """`y = out`. The target is lost, so its earlier value is kept."""

    is_lossy = True

    def forward(
        self,
        x: Tensor,
        out: Tensor,
    ) -> Tensor:
        return out

    def inverse(
        self,
        y: Tensor,
        out: Tensor,
    ) -> Tensor:
        raise AssertionError("an overwritten target is kept, not rebuilt")


@dataclass(frozen=True)
class Mapped(Overwrite):
    """`y = out`, where out is an invertible map of the target."""

    is_lossy = False
    changes_shape = True


# Proven by the tests. A user's own coupling, or a subclass of these, is tried on live data instead.
TRUSTED: set[type] = {
    *(Additive, Affine, Scaled, Momentum),
    *(TwoStepUpdate, BdiaUpdate, Overwrite, Mapped),
}


def is_trusted(coupling: object) -> bool:
    return type(coupling) in TRUSTED


def is_number(value: object) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@functools.cache
def has_inverse_in_place(kind: type) -> bool:
    """Whether `inverse_` belongs to `inverse`: a subclass may override only one of them."""
    owners = [cls for cls in kind.__mro__ if {"inverse", "inverse_"} & vars(cls).keys()]
    return bool(owners) and "inverse_" in vars(owners[0])


@dataclass(frozen=True)
class WithAux:
    """What a function returns if it has more than its output to return.

    `aux` is any pytree of tensors: a load-balancing loss, attention maps. The stack then returns
    `(y, aux)`, where `aux` is a list with an entry for each call that returned one, in forward
    order; gradients flow through it.
    """

    output: Any
    aux: Any
