"""A small training run, to be attacked: how it is begun, resumed and compared."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from speedrun import checkpoints, metrics
from speedrun.__main__ import main
from speedrun.attacks.forks import Ended, Process

STEPS = 8
SETTINGS = "--depth 2 --width 16 --heads 2 --context 16 --batch 4 --warmup 3 --dropout 0.1".split()
OPTIONS = [*SETTINGS, "--steps", str(STEPS), "--save-every", "2", "--json"]
Content = tuple[list[float], dict[str, bytes]]


def write_text(folder: Path) -> Path:
    """The text of all runs."""
    path = folder / "text.txt"
    path.write_text("".join(f"the square of {i} is {i * i}.\n" for i in range(2000)))
    return path


class Attacked:
    """A run of one or several processes in a folder."""

    def __init__(self, folder: Path, text: Path, world: int = 1, shard: bool = False) -> None:
        self.folder = folder
        self.world = world
        self.options = ["--data", str(text), *OPTIONS, *(["--shard"] if shard else [])]

    def arguments(self) -> list[str]:
        """Those that begin it, or go on with it."""
        if (self.folder / "configuration.json").exists():
            return ["train", "--resume", "--out", str(self.folder), "--json"]
        return ["train", "--out", str(self.folder), *self.options]

    def start(self, around: Callable[[Callable[[], int]], int] | None = None) -> list[Process]:
        """Start it; `around` is called in each process with what trains."""
        arguments = self.arguments()

        def command() -> int:
            train = lambda: main(arguments)  # noqa: E731
            return train() if around is None else around(train)

        if self.world == 1:
            return [Process(command)]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared["WORLD_SIZE"] = str(self.world)
        return [Process(command, {**shared, "RANK": str(i)}) for i in range(self.world)]

    def to_end(self) -> list[Ended]:
        return [process.wait() for process in self.start()]

    def content(self) -> Content:
        """The loss of every step, and the tensors of the last checkpoint.

        Not its files: those of a sharded one list tensors in the order in which they were made.
        """
        rows = metrics.read(self.folder / "metrics.jsonl")
        last = self.folder / "checkpoints" / f"{checkpoints.steps(self.folder)[-1]:08d}"
        tensors = {}
        for path in last.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                tensors[f"{path.name}: {name}"] = tensor.numpy().tobytes()
        return [row["bits_per_byte"] for row in rows], tensors

    def is_like(self, whole: Content) -> str | None:
        """Finish it, and tell what differs from a run that was never attacked."""
        for ended in self.to_end():
            fault = ended.fault(0)
            if fault is not None:
                return f"it does not go on: {fault}"
        if self.content() != whole:
            return "it ends with other bits"
        left = [path.name for path in self.folder.glob("**/*.part")]
        return f"it leaves {left[0]}" if left else None


def whole(folder: Path, text: Path, world: int = 1, shard: bool = False) -> tuple[Content, float]:
    """What a run that is never attacked has in the end, and the seconds that it takes."""
    run = Attacked(folder, text, world, shard)
    begin = time.monotonic()
    for ended in run.to_end():
        if ended.code:
            raise RuntimeError(f"a run that was not attacked fails: {ended.err}")
    return run.content(), time.monotonic() - begin


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/dev/fd"))
