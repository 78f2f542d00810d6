"""`python -m speedrun.attacks`: all attacks or some, in full or a share of them."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrograd.cli.mistakes import Mistake, run_command
from retrograd.cli.terminal import tell
from speedrun.attacks import commands, damage, interrupts, kills, page, threads
from speedrun.attacks.outcome import Outcome

ALL = 1.0  # a share: every bit


class Attack(NamedTuple):
    """An attack, and how much of it there is in full: a number of trials, or the share of bits."""

    run: Callable[[Any, random.Random, Path], Outcome]
    full: int | float
    title: str


ATTACKS = {
    "kills": Attack(
        kills.kills,
        70,
        "runs killed at random moments (one process, two, sharded), up to twice, and resumed: the "
        "same losses, weights and moments to the bit",
    ),
    "lost_ranks": Attack(
        kills.lost_ranks,
        20,
        "one of two processes killed: the other ends with a line, the run goes on to the same bits",
    ),
    "shared_folders": Attack(
        kills.shared_folders,
        40,
        "two runs begun at once: one of them in a folder, numbered folders of their own",
    ),
    "full_disks": Attack(
        kills.full_disks,
        40,
        "no file may be larger than a random size: a line, and later the same bits",
    ),
    "states": Attack(
        damage.states,
        ALL,
        "bits of `state.json` flipped, of one process and sharded: the checkpoint before it",
    ),
    "weights": Attack(
        damage.weights,
        446,
        "random bits of weights and moments flipped: the checkpoint before it",
    ),
    "configurations": Attack(
        damage.configurations,
        ALL,
        "bits of `configuration.json` flipped: a message, or the same numbers",
    ),
    "curves": Attack(
        damage.curves,
        ALL,
        "bits of `metrics.jsonl` flipped: at most two lines are passed over",
    ),
    "interrupts": Attack(
        interrupts.interrupts,
        300,
        "Ctrl-C before a random line of the trainer: exit code 130, and later the same bits",
    ),
    "soak": Attack(
        interrupts.soak,
        20_000,
        "steps of one run: as many tensors, bytes and open files at the end as after a quarter",
    ),
    "threads": Attack(
        threads.threads,
        1200,
        "steps of two threads with dropout and [a lock](limits.md#several-threads): gradients of "
        "plain autograd",
    ),
    **{
        f"command_lines_{verb}": Attack(
            commands.command_lines(verb),
            300,
            f"random command lines of `{verb}`: no traceback, no control character, no hang",
        )
        for verb in commands.VERBS
    },
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m speedrun.attacks",
        description="Attacks the trainer and the command line, and counts what is lost. Exit code: "
        "0 if nothing is, 1 if something is.",
    )
    names = f"some of {', '.join(ATTACKS)} (all)"
    made.add_argument("names", nargs="*", metavar="NAME", help=names)
    made.add_argument("--share", type=float, default=1.0, help="of the full number of trials (1)")
    made.add_argument("--seed", type=int, default=0, help="of the random draws (0)")
    made.add_argument("--write-docs", action="store_true", help=f"write the table in {page.PAGE}")
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    made.set_defaults(run=run)
    return made


def run(options: argparse.Namespace) -> int:
    unknown = set(options.names) - ATTACKS.keys()
    if unknown:
        raise Mistake(f"{min(unknown)}: no such attack; there are {', '.join(ATTACKS)}.")
    if not 0 < options.share <= 1:
        raise Mistake(f"--share {options.share}: must be above 0 and at most 1.")
    _import_all()
    found = {}
    for name in options.names or ATTACKS:
        attack = ATTACKS[name]
        begin = time.monotonic()
        found[name] = _attacked(attack, options.share, random.Random(f"{name} {options.seed}"))
        seconds = time.monotonic() - begin
        tell(f"{name}: {found[name].tried} tried, {len(found[name].lost)} lost, {seconds:.0f} s")
        for line in found[name].lost[:20]:
            tell(f"    {line}")
        if options.write_docs:  # after each: what was run is not lost, either
            page.write({name: (ATTACKS[name].title, outcome) for name, outcome in found.items()})
    if options.json:
        facts = {name: [outcome.tried, *outcome.lost] for name, outcome in found.items()}
        print(json.dumps(facts))
    return 1 if any(outcome.lost for outcome in found.values()) else 0


def _attacked(attack: Attack, share: float, draws: random.Random) -> Outcome:
    scaled = attack.full * share
    amount = scaled if isinstance(attack.full, float) else max(round(scaled), 1)
    with tempfile.TemporaryDirectory() as folder:
        return attack.run(amount, draws, Path(folder))


def _import_all() -> None:
    """Import what a run would import, once: processes that are forked have it then."""
    for name in (
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
        "safetensors.torch",
        "torch.distributed.checkpoint",
        "retrograd.checking",
    ):
        importlib.import_module(name)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("speedrun.attacks", parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
