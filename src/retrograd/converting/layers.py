"""The layers of a converted model as a stack: a `Residual` whose functions are the model's own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.errors import ConversionError, RetrogradError, explain
from retrograd.core.exact import Grid, Precision
from retrograd.core.updates import WithAux
from retrograd.residual import Residual
from retrograd.rules import ORDINARY

log = logging.getLogger("retrograd")

ARGUMENTS = "arguments"  # the one keyword argument of a `LayerBody`
NARROW = Grid()
WIDE = Grid(dtype=torch.float64)
HEADROOM = 8  # how much larger than in the first batch streams may become


class LayerBody(nn.Module):
    """What a layer computes, without the hooks on it: they surround the update of its stack."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.name = name  # the path of the layer in the model
        self.layer = layer
        self.own_forward = layer.__dict__.get("forward")  # that somebody set on the instance
        parameters = inspect.signature(layer.forward).parameters
        self.first_argument = next(iter(parameters), "")  # the name of the hidden state

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The layer as it was before it was converted."""
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def forward(self, x: Tensor, *, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """The new hidden state; `WithAux` with the rest if the layer returns a tuple."""
        args, kwargs = arguments
        returned = self.run(x, *args, **kwargs)
        output, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
        if not has_same_shape(output, x):
            raise OtherShape(self.name, x, output)
        return WithAux(output, tuple(rest)) if isinstance(returned, tuple) else output


def has_same_shape(output: Any, x: Any) -> bool:
    if not isinstance(output, Tensor) or not isinstance(x, Tensor):
        return False
    return output.shape == x.shape


class OtherShape(RetrogradError):
    """A layer returned something else than a hidden state of the shape that it got."""

    def __init__(self, name: str, x: Tensor, returned: Any) -> None:
        self.layer = name
        super().__init__(f"{name} got {describe(x)} and returned {describe(returned)}")


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


class ConvertedLayers(Residual):
    """Consecutive layers of a converted model. Its settings may be assigned at any time.

    The model runs its layers one by one, and each call is one update.
    """

    takes_arguments_later = True

    def __init__(self, bodies: Sequence[LayerBody], *, exact: Any, **settings: Any) -> None:
        self.chooses_grid = False
        super().__init__(bodies, skip=True, exact=WIDE if exact is True else exact, **settings)
        self.chooses_grid = exact is True  # by what the first batch shows

    @property
    def bodies(self) -> list[Any]:
        return list(self.functions)

    def _name(self, layer: int) -> str:
        return self.bodies[layer].name

    def part(self, start: int, stop: int) -> ConvertedLayers:
        """Some of the layers, with the same settings."""
        rule = self.rule
        if hasattr(rule, "part"):
            rule = rule.part(slice(start, stop))  # type: ignore[attr-defined]
        settings = {**self._settings(), "rule": rule}
        if self.chooses_grid:
            settings["exact"] = True
        return ConvertedLayers(self.bodies[start:stop], **settings)

    def _set_precision(self, precision: Precision) -> None:
        super()._set_precision(precision)
        self.chooses_grid = False

    @property
    def is_ordinary(self) -> bool:
        """Whether a plain pass is that of the ordinary network."""
        return all(step == ORDINARY for step in self._steps())

    def choose_grid(self, largest: Tensor) -> None:
        """Choose the grid by the largest value of a hidden state in the first batch."""
        if not self.chooses_grid:
            return
        value = largest.item()
        fits = value * HEADROOM < NARROW.limit(torch.float32)
        self.exact = NARROW if fits else WIDE
        text = "%s: hidden states of up to %.3g in the first batch; exact=%r from now on."
        log.info(text, self.bodies[0].name, value, self.exact)


def not_a_chain(name: str, what: str, why: str, fix: str) -> RetrogradError:
    return explain(ConversionError, f"{name}:", what, why, fix)
