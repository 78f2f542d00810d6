"""What is wrong: from the findings to a list of problems, causes first, then what follows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import NamedTuple

from retrograd.budget import BudgetError
from retrograd.checking.causes import (
    DRAW,
    FOLLOWS,
    LEAVE_ALONE,
    Cause,
    cause_of_changed_argument,
    cause_of_difference,
    cause_of_drift,
    cause_of_flips,
    cause_of_misfit,
)
from retrograd.checking.compare import Deviation, rounding_limit, severity, worst
from retrograd.checking.findings import Findings
from retrograd.checking.functions import FunctionRecord
from retrograd.checking.observers import StackRun
from retrograd.checking.report import Problem, ProblemKind
from retrograd.core.errors import CouplingError, InPlaceError, RetrogradError
from retrograd.core.updates import Coupling


def find_problems(findings: Findings) -> list[Problem]:
    """Everything that is wrong."""
    if not findings.stacks and not findings.has_pieces:
        return [_no_stack()]
    roots = [*_of_functions(findings), *_of_couplings(findings)]
    errors = _of_errors(findings, bool(roots))
    roots += [problem for problem in errors if problem not in roots]
    noise = _noise(findings, bool(roots))
    found = [*roots, *noise, *_drift(findings, bool(roots))]
    if not noise:
        found += _gradients(findings, bool(found))
    found += _buffers(findings, bool(roots))
    found += _random(findings)
    return found


def _problem(kind: ProblemKind, where: str, what: str, cause: Cause) -> Problem:
    return Problem(kind, where, what, cause.text, cause.fix)


def _no_stack() -> Problem:
    return Problem(
        kind="nothing",
        where="the network",
        what="no stack of retrograd ran, so there was nothing to check.",
        cause="the network has none, or does not call it for these arguments (stacks of compat run "
        "reversed only above reverse_thres).",
        fix="check a network that calls an rg.ReversibleSequence or rg.Reversible.",
    )


# --- functions


class _Fault(NamedTuple):
    """Something that one function does wrong."""

    kind: ProblemKind
    what: str
    cause: Cause


def _of_functions(findings: Findings) -> Iterator[Problem]:
    """One problem for each kind of fault, however many functions have it."""
    groups: dict[tuple[ProblemKind, str], list[tuple[FunctionRecord, _Fault]]] = {}
    for record in findings.functions:
        for fault in _faults(record, findings.limit):
            groups.setdefault((fault.kind, fault.cause.key), []).append((record, fault))
    for group in groups.values():
        record, fault = max(group, key=lambda entry: entry[0].difference)
        yield _problem(fault.kind, f"{record.name}{_and_more(group)}", fault.what, fault.cause)


def _faults(record: FunctionRecord, limit: float) -> Iterator[_Fault]:
    if record.edits_input:
        cause = Cause(
            "it writes to its input through .data, NumPy or another view that autograd does not "
            "see.",
            "use the out-of-place operation, or start the function with x.clone().",
        )
        yield _Fault("input", "changed its input in place.", cause)
    if record.is_spoilt_by_arguments:
        what = f"changes a keyword argument: {record.argument_changes[0].text}."
        yield _Fault("input", what, cause_of_changed_argument(record))
    elif record.raised is not None:
        what = f"raised when it ran again: {record.raised}"
        yield _Fault("determinism", what, cause_of_difference(record))
    elif record.excess > 1 or (record.difference and not limit):
        what = f"returned another output when it ran again on the same input: {_size(record)}."
        yield _Fault("determinism", what, cause_of_difference(record))
    elif record.changes:
        what = f"changes Python state when it is recomputed: {record.changes[0].text}."
        yield _Fault("state", what, cause_of_difference(record))


def _size(record: FunctionRecord) -> str:
    if math.isfinite(record.difference):
        return f"off by {record.difference:.1e} of its size"
    return "of another shape or dtype, or with entirely different values"


# --- couplings


class _Misfit(NamedTuple):
    """An update that was not undone, though its function did the same again."""

    update: str
    coupling: Coupling
    relative: float


def _of_couplings(findings: Findings) -> Iterator[Problem]:
    """One problem for each class of coupling: the update that is furthest off."""
    largest: dict[str, _Misfit] = {}
    for misfit in _misfits(findings):
        name = type(misfit.coupling).__name__
        if misfit.relative > (largest[name].relative if name in largest else 0.0):
            largest[name] = misfit
    for name, misfit in largest.items():
        what = (
            f"undoing it with {name} gives a stream that is off by {misfit.relative:.1e} of its "
            "size, although its function returned the same output again."
        )
        yield _problem("coupling", misfit.update, what, cause_of_misfit(misfit.coupling))


def _misfits(findings: Findings) -> Iterator[_Misfit]:
    differing = {
        record.name
        for record in findings.functions
        if record.difference or record.raised or record.mismatches
    }
    for stack in findings.stacks:
        updates = zip(stack.update_names, stack.couplings)
        for index, (name, coupling) in enumerate(updates):
            deviations = findings.update_deviations.get((stack.name, index), {})
            if name not in differing:
                for deviation in filter(_is_beyond_rounding, deviations.values()):
                    yield _Misfit(name, coupling, deviation.relative)


def _is_beyond_rounding(deviation: Deviation) -> bool:
    return not deviation.relative <= rounding_limit(deviation.dtype)  # NaN is beyond, too


# --- what the whole network computed


def _noise(findings: Findings, is_explained: bool) -> list[Problem]:
    """Plain autograd has to agree with itself before anything can be compared with it."""
    noisy = _beyond(findings.noise, findings.limit) if findings.limit else {}
    if not noisy:
        return []
    name, difference = worst(noisy)
    what = (
        f"in two steps of plain autograd it differs by {difference:.1e} of its size, so gradients "
        "cannot be compared."
    )
    cause = Cause(
        "something outside of the stacks is not the same each time.",
        "seed it, or pass it as an argument: check runs the same step many times.",
    )
    where = f"{name}{_and_more(noisy)}"
    return [_problem("noise", where, what, FOLLOWS if is_explained else cause)]


def _drift(findings: Findings, is_explained: bool) -> list[Problem]:
    beyond = [drift for drift in findings.drift if not drift.relative <= findings.limit]
    if not beyond:
        return []
    first = max(beyond, key=lambda drift: drift.update)  # the first that backward comes to
    furthest = max(beyond, key=lambda drift: severity(drift.relative))
    what = (
        f"when backward has rebuilt the streams to here, {first.stream!r} is off by "
        f"{first.relative:.1e} of its size; before {furthest.name}, by {furthest.relative:.1e}. "
        f"The limit for this dtype is {findings.limit:.0e}."
    )
    cause = FOLLOWS if is_explained else cause_of_drift(_stack(findings, first.stack), findings)
    return [_problem("drift", first.name, what, cause)]


def _gradients(findings: Findings, is_explained: bool) -> list[Problem]:
    wrong = {
        name: difference
        for name, difference in findings.gradients.items()
        if not difference <= max(findings.limit, 4 * findings.noise.get(name, 0.0))
    }
    if not wrong:
        return []
    name, difference = worst(wrong)
    what = (
        f"its gradient is off by {difference:.1e} of its size; the limit is {findings.limit:.0e}."
    )
    cause = FOLLOWS if is_explained else _cause_of_wrong_gradient(findings)
    return [_problem("gradients", f"{name}{_and_more(wrong)}", what, cause)]


def _cause_of_wrong_gradient(findings: Findings) -> Cause:
    kept = findings.kept
    reversed_ = findings.reversed
    if kept is not None and reversed_ is not None and kept.outputs != reversed_.outputs:
        return Cause(
            f"the network returns {len(kept.outputs)} tensors with gradients in plain autograd and "
            f"{len(reversed_.outputs)} reversed, or others, so gradients cannot be compared.",
            "return the same tensors; pass no cache in training (use_cache=False).",
        )
    furthest = max(findings.drift, key=lambda drift: drift.relative, default=None)
    if furthest is not None and furthest.relative > findings.limit / 10:
        return cause_of_drift(_stack(findings, furthest.stack), findings)
    if findings.flipped:
        return cause_of_flips(findings)
    return Cause(
        "a choice inside a function (top-k, argmax, hashing, a threshold) that is another one for "
        "the rounded streams; or a gradient that is zero except for rounding.",
        "exact=True restores every bit, and so every choice.",
    )


def _buffers(findings: Findings, is_explained: bool) -> list[Problem]:
    wrong = _beyond(findings.buffers, findings.limit)
    if not wrong:
        return []
    name = next(iter(wrong))
    what = f"after a step it is off by {wrong[name]:.1e} of its size, compared with plain autograd."
    text = "a function updates it where the engine does not see it."
    cause = FOLLOWS.text if is_explained else text
    fix = f"register it in the module that updates it; or {LEAVE_ALONE}."
    return [Problem("buffers", f"{name}{_and_more(wrong)}", what, cause, fix)]


def _random(findings: Findings) -> list[Problem]:
    wrong = [name for name, same in findings.random.items() if not same]
    if not wrong:
        return []
    what = "after a step its state is not that of plain autograd."
    drawing = [record.name for record in findings.functions if set(wrong) & record.draws]
    if drawing:
        cause = Cause(f"{drawing[0]} draws from it, in forward and again in recompute.", DRAW)
    else:
        cause = Cause(
            "recompute draws from it.",
            "make it an attribute of the function's module, or a keyword argument: there it is "
            "found and replayed.",
        )
    return [_problem("random", ", ".join(wrong), what, cause)]


# --- errors


def _of_errors(findings: Findings, is_explained: bool) -> Iterator[Problem]:
    texts: set[str] = set()
    for error in findings.errors:
        if str(error) not in texts:
            texts.add(str(error))
            yield _of_error(error, is_explained)


def _of_error(error: Exception, is_explained: bool) -> Problem:
    """An error of retrograd names its cause and fix itself."""
    first, *rest = str(error).splitlines() or [""]
    parts = _labelled(rest)
    kind: ProblemKind = "error"
    if isinstance(error, CouplingError):
        kind = "coupling"
    if isinstance(error, InPlaceError) and "changed its input" in first:
        kind = "input"
    cause = parts.get("Why") or parts.get("Usual causes")
    if isinstance(error, BudgetError):
        cause = "the stack needs more than the budget, even if it keeps nothing."
    if is_explained:
        cause = FOLLOWS.text
    return Problem(
        kind=kind,
        where="a step" if isinstance(error, RetrogradError) else "a reversed step",
        what=f"{type(error).__name__}: {first}",
        cause=cause or "it is raised only when the network runs reversed.",
        fix=parts.get("Fix", "memory=rg.Keep() does not recompute."),
    )


def _labelled(lines: Iterable[str]) -> dict[str, str]:
    """Lines such as `Fix: exact=True`, by their label."""
    parts: dict[str, str] = {}
    for line in lines:
        label, _, text = line.strip().partition(": ")
        if text:
            parts[label] = text
    return parts


# ---


def _stack(findings: Findings, name: str) -> StackRun:
    return next(stack for stack in findings.stacks if stack.name == name)


def _beyond(differences: Mapping[str, float], limit: float) -> dict[str, float]:
    return {name: value for name, value in differences.items() if not value <= limit}


def _and_more(found: Sized) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
