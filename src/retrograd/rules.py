"""Rules: how the states of a residual network follow each other.

A residual network is an integrator. With `p[k]` the state before layer k and `f` what a layer adds,

    p[k+1] = previous * p[k-1] + current * p[k] + scale * f(p[k])

The ordinary network is `0, 1, 1`: Euler's method, which cannot be undone, so that the input of each
layer is kept. A rule with `previous != 0` has two states, and each follows from the other two. The
first step is Euler's, because there is no state before the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from retrograd.core.updates import is_number

Number = float | Sequence[float]


class Coefficients(NamedTuple):
    """One step of a rule: `previous * p[k-1] + current * p[k] + scale * f(p[k])`."""

    previous: float
    current: float
    scale: float
    draws_sign: bool = False  # `previous` gets a random sign for each sample: see `Bdia`


ORDINARY = Coefficients(0.0, 1.0, 1.0)


class Rule(Protocol):
    """What `rule=` of a `Residual` takes. Write your own with this method.

    A rule with a number for each layer may have a method `part(slice)`, too: the rule for a slice
    of the network.
    """

    def steps(self, layers: int, training: bool, /) -> list[Coefficients]:
        """The coefficients of each layer. Those of the first one must not use `previous`."""
        ...


@dataclass(frozen=True)
class Euler:
    """The ordinary residual network: `p[k+1] = p[k] + f(p[k])`.

    It cannot be undone. So the input of each layer is kept, as checkpointing does, and a step costs
    what per-layer checkpointing costs. Outputs and gradients are those of the network in plain
    autograd, to the bit.
    """

    def steps(self, layers: int, training: bool) -> list[Coefficients]:
        return [ORDINARY] * layers


@dataclass(frozen=True)
class Midpoint:
    """`p[k+1] = p[k-1] + 2 * h * f(p[k])`, after a first step of `h`. Kept: nothing."""

    h: float = 0.5

    def __post_init__(self) -> None:
        _check_numbers(self, "h")

    def steps(self, layers: int, training: bool) -> list[Coefficients]:
        return _after(self.h, Coefficients(1.0, 0.0, 2 * self.h), layers)


@dataclass(frozen=True)
class Leapfrog:
    """`p[k+1] = 2 * p[k] - p[k-1] + h**2 * f(p[k])`, after a first step of `h`. Kept: nothing."""

    h: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self, "h")

    def steps(self, layers: int, training: bool) -> list[Coefficients]:
        return _after(self.h, Coefficients(-1.0, 2.0, self.h**2), layers)


@dataclass(frozen=True)
class Blend:
    """`p[k+1] = a * p[k-1] + (1 - a) * p[k] + h * f(p[k])`, where `h` is `1 + a` unless given.

    Where f changes slowly from layer to layer, that is Euler's method to second order, so weights
    of an ordinary network fit. Undoing divides by `a`: this needs `exact=True`, which stores
    `log2(1 / a)` bits for each element and layer.
    """

    a: float
    h: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, "a", *(() if self.h is None else ("h",)))
        if not 0 < abs(self.a) <= 1:
            raise ValueError(
                f"Blend(a={self.a!r}): a lies between 0 and 1. Try Blend(1/4); rg.Euler() is the "
                "rule with a = 0."
            )

    def steps(self, layers: int, training: bool) -> list[Coefficients]:
        h = 1 + self.a if self.h is None else self.h
        return _after(1.0, Coefficients(self.a, 1 - self.a, h), layers)


@dataclass(frozen=True)
class Bdia:
    """`p[k+1] = g * p[k-1] + (1 - g) * p[k] + (1 + g) * f(p[k])`, `g` being `gamma` or `-gamma`.

    While training, a sign is drawn for each sample of a tensor and each layer, from torch's
    generators. In
    evaluation `g` is 0: the ordinary network, to the bit. Undoing divides by `gamma`: this needs
    `exact=True`, which stores `log2(1 / gamma)` bits for each element and layer.
    """

    gamma: float = 0.5

    def __post_init__(self) -> None:
        _check_numbers(self, "gamma")
        if not 0 < self.gamma <= 1:
            raise ValueError(
                f"Bdia(gamma={self.gamma!r}): gamma lies between 0 and 1. Try Bdia(0.5)."
            )

    def steps(self, layers: int, training: bool) -> list[Coefficients]:
        if not training:
            return [ORDINARY] * layers
        return _after(1.0, Coefficients(self.gamma, 0.0, 0.0, draws_sign=True), layers)


@dataclass
class TwoStep:
    """`p[k+1] = previous * p[k-1] + current * p[k] + scale * f(p[k])`: any rule of two steps.

    Each is a number, or a sequence with a number for each layer. They may be assigned at any time,
    also during training: a call uses the numbers of its forward in backward. Where `previous` is 0,
    the state is kept, as in `Euler`. The first layer does not use `previous`.

    Example:
        >>> rewiring = rg.TwoStep(previous=1, current=0, scale=1)
        >>> dr2net = rg.TwoStep(previous=0.5, current=0.5, scale=1)
    """

    previous: Number
    current: Number
    scale: Number

    def __post_init__(self) -> None:
        _check_numbers(self, "previous", "current", "scale", may_be_sequences=True)

    def part(self, index: slice) -> TwoStep:
        """The rule for a slice of the layers."""
        values = (self.previous, self.current, self.scale)
        return TwoStep(*[v[index] if isinstance(v, Sequence) else v for v in values])

    def steps(self, layers: int, training: bool) -> list[Coefficients]:
        self.__post_init__()  # the numbers may have been assigned
        names = ("previous", "current", "scale")
        columns = [_for_each_layer(getattr(self, name), name, layers) for name in names]
        steps = [Coefficients(*row) for row in zip(*columns)]
        if steps:
            # There is no state before the input, so the first layer counts its input for both.
            first = steps[0]
            steps[0] = Coefficients(0.0, first.previous + first.current, first.scale)
        return steps


def growth(steps: Sequence[Coefficients]) -> float:
    """How much undoing one layer enlarges an error, at most, if nothing is exact."""
    factors = [1 / abs(step.previous) for step in steps if step.previous]
    return max(factors, default=1.0)


def _after(first: float, then: Coefficients, layers: int) -> list[Coefficients]:
    """A first step of Euler's, and then always the same one."""
    start = Coefficients(0.0, 1.0, first)
    return [start, *[then] * (layers - 1)][:layers]


