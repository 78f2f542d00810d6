"""`retrograd plan`: what a memory mode keeps of each update, and the bytes that a step needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrograd.cli.check import WRONG, can_plot, draw
from retrograd.cli.mistakes import Mistake
from retrograd.cli.target import HELP, load, one_line, user_code
from retrograd.cli.terminal import printable

if TYPE_CHECKING:
    from retrograd.stepplan import StepPlan


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        usage="retrograd plan [-h] TARGET [--memory MODE [MODE ...]] [--plot FILE] [--json]",
        help="what a budget keeps of each layer, and the bytes and time that a step then takes",
        description="Runs a network forward and shows what memory modes would keep of each update "
        "of its stacks; nothing is trained. A budget is one for all stacks. With --plot, a picture "
        "of the bytes over the course of a step.",
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
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw the plans")
    plan.add_argument(
        "--json", action="store_true", help="print the plans as JSON, and nothing else"
    )
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    modes = [_memory_mode(text) for text in options.memory]
    if options.plot is not None and not can_plot(options.plot):
        return WRONG
    with user_code(options):
        plans = _plans(options.target, modes)
    if not plans:
        raise Mistake(f"{options.target}: no stack of retrograd ran, so there is nothing to plan.")
    if options.plot is not None:
        first, *others = plans
        draw(first.draw, options.plot, *others)
    if options.json:
        print(json.dumps([_facts(plan) for plan in plans], indent=2))
    else:
        print(printable("\n".join(map(str, plans))))
    return 0


def _plans(target: str, modes: list[Any]) -> list[StepPlan]:
    """The plan of a step of the network in each memory mode."""
    from retrograd.checking import as_module
    from retrograd.core.errors import RetrogradError
    from retrograd.whole_model import measured_calls, plan_in

    module, args, kwargs = load(target)
    try:
        calls, head = measured_calls(as_module(module), args, kwargs)
        return [plan_in(mode, calls, head) for mode in modes] if calls else []
    except RetrogradError as error:
        raise Mistake(" ".join(str(error).split())) from error
    except Exception as error:
        raise Mistake(f"{target}: {one_line(error)}.") from error


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
        "head": None if plan.head is None else plan.head._asdict(),
        "rows": [row._asdict() for row in plan.rows],
    }
