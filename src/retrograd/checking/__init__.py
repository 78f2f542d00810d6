"""`rg.check`: runs a network reversed and in plain autograd, and reports what differs.

The network takes the same step again and again, from the same state:

1. kept, twice: plain autograd, and how far it agrees with itself;
2. reversed, as its stacks are configured: gradients, buffers and random state must be those of the
   kept step;
3. reversed, each update by itself: recompute gets the streams that forward saw, so a difference is
   caused by the function or by the coupling; meanwhile the function's Python state is watched;
4. reversed, with each rebuilt stream compared: drift by depth;
5. reversed, with the masks of functions (of ReLU, max-pooling) compared with forward;
6. kept, with each function called with other inputs too: does it contain a skip of its own?
7. kept and reversed once more, for bytes and time.

To read in this order: `runs.py` (a step), `observers.py` (how the stacks run meanwhile),
`findings.py` (the steps and their comparison), `problems.py`, `causes.py` and `advice.py` (what
is wrong or could be better, and why), `report.py`.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.checking.progress import Progress
from retrograd.checking.report import Advice, Both, Problem, Report, thinned
from retrograd.checking.runs import Network, run_eagerly
from retrograd.core.private import is_fake
from retrograd.core.streams import flatten
from retrograd.sequence import ReversibleSequence

if TYPE_CHECKING:
    from retrograd.checking.findings import Findings

__all__ = ["Advice", "Problem", "Report", "check"]


def check(module: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Run a network reversed and kept, and report whether they agree: gradients, drift,
    determinism, state, memory, time. What is not wrong but could be better is advice.

    Takes about twenty steps. Some of them keep all activations, so choose arguments for which
    these fit in memory. Everything is put back afterwards: parameters, gradients, buffers, random
    states, Python state of the functions.

    Args:
        module: a network that contains stacks, or a list of `(f, g)` pairs.
        args, kwargs: the arguments, as in `module(*args, **kwargs)`. Tensors are copied. Gradients
            are compared for all parameters and arguments that require them. A scalar output is the
            loss; any other output gets a random gradient.
        progress: whether a line on stderr says what is being done. None, the default: if stderr is
            a terminal. If `forward` of the network has an argument of this name, it gets it.

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
    # Here, because not every script that trains checks.
    from retrograd.checking.findings import STEPS, collect

    network_module = as_module(module)
    progress = None if _takes_progress(network_module) else kwargs.pop("progress", None)
    _check_arguments(args, kwargs)
    line = Progress(STEPS, progress)
    with run_eagerly(network_module):
        network = Network(network_module, args, kwargs, line)
        try:
            return _report(collect(network), network_module.training)
        finally:
            line.close()
            network.release()


def _takes_progress(module: nn.Module) -> bool:
    """Whether the network has an argument of that name."""
    try:
        return "progress" in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False


def as_module(module: Any) -> nn.Module:
    """The network to check: unwrapped, and built if it is a list of pairs."""
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
        _check_tensor(name, tensor)
    return module


def _check_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape yet, because its module is lazy: call the network once before."
        )
    if tensor.is_meta or is_fake(tensor):
        raise ValueError(
            f"{name} has no values to compare: it is on the meta device, or a fake tensor."
        )
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"{name} is sharded: check the network before fully_shard.")


def _check_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for leaf in flatten((args, kwargs))[0]:
        if isinstance(leaf, Iterator):
            raise ValueError(
                f"an argument is an iterator ({leaf!r:.60}), and check calls the network many "
                "times: pass a list."
            )
        if isinstance(leaf, Tensor) and (leaf.is_meta or is_fake(leaf)):
            raise ValueError(
                "an argument has no values to compare: it is on the meta device, or a fake tensor."
            )


def _report(findings: Findings, training: bool) -> Report:
    from retrograd.checking.advice import find_advice
    from retrograd.checking.problems import find_problems

    peak = None
    course = None
    if findings.traces is not None:
        kept, reversed_ = findings.traces
        peak = Both(kept.activation_peak, reversed_.activation_peak)
        course = (
            thinned(kept.bytes, kept.forward),
            thinned(reversed_.bytes, reversed_.forward),
        )
    functions = findings.functions
    changes = [change.text for record in functions for change in record.changes]
    problems = find_problems(findings)
    return Report(
        problems=tuple(problems),
        advice=tuple(find_advice(findings, problems)),
        stacks=tuple(stack.describe() for stack in findings.stacks),
        limit=findings.limit,
        gradients=findings.gradients,
        noise=max(findings.noise.values(), default=0.0),
        drift=tuple(findings.drift),
        determinism={record.name: record.difference for record in functions if record.comparisons},
        masks={name: (one.flipped, one.total) for name, one in findings.masks.items()},
        state=tuple(dict.fromkeys(changes)),
        buffers=findings.buffers,
        random=findings.random,
        evaluations=findings.evaluations,
        peak=peak,
        seconds=findings.seconds,
        course=course,
        notes=tuple(findings.notes),
        training=training,
        versions={"torch": torch.__version__, "Python": platform.python_version()},
    )
