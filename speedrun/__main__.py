"""`python -m speedrun train` and `python -m speedrun sample`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

# Read when torch is loaded. Threads that wait for each other sleep: spinning, they would take the
# cores from each other where other programs are busy (`python -m speedrun.attacks.busy`).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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
