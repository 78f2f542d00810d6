"""`python -m speedrun train` and `python -m speedrun sample`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from retrograd.cli.mistakes import run_command
from speedrun import sample, train


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m speedrun",
        description="Train a language model of reversible layers, and sample from it.",
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    train.add(commands)
    sample.add(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("speedrun", parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
