"""`install("some_package")`: put retrograd under a package that carries a copy of one of the five
reversible modules.

A module is recognised by what it defines, not by where it comes from: it has every public name of
one of the five systems, with the same signatures; and, because signatures do not show how streams
are merged, both are then run on a small example and must agree.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.compat import axial, nuwa, nuwa_video_audio, reformer, se3


class _Function(nn.Module):
    """The functions of the examples: each has a gain of its own, and shows in its output whatever
    else it was given.
    """

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Any, *others: Tensor, **kwargs: Any) -> Any:
        given = sum(other.square().mean() for other in others) + sum(
            len(name) * value for name, value in kwargs.items() if value
        )
        if isinstance(x, dict):
            return {degree: (self.gain * features + given).tanh() for degree, features in x.items()}
        return (self.gain * x + given).tanh()


def _functions(blocks: int, each: int) -> list[list[nn.Module]]:
    return [[_Function(0.5 + 0.1 * (each * i + j)) for j in range(each)] for i in range(blocks)]


def _pairs(sequence: Any, x: Any, **options: Any) -> Any:
    return sequence([tuple(pair) for pair in _functions(3, 2)], **options)(x, text=0.3)


def _routed(sequence: Any) -> Any:
    return _pairs(
        sequence, _ramp(1, 4, 6), args_route={"text": [(True, False), (False, True), (True, True)]}
    )


def _two_modalities(sequence: Any) -> Any:
    types = [name for name in nuwa_video_audio.BLOCK_TYPES for _ in range(2)]
    masks = {"context": 0.1, "context_mask": 0.2, "video_mask": 0.3, "audio_mask": 0.4}
    return sequence(_functions(len(types), 4), types)(_ramp(1, 4, 6), 2 * _ramp(1, 3, 6), **masks)


def _ramp(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape), device="cpu").view(shape)


class System(NamedTuple):
    """One of the five: its names, and what its sequence makes of an example."""

    module: ModuleType
    names: tuple[str, ...]
    sequence: str
    example: Callable[[Any], Any]


SYSTEMS = [
    System(
        reformer,
        ("Deterministic", "ReversibleBlock", "IrreversibleBlock", "ReversibleSequence"),
        "ReversibleSequence",
        lambda sequence: _pairs(sequence, _ramp(1, 4, 6)),
    ),
    System(
        axial,
        ("Deterministic", "ReversibleBlock", "IrreversibleBlock", "ReversibleSequence"),
        "ReversibleSequence",
        lambda sequence: _pairs(sequence, _ramp(1, 4, 2, 3)),
    ),
    System(
        nuwa,
        ("Deterministic", "ReversibleBlock", "ReversibleSequence", "route_args"),
        "ReversibleSequence",
        _routed,
    ),
    System(
        se3,
        ("Deterministic", "ReversibleBlock", "ReversibleSequence", "SequentialSequence"),
        "ReversibleSequence",
        lambda sequence: _pairs(sequence, {"0": _ramp(1, 8, 1), "1": _ramp(1, 8, 3)}),
    ),
    System(
        nuwa_video_audio,
        (
            "ReversibleSelfAttnBlock",
            "ReversibleCrossAttnBlock",
            "ReversibleCrossModalityAttnBlock",
            "DualModalityReversibleSequence",
            "reversible_apply",
            "irreversible_apply",
        ),
        "DualModalityReversibleSequence",
        _two_modalities,
    ),
]


class Installed(NamedTuple):
    """What `install` did: which of the package's modules, which of the five systems, and every name
    that now means ours.
    """

    module: str
    system: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module} runs on {self.system} ({', '.join(self.names)})"


class Swap(NamedTuple):
    """A name in a loaded module, and what it meant before and after."""

    module: ModuleType
    name: str
    theirs: Any
    ours: Any


@dataclass
class Installation:
    """What was done to one package, and what undoing it needs."""

    report: list[Installed]
    swaps: list[Swap]
    left_alone: set[tuple[str, str]]  # names, by module, that meant ours before

    def is_in_place(self) -> bool:
        return all(
            getattr(sys.modules.get(s.module.__name__), s.name, None) is s.ours for s in self.swaps
        )


_installations: dict[str, Installation] = {}


def install(package: str) -> list[Installed]:
    """Put retrograd under an installed package whose reversible module is one of the five, for
    models built from now on.

    Works before and after the package was imported. Returns what was replaced. `uninstall(package)`
    undoes it.

    Raises `ModuleNotFoundError` for a package that is not installed, and `ValueError` for one
    without such a module, or with one that looks like one of the five and computes something else.

    Example:
        >>> rg.compat.install("reformer_pytorch")  # doctest: +SKIP
        [Installed(module='reformer_pytorch.reversible', system='retrograd.compat.reformer',
        names=('Deterministic', ...))]
    """
    before = _installations.get(package)
    if before is not None and before.is_in_place():
        return before.report
    _import(package)
    found, near_misses = [], []
    for module in _candidates(package):
        for system in SYSTEMS:
            difference = _difference(module, system)
            if difference is None:
                found.append((module, system))
                continue
            near_misses.append(f"{module.__name__} is not {system.module.__name__}: {difference}")
    if not found:
        looked_for = "; ".join(
            f"{s.module.__name__.rpartition('.')[2]}: {', '.join(s.names)}" for s in SYSTEMS
        )
        why = (
            "".join(f"\n  {miss}" for miss in near_misses)
            or "\n  no file of it defines a reversible sequence"
        )
        raise ValueError(
            f"install({package!r}): no module of this package is one of the five that retrograd "
            "replaces. Looked for a module "
            f"with the names and signatures of one of these ({looked_for}).{why}"
        )
    swaps: list[Swap] = []
    left_alone: set[tuple[str, str]] = set()
    for module, system in found:
        for name in system.names:
            theirs, ours = getattr(module, name), getattr(system.module, name)
            swaps += [Swap(m, n, theirs, ours) for m, n in _names_of(theirs)]
            left_alone |= {(m.__name__, n) for m, n in _names_of(ours)}
    report = [
        Installed(module.__name__, system.module.__name__, system.names) for module, system in found
    ]
    for swap in swaps:
        setattr(swap.module, swap.name, swap.ours)
    if before is None:
        _installations[package] = Installation(report, swaps, left_alone)
    else:  # a reload in between; what was swapped before stays so
        before.report, before.swaps = report, before.swaps + swaps
    return report


def uninstall(package: str) -> None:
    """Undo `install(package)`. Models that were built in between stay as they are. Nothing happens
    if it was not installed.
    """
    done = _installations.pop(package, None)
    if done is None:
        return
    for module, name, theirs, ours in done.swaps:
        if getattr(module, name, None) is ours:
            setattr(module, name, theirs)
    for theirs, ours in {id(swap.ours): (swap.theirs, swap.ours) for swap in done.swaps}.values():
        for module, name in _names_of(ours):  # names that its own modules have imported since
            is_its_own = module.__name__.partition(".")[0] == package.partition(".")[0]
            if is_its_own and (module.__name__, name) not in done.left_alone:
                setattr(module, name, theirs)


def _import(package: str) -> None:
    if package not in sys.modules and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise ModuleNotFoundError(
            f"install({package!r}): there is no such package. Give the name that you import, such "
            "as reformer_pytorch, and "
            f"install it first (pip install {package.replace('_', '-')}).",
            name=package,
        )
    importlib.import_module(package)


def _candidates(package: str) -> Iterator[ModuleType]:
    """The package's modules that define a reversible sequence. Found in their source: others are
    not imported.
    """
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


def _difference(module: ModuleType, system: System) -> str | None:
    """How a module differs from a system, in words; None if it does not."""
    missing = [name for name in system.names if not hasattr(module, name)]
    if missing:
        return f"it has no {', '.join(missing)}"
    for name in system.names:
        theirs, ours = _signatures(getattr(module, name)), _signatures(getattr(system.module, name))
        for method in ours if theirs else ():
            if method not in theirs:
                return f"{name} has no {method[1:]}"
            if theirs[method] != ours[method]:
                return (
                    f"{name}{method} takes ({', '.join(theirs[method])}), not "
                    f"({', '.join(ours[method])})"
                )
    random = torch.get_rng_state()
    try:
        with torch.no_grad():
            theirs, ours = (
                system.example(getattr(m, system.sequence)) for m in (module, system.module)
            )
    except Exception as error:
        return f"on an example it raised {type(error).__name__}: {error}"
    finally:
        torch.set_rng_state(random)
    try:
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    except (AssertionError, TypeError):
        return (
            "on an example it computes something else (it may split, merge or route its "
            "streams "
            "otherwise)"
        )
    return None


def _signatures(value: Any) -> dict[str, list[str]]:
    """The parameters of a function, or of a class's constructor and forward, without their
    annotations.
    """
    if not inspect.isclass(value):
        # A built-in, such as the `apply` of an autograd function, shows no parameters; its name has
        # to do.
        return {"": _parameters(value)} if inspect.isfunction(value) else {}
    return {
        f".{name}": _parameters(getattr(value, name))
        for name in ("__init__", "forward")
        if hasattr(value, name)
    }


def _parameters(function: Any) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return [str(p.replace(annotation=p.empty)) for p in parameters if p.name != "self"]


def _names_of(value: Any) -> list[tuple[ModuleType, str]]:
    """Everywhere a loaded module has a name for this: where it is defined, and where it was
    imported to.
    """
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not module.__name__.startswith("retrograd.")
        for name, meaning in list(vars(module).items())
        if meaning is value
    ]
