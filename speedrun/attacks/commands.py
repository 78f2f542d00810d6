"""Random command lines. Each ends soon, with an exit code that means something and no traceback."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from retrograd import cli
from speedrun.__main__ import main
from speedrun.attacks.forks import Process
from speedrun.attacks.outcome import Outcome
from speedrun.attacks.runs import whole, write_text

VERBS = ("train", "sample", "check", "plan", "info")
CODES = (0, 1, 2, 130, 141)
NETWORKS = """
import torch
from torch import nn
import retrograd as rg

def sound():
    return [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)], (torch.randn(2, 4),)

def named():
    a, b = "$a", "\\x1b"
    updates = [rg.Update(a, nn.Linear(4, 4), reads=(b,)), rg.Update(b, nn.Linear(4, 4), reads=(a,))]
    return rg.Reversible(updates), ({a: torch.randn(2, 4), b: torch.randn(2, 4)},)

def wrong():
    return [(nn.Linear(4, 4), nn.Linear(4, 4))], (torch.randn(2, 5),)

def fails():
    raise OSError("\\x1b[2J")

number = 3
"""

ODD = ["", " ", "-1", "0", "1", "2", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "²", "x"]
ODD += ["\x1b[2J", "ünï", os.fsdecode(b"\xff"), "--", "-", "'; rm -r x", "%s", "{}", "a" * 300]
PATHS = ["/dev/null", "/dev/full", "/dev/zero", ".", "..", "folder", "file", "pipe", "link", "loop"]
PATHS += ["missing", "missing/deep", os.fsdecode(b"n\xff"), "", "file/below", "a" * 300]

TRAIN = {
    "--data": ["text.txt", "folder", *PATHS],
    "--depth": ["1", "2", "3", "1000000000", *ODD],
    "--width": ["8", "16", "7", "1000000000", *ODD],
    "--heads": ["1", "2", "3", *ODD],
    "--context": ["4", "8", "1000000", *ODD],
    "--dropout": ["0", "0.5", "1", *ODD],
    "--batch": ["1", "2", "4", "1000000000", *ODD],
    "--accumulate": ["1", "2", *ODD],
    "--lr": ["1e-3", "1e30", *ODD],
    "--warmup": ["0", "3", *ODD],
    "--seed": ["0", "2147483647", *ODD],
    "--dtype": ["float32", "bfloat16", *ODD],
    "--memory": ["reverse", "keep", "25%", "1 MiB", "1 B", *ODD],
    "--save-every": ["1", "2", *ODD],
    "--out": ["run", "run2", *PATHS],
    "--exact": None,
    "--shard": None,
    "--resume": None,
    "--json": None,
}
OPTIONS: dict[str, dict[str, list[str] | None]] = {
    "train": TRAIN,
    "sample": {
        "--prompt": ["def ", *ODD],
        "--count": ["0", "3", "-1", "x", "nan", ""],
        "--temperature": ["0", "1", "1e-45", *ODD],
        "--seed": ["0", *ODD],
        "--json": None,
    },
    "check": {"--plot": ["a.svg", "a.PNG", *PATHS], "--html": ["a.html", *PATHS], "--json": None},
    "plan": {
        "--memory": ["own", "reverse", "keep", "anchor=2", "25%", "16 KiB", *ODD],
        "--plot": ["a.svg", *PATHS],
        "--json": None,
    },
    "info": {"--json": None, "--help": None, "x": None},
}
TARGETS = ["networks", "networks.py", "nowhere", "nowhere.py", "folder", "pipe", "", *ODD]
NAMES = ["sound", "sound", "named", "wrong", "fails", "number", "nothing", "", "a.b", *ODD]


def command_lines(verb: str) -> Callable[[int, Random, Path], Outcome]:
    """The attack on one verb."""

    def attack(count: int, draws: Random, folder: Path) -> Outcome:
        _prepare(folder)

        def trial(_: int) -> str | None:
            arguments = _random_arguments(verb, draws)
            process = Process(lambda: _command(verb)(arguments), folder=folder)
            ended = process.wait(timeout=100)
            fault = ended.fault(*CODES) or _unprintable(ended.out + ended.err)
            if not os.path.exists("/dev/null") or os.path.isfile("/dev/null"):
                fault = "/dev/null is a file"
            return None if fault is None else f"{arguments!r:.300}: {fault}"

        return Outcome.of(map(trial, range(count)))

    return attack


def _prepare(folder: Path) -> None:
    text = write_text(folder)
    whole(folder / "run", text)
    (folder / "networks.py").write_text(NETWORKS)
    (folder / "folder").mkdir()
    (folder / "folder" / "some.txt").write_text("some text " * 100)
    (folder / "folder" / os.fsdecode(b"n\xff.txt")).write_text("some text " * 100)
    (folder / "file").write_text("some text " * 100)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("file")
    (folder / "loop").symlink_to("loop")


def _command(verb: str) -> Callable[[Sequence[str]], int]:
    return main if verb in ("train", "sample") else cli.main


def _random_arguments(verb: str, draws: Random) -> list[str]:
    arguments = [verb]
    if verb == "train":  # small and short, unless a random option says otherwise
        arguments += "--depth 1 --width 8 --heads 1 --context 4 --batch 1 --steps 2".split()
        arguments += ["--data", "text.txt"]
    elif verb == "sample":
        arguments += [draws.choice(["run", "run", *PATHS]), "--count", "2"]
    elif verb != "info":
        arguments += [f"{draws.choice(TARGETS[:2] * 9 + TARGETS)}:{draws.choice(NAMES)}"]
    options = OPTIONS[verb]
    for name in draws.sample(sorted(options), draws.randint(0, min(4, len(options)))):
        values = options[name]
        arguments += [name] if values is None else [name, draws.choice(values)]
    return arguments


def _unprintable(text: str) -> str | None:
    found = {character for character in text if ord(character) < 32 or ord(character) == 127}
    found -= {"\n", "\t"}
    return f"control characters {found}" if found else None
