"""`install("some_package")`: run the reversible blocks of an installed package on retrograd.

Such a package has an autograd function that walks a list of blocks. `engine_searching` finds it in
the source. Here its name is replaced in every loaded module that has it, by an `EngineCall`, and
put back by `uninstall`. The package's classes stay as they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from retrograd.compat.pairs import Engine
from retrograd.core.exact import Grid
from retrograd.core.memory import MemoryMode, Reverse
from retrograd.core.private import is_apply_of
from retrograd.stack import checked_memory

if TYPE_CHECKING:  # what `install` needs is loaded when it is called
    from retrograd.compat.engine_calls import EngineCall

# Packages that have another kind of engine, and the page that shows how their networks move.
PAGES = {
    "memcnn": "memcnn.md",
    "revlib": "revlib.md",
    "revtorch": "revtorch.md",
    "torch_geometric": "other-libraries.md",
    "mmpretrain": "other-libraries.md",
    "slowfast": "other-libraries.md",
    "iunets": "other-libraries.md",
    "FrEIA": "other-libraries.md",
    "momentumnet": "other-libraries.md",
    "revcol": "other-libraries.md",
    "torch": "checkpoint.md",
}


class Installed(NamedTuple):
    """What `install` replaced: a module of the package, and the names of the autograd functions in
    it whose calls now run on retrograd.
    """

    module: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.names)} of {self.module} runs on retrograd"


class Replacement(NamedTuple):
    """A name in a loaded module, with its value before and after."""

    holder: Any  # a module, or a class of one
    name: str
    theirs: object
    ours: object


@dataclass
class Installation:
    """What was done to one package, and what `uninstall` needs to undo it."""

    report: list[Installed]
    replacements: list[Replacement]
    settings: dict[str, Any]

    def is_in_place(self) -> bool:
        for replacement in self.replacements:
            holder = replacement.holder
            if isinstance(holder, ModuleType):  # one that is loaded now
                holder = sys.modules.get(holder.__name__)
            if getattr(holder, replacement.name, None) is not replacement.ours:
                return False
        return True


_installations: dict[str, Installation] = {}


def install(
    package: str, *, memory: MemoryMode | str = Reverse(), exact: bool | Grid = False
) -> list[Installed]:
    """Run the reversible blocks of an installed package on retrograd.

    The package's classes stay: constructors, state-dict keys and random draws are its own. Only the
    autograd function that walks its blocks is replaced. What the blocks compute is learned from
    their own `forward`, when they first run. Models that were built before are reached, too, and
    the package may be imported before or after. `uninstall(package)` undoes it.

    Args:
        package: the name that you import.
        memory, exact: as for `rg.Reversible`, for every model of the package. `rg.set_memory`
            changes the memory mode of one model. Install again to change both for all.

    Returns what was replaced. Raises `ModuleNotFoundError` if the package is not installed, and
    `ValueError` if it has no such function. A block that is not a list of updates
    `stream += function(...)` raises `rg.ConversionError` when it first runs.

    Example:
        >>> rg.compat.install("reformer_pytorch")  # doctest: +SKIP
        [Installed(module='reformer_pytorch.reversible', names=('_ReversibleFunction',))]
    """
    settings = {"memory": checked_memory(memory), "exact": exact}
    previous = _installations.get(package)
    if previous is not None and previous.is_in_place():
        if previous.settings == settings:
            return previous.report
        uninstall(package)
    elif previous is not None:  # a module was reloaded
        uninstall(package)
    _import(package)
    if _page_hint(package):
        raise ValueError(
            f"install({package!r}): there is nothing to replace, because its engine is of another "
            f"kind.{_page_hint(package)}"
        )
    found = list(_functions(package))
    if not found:
        raise ValueError(_nothing_found(package))
    replacements = [
        each for module, name in found for each in _replacements(module, name, settings)
    ]
    for replacement in replacements:
        setattr(replacement.holder, replacement.name, replacement.ours)
    names: dict[str, tuple[str, ...]] = {}
    for module, name in found:
        names[module.__name__] = (*names.get(module.__name__, ()), name)
    report = [Installed(module, of_module) for module, of_module in names.items()]
    _installations[package] = Installation(report, replacements, settings)
    return report


def uninstall(package: str) -> None:
    """Undo `install(package)`. Does nothing if it was not installed.

    All models of the package run on its own engine again.
    """
    installation = _installations.pop(package, None)
    if installation is None:
        return
    for holder, name, theirs, ours in installation.replacements:
        if getattr(holder, name, None) is ours:
            setattr(holder, name, theirs)
    # Modules that were imported since then have the replacement, too.
    for replacement in installation.replacements:
        for module, name in _references(lambda value, ours=replacement.ours: value is ours):
            setattr(module, name, replacement.theirs)


def engines_of(model: nn.Module) -> dict[str, Engine]:
    """The engines of a model's blocks, by the path of the module that runs them."""
    found: dict[str, Engine] = {}
    if not _installations:
        return found
    for path, module in model.named_modules():
        lists = [part for part in module.children() if isinstance(part, nn.ModuleList)]
        blocks = [block for part in lists for block in part]
        call = _call_in(type(module).forward)
        if call is not None and blocks:
            found[path] = call.engines.of(blocks)
    return found


