"""Running a command: what a user can correct is one line on stderr and an exit code of 2."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

MISTAKE = 2
INTERRUPTED = 130  # as shells report SIGINT
OUTPUT_CLOSED = 141  # as shells report SIGPIPE


class Mistake(Exception):
    """A mistake that the user can correct. Its text says how, in one line."""


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code.

    A mistake, Ctrl-C, a full disk and an output that nobody reads end it without a traceback.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = command()
        sys.stdout.flush()  # so that an error of the output is raised here
        return code
    except Mistake as mistake:
        if os.environ.get("RANK", "0") == "0":  # under torchrun, one process prints
            print(f"{name}: {mistake}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:  # for example under `| head`
        _discard_output()
        return OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _discard_output()
        print(f"{name}: {error.strerror}.", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Send the rest of stdout nowhere, so that flushing it at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
