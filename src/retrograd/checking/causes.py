"""From what was seen to what is wrong: problems, each with its likely cause and the fix to type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.budget import BudgetError
from retrograd.checking.reach import Change, is_same, outside_sources
from retrograd.checking.report import Drift, Problem
from retrograd.checking.runs import Evidence, Gap, Stack, Taken, gap_of, largest, rounding
from retrograd.core.errors import CouplingError, InPlaceError, RetrogradError
from retrograd.core.updates import TRUSTED, Additive

LEAVE_ALONE = "leave it alone in recompute: `if not rg.is_recomputing(): ...`"
AS_ARGUMENT = "pass it as a keyword argument of the stack, which is the same both times"
DRAW = (
    "draw with torch, whose generators are replayed; or draw outside of the stack, and "
    f"{AS_ARGUMENT}."
)


@dataclass
class Seen:
    """All that the runs gave."""

    stacks: list[Stack] = field(default_factory=list)
    limit: float = 0.0
    kept: Taken | None = None
    reversed: Taken | None = None
    errors: list[Exception] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    random: dict[str, bool] = field(default_factory=dict)
    drift: list[Drift] = field(default_factory=list)
    alone: dict[tuple[str, int], dict[str, Gap]] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)
    narrow: dict[str, float] = field(
        default_factory=dict
    )  # by stack: the largest epsilon of what its functions compute in


def problems(seen: Seen) -> list[Problem]:
    """What is wrong: causes first, then what follows from them."""
    if not seen.stacks:
        return [_nothing()]
    roots = [*_functions(seen), *_couplings(seen)]
    roots += [problem for problem in _errors(seen, bool(roots)) if problem not in roots]
    noise = _noise(seen, bool(roots))
    found = [*roots, *noise, *_drift(seen, bool(roots))]
    found += _gradients(seen, bool(found)) if not noise else []
    found += _buffers(seen, bool(roots))
    found += _random(seen)
    return found


def _nothing() -> Problem:
    what = "no stack of retrograd ran, so there was nothing to check."
    cause = (
        "the network has none, or does not call it for these arguments (those of compat do "
        "not, up to reverse_thres)."
    )
    return Problem(
        "nothing",
        "the network",
        what,
        cause,
        "check a network that calls an rg.ReversibleSequence or rg.Reversible.",
    )


# --- functions


def _functions(seen: Seen) -> Iterator[Problem]:
    """One problem for each kind of fault, however many blocks have it."""
    groups: dict[tuple[str, ...], list[tuple[Evidence, str, str, str]]] = {}
    for evidence in seen.evidence:
        for kind, what, cause, fix, key in _faults(evidence, seen.limit):
            groups.setdefault((kind, key), []).append((evidence, what, cause, fix))
    for (kind, _), group in groups.items():
        worst, what, cause, fix = max(group, key=lambda entry: entry[0].differs)
        yield Problem(kind, f"{worst.name}{_more(group)}", what, cause, fix)


def _faults(evidence: Evidence, limit: float) -> Iterator[tuple[str, str, str, str, str]]:
    """Kind, what, cause, fix, and what makes faults of several functions the same one."""
    if evidence.edits_input:
        cause = (
            "it writes to its input through .data, NumPy or another view that autograd does "
            "not count."
        )
        fix = "use the out-of-place operation, or start the function with x.clone()."
        yield "input", "changed its input in place.", cause, fix, ""
    if evidence.raised is not None:
        yield "determinism", f"raised when it ran again: {evidence.raised}", *_cause(evidence)
    elif evidence.excess > 1 or (evidence.differs and not limit):
        size = (
            f"{evidence.differs:.1e} of its size off"
            if math.isfinite(evidence.differs)
            else "of another shape, or all of it"
        )
        what = f"returned something else when it ran again on the same input: {size}."
        yield "determinism", what, *_cause(evidence)
    elif evidence.changed:
        what = f"changes Python state again when it is recomputed: {evidence.changed[0].text}."
        yield "state", what, *_cause(evidence)


def _cause(evidence: Evidence) -> tuple[str, str, str]:
    """Why a function probably did something else the second time, the fix, and a key for the same
    reason elsewhere.
    """
    if evidence.reads_target is not None:
        path = _own(evidence.reads_target, evidence.name)
        cause = (
            f"it reads its own target, the stream that it updates, through `{path}`; in "
            "recompute another value is there."
        )
        fix = (
            "let it read a stream (rg.Update(..., reads=(...))) or a keyword argument, never "
            "its "
            "target."
        )
        return cause, fix, f"target {path}"
    if evidence.draws:
        source = " and ".join(sorted(evidence.draws))
        return f"it draws from {source}, which nobody replays.", DRAW, source
    order = ("random", "cache", "tensor", "counter", "value")
    for change in sorted(evidence.changed, key=lambda change: order.index(change.kind)):
        return *_of_change(change), f"{change.kind} {_own(change.path, evidence.name)}"
    sources = outside_sources(evidence.name, evidence.fn)
    if sources:
        return (
            f"it depends on {', '.join(sources)}, which gives another answer each time.",
            f"ask once, outside of the stack, and {AS_ARGUMENT}.",
            str(sources),
        )
    cause = (
        "state that was not found: a kernel that is not deterministic, a file, a thread, an "
        "object out of reach."
    )
    fix = (
        "torch.use_deterministic_algorithms(True) shows kernels that are not; memory=rg.Keep() "
        "does not recompute."
    )
    return cause, fix, "unknown"


def _of_change(change: Change) -> tuple[str, str]:
    text = change.text
    if change.kind == "cache":
        return (
            f"a cache that grows on each call, also in recompute: {text}.",
            f"{LEAVE_ALONE}; or {AS_ARGUMENT}.",
        )
    if change.kind == "random":
        fix = (
            "use a torch.Generator that is an attribute of the module or a keyword argument, "
            "which is replayed; or draw "
        )
        return (
            f"a random generator that nobody replays: {text}.",
            f"{fix}outside of the stack, and {AS_ARGUMENT}.",
        )
    if change.kind == "tensor" and "another tensor" in text:
        return (
            "it leaves a tensor behind, and recompute overwrites it with that of another call: "
            f"{text}.",
            f"{LEAVE_ALONE}.",
        )
    if change.kind == "tensor":
        cause = f"a buffer outside the module tree, which is updated again in recompute: {text}."
        return cause, f"register it: self.register_buffer(name, tensor); or {LEAVE_ALONE}."
    if change.kind == "counter":
        return f"it counts its calls, also those of recompute: {text}.", f"{LEAVE_ALONE}."
    return f"state outside its modules, which recompute changes again: {text}.", f"{LEAVE_ALONE}."


def _own(path: str, name: str) -> str:
    """A path as seen from the function."""
    return path.removeprefix(name).lstrip(".: ") or path


# --- updates


def _couplings(seen: Seen) -> Iterator[Problem]:
    differing = {evidence.name for evidence in seen.evidence if evidence.differs or evidence.raised}
    worst: dict[str, tuple[float, str, Any]] = {}
    for stack in seen.stacks:
        for index, (step, name) in enumerate(zip(stack.program, stack.names)):
            for gap in seen.alone.get((stack.name, index), {}).values():
                coupling = type(step.coupling).__name__
                if name not in differing and not gap.relative <= rounding(gap.dtype):
                    if gap.relative > worst.get(coupling, (0.0,))[0]:
                        worst[coupling] = gap.relative, name, step.coupling
    for name, (relative, where, coupling) in worst.items():
        what = (
            f"undoing it with {name} misses the stream by {relative:.1e} of its size, though "
            "its function did the same again."
        )
        if isinstance(coupling, Additive):
            cause = (
                "values in the stream, or added to it, are so large that the sum rounds away "
                "what was there."
            )
            yield Problem(
                "coupling",
                where,
                what,
                cause,
                "normalise them; exact=True or stream_dtype=torch.float64.",
            )
        elif isinstance(coupling, TRUSTED):
            cause = (
                "undoing enlarges rounding errors: by exp(limit) for rg.Affine(limit), by 1 / "
                "gamma for rg.Momentum(gamma)."
            )
            yield Problem(
                "coupling",
                where,
                what,
                cause,
                "use rg.Additive(), a smaller limit or a larger gamma.",
            )
        else:
            cause = (
                f"{name}.inverse(y, out) is not the inverse of {name}.forward(x, out), or "
                "enlarges rounding errors."
            )
            yield Problem(
                "coupling",
                where,
                what,
                cause,
                "solve forward for x in inverse, and keep factors away from zero.",
            )


def _drift(seen: Seen, explained: bool) -> list[Problem]:
    beyond = [drift for drift in seen.drift if not drift.relative <= seen.limit]
    if not beyond:
        return []
    first = max(beyond, key=lambda drift: drift.update)  # as backward goes
    worst = max(
        beyond, key=lambda drift: drift.relative if math.isfinite(drift.relative) else math.inf
    )
    stack = next(stack for stack in seen.stacks if stack.name == first.stack)
    what = (
        f"stream {first.stream!r} is off by {first.relative:.1e} of its size when it has been "
        "rebuilt to here, and by "
        f"{worst.relative:.1e} before {worst.name}; healthy networks of this dtype stay below "
        f"{seen.limit:.0e}."
    )
    cause, fix = (
        ("it follows from the problems above.", "solve them first.")
        if explained
        else _cause_of_drift(stack, seen)
    )
    return [Problem("drift", first.name, what, cause, fix)]


def _cause_of_drift(stack: Stack, seen: Seen) -> tuple[str, str]:
    gaps = [
        gap for (name, _), gaps in seen.alone.items() if name == stack.name for gap in gaps.values()
    ]
    narrow = next((gap.dtype for gap in gaps if gap.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is not None:
        kind = str(narrow).removeprefix("torch.")
        return (
            f"the streams are {kind}: every update that is undone rounds by "
            f"{torch.finfo(narrow).eps:.0e}, and it adds up.",
            "leave out stream_dtype, so that streams are float32 while functions compute as "
            "before; or exact=True.",
        )
    couplings = {type(step.coupling).__name__ for step in stack.program} - {"Additive", "OnGrid"}
    if couplings:
        return (
            f"{', '.join(sorted(couplings))} multiplies, and undoing it enlarges rounding errors "
            "with every update.",
            "memory=rg.Anchor(every=16) bounds it; stream_dtype=torch.float64 makes it small; "
            "rg.Additive(), exact=True: none.",
        )
    if stack.module.precision.grid is not None:
        return (
            "with exact=True nothing may be off: a function gave another output for the same "
            "input.",
            "torch.use_deterministic_algorithms(True) shows kernels that are not.",
        )
    if seen.narrow.get(stack.name, 0.0) > 1e-4:
        return (
            "functions compute in half precision: an input that is a little off comes out another "
            "number of theirs.",
            "exact=True, which restores every bit; memory=rg.Anchor(every=16) bounds it.",
        )
    return (
        "undoing an update rounds, the functions enlarge the error, and it grows with depth.",
        "exact=True restores every bit; stream_dtype=torch.float64 makes it small; "
        "memory=rg.Anchor(every=16) bounds it.",
    )


def _gradients(seen: Seen, explained: bool) -> list[Problem]:
    wrong = {
        name: off
        for name, off in seen.gradients.items()
        if not off <= max(seen.limit, 4 * seen.noise.get(name, 0.0))
    }
    if not wrong:
        return []
    name = max(wrong, key=lambda name: wrong[name] if not math.isnan(wrong[name]) else math.inf)
    what = f"its gradient is off by {wrong[name]:.1e} of its size; the limit is {seen.limit:.0e}."
    if explained:
        return [
            Problem(
                "gradients",
                f"{name}{_more(wrong)}",
                what,
                "it follows from the problems above.",
                "solve them first.",
            )
        ]
    drifted = max(seen.drift, key=lambda drift: drift.relative, default=None)
    if drifted is not None and drifted.relative > seen.limit / 10:
        stack = next(stack for stack in seen.stacks if stack.name == drifted.stack)
        return [Problem("gradients", f"{name}{_more(wrong)}", what, *_cause_of_drift(stack, seen))]
    cause = (
        "a choice inside a function (top-k, argmax, hashing, a threshold) that the rounding of "
        "rebuilt streams turned over; or a "
        "gradient that is zero but for rounding."
    )
    return [
        Problem(
            "gradients",
            f"{name}{_more(wrong)}",
            what,
            cause,
            "exact=True restores every bit, and so every choice.",
        )
    ]


def _noise(seen: Seen, explained: bool) -> list[Problem]:
    """Plain autograd has to agree with itself before anything can be compared with it."""
    noisy = (
        {name: off for name, off in seen.noise.items() if not off <= seen.limit}
        if seen.limit
        else {}
    )
    if not noisy:
        return []
    name = max(noisy, key=lambda name: noisy[name] if not math.isnan(noisy[name]) else math.inf)
    what = (
        f"two steps of plain autograd differ by {noisy[name]:.1e} of its size, so no gradient "
        "can be compared with them."
    )
    cause = (
        "it follows from the problems above."
        if explained
        else "something outside of the stacks is not the same each time."
    )
    fix = "seed it, or pass it as an argument: check takes the same step again and again."
    return [
        Problem(
            "noise", f"{name}{_more(noisy)}", what, cause, "solve them first." if explained else fix
        )
    ]


def _more(found: Sized) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def _buffers(seen: Seen, explained: bool) -> list[Problem]:
    wrong = [name for name, off in seen.buffers.items() if not off <= seen.limit]
    if not wrong:
        return []
    what = f"after a step it is {seen.buffers[wrong[0]]:.1e} off what plain autograd leaves."
    cause = (
        "it follows from the problems above."
        if explained
        else "a function updates it where the engine does not see it."
    )
    fix = f"register it in the module that updates it; or {LEAVE_ALONE}."
    return [Problem("buffers", f"{wrong[0]}{_more(wrong)}", what, cause, fix)]


def _random(seen: Seen) -> list[Problem]:
    wrong = [name for name, same in seen.random.items() if not same]
    if not wrong:
        return []
    what = "after a step it is not where plain autograd leaves it."
    drawing = [evidence.name for evidence in seen.evidence if set(wrong) & evidence.draws]
    cause = (
        f"{drawing[0]} draws from it, in forward and again in recompute."
        if drawing
        else "recompute draws from it."
    )
    own = (
        "make it an attribute of the function's module, or a keyword argument: there it is "
        "found, and replayed."
    )
    return [Problem("random", ", ".join(wrong), what, cause, DRAW if drawing else own)]


# --- errors


def _errors(seen: Seen, explained: bool) -> Iterator[Problem]:
    told: set[str] = set()
    for error in seen.errors:
        text = str(error)
        if text not in told:
            told.add(text)
            yield _of_error(error, explained)


def _of_error(error: Exception, explained: bool) -> Problem:
    """An error of ours has its own words for the cause and the fix."""
    first, *rest = str(error).splitlines() or [""]
    said: dict[str, str] = {}
    for line in rest:
        word, _, text = line.strip().partition(": ")
        if text:
            said[word] = text
    cause = (
        said.get("Why")
        or said.get("Usual causes")
        or "it came up only when the network ran reversed."
    )
    if isinstance(error, BudgetError):
        cause = "what the stack needs in any case is more than the budget allows."
    if explained:
        cause = "it follows from the problems above."
    fix = said.get("Fix", "memory=rg.Keep() does not recompute.")
    kind = "coupling" if isinstance(error, CouplingError) else "error"
    if isinstance(error, InPlaceError) and "changed its input" in first:
        kind = "input"
    ours = isinstance(error, RetrogradError)
    return Problem(
        kind,
        "a reversed step" if not ours else "a step",
        f"{type(error).__name__}: {first}",
        cause,
        fix,
    )


def relative(
    now: dict[str, torch.Tensor], then: dict[str, torch.Tensor], floor: float
) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest value, or to the floor where
    that is larger.

    What is the same infinity in both, or NaN in both, does not differ.
    """
    found = {}
    for name in {**then, **now}:
        a, b = now.get(name), then.get(name)
        found[name] = (
            math.inf if a is None or b is None or a.shape != b.shape else _difference(a, b, floor)
        )
    return found


def _difference(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    if is_same(a, b):
        return 0.0
    if not a.is_floating_point() and not a.is_complex():
        return math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    scale = max(largest(b), floor)
    return gap_of(a, b) / scale if scale else math.inf


def usual_size(tensors: Iterable[torch.Tensor]) -> float:
    """The median of the largest values, of tensors that are not zero."""
    sizes = sorted(size for size in map(largest, tensors) if size)
    return sizes[len(sizes) // 2] if sizes else 0.0
