"""`retrograd plan`: what a memory mode keeps of each update, and what a step then needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from retrograd.cli.check import can_draw, draw
from retrograd.cli.mistakes import Mistake
from retrograd.cli.target import HELP, load, theirs, told


def add(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        usage="retrograd plan [-h] TARGET [--memory MODE [MODE ...]] [--plot FILE] [--json]",
        help="what a budget keeps of each layer, and the bytes and time that a step then takes",
        description="Runs a network forward once, watched, and shows what memory modes would keep "
        "of each update of its stacks; "
        "nothing is trained. With --plot, a picture of the bytes over the course of a step.",
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
    from retrograd.core.errors import RetrogradError

    modes = [_mode(text) for text in options.memory]
    drawn = options.plot is not None and can_draw(options.plot)
    found: list[tuple[str, Any]] = []
    with theirs(options):
        module, args, kwargs = load(options.target)
        try:
            for name, stack, given, keywords in calls(module, args, kwargs):
                own = stack.memory
                try:
                    for mode in modes:
                        stack.memory = own if mode is None else mode
                        found.append((name, stack.plan(*given, **keywords)))
                finally:
                    stack.memory = own
        except RetrogradError as error:
            raise Mistake(" ".join(str(error).split())) from error
        except Exception as error:
            raise Mistake(f"{options.target}: {told(error)}.") from error
    if not found:
        raise Mistake(f"{options.target}: no stack of retrograd ran, so there is nothing to plan.")
    if drawn:
        first, *others = [plan for name, plan in found if name == found[0][0]]
        draw(first.draw, options.plot, *others)
    if options.json:
        print(json.dumps([{"stack": name, **_data(plan)} for name, plan in found], indent=2))
    else:
        print("\n".join(f"{name}: {plan}" for name, plan in found))
    return 0


def calls(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """The stacks that a network calls, each with what its first call was given. The network is left
    as it was.
    """
    from retrograd.checking import as_module
    from retrograd.checking.runs import Network
    from retrograd.measure import Counting

    found: dict[str, tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = {}
    module = as_module(module)
    network = Network(module, args, kwargs)
    handles = []
    try:
        with Counting(module) as observer:  # which stacks run, wherever they are
            module(*args, **kwargs)
        network.snapshot.restore()
        for name, stack in observer.stacks.values():

            def enter(
                stack: Any, given: Any, keywords: Any, name: str = name or type(stack).__name__
            ) -> None:
                found.setdefault(name, (name, stack, given, keywords))

            handles.append(stack.register_forward_pre_hook(enter, with_kwargs=True))
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        network.release()
    return list(found.values())


def _mode(text: str) -> Any:
    """What is meant by a word; None: the stack's own."""
    import retrograd as rg

    word, _, number = text.partition("=")
    try:
        if word == "anchor":
            return rg.Anchor(every=int(number))
        named: dict[str, Any] = {"own": None, "reverse": rg.Reverse(), "keep": rg.Keep()}
        return named[text] if text in named else rg.Budget(text)
    except ValueError as error:
        raise Mistake(
            f'--memory {text!r}: own, reverse, keep, anchor=16, or a budget such as "200 MiB" or '
            '"25%".'
        ) from error


def _data(plan: Any) -> dict[str, Any]:
    facts = {name: getattr(plan, name) for name in ("peak", "plain", "floor", "gradients", "time")}
    return {"memory": repr(plan.memory), **facts, "rows": [row._asdict() for row in plan.rows]}