def _for_each_layer(value: Number, name: str, layers: int) -> list[float]:
    if not isinstance(value, Sequence):
        return [float(value)] * layers
    if len(value) != layers:
        raise ValueError(
            f"TwoStep({name}=...) has {len(value)} numbers for {layers} layers; give one for each."
        )
    return [float(number) for number in value]


def _check_numbers(rule: object, *names: str, may_be_sequences: bool = False) -> None:
    """Raise unless these attributes are finite numbers, or sequences of them."""
    for name in names:
        value = getattr(rule, name)
        is_sequence = may_be_sequences and isinstance(value, Sequence)
        if not all(map(is_number, value if is_sequence else [value])):
            kind = type(rule).__name__
            raise ValueError(f"{kind}({name}={value!r}): {name} must be a finite number.")


def checked_steps(rule: Rule, layers: int, training: bool) -> list[Coefficients]:
    """The steps of a rule, which may be the user's own."""
    steps = rule.steps(layers, training)
    problem = _problem_of(steps, layers)
    if problem is not None:
        kind, what = problem
        raise kind(f"rule={rule!r}: steps({layers}, {training}) {what}")
    return steps


def _problem_of(steps: Sequence[Coefficients], layers: int) -> tuple[type[Exception], str] | None:
    """What is wrong with the steps of a rule."""
    if not all(isinstance(step, Coefficients) for step in steps):
        return TypeError, "must return a list of retrograd.rules.Coefficients."
    if len(steps) != layers:
        return ValueError, f"returned {len(steps)} steps; return one for each layer."
    if steps and steps[0].previous:
        first = f"returned a first step with previous={steps[0].previous}"
        return ValueError, f"{first}, and there is no state before the input. Return previous=0."
    return None
