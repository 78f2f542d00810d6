"""`retrograd plan`: what a memory mode keeps of each update, and what a step then needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from retrograd.cli.check import can_draw
from retrograd.cli.mistakes import Mistake
from retrograd.cli.target import HELP, load, told


def add(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a budget keeps of each layer, and the bytes and time that a step then takes",
        description="Runs a network forward once, watched, and shows what memory modes would keep of each update of its stacks; "
        "nothing is trained. With --plot, a picture of the bytes over the course of a step.",
    )
    plan.add_argument("target", metavar="TARGET", help=HELP)
    plan.add_argument(
        "--memory",
        nargs="+",
        metavar="MODE",
        default=["own", "keep"],
        help='own: as the stack says; reverse; keep; anchor=16; or a budget: "200 MiB", "25%%" (own keep)',
    )
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.svg, .png, .pdf)")
    plan.add_argument("--json", action="store_true", help="print the plans as JSON, and nothing else")
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from retrograd.core.errors import RetrogradError

    modes = [_mode(text) for text in options.memory]
    if options.plot is not None:
        can_draw(options.plot)
    module, args, kwargs = load(options.target)
    found: list[tuple[str, Any]] = []
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
    if options.plot is not None:
        first, *others = [plan for name, plan in found if name == found[0][0]]
        try:
            first.draw(options.plot, *others)
        except OSError as error:
            raise Mistake(f"{error.strerror or error}: {error.filename}.") from error
    if options.json:
        print(json.dumps([{"stack": name, **_data(plan)} for name, plan in found], indent=2))
    else:
        print("\n".join(f"{name}: {plan}" for name, plan in found))
    return 0


def calls(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """The stacks that a network calls, each with what its first call was given. The network is left as it was."""
    from retrograd.checking.runs import Network
    from retrograd.sequence import Reversible, ReversibleSequence

    if not hasattr(module, "named_modules"):
        module = ReversibleSequence(module)
    found: dict[str, tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = {}
    network = Network(module, args, kwargs)
    handles = []
    for path, part in module.named_modules():
        if isinstance(part, (Reversible, ReversibleSequence)):
            name = path or type(part).__name__

            def enter(part: Any, given: Any, keywords: Any, name: str = name) -> None:
                found.setdefault(name, (name, part, given, keywords))

            handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        network.restore()
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
        raise Mistake(f'--memory {text!r}: own, reverse, keep, anchor=16, or a budget such as "200 MiB" or "25%".') from error


def _data(plan: Any) -> dict[str, Any]:
    facts = {name: getattr(plan, name) for name in ("peak", "plain", "floor", "gradients", "time")}
    return {"memory": repr(plan.memory), **facts, "rows": [row._asdict() for row in plan.rows]}
