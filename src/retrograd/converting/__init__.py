"""`rg.convert`: the layers of an existing model become a reversible stack, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from retrograd.converting.conversion import ATTRIBUTE, Conversion, revert_all
from retrograd.converting.finding import find_layers
from retrograd.core.exact import DriftAction, Grid
from retrograd.core.memory import Keep, MemoryMode, Reverse
from retrograd.core.structure import VerifyCalls
from retrograd.rules import Blend, Rule
from retrograd.shared_budget import share_memory
from retrograd.stack import checked_memory

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    rule: Rule = Blend(1 / 4),
    memory: MemoryMode | str = Reverse(),
    exact: bool | Grid = True,
    *,
    layers: str | Sequence[str] | None = None,
    drift: DriftAction = "warn",
    stream_dtype: torch.dtype | None = None,
    verify: VerifyCalls = "first",
) -> Model:
    """Make the layers of a model reversible, in place, and return the model.

    The layers stay where they are, with their names, classes and hooks; only what happens between
    them follows the rule. With `Euler()`, the model is the original one to the bit, and just its
    memory changes. Convert again to change the settings; `rg.revert` takes it back.

    Args:
        model: any module with a list of layers (`ModuleList` or `Sequential`) that it runs one
            after the other, each mapping a hidden state to the next one.
        rule: how the hidden states follow each other. `Blend(1/4)` fits pretrained weights.
        memory: as for `Residual`; a budget is one for all converted lists, as in `rg.set_memory`.
        exact: True rebuilds hidden states to the bit. Streams are float64 in the first batch; from
            then on they are float32 if 8 times its largest value fits the grid. A `Grid` is used
            as it is.
        layers: the path of the list, such as `"model.layers"`, or several. None: the longest list
            of layers of one class, and others of that class.
        drift, stream_dtype, verify: as for `ReversibleSequence`.

    Example:
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.Sequential(*[layer() for _ in range(6)])
        >>> names = list(model.state_dict())
        >>> model = rg.convert(model)
        >>> model(torch.randn(2, 5, 16)).sum().backward()
        >>> list(model.state_dict()) == names
        True
    """
    found = find_layers(model, layers)
    memory = checked_memory(memory)
    settings = {
        "rule": rule,
        "memory": Keep(),  # until all are there: a budget is one for all of them
        "exact": exact,
        "drift": drift,
        "stream_dtype": stream_dtype,
        "verify": verify,
    }
    for one in found:
        before = one.module.__dict__.get(ATTRIBUTE)
        if before is not None:
            before.revert()
    conversions = [Conversion(one, settings) for one in found]
    stacks = {one.name: one.stacks[0] for one in conversions}
    share_memory(model, stacks, memory)
    for conversion in conversions:
        conversion.shared = conversion.stacks[0].memory
        conversion.group = conversions
        conversion.install()
    return model


def revert(model: Model) -> Model:
    """Take back what `rg.convert` did, and return the model. Its weights stay as they are now.

    Example:
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3)]
        >>> model = rg.revert(rg.convert(torch.nn.Sequential(*layers)))
    """
    found = [module.__dict__.get(ATTRIBUTE) for module in model.modules()]
    revert_all([conversion for conversion in found if conversion is not None])
    return model
