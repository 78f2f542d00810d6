"""Why something is wrong: the likely cause of a difference, and the code that fixes it."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from retrograd.checking.crawl import crawl, globals_of, is_opaque, is_user_code
from retrograd.checking.findings import Findings
from retrograd.checking.fingerprints import Change, ChangeKind
from retrograd.checking.functions import FunctionRecord
from retrograd.checking.observers import StackRun
from retrograd.core.updates import Additive, Coupling, is_trusted

LEAVE_ALONE = "do not change it in recompute: `if not rg.is_recomputing(): ...`"
AS_ARGUMENT = "pass it to the stack as a keyword argument: recompute gets the same one"
DRAW = (
    "draw with torch, whose generators are replayed; or draw once, outside the stack, and "
    f"{AS_ARGUMENT}."
)

_LIKELIEST_FIRST: tuple[ChangeKind, ...] = ("random", "cache", "tensor", "counter", "value")
_NONDETERMINISTIC_MODULES = ("time", "datetime", "secrets", "uuid", "os")


class Cause(NamedTuple):
    """The likely cause of a problem and its fix. Functions with the same key share the problem."""

    text: str
    fix: str
    key: str = ""


def cause_of_changed_argument(record: FunctionRecord) -> Cause:
    """Why a function that changes one of its arguments cannot run again."""
    change = record.argument_changes[0]
    return Cause(
        "a cache in a keyword argument: forward fills it, and recompute does not get it as forward "
        "did (a list as it was when the call began, an object as it is now).",
        "pass no cache in training (use_cache=False); or let the function return what it adds, as "
        "rg.WithAux(output, aux).",
        f"argument {change.path}",
    )


FOLLOWS = Cause("it follows from the problems above.", "fix those first.")


# --- of a function that did something else in recompute


def cause_of_difference(record: FunctionRecord) -> Cause:
    """Why a function did something else in recompute."""
    if record.target_path is not None:
        return _cause_of_reading_target(record.target_path, record.name)
    if record.draws:
        source = " and ".join(sorted(record.draws))
        return Cause(f"it draws from {source}, which recompute does not replay.", DRAW, source)
    if record.changes:
        change = min(record.changes, key=lambda change: _LIKELIEST_FIRST.index(change.kind))
        cause = _cause_of_change(change)
        return cause._replace(key=f"{change.kind} {_inner_path(change.path, record.name)}")
    sources = nondeterministic_sources(record.name, record.fn)
    if sources:
        return Cause(
            f"it depends on {', '.join(sources)}, which returns another value each time.",
            f"call it once, outside the stack, and {AS_ARGUMENT}.",
            str(sources),
        )
    return Cause(
        "it was not found. It may be a kernel that is not deterministic, a file, a thread, or an "
        "object that check does not search.",
        "torch.use_deterministic_algorithms(True) shows such kernels; memory=rg.Keep() does not "
        "recompute.",
        "unknown",
    )


def _cause_of_reading_target(target_path: str, function: str) -> Cause:
    path = _inner_path(target_path, function)
    return Cause(
        f"it reads its own target, the stream that it updates, through `{path}`; in recompute "
        "that holds another value.",
        "let it read a stream (rg.Update(..., reads=(...))) or a keyword argument, never its "
        "target.",
        f"target {path}",
    )


def _cause_of_change(change: Change) -> Cause:
    text = change.text
    if change.kind == "cache":
        return Cause(
            f"a cache that grows on each call, in recompute too: {text}.",
            f"{LEAVE_ALONE}; or {AS_ARGUMENT}.",
        )
    if change.kind == "random":
        return Cause(
            f"a random generator that recompute does not replay: {text}.",
            "use a torch.Generator that is an attribute of the module or a keyword argument: it "
            f"is replayed; or draw once, outside the stack, and {AS_ARGUMENT}.",
        )
    if change.kind == "counter":
        return Cause(
            f"it counts its calls, those of recompute too: {text}.",
            f"{LEAVE_ALONE}.",
        )
    if change.kind == "value":
        return Cause(
            f"state outside of its modules, which recompute changes again: {text}.",
            f"{LEAVE_ALONE}.",
        )
    if change.is_new_tensor:
        return Cause(
            f"it stores a tensor, and recompute stores another one in its place: {text}.",
            f"{LEAVE_ALONE}.",
        )
    return Cause(
        f"a buffer outside the module tree, which recompute updates again: {text}.",
        f"register it: self.register_buffer(name, tensor); or {LEAVE_ALONE}.",
    )


def _inner_path(path: str, function: str) -> str:
    """A path as seen from the function, which is the same in all blocks."""
    return path.removeprefix(function).lstrip(".: ") or path


def nondeterministic_sources(path: str, root: object) -> list[str]:
    """What the code uses that gives another answer each time: clocks, the system's random
    numbers.
    """
    sources: dict[str, None] = {}  # in order, without repetition
    for reference in crawl(path, root):
        if isinstance(reference.value, random.SystemRandom):
            sources["random.SystemRandom"] = None
        for function in _user_functions(reference.value):
            sources |= dict.fromkeys(_sources_of(function))
    return list(sources)


def _user_functions(value: object) -> Iterator[types.FunctionType]:
    """The value itself if it is a function, or the methods of its class."""
    candidates = [value]
    if isinstance(value, nn.Module) or not is_opaque(type(value)):
        candidates = [inner for cls in type(value).__mro__ for inner in vars(cls).values()]
    for candidate in candidates:
        if isinstance(candidate, types.FunctionType) and is_user_code(candidate):
            yield candidate


def _sources_of(function: types.FunctionType) -> Iterator[str]:
    for name in globals_of(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            home = value.__name__
        else:
            home = getattr(value, "__module__", None)
        if home not in _NONDETERMINISTIC_MODULES:
            continue
        if home != "os" or "urandom" in function.__code__.co_names:
            yield name if home == name else f"{home}.{name}"


# --- of an update that cannot be undone


def cause_of_misfit(coupling: Coupling) -> Cause:
    """Why undoing an update misses the stream, though its function did the same again."""
    if is_trusted(coupling) and isinstance(coupling, Additive):
        return Cause(
            "the stream or the function's output has values so large that their sum is rounded "
            "too coarsely to be undone.",
            "normalise them; or exact=True; or stream_dtype=torch.float64.",
        )
    if is_trusted(coupling):
        return Cause(
            "undoing amplifies rounding errors: by exp(limit) for rg.Affine(limit), by 1 / gamma "
            "for rg.Momentum(gamma).",
            "use rg.Additive(), a smaller limit or a larger gamma.",
        )
    name = type(coupling).__name__
    return Cause(
        f"{name}.inverse(y, out) is not the inverse of {name}.forward(x, out), or amplifies "
        "rounding errors.",
        "solve forward for x in inverse, and keep factors away from zero.",
    )


# --- of streams that drift


def cause_of_drift(stack: StackRun, findings: Findings) -> Cause:
    """Why rebuilt streams drift, though each update by itself is right."""
    dtype = findings.half_precision(stack)
    if dtype is not None:
        kind = str(dtype).removeprefix("torch.")
        return Cause(
            f"the streams are {kind}: undoing an update rounds by {torch.finfo(dtype).eps:.0e}, "
            "and these errors add up.",
            "leave out stream_dtype: streams are then float32, and functions compute as before; "
            "or exact=True.",
        )
    couplings = {type(coupling).__name__ for coupling in stack.couplings} - {"Additive", "OnGrid"}
    if couplings:
        return Cause(
            f"{', '.join(sorted(couplings))} multiplies, so undoing each update amplifies "
            "rounding errors.",
            "memory=rg.Anchor(every=16) bounds the error; stream_dtype=torch.float64 makes it "
            "small; rg.Additive() with exact=True has none.",
        )
    if stack.is_exact:
        return Cause(
            "exact=True restores every bit, so a function returned another output for the same "
            "input.",
            "torch.use_deterministic_algorithms(True) shows kernels that are not deterministic.",
        )
    if findings.has_half_precision(stack):
        return Cause(
            "functions compute in half precision, so a small error in their input may change "
            "their output by a whole rounding step.",
            "exact=True restores every bit; memory=rg.Anchor(every=16) bounds the error.",
        )
    return Cause(
        "undoing an update rounds, the functions amplify the error, and it grows with depth.",
        "exact=True restores every bit; stream_dtype=torch.float64 makes the error small; "
        "memory=rg.Anchor(every=16) bounds it.",
    )


def cause_of_flips(findings: Findings) -> Cause:
    """Why a mask is another one in recompute, though the function did the same."""
    names = sorted(findings.flipped, key=lambda name: -findings.flipped[name].flipped)
    operations = sorted(set().union(*(flips.operations for flips in findings.flipped.values())))
    flips = findings.flips
    return Cause(
        f"{flips.flipped:,} of {flips.total:,} masks, signs and indices ({', '.join(operations)}) "
        f"flipped, most of them in {names[0]}: rebuilt inputs differ from those of forward by "
        "rounding, and some crossed a kink. There the gradient is another one.",
        "exact=True restores every bit, and so every mask; stream_dtype=torch.float64 makes flips "
        "rare.",
    )
