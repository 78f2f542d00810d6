"""The command line, one file for each verb."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import retrograd
from retrograd.cli import check, info, plan
from retrograd.cli.mistakes import run_command

VERBS = (check, plan, info)


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
    return run_command(f"retrograd {options.command}", lambda: options.run(options))