def _call_in(forward: Any) -> EngineCall | None:
    """The replaced autograd function that a method uses."""
    from retrograd.compat.engine_calls import EngineCall

    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        value = forward.__globals__.get(name)
        holder: Any = value.__self__ if type(value) is MethodType else value
        if issubclass(type(holder), EngineCall):
            return holder
    return None


def _import(package: str) -> None:
    if package not in sys.modules and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise ModuleNotFoundError(
            f"install({package!r}): there is no such package. Give the name that you import, such "
            f"as reformer_pytorch, and install it first (pip install {package.replace('_', '-')})."
            f"{_page_hint(package)}",
            name=package,
        )
    importlib.import_module(package)


def _functions(package: str) -> Iterator[tuple[ModuleType, str]]:
    """The package's autograd functions that walk a list of blocks; no other module is imported."""
    from retrograd.compat.engine_searching import engine_functions

    for module_name, names in engine_functions(sys.modules[package]):
        module = _imported(package, module_name)
        if module is None:
            continue
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                yield module, name


def _imported(package: str, name: str) -> ModuleType | None:
    """A module of the package; None, with a warning, if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a module does when it runs
        what = f"install({package!r}): {name} has an engine, too, but cannot be imported"
        warnings.warn(f"{what} ({type(error).__name__}: {error}).", stacklevel=4)
        return None


def _replacements(
    module: ModuleType, name: str, settings: Mapping[str, Any]
) -> Iterator[Replacement]:
    """All names that refer to an autograd function, or to its `apply`."""
    theirs = getattr(module, name)
    ours = _engine_call(theirs, settings)
    for holder, alias in _references(lambda value: value is theirs):
        yield Replacement(holder, alias, theirs, ours)
    apply = ours.apply
    for holder, alias in _references(lambda value: is_apply_of(value, theirs)):
        yield Replacement(holder, alias, getattr(holder, alias), apply)
    for holder, attribute, value in ours.others():
        yield Replacement(holder, attribute, getattr(holder, attribute), value)


def _engine_call(theirs: type[torch.autograd.Function], settings: Mapping[str, Any]) -> EngineCall:
    from retrograd.compat import engine_calls, huggingface

    if theirs.__module__ == huggingface.HOME:  # its layers return more than tensors
        return huggingface.ReformerCall(theirs, settings)
    return engine_calls.EngineCall(theirs, settings)


def _references(matches: Callable[[object], bool]) -> list[tuple[ModuleType, str]]:
    """Every name in a loaded module whose value matches, where defined or imported."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not module.__name__.startswith("retrograd.")
        for name, value in list(vars(module).items())
        if matches(value)
    ]


def _nothing_found(package: str) -> str:
    return (
        f"install({package!r}): there is nothing to replace. Looked in its source for an autograd "
        "function whose forward calls the blocks of a list one after another, and found none. "
        "rg.convert(model) makes the layers of an ordinary model reversible."
    )


def _page_hint(package: str) -> str:
    page = PAGES.get(package.partition(".")[0])
    if page is None:
        return ""
    return f" docs/migrate/{page} shows how its networks run on retrograd."
