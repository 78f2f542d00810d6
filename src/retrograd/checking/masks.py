"""The masks of a function: what it decides by comparing numbers, such as the mask of a ReLU, the
indices of max-pooling, a rounded value.

Rebuilt inputs differ from those of forward by rounding. Most functions then change as little. But a
value that crosses a kink flips a mask, and its gradient is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from retrograd.checking.compare import is_real_valued
from retrograd.core.private import DispatchMode
from retrograd.core.streams import flatten, tensors_in


class Mask(NamedTuple):
    """What one operation decided, element by element."""

    operation: str
    value: Tensor


class Masks(DispatchMode):
    """While active, collects the masks of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Mask] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        name = getattr(packet, "__name__", "").strip("_")
        if name in _KINKS and _is_compared(args):
            # Before it runs: it may write to its input.
            values = [value for value in _KINKS[name](*args, **kwargs) if value is not None]
            self.found += [Mask(name, value.detach()) for value in values]
        result = func(*args, **kwargs)
        if name in _ROUNDING:
            self.found.append(Mask(name, result.detach().clone()))
        elif name not in _RANDOM and _is_compared(args):
            self.found += [Mask(name, value) for value in _decisions(result)]
        return result


class Flips(NamedTuple):
    """How many masks of a function are others in recompute than in forward."""

    flipped: int
    total: int
    operations: frozenset[str] = frozenset()  # whose masks flipped

    def __add__(self, other: Flips) -> Flips:  # type: ignore[override]
        flipped = self.flipped + other.flipped
        return Flips(flipped, self.total + other.total, self.operations | other.operations)


NO_FLIPS = Flips(0, 0)


def flips_between(forward: Sequence[Mask], again: Sequence[Mask]) -> Flips:
    """What differs. Nothing if other operations ran: that is another matter."""
    if [_kind(mask) for mask in forward] != [_kind(mask) for mask in again]:
        return NO_FLIPS
    flips = NO_FLIPS
    for first, second in zip(forward, again):
        count = int((first.value != second.value).sum())
        operations = frozenset([first.operation] if count else [])
        flips += Flips(count, first.value.numel(), operations)
    return flips


def _kind(mask: Mask) -> tuple[str, Sequence[int]]:
    return mask.operation, mask.value.shape


def _is_compared(args: Sequence[Any]) -> bool:
    """Whether the operation gets real numbers, which rounding may have changed."""
    return any(isinstance(arg, Tensor) and _is_real(arg) for arg in flatten(args)[0])


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta


def _decisions(result: Any) -> list[Tensor]:
    """The masks and indices among what an operation returned."""
    leaves = tensors_in(result)
    return [leaf.detach() for leaf in leaves if not is_real_valued(leaf) and not leaf.is_meta]


# --- operations with kinks: where the input is, seen from them

Where = Callable[..., list[Any]]


def _above(*limits: float) -> Where:
    return lambda x, *args, **kwargs: [x > limit for limit in limits]


def _threshold(x: Tensor, threshold: Any, value: Any) -> list[Any]:
    return [x > threshold]


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> list[Any]:
    return [None if min is None else x > min, None if max is None else x < max]


def _hardtanh(x: Tensor, min_val: Any = -1, max_val: Any = 1) -> list[Any]:
    return _clamp(x, min_val, max_val)


def _clamp_max(x: Tensor, max: Any) -> list[Any]:
    return [x < max]


def _shrink(x: Tensor, lambd: Any = 0.5) -> list[Any]:
    return _clamp(x, -lambd, lambd)


def _larger(x: Tensor, other: Tensor) -> list[Any]:
    return [x > other]


_KINKS: dict[str, Where] = {
    **dict.fromkeys(("relu", "leaky_relu", "prelu", "prelu_kernel", "rrelu", "abs"), _above(0)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), _above(-3, 3)),
    **dict.fromkeys(("softshrink", "hardshrink"), _shrink),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), _larger),
    "threshold": _threshold,
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
}
_ROUNDING = ("round", "floor", "ceil", "trunc", "sign", "sgn")
_RANDOM = ("native_dropout", "bernoulli", "rrelu_with_noise")
