"""The command line, one file for each verb. Errors of the user go to stderr in one line, with an
exit code of 2.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

import retrograd
from retrograd.cli import bench, check, completion, info, plan, sample, train
from retrograd.cli.mistakes import Mistake

VERBS = (check, plan, train, sample, bench, info, completion)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="retrograd", description="Train very deep networks without storing their activations."
    )
    made.add_argument("--version", action="store_true", help="print the version")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    for verb in VERBS:
        verb.add(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    if options.version:
        print(f"retrograd {retrograd.__version__}")
        return 0
    if options.command is None:
        made.error("which command? See retrograd --help")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = options.run(options)
        sys.stdout.flush()  # here, where it can be told that nobody reads
        return code
    except Mistake as mistake:
        if os.environ.get("RANK", "0") == "0":  # of several processes, one tells
            print(f"retrograd {options.command}: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"retrograd {options.command}: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"retrograd {options.command}: interrupted", file=sys.stderr)
        return 130
