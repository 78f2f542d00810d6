"""`retrograd check`: `rg.check` from the shell, with an exit code for CI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrograd.cli.mistakes import Mistake
from retrograd.cli.target import HELP, load, theirs, told
from retrograd.files import write_whole

WRONG = 1


def add(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="prove a network of yours right: gradients, drift, determinism, state, memory and "
        "time, against plain autograd",
        description="Runs a network reversed and with everything kept, about fifteen steps in all, "
        "and reports whether they "
        "agree; for each problem the likely cause and the fix. Exit code: 0 if nothing is wrong, 1 "
        "if something is, 2 if it "
        "could not be run.",
    )
    check.add_argument("target", metavar="TARGET", help=HELP)
    check.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="a picture: memory over a step, drift against depth",
    )
    check.add_argument("--html", type=Path, metavar="FILE", help="the report as a page")
    check.add_argument(
        "--json", action="store_true", help="print the report as JSON, and nothing else"
    )
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import retrograd as rg

    if options.html is not None:  # before the work, not after
        can_write(options.html)
    drawn = options.plot is not None and can_draw(options.plot)
    with theirs(options):
        module, args, kwargs = load(options.target)
        try:
            report = rg.check(module, *args, **kwargs)
        except Exception as error:
            raise Mistake(f"{options.target}: {told(error)}.") from error
    if drawn:
        draw(report.plot, options.plot)
    try:
        if options.html is not None:
            style = (
                "<style>body { font: 15px sans-serif; margin: 2em } td, th { padding: 2px "
                "10px "
                "2px 0 }</style>"
            )
            head = f'<!doctype html><meta charset="utf-8"><title>retrograd check</title>{style}'
            write_whole(options.html, f"{head}{report._repr_html_()}\n")
    except OSError as error:
        raise Mistake(f"{error.strerror or error}: {error.filename}.") from error
    print(report.to_json() if options.json else report)
    return 0 if report.ok else WRONG


def can_write(path: Path) -> None:
    """A mistake if it is not a file in a folder that is there."""
    if path.is_dir() or not path.parent.is_dir():
        raise Mistake(
            f"{path}: that is a folder; name a file."
            if path.is_dir()
            else f"{path}: there is no folder {path.parent}; name a file."
        )


def draw(plot: Callable[..., Any], path: Path, *others: Any) -> None:
    try:
        plot(path, *others)
    except OSError as error:
        raise Mistake(f"{error.strerror or error}: {error.filename}.") from error
    except Exception as error:  # of a kind of picture that needs more than matplotlib
        raise Mistake(f"{path}: {told(error)}.") from error


def can_draw(path: Path) -> bool:
    """Whether matplotlib is there, told if not; a mistake if it does not know such a file."""
    can_write(path)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        print(
            f"no picture {path}: matplotlib is not installed (pip install 'retrograd[plots]')",
            file=sys.stderr,
        )
        return False
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise Mistake(f"{path}: no such kind of picture; there are .{', .'.join(sorted(known))}.")
    return True
