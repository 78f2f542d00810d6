"""The five systems, and how a module of another package is recognised as one of them.

A module is recognised by what it defines, not by its package. It must have every public name of a
system, with the same signatures. Signatures do not show how streams are merged, so both are also
run on a small example and must agree.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.compat import axial, nuwa, nuwa_video_audio, reformer, se3

SequenceClass = Callable[..., nn.Module]


class System(NamedTuple):
    """One of the five systems: its public names, and an example that runs its sequence class."""

    module: ModuleType
    names: tuple[str, ...]
    sequence: str
    example: Callable[[SequenceClass], Any]

    @property
    def short_name(self) -> str:
        return self.module.__name__.rpartition(".")[2]


class ExampleFunction(nn.Module):
    """A function of the examples. Its output depends on its gain and on every argument that it
    gets.
    """

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Any, *others: Tensor, **kwargs: Any) -> Any:
        shift = sum(other.square().mean() for other in others)
        shift += sum(len(name) * value for name, value in kwargs.items() if value)
        if isinstance(x, dict):
            return {degree: (self.gain * features + shift).tanh() for degree, features in x.items()}
        return (self.gain * x + shift).tanh()


def _functions(blocks: int, per_block: int) -> list[list[ExampleFunction]]:
    """Functions that all have different gains."""
    gains = [0.5 + 0.1 * i for i in range(blocks * per_block)]
    functions = [ExampleFunction(gain) for gain in gains]
    return [functions[i : i + per_block] for i in range(0, len(functions), per_block)]


def _ramp(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape), device="cpu").view(shape)


def _run_pairs(sequence: SequenceClass, x: Any, **options: Any) -> Any:
    stack = sequence([tuple(pair) for pair in _functions(3, 2)], **options)
    return stack(x, text=0.3)


def _run_reformer(sequence: SequenceClass) -> Any:
    return _run_pairs(sequence, _ramp(1, 4, 6))


def _run_axial(sequence: SequenceClass) -> Any:
    return _run_pairs(sequence, _ramp(1, 4, 2, 3))


def _run_nuwa(sequence: SequenceClass) -> Any:
    route = {"text": [(True, False), (False, True), (True, True)]}
    return _run_pairs(sequence, _ramp(1, 4, 6), args_route=route)


def _run_se3(sequence: SequenceClass) -> Any:
    return _run_pairs(sequence, {"0": _ramp(1, 8, 1), "1": _ramp(1, 8, 3)})


def _run_nuwa_video_audio(sequence: SequenceClass) -> Any:
    types = [name for name in nuwa_video_audio.BLOCK_TYPES for _ in range(2)]
    stack = sequence(_functions(len(types), 4), types)
    video = _ramp(1, 4, 6)
    audio = 2 * _ramp(1, 3, 6)
    return stack(video, audio, context=0.1, context_mask=0.2, video_mask=0.3, audio_mask=0.4)


SYSTEMS = [
    System(
        reformer,
        ("Deterministic", "ReversibleBlock", "IrreversibleBlock", "ReversibleSequence"),
        "ReversibleSequence",
        _run_reformer,
    ),
    System(
        axial,
        ("Deterministic", "ReversibleBlock", "IrreversibleBlock", "ReversibleSequence"),
        "ReversibleSequence",
        _run_axial,
    ),
    System(
        nuwa,
        ("Deterministic", "ReversibleBlock", "ReversibleSequence", "route_args"),
        "ReversibleSequence",
        _run_nuwa,
    ),
    System(
        se3,
        ("Deterministic", "ReversibleBlock", "ReversibleSequence", "SequentialSequence"),
        "ReversibleSequence",
        _run_se3,
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
        _run_nuwa_video_audio,
    ),
]


def difference(module: ModuleType, system: System) -> str | None:
    """How a module differs from a system, as text; None if it does not."""
    missing = [name for name in system.names if not hasattr(module, name)]
    if missing:
        return f"it has no {', '.join(missing)}"
    return _signature_difference(module, system) or _result_difference(module, system)


def _signature_difference(module: ModuleType, system: System) -> str | None:
    for name in system.names:
        theirs = _signatures(getattr(module, name))
        ours = _signatures(getattr(system.module, name))
        if not theirs:  # a built-in: only its name can be compared
            continue
        for method, parameters in ours.items():
            if method not in theirs:
                return f"{name} has no {method[1:]}"
            if theirs[method] != parameters:
                return (
                    f"{name}{method} takes ({', '.join(theirs[method])}), not "
                    f"({', '.join(parameters)})"
                )
    return None


def _signatures(value: Any) -> dict[str, list[str]]:
    """The parameters of a class's `.__init__` and `.forward`, or of a function under the name "".

    Empty for a built-in, such as the `apply` of an autograd function, which has no signature.
    """
    if inspect.isfunction(value):
        return {"": _parameters(value)}
    if not inspect.isclass(value):
        return {}
    methods = [name for name in ("__init__", "forward") if hasattr(value, name)]
    return {f".{name}": _parameters(getattr(value, name)) for name in methods}


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters as text, without annotations and without self."""
    parameters = inspect.signature(function).parameters.values()
    return [str(p.replace(annotation=p.empty)) for p in parameters if p.name != "self"]


def _result_difference(module: ModuleType, system: System) -> str | None:
    rng_state = torch.get_rng_state()
    try:
        with torch.no_grad():
            theirs = system.example(getattr(module, system.sequence))
            ours = system.example(getattr(system.module, system.sequence))
    except Exception as error:
        return f"on an example it raised {type(error).__name__}: {error}"
    finally:
        torch.set_rng_state(rng_state)
    try:
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    except (AssertionError, TypeError):
        return (
            "on an example it computes something else (it may split, merge or route its streams "
            "differently)"
        )
    return None
