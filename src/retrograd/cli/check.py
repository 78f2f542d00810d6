"""`retrograd check`: `rg.check` from the shell, with an exit code for CI."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrograd.cli.colours import show
from retrograd.cli.mistakes import Mistake, of_file
from retrograd.cli.target import HELP, load, one_line, user_code
from retrograd.cli.terminal import printable, tell
from retrograd.files import write_whole

if TYPE_CHECKING:
    from retrograd.checking import Report

WRONG = 1  # the exit code if the check finds something wrong, or cannot draw what it was asked for
PAGE = """\
<!doctype html><meta charset="utf-8"><title>retrograd check</title>\
<style>body {{ font: 15px sans-serif; margin: 2em }} td, th {{ padding: 2px 10px 2px 0 }}</style>\
{report}
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="prove a network of yours right: gradients, drift, determinism, state, memory and "
        "time, against plain autograd",
        description="Runs a network reversed and with everything kept, about twenty steps in all, "
        "and reports whether they agree; for each problem the likely cause and the fix. Exit code: "
        "0 if nothing is wrong, 1 if something is, 2 if it could not be run.",
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
    # Wrong file names are reported before the check runs, not after it.
    if options.html is not None:
        check_path(options.html)
    if options.plot is not None and not can_plot(options.plot):
        return WRONG
    with user_code(options):
        report = _check(options.target)
    if options.plot is not None:
        draw(report.plot, options.plot)
    if options.html is not None:
        _write_page(report, options.html)
    if options.json:
        print(report.to_json())
    else:
        show(printable(str(report)))
    return 0 if report.ok else WRONG


def _check(target: str) -> Report:
    import retrograd as rg

    module, args, kwargs = load(target)
    try:
        return rg.check(module, *args, **kwargs)
    except Exception as error:
        raise Mistake(f"{target}: {one_line(error)}.") from error


def _write_page(report: Report, path: Path) -> None:
    try:
        write_whole(path, PAGE.format(report=report._repr_html_()))
    except OSError as error:
        raise Mistake(of_file(error)) from error


def check_path(path: Path) -> None:
    """Raise `Mistake` unless `path` names a file in a folder that exists."""
    if path.is_dir():
        raise Mistake(f"{path}: that is a folder; name a file.")
    if not path.parent.is_dir():
        raise Mistake(f"{path}: there is no folder {path.parent}; name a file.")


def can_plot(path: Path) -> bool:
    """Whether matplotlib is installed; says so on stderr if not.

    Raises `Mistake` if `path` is not a file that matplotlib can write.
    """
    check_path(path)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        tell(f"no picture {path}: matplotlib is not installed (pip install 'retrograd[plots]')")
        return False
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise Mistake(f"{path}: no such kind of picture; there are .{', .'.join(sorted(known))}.")
    return True


def draw(plot: Callable[..., Any], path: Path, *others: Any) -> None:
    """`plot(path, *others)`, with errors turned into a `Mistake`."""
    try:
        plot(path, *others)
    except OSError as error:
        raise Mistake(of_file(error)) from error
    except Exception as error:  # some file types need more than matplotlib
        raise Mistake(f"{path}: {one_line(error)}.") from error
