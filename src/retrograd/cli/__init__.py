"""The command line, one file for each verb. Errors of the user go to stderr in one line, with an exit code of 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from retrograd.cli import bench, sample, train
from retrograd.cli.mistakes import Mistake


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="retrograd", description="Train very deep networks without storing their activations.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for verb in (train, sample, bench):
        verb.add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except Mistake as mistake:
        if os.environ.get("RANK", "0") == "0":  # of several processes, one tells
            print(f"retrograd {options.command}: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        print(f"retrograd {options.command}: interrupted", file=sys.stderr)
        return 130
