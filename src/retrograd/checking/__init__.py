"""`rg.check`: proof that a network of yours is right, or what is wrong with it.

The network takes the same step again and again, from the same state:

1. kept, twice: plain autograd, and how far it agrees with itself;
2. reversed, as its stacks say: gradients, buffers and random state must be those of the kept step;
3. reversed with every update judged alone: recompute gets the streams that forward saw, so whatever
   differs is the function's doing, or the coupling's; meanwhile its Python state is watched;
4. reversed with every rebuilt stream compared: drift, by depth;
5. both ways once more for bytes, and in turn for time.
"""

from __future__ import annotations

import platform
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from retrograd.checking import causes
from retrograd.checking.causes import Seen, relative, usual_size
from retrograd.checking.report import Both, Drift, Problem, Report, Stack, thinned
from retrograd.checking.runs import (
    Alone,
    Course,
    Drifting,
    Kept,
    Network,
    Observer,
    Reversed,
    Taken,
    as_written,
    course,
    reversing,
    seconds,
)
from retrograd.core.errors import RetrogradError
from retrograd.core.exact import Grid
from retrograd.core.private import is_fake
from retrograd.core.streams import flatten
from retrograd.sequence import ReversibleSequence

__all__ = ["Problem", "Report", "check"]


def check(module: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Run a network reversed and kept, and report whether they agree: gradients, drift,
    determinism, state, memory, time.

    Takes about fifteen steps of the network, one of which keeps everything: choose arguments for
    which that fits. Everything is
    put back afterwards: parameters, gradients, buffers, random states, Python state of the
    functions.

    Args:
        module: a network that contains stacks, or a list of `(f, g)` pairs.
        args, kwargs: what to call it with, as in `module(*args, **kwargs)`. Tensors are copied.
            Gradients are compared of all parameters that require them, and of tensors here that do.
            If the output is one number, that is the loss; otherwise each output is weighted at
            random.

    Returns:
        A `Report`: `report.ok`, `print(report)`, `report.to_json()`, `report.plot()`. Notebooks
        show it as a table.

    Example:
        >>> pairs = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence(pairs)
        >>> report = rg.check(stack, torch.randn(2, 8))
        >>> report.ok
        True
    """
    module = as_module(module)
    _check_arguments(args, kwargs)
    with as_written(module):
        network = Network(module, args, kwargs)
        try:
            return _report(network, module.training)
        finally:
            network.release()


def as_module(module: Any) -> nn.Module:
    while hasattr(module, "_orig_mod"):  # torch.compile's wrapper: stacks run outside of it anyway
        module = module._orig_mod
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    if isinstance(module, type):
        raise TypeError(
            f"check takes a network, and {module.__name__} is a class: pass an instance."
        )
    if not isinstance(module, nn.Module):
        if not isinstance(module, Iterable):
            raise TypeError(f"check takes a module or a list of (f, g) pairs, not {module!r:.80}.")
        module = ReversibleSequence(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet, and check leaves everything as it was: call the network "
                "once before."
            )
        if tensor.is_meta or is_fake(tensor):
            raise ValueError(
                f"{name} has no values (it is on the meta device, or fake), so there is nothing to "
                "compare."
            )
        if hasattr(tensor, "full_tensor"):
            raise ValueError(f"{name} is sharded: check the network before fully_shard.")
    return module


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for leaf in flatten((args, kwargs))[0]:
        if isinstance(leaf, Iterator):
            raise ValueError(
                f"an argument is an iterator ({leaf!r:.60}), and check calls the network again and "
                "again: pass a list."
            )
        if isinstance(leaf, torch.Tensor) and (leaf.is_meta or is_fake(leaf)):
            raise ValueError(
                "an argument has no values (it is on the meta device, or fake), so there is "
                "nothing to compare."
            )


def _is_of_the_compiler(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any("_dynamo" in frame.filename or "_functorch" in frame.filename for frame in frames)


def _attempt(network: Network, observer: Observer, seen: Seen) -> Taken | None:
    """A step, or nothing and the error among those that were seen."""
    try:
        with observer:
            return network.step()
    except Exception as error:
        if isinstance(observer, Kept) and not isinstance(error, RetrogradError):
            if "use_reentrant" in str(error) or "incompatible with .grad()" in str(error):
                raise ValueError(
                    "the network checkpoints with use_reentrant=True; check needs "
                    "use_reentrant=False."
                ) from error
            raise  # plain autograd fails as well: the caller's own
        seen.errors.append(error)
        return None


def _report(network: Network, training: bool) -> Report:
    seen, notes = Seen(), []
    kept, reversed_ = Kept(network), Reversed(network)
    seen.kept, again = _attempt(network, Kept(network), seen), None
    if seen.kept is not None:
        if not seen.kept.gradients:
            raise ValueError(
                f"nothing to compare: the network returned {seen.kept.output}, in which no tensor "
                "was found that depends on a "
                "parameter or an argument that requires grad. If all parameters are frozen, pass "
                "x.requires_grad_()."
            )
        again = _attempt(network, kept, seen)
    if _attempt(network, Reversed(network), seen) is not None:  # a budget watches its first step
        seen.reversed = _attempt(network, reversed_, seen)
    alone, drifting = Alone(network), Drifting(network)
    if seen.kept is not None:
        _attempt(network, alone, seen)
        _attempt(network, drifting, seen)
    _compare(network, seen, alone, drifting, again)
    courses: list[tuple[Course, int]] = []
    times = None
    if seen.kept is not None and seen.reversed is not None:
        times = Both(*seconds(network, [Kept, Reversed]))
        try:
            courses = [course(network, way(network)) for way in (Kept, Reversed)]
        except Exception as error:  # not every operation can be watched: torch.cond cannot
            notes.append(
                f"bytes could not be counted ({type(error).__name__}: "
                f"{' '.join(str(error).split()):.100})"
            )
            if _is_of_the_compiler(
                error
            ):  # which, once it failed under a dispatch mode, would fail without one, too
                torch.compiler.reset()
    if not network.snapshot.is_complete:
        notes.append(
            "there is more Python state within reach than was looked at: not all of it may have "
            "been put back"
        )
    if seen.kept is not None and not all(
        bool(g.isfinite().all()) for g in seen.kept.gradients.values()
    ):
        notes.append(
            "gradients of plain autograd are not all finite; where reversed ones are the same, "
            "they count as equal"
        )
    return Report(
        problems=tuple(causes.problems(seen)),
        stacks=tuple(_described(stack) for stack in seen.stacks),
        limit=seen.limit,
        gradients=seen.gradients,
        noise=max(seen.noise.values(), default=0.0),
        drift=tuple(seen.drift),
        determinism={e.name: e.differs for e in seen.evidence if e.again},
        state=tuple(dict.fromkeys(change.text for e in seen.evidence for change in e.changed)),
        buffers=seen.buffers,
        random=seen.random,
        evaluations={
            n: (count, reversed_.evaluations.get(n, 0))
            for n, count in kept.evaluations.items()
            if seen.reversed
        },
        peak=Both(*(live.peak - gradients for live, gradients in courses)) if courses else None,
        seconds=times,
        course=tuple(thinned(live.bytes, live.forward) for live, _ in courses) if courses else None,  # type: ignore[arg-type]
        notes=tuple(notes),
        training=training,
        versions={"torch": torch.__version__, "Python": platform.python_version()},
    )


def _compare(
    network: Network, seen: Seen, alone: Alone, drifting: Drifting, again: Taken | None
) -> None:
    seen.stacks = list(network.stacks.values())
    seen.evidence, seen.alone = list(alone.evidence.values()), alone.streams
    exact = bool(seen.stacks) and all(
        stack.module.precision.grid is not None for stack in seen.stacks
    )
    epsilons = [
        torch.finfo(gap.dtype.to_real()).eps
        for gaps in drifting.streams.values()
        for gap in gaps.values()
    ]
    seen.narrow = drifting.narrow
    epsilons += seen.narrow.values()
    seen.limit = (
        0.0 if exact else min(max(epsilons, default=torch.finfo(torch.float32).eps) ** 0.5, 0.03)
    )
    for (stack, index), gaps in sorted(drifting.streams.items()):
        where = network.stacks[stack].names[index]
        seen.drift += [Drift(stack, index, where, name, gap.relative) for name, gap in gaps.items()]
    kept, reversed_ = seen.kept, seen.reversed
    if kept is None or reversed_ is None:
        return
    # A gradient that is zero but for rounding would make any error look large: it is measured by
    # the others' size.
    floor = usual_size(kept.gradients.values()) / 100
    seen.gradients = relative(reversed_.gradients, kept.gradients, floor)
    if again is not None:
        seen.noise = relative(again.gradients, kept.gradients, floor)
    seen.buffers = relative(reversed_.buffers, kept.buffers, 0.0)
    seen.random = {name: reversed_.random.get(name) == state for name, state in kept.random.items()}


def _described(stack: Any) -> Stack:
    module = stack.module
    mode = reversing(module.memory)
    memory = f"memory={mode!r}" + (
        "" if mode is module.memory else f" (the stack's own is {module.memory!r})"
    )
    how = [repr(module.streams)] if hasattr(module, "streams") else []
    how += sorted(
        {type(step.coupling).__name__.replace("OnGrid", "Additive") for step in stack.program}
    )
    precision = str(module.precision).replace(repr(Grid()), "True")
    return Stack(
        stack.name, type(module).__name__, len(stack.program), memory, ", ".join(how) + precision
    )
