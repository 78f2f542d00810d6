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
    made.set_defaults(run=lambda options: _without_command(made, options))
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    for verb in VERBS:
        verb.add(commands)
    return made


def _without_command(made: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not options.version:
        made.error("which command? See retrograd --help")
    print(f"retrograd {retrograd.__version__}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("retrograd", parser(), arguments)
