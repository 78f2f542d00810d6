"""What the steps showed, as numbers: the steps of a check in their order, and the comparisons."""

from __future__ import annotations

import contextlib
import functools
import operator
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from retrograd.checking.compare import relative_differences, typical_size
from retrograd.checking.costs import ROUNDS, MemoryTrace, median_seconds, memory_trace
from retrograd.checking.functions import FunctionRecord
from retrograd.checking.masks import NO_FLIPS, Flips
from retrograd.checking.observers import (
    DriftCheck,
    KeepAll,
    MaskCheck,
    Observer,
    PerUpdateCheck,
    ReverseAll,
    SkipCheck,
    StackBytes,
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
    stack_bytes: int | None = None  # that the stacks leave for backward, in plain autograd
    masks: dict[str, Flips] = field(default_factory=dict)  # by function
    skips: list[str] = field(default_factory=list)  # functions that contain one of their own
    has_pieces: bool = False  # whether an `rg.Chunked` ran
    notes: list[str] = field(default_factory=list)

    @property
    def flipped(self) -> dict[str, Flips]:
        """The functions with masks that flipped."""
        return {name: flips for name, flips in self.masks.items() if flips.flipped}

    @property
    def flips(self) -> Flips:
        """Of all functions."""
        return functools.reduce(operator.add, self.masks.values(), NO_FLIPS)

    def half_precision(self, stack: StackRun) -> torch.dtype | None:
        """The dtype of the stack's streams, if it is a narrow one."""
        for (name, _), deviations in self.update_deviations.items():
            if name == stack.name:
                for deviation in deviations.values():
                    if deviation.dtype in (torch.bfloat16, torch.float16):
                        return deviation.dtype
        return None

    def has_half_precision(self, stack: StackRun) -> bool:
        """Whether streams or functions of the stack are in half precision."""
        return self.half_precision(stack) is not None or self.epsilons.get(stack.name, 0.0) > 1e-4


# What `collect` does: how many steps and of which kind. `Progress` counts them.
STEPS = 8 + 2 * ROUNDS + 2


def collect(network: Network) -> Findings:
    """Run all steps of a check, and compare them."""
    findings = Findings()
    registry = StackRegistry(network)
    attempt = functools.partial(_attempt, network, findings)
    kept = KeepAll(registry)
    reversed_ = ReverseAll(registry)
    kept_again = None
    network.progress.enter("plain autograd")
    findings.kept = _settled(attempt, registry)
    if findings.kept is not None:
        _require_gradients(findings.kept)
        kept_again = attempt(kept)
    network.progress.enter("reversed")
    if attempt(ReverseAll(registry)) is not None:  # a budget makes its plan in the first step
        findings.reversed = attempt(reversed_)
    per_update = PerUpdateCheck(registry)
    drift = DriftCheck(registry)
    if findings.kept is not None:
        network.progress.enter("reversed, each function run again on the same input")
        attempt(per_update)
        network.progress.enter("reversed, each rebuilt stream compared")
        attempt(drift)
    findings.stacks = list(registry.by_name.values())
    findings.has_pieces = bool(registry.pieces)
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
        _compare_masks(findings, network, registry)
        _find_skips(findings, network, registry)
        _measure(findings, network, registry)
    _add_notes(findings, network)
    return findings


def _settled(
    attempt: Callable[[Observer], StepResult | None], registry: StackRegistry
) -> StepResult | None:
    """A kept step. A converted model chooses its grid in the first batch, or, if a layer turns out
    to change the shape, in the second one: then one or two more.
    """
    for _ in range(2):
        result = attempt(KeepAll(registry))
        if not registry.have_changed():
            return result
    return attempt(KeepAll(registry))


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
    network.progress.enter("time")
    findings.seconds = Both(*median_seconds(network, observers))
    network.progress.enter("bytes")
    with _in_dispatch_mode(findings, "bytes could not be counted"):
        kept = MemoryTrace()
        stacks = StackBytes(registry, lambda: kept.now)
        memory_trace(network, stacks, kept)
        findings.traces = kept, memory_trace(network, ReverseAll(registry), MemoryTrace())
        findings.stack_bytes = stacks.bytes


def _compare_masks(findings: Findings, network: Network, registry: StackRegistry) -> None:
    """A reversed step in which the masks of functions are compared with forward."""
    masks = MaskCheck(registry)
    network.progress.enter("reversed, masks compared")
    with _in_dispatch_mode(findings, "masks could not be compared"):
        with masks:
            network.step()
        findings.masks = masks.flips


def _find_skips(findings: Findings, network: Network, registry: StackRegistry) -> None:
    """A kept step in which functions are also called with other inputs."""
    skips = SkipCheck(registry)
    network.progress.enter("plain autograd, functions searched for skips")
    with contextlib.suppress(Exception), skips:  # functions may not support other inputs
        network.step()
    findings.skips = [name for name, is_found in skips.found.items() if is_found]


@contextlib.contextmanager
def _in_dispatch_mode(findings: Findings, what_fails: str) -> Iterator[None]:
    """Turn an error into a note: some operations, such as torch.cond, fail in a dispatch mode."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        findings.notes.append(f"{what_fails} ({type(error).__name__}: {text:.100})")
        if _is_raised_by_compiler(error):
            torch.compiler.reset()  # else it would fail from now on, without a dispatch mode too


def _is_raised_by_compiler(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any("_dynamo" in frame.filename or "_functorch" in frame.filename for frame in frames)


def _add_notes(findings: Findings, network: Network) -> None:
    if findings.has_pieces and not findings.stacks:
        findings.notes.append("no stack ran, but functions in pieces (rg.Chunked)")
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
