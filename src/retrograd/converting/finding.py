"""Which layers of a model to convert: the longest list of layers, or those that the user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from retrograd.core.errors import ConversionError, explain

LISTS = (nn.ModuleList, nn.Sequential)


class LayerList(NamedTuple):
    """A list of layers in a model."""

    name: str  # its path in the model
    module: nn.Module
    layers: list[nn.Module]
    callers: list[nn.Module]  # the modules around it that have a forward, the innermost first


def find_layers(model: nn.Module, layers: str | Sequence[str] | None) -> list[LayerList]:
    """The lists of layers that `layers` names. None: the longest one, and others of its class."""
    if layers is None:
        return [layer_list(model, name) for name in longest(model)]
    names = [layers] if isinstance(layers, str) else layers
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not is_list or not names:
        raise TypeError(f'layers={layers!r}: pass the path of a list, such as "model.layers".')
    return [layer_list(model, name) for name in names]


def layer_list(model: nn.Module, name: str) -> LayerList:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise cannot_find(model, f"layers={name!r}: the model has no such module.") from None
    if not isinstance(module, LISTS) or len(module) < 2:
        kind = type(module).__name__
        what = f"layers={name!r} is a {kind}, not a list of two layers or more."
        raise cannot_find(model, what)
    items = list(module._modules.values())
    assert all(isinstance(item, nn.Module) for item in items)
    if len(set(items)) < len(items):
        raise cannot_find(model, f"a layer stands at two places of the list {name!r}.")
    return LayerList(name, module, items, callers(model, name))  # type: ignore[arg-type]


def callers(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that may run the list: itself, if it has a forward, and those around it."""
    parts = name.split(".") if name else []
    paths = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
    modules = [model.get_submodule(path) for path in paths]
    return [module for module in modules if has_forward(module)]


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def longest(model: nn.Module) -> list[str]:
    """The path of the longest list of layers of one class, and of others of that class."""
    found = list(candidates(model))
    if not found:
        raise cannot_find(model, "convert found no list of layers in the model.")
    name, module = max(found, key=lambda pair: len(pair[1]._modules))  # the first of equals
    kind = layer_class(module)
    chosen = [name]
    for other, candidate in found:
        is_apart = not any(is_inside(other, one) or is_inside(one, other) for one in chosen)
        if is_apart and layer_class(candidate) is kind:
            chosen.append(other)
    return sorted(chosen, key=[name for name, _ in found].index)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Lists of two layers or more, all of one class, each with modules of its own."""
    for name, module in model.named_modules():
        if isinstance(module, LISTS) and len(module) > 1 and layer_class(module) is not None:
            yield name, module


def layer_class(module: nn.Module) -> type | None:
    """The class of all layers of a list; None if there are several, or no layers."""
    items = list(module._modules.values())
    kinds = {type(item) for item in items}
    is_layer = all(item is not None and item._modules and has_forward(item) for item in items)
    is_list = any(issubclass(kind, LISTS) for kind in kinds)
    return kinds.pop() if len(kinds) == 1 and is_layer and not is_list else None


def is_inside(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}." if other else "")


def cannot_find(model: nn.Module, what: str) -> Exception:
    lists = [
        f"{name or 'the model itself'} ({len(module)} x {type(module[0]).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, LISTS) and len(module) > 1
    ]
    why = "convert needs a list (ModuleList or Sequential) of layers that run one after the other."
    if lists:
        fix = f"name it: layers=..., one of {', '.join(lists[:8])}."
    else:
        fix = "build the layers as a list, or use rg.Residual([...]) in the model."
    return explain(ConversionError, "convert:", what, why, fix)
