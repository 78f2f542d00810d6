"""What the steps showed, as numbers: the steps of a check in their order, and the comparisons."""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass, field

import torch

from retrograd.checking.compare import relative_differences, typical_size
from retrograd.checking.costs import MemoryTrace, median_seconds, memory_trace
from retrograd.checking.functions import FunctionRecord
from retrograd.checking.observers import (
    DriftCheck,
    KeepAll,
    Observer,
    PerUpdateCheck,
    ReverseAll,
    StackDeviations,
    StackRegistry,
    StackRun,
)
from retrograd.checking.report import Both, Drift
from retrograd.checking.runs import Network, StepResult
from retrograd.core.errors import RetrogradError


@dataclass
class Findings:
    """Everything that is known about the network. A figure is empty or None if its step failed."""

    stacks: list[StackRun] = field(default_factory=list)
    limit: float = 0.0  # of relative differences
    kept: StepResult | None = None
    reversed: StepResult | None = None
    errors: list[Exception] = field(default_factory=list)  # raised by reversed steps
    gradients: dict[str, float] = field(default_factory=dict)  # relative differences, by name
    noise: dict[str, float] = field(default_factory=dict)  # the same between two kept steps
    buffers: dict[str, float] = field(default_factory=dict)
    random: dict[str, bool] = field(default_factory=dict)  # whether the state is the same
    drift: list[Drift] = field(default_factory=list)
    update_deviations: StackDeviations = field(default_factory=dict)  # each update by itself
    functions: list[FunctionRecord] = field(default_factory=list)
    epsilons: dict[str, float] = field(default_factory=dict)  # see `DriftCheck`
    evaluations: dict[str, tuple[int, int]] = field(default_factory=dict)  # kept, reversed
    seconds: Both | None = None
    traces: tuple[MemoryTrace, MemoryTrace] | None = None  # kept, reversed
    notes: list[str] = field(default_factory=list)


def collect(network: Network) -> Findings:
    """Run all steps of a check, and compare them."""
    findings = Findings()
    registry = StackRegistry(network)
    attempt = functools.partial(_attempt, network, findings)
    kept = KeepAll(registry)
    reversed_ = ReverseAll(registry)
    kept_again = None
    findings.kept = attempt(KeepAll(registry))
    if findings.kept is not None:
        _require_gradients(findings.kept)
        kept_again = attempt(kept)
    if attempt(ReverseAll(registry)) is not None:  # a budget makes its plan in the first step
        findings.reversed = attempt(reversed_)
    per_update = PerUpdateCheck(registry)
    drift = DriftCheck(registry)
    if findings.kept is not None:
        attempt(per_update)
        attempt(drift)
    findings.stacks = list(registry.by_name.values())
    findings.functions = list(per_update.records.values())
    findings.update_deviations = per_update.deviations
    findings.epsilons = drift.epsilons
    findings.drift = _drift(drift, registry)
    findings.limit = _limit(findings.stacks, drift)
    _compare(findings, kept_again)
    if findings.kept is not None and findings.reversed is not None:
        findings.evaluations = {
            name: (count, reversed_.evaluations.get(name, 0))
            for name, count in kept.evaluations.items()
        }
        _measure(findings, network, registry)
    _add_notes(findings, network)
    return findings


def _attempt(network: Network, findings: Findings, observer: Observer) -> StepResult | None:
    """A step. If it fails only because the stacks run reversed, its error is a finding."""
    try:
        with observer:
            return network.step()
    except Exception as error:
        if not isinstance(observer, KeepAll) or isinstance(error, RetrogradError):
            findings.errors.append(error)
            return None
        if "use_reentrant" in str(error) or "incompatible with .grad()" in str(error):
            raise ValueError(
                "the network checkpoints with use_reentrant=True; check needs use_reentrant=False."
            ) from error
        raise  # plain autograd fails as well: the network's own error


def _require_gradients(kept: StepResult) -> None:
    if not kept.gradients:
        raise ValueError(
            f"nothing to compare: the network returned {kept.output_type}, in which no tensor "
            "depends on a parameter or an argument that requires grad. If all parameters are "
            "frozen, pass x.requires_grad_()."
        )


def _drift(check: DriftCheck, registry: StackRegistry) -> list[Drift]:
    drift: list[Drift] = []
    for (stack, index), deviations in sorted(check.deviations.items()):
        name = registry.by_name[stack].update_names[index]
        for stream, deviation in deviations.items():
            drift.append(Drift(stack, index, name, stream, deviation.relative))
    return drift


def _limit(stacks: list[StackRun], check: DriftCheck) -> float:
    """The limit of the drift guard: the square root of the largest epsilon in use, at most 3 %; 0
    if all stacks are exact.
    """
    if stacks and all(stack.is_exact for stack in stacks):
        return 0.0
    epsilons = [
        torch.finfo(deviation.dtype.to_real()).eps
        for deviations in check.deviations.values()
        for deviation in deviations.values()
    ]
    epsilons += check.epsilons.values()
    epsilon = max(epsilons, default=torch.finfo(torch.float32).eps)
    return min(epsilon**0.5, 0.03)


def _compare(findings: Findings, kept_again: StepResult | None) -> None:
    """Compare the reversed step with the kept one, and two kept ones with each other."""
    kept = findings.kept
    reversed_ = findings.reversed
    if kept is None or reversed_ is None:
        return
    # Any error looks large beside a gradient that is zero but for rounding, so such a gradient is
    # measured by the typical size of the others.
    floor = typical_size(kept.gradients.values()) / 100
    findings.gradients = relative_differences(reversed_.gradients, kept.gradients, floor)
    if kept_again is not None:
        findings.noise = relative_differences(kept_again.gradients, kept.gradients, floor)
    findings.buffers = relative_differences(reversed_.buffers, kept.buffers, 0.0)
    findings.random = {
        name: reversed_.random.get(name) == state for name, state in kept.random.items()
    }


def _measure(findings: Findings, network: Network, registry: StackRegistry) -> None:
    """Time and bytes of a kept and of a reversed step."""
    observers = [functools.partial(KeepAll, registry), functools.partial(ReverseAll, registry)]
    findings.seconds = Both(*median_seconds(network, observers))
    try:
        kept = memory_trace(network, KeepAll(registry))
        findings.traces = kept, memory_trace(network, ReverseAll(registry))
    except Exception as error:  # some operations, such as torch.cond, fail in a dispatch mode
        text = " ".join(str(error).split())
        findings.notes.append(f"bytes could not be counted ({type(error).__name__}: {text:.100})")
        if _is_raised_by_compiler(error):
            torch.compiler.reset()  # else it would fail from now on, without a dispatch mode too


def _is_raised_by_compiler(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any("_dynamo" in frame.filename or "_functorch" in frame.filename for frame in frames)


def _add_notes(findings: Findings, network: Network) -> None:
    if not network.snapshot.is_complete:
        findings.notes.append(
            "the network can reach more Python state than check searches: some of it may not have "
            "been put back"
        )
    gradients = [] if findings.kept is None else findings.kept.gradients.values()
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        findings.notes.append(
            "gradients of plain autograd are not all finite; equal infinities count as equal, and "
            "so do NaNs"
        )
