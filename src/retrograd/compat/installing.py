"""`install("some_package")`: replace the reversible module of an installed package by retrograd's.

`systems` decides which modules can be replaced. Here their names are replaced in every loaded
module that has them, and put back by `uninstall`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from retrograd.compat.systems import SYSTEMS, System, difference


class Installed(NamedTuple):
    """What `install` replaced: a module of the package, the system that replaces it, and the names
    that now refer to retrograd's classes and functions.
    """

    module: str
    system: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module} runs on {self.system} ({', '.join(self.names)})"


class Replacement(NamedTuple):
    """A name in a loaded module, with its value before and after."""

    module: ModuleType
    name: str
    theirs: object
    ours: object


@dataclass
class Installation:
    """What was done to one package, and what `uninstall` needs to undo it."""

    report: list[Installed]
    replacements: list[Replacement]
    ours_before: set[tuple[str, str]]  # names, by module, that were retrograd's already

    def is_in_place(self) -> bool:
        for replacement in self.replacements:
            module = sys.modules.get(replacement.module.__name__)
            if getattr(module, replacement.name, None) is not replacement.ours:
                return False
        return True


_installations: dict[str, Installation] = {}


def install(package: str) -> list[Installed]:
    """Run an installed package on retrograd, if its reversible module is one of the five systems.

    Models that are built from now on use retrograd. The package may be imported before or after.
    Returns what was replaced. `uninstall(package)` undoes it.

    Raises `ModuleNotFoundError` if the package is not installed. Raises `ValueError` if it has no
    such module, or if its module looks like one of the five and computes something else.

    Example:
        >>> rg.compat.install("reformer_pytorch")  # doctest: +SKIP
        [Installed(module='reformer_pytorch.reversible', system='retrograd.compat.reformer',
        names=('Deterministic', ...))]
    """
    previous = _installations.get(package)
    if previous is not None and previous.is_in_place():
        return previous.report
    _import(package)
    matches = _matching_modules(package)
    report = [
        Installed(module.__name__, system.module.__name__, system.names)
        for module, system in matches
    ]
    replacements: list[Replacement] = []
    ours_before: set[tuple[str, str]] = set()
    for module, system in matches:
        for name in system.names:
            theirs = getattr(module, name)
            ours = getattr(system.module, name)
            replacements += [Replacement(m, n, theirs, ours) for m, n in _references(theirs)]
            ours_before |= {(m.__name__, n) for m, n in _references(ours)}
    for replacement in replacements:
        setattr(replacement.module, replacement.name, replacement.ours)
    if previous is not None:  # a module was reloaded; the other replacements are still in place
        replacements = previous.replacements + replacements
        ours_before = previous.ours_before
    _installations[package] = Installation(report, replacements, ours_before)
    return report


def uninstall(package: str) -> None:
    """Undo `install(package)`. Does nothing if it was not installed.

    Models that were built in between keep running on retrograd.
    """
    installation = _installations.pop(package, None)
    if installation is None:
        return
    for module, name, theirs, ours in installation.replacements:
        if getattr(module, name, None) is ours:
            setattr(module, name, theirs)
    # Modules of the package that were imported since then have retrograd's values, too.
    latest = {id(replacement.ours): replacement for replacement in installation.replacements}
    top_level = package.partition(".")[0]
    for replacement in latest.values():
        for module, name in _references(replacement.ours):
            in_package = module.__name__.partition(".")[0] == top_level
            if in_package and (module.__name__, name) not in installation.ours_before:
                setattr(module, name, replacement.theirs)


def _import(package: str) -> None:
    if package not in sys.modules and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise ModuleNotFoundError(
            f"install({package!r}): there is no such package. Give the name that you import, such "
            f"as reformer_pytorch, and install it first (pip install {package.replace('_', '-')}).",
            name=package,
        )
    importlib.import_module(package)


def _matching_modules(package: str) -> list[tuple[ModuleType, System]]:
    """The package's modules that retrograd can replace, each with its system."""
    matches = []
    differences = []
    for module in _candidates(package):
        for system in SYSTEMS:
            found = difference(module, system)
            if found is None:
                matches.append((module, system))
            else:
                differences.append(f"{module.__name__} is not {system.module.__name__}: {found}")
    if matches:
        return matches
    names = "; ".join(f"{system.short_name}: {', '.join(system.names)}" for system in SYSTEMS)
    reasons = differences or ["no file of it defines a reversible sequence"]
    lines = "".join(f"\n  {reason}" for reason in reasons)
    raise ValueError(
        f"install({package!r}): no module of this package is one of the five that retrograd "
        "replaces. Looked for a module with the names and signatures of one of these "
        f"({names}).{lines}"
    )


def _candidates(package: str) -> Iterator[ModuleType]:
    """The package's modules whose source defines a reversible sequence; no others are imported."""
    root = sys.modules[package]
    if not hasattr(root, "__path__"):  # a single file
        yield root
    for folder in map(Path, getattr(root, "__path__", [])):
        for path in sorted(folder.rglob("*.py")):
            source = path.read_text(encoding="utf-8", errors="ignore")
            if any(f"class {system.sequence}(" in source for system in SYSTEMS):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join([package, *parts]).removesuffix(".__init__")
                yield importlib.import_module(name)


def _references(value: object) -> list[tuple[ModuleType, str]]:
    """Every name in a loaded module that refers to this value, where defined or imported."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not module.__name__.startswith("retrograd.")
        for name, other in list(vars(module).items())
        if other is value
    ]
