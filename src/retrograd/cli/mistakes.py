"""Running a command: what a user can correct is one line on stderr and an exit code of 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from retrograd.cli.terminal import discard, open_standard_streams, tell

MISTAKE = 2
INTERRUPTED = 130  # as shells report SIGINT
OUTPUT_CLOSED = 141  # as shells report SIGPIPE


class Mistake(Exception):
    """A mistake that the user can correct. Its text says how, in one line.

    Of several processes that meet the same mistake, one has the text; that of the others is empty,
    and nothing is printed.
    """


def run_command(name: str, parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run `options.run(options)` for the arguments of a command, and return its exit code.

    A mistake, Ctrl-C, a full disk and an output that nobody reads end it without a traceback.
    """
    open_standard_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        try:
            options = parser.parse_args(arguments)
            return _run(name, options)
        finally:
            sys.stdout.flush()  # so that an error of the output is raised here
    except BrokenPipeError:  # for example under `| head`
        discard(1)
        return OUTPUT_CLOSED
    except OSError as error:
        discard(1)
        tell(f"{name}: {of_file(error)}")
        return MISTAKE


def _run(name: str, options: argparse.Namespace) -> int:
    if "command" in options:
        name = f"{name} {options.command}"
    try:
        return options.run(options)
    except Mistake as mistake:
        if str(mistake):
            tell(f"{name}: {mistake}")
        return MISTAKE
    except MemoryError:
        tell(f"{name}: there is not enough memory.")
        return MISTAKE
    except KeyboardInterrupt:
        tell(f"{name}: interrupted")
        return INTERRUPTED


def of_file(error: OSError) -> str:
    """What went wrong with which file, in one line."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}."
