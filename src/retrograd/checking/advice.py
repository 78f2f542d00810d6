"""Advice: nothing is wrong, but something could be better, or may go wrong later."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.checking.causes import cause_of_drift, cause_of_flips
from retrograd.checking.compare import severity, worst
from retrograd.checking.findings import Findings
from retrograd.checking.observers import StackRun
from retrograd.checking.report import Advice, Drift, Problem
from retrograd.core.memory import Anchor, Keep, Reverse
from retrograd.sizes import human

DEEP = 12  # blocks: from here on, errors of half precision are no longer small
WORTH = 0.95  # reversal should need less than this part of the bytes


def find_advice(findings: Findings, problems: list[Problem]) -> Iterator[Advice]:
    """All advice. What a problem says already is left out."""
    kinds = {problem.kind for problem in problems}
    yield from _skips(findings)
    if not kinds & {"gradients", "noise"}:
        yield from _flips(findings)
    if not kinds & {"gradients", "noise", "drift", "determinism"}:
        yield from _half_precision(findings)
    yield from _memory(findings)


# --- functions


def _skips(findings: Findings) -> Iterator[Advice]:
    if not findings.skips:
        return
    yield Advice(
        kind="skip",
        where=and_more(findings.skips),
        what="contains a skip of its own: without its weights it returns its input.",
        cause="the stack adds the output of a function to a stream anyway. With f(x) = x + g(x) "
        "streams are added to each other, and grow with depth.",
        fix="leave the skip out of the function; or pass whole layers to "
        "rg.Residual(layers, skip=True); or rg.convert(model) an ordinary model.",
    )


def _flips(findings: Findings) -> Iterator[Advice]:
    if not findings.flipped:
        return
    names = sorted(findings.flipped, key=lambda name: -findings.flipped[name].flipped)
    cause = cause_of_flips(findings)
    yield Advice("masks", and_more(names), _effect_on_gradients(findings), cause.text, cause.fix)


def _effect_on_gradients(findings: Findings) -> str:
    flips = findings.flips
    what = f"{flips.flipped:,} of {flips.total:,} masks flipped in recompute"
    if not findings.gradients:
        return f"{what}."
    name, difference = worst(findings.gradients)
    return f"{what}. Gradients are at most {difference:.1e} off ({name})."


# --- precision


def _half_precision(findings: Findings) -> Iterator[Advice]:
    for stack in findings.stacks:
        drift = _furthest(stack, findings)
        if drift is None or not _is_in_half_precision(stack, findings):
            continue
        what = (
            f"{stack.depth} blocks in half precision: rebuilt streams are up to "
            f"{drift.relative:.1e} off ({drift.stream!r} before {drift.name}), and the error grows "
            f"with depth. The limit is {findings.limit:.0e}."
        )
        cause = cause_of_drift(stack, findings)
        yield Advice("precision", stack.name, what, cause.text, cause.fix)


def _furthest(stack: StackRun, findings: Findings) -> Drift | None:
    """Where the streams of the stack are furthest off; None if they are rebuilt to the bit."""
    drift = [one for one in findings.drift if one.stack == stack.name and one.relative]
    return max(drift, key=lambda one: severity(one.relative), default=None)


def _is_in_half_precision(stack: StackRun, findings: Findings) -> bool:
    """Whether the stack is deep, nothing bounds its drift, and its dtypes are narrow."""
    is_bounded = stack.is_exact or isinstance(stack.module.memory, (Anchor, Keep))
    return stack.depth > DEEP and not is_bounded and findings.has_half_precision(stack)


# --- memory


def _memory(findings: Findings) -> Iterator[Advice]:
    if findings.traces is None or not findings.stacks:
        return
    kept, reversed_ = (trace.activation_peak for trace in findings.traces)
    if reversed_ < WORTH * kept or kept <= 0:
        return
    time = "" if findings.seconds is None else f", in {findings.seconds.ratio:.2f} of its time"
    yield Advice(
        kind="memory",
        where=and_more([stack.name for stack in findings.stacks]),
        what=f"reversal saves nothing here: a step takes {human(reversed_)} of activations, and "
        f"plain autograd {human(kept)}{time}.",
        cause=_cause_of_no_savings(findings, kept),
        fix=_fix_of_no_savings(findings),
    )


def _cause_of_no_savings(findings: Findings, peak: int) -> str:
    inside = findings.stack_bytes
    stacks = [stack.module for stack in findings.stacks]
    other = [stack for stack in stacks if not isinstance(stack.memory, (Reverse, Keep))]
    if not any(p.requires_grad for stack in stacks for p in stack.parameters()):
        return "all functions are frozen, so autograd saves little of them."
    if max(stack.depth for stack in findings.stacks) <= 1:
        return "there is one block, and the last block is kept in any case."
    if inside is not None and 0 < inside < peak / 2:
        return (
            f"most memory is used outside of the stacks (a loss, a head, an embedding): what they "
            f"keep is {human(inside)} of {human(peak)}."
        )
    if other:
        return f"memory={other[0].memory!r} keeps nearly everything."
    return (
        "the streams are as large as what autograd saves of the functions, which is little; "
        "or there are too few blocks for a difference."
    )


def _fix_of_no_savings(findings: Findings) -> str:
    if any(hasattr(stack.module, "bodies") for stack in findings.stacks):
        return "rg.revert(model) is faster; reversal pays for more layers or larger inputs."
    return "memory=rg.Keep() is faster; reversal pays for more blocks or larger inputs."


def and_more(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]
