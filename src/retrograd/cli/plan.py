"""`retrograd plan`: what a memory mode keeps of each update, and the bytes that a step needs."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from retrograd.cli.check import can_plot, draw
from retrograd.cli.mistakes import Mistake
from retrograd.cli.target import HELP, load, one_line, user_code

if TYPE_CHECKING:
    from retrograd.stepplan import StepPlan


class StackCall(NamedTuple):
    """A stack of a network, and the arguments of its first call."""

    name: str
    stack: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        usage="retrograd plan [-h] TARGET [--memory MODE [MODE ...]] [--plot FILE] [--json]",
        help="what a budget keeps of each layer, and the bytes and time that a step then takes",
        description="Runs a network forward and shows what memory modes would keep of each update "
        "of its stacks; nothing is trained. With --plot, a picture of the bytes over the course of "
        "a step.",
    )
    plan.add_argument("target", metavar="TARGET", help=HELP)
    plan.add_argument(
        "--memory",
        nargs="+",
        metavar="MODE",
        default=["own", "keep"],
        help='own: as the stack says; reverse; keep; anchor=16; or a budget: "200 MiB", "25%%" '
        "(own keep)",
    )
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw those of the first stack")
    plan.add_argument(
        "--json", action="store_true", help="print the plans as JSON, and nothing else"
    )
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    modes = [_memory_mode(text) for text in options.memory]
    with_plot = options.plot is not None and can_plot(options.plot)
    with user_code(options):
        plans = _plans(options.target, modes)
    if not plans:
        raise Mistake(f"{options.target}: no stack of retrograd ran, so there is nothing to plan.")
    if with_plot:
        first_name = plans[0][0]
        first, *others = [plan for name, plan in plans if name == first_name]
        draw(first.draw, options.plot, *others)
    if options.json:
        print(json.dumps([{"stack": name, **_facts(plan)} for name, plan in plans], indent=2))
    else:
        print("\n".join(f"{name}: {plan}" for name, plan in plans))
    return 0


def _plans(target: str, modes: list[Any]) -> list[tuple[str, StepPlan]]:
    """For each stack of a network its name and its plan in each memory mode."""
    from retrograd.core.errors import RetrogradError

    module, args, kwargs = load(target)
    plans = []
    try:
        for call in _stack_calls(module, args, kwargs):
            plans += [(call.name, plan) for plan in _plans_of(call, modes)]
    except RetrogradError as error:
        raise Mistake(" ".join(str(error).split())) from error
    except Exception as error:
        raise Mistake(f"{target}: {one_line(error)}.") from error
    return plans


def _plans_of(call: StackCall, modes: list[Any]) -> list[StepPlan]:
    own = call.stack.memory
    plans = []
    try:
        for mode in modes:
            call.stack.memory = own if mode is None else mode
            plans.append(call.stack.plan(*call.args, **call.kwargs))
    finally:
        call.stack.memory = own
    return plans


def _stack_calls(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StackCall]:
    """The stacks that a network calls. The network is left as it was."""
    from retrograd.checking import as_module
    from retrograd.checking.runs import Network
    from retrograd.measure import Counting

    calls: dict[str, StackCall] = {}
    module = as_module(module)
    network = Network(module, args, kwargs)
    handles = []
    try:
        with Counting(module) as observer:  # finds the stacks that run, also those in plain lists
            module(*args, **kwargs)
        network.snapshot.restore()
        for name, stack in observer.stacks.values():
            hook = functools.partial(_record_call, calls, name or type(stack).__name__)
            handles.append(stack.register_forward_pre_hook(hook, with_kwargs=True))
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        network.release()
    return list(calls.values())


def _record_call(
    calls: dict[str, StackCall], name: str, stack: Any, args: tuple[Any, ...], kwargs: Any
) -> None:
    """A forward pre-hook: remember the first call of a stack."""
    calls.setdefault(name, StackCall(name, stack, args, kwargs))


def _memory_mode(text: str) -> Any:
    """A memory mode from its text; None for "own", the stack's own mode."""
    import retrograd as rg

    word, _, number = text.partition("=")
    named = {"own": None, "reverse": rg.Reverse(), "keep": rg.Keep()}
    if text in named:
        return named[text]
    try:
        return rg.Anchor(every=int(number)) if word == "anchor" else rg.Budget(text)
    except ValueError as error:
        raise Mistake(
            f'--memory {text!r}: own, reverse, keep, anchor=16, or a budget such as "200 MiB" or '
            '"25%".'
        ) from error


def _facts(plan: StepPlan) -> dict[str, Any]:
    names = ("peak", "plain", "floor", "gradients", "time")
    return {
        "memory": repr(plan.memory),
        **{name: getattr(plan, name) for name in names},
        "rows": [row._asdict() for row in plan.rows],
    }
