"""Runs that are killed, that lose a process, that meet in a folder, or whose disk is full."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from random import Random

from speedrun.__main__ import main
from speedrun.attacks.forks import Process
from speedrun.attacks.outcome import Outcome
from speedrun.attacks.runs import OPTIONS, Attacked, Content, whole, write_text

KINDS = ((1, False), (1, False), (1, False), (2, False), (2, True))  # processes, sharded


def kills(count: int, draws: Random, folder: Path) -> Outcome:
    """Kill all processes of a run at a random moment, up to twice, and resume it."""
    text = write_text(folder)
    wholes = {kind: whole(folder / f"whole-{i}", text, *kind) for i, kind in enumerate(KINDS)}

    def trial(i: int) -> str | None:
        kind = KINDS[i % len(KINDS)]
        content, seconds = wholes[kind]
        run = Attacked(folder / str(i), text, *kind)
        for _ in range(draws.randint(1, 2)):
            processes = run.start()
            time.sleep(draws.random() * seconds)
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        return _compared(run, content)

    return Outcome.of(map(trial, range(count)))


def _compared(run: Attacked, content: Content) -> str | None:
    found = run.is_like(content)
    return None if found is None else f"{run.world} processes: {found}"


def lost_ranks(count: int, draws: Random, folder: Path) -> Outcome:
    """Kill one of two processes: the other ends with a line, and the run goes on from there."""
    text = write_text(folder)
    content, seconds = whole(folder / "whole", text, 2)

    def trial(i: int) -> str | None:
        run = Attacked(folder / str(i), text, 2)
        processes = run.start()
        time.sleep(draws.uniform(0.5, 1) * seconds)
        lost = draws.randrange(2)
        processes[lost].kill()
        ended = [process.wait() for process in processes]
        return ended[1 - lost].fault(0, 2) or _compared(run, content)

    return Outcome.of(map(trial, range(count)))


def shared_folders(count: int, draws: Random, folder: Path) -> Outcome:
    """Start two runs at once, in one folder or in the next numbered one."""
    text = write_text(folder)
    content, _ = whole(folder / "whole", text)

    def trial(i: int) -> str | None:
        own = folder / str(i)
        own.mkdir()
        named = ["--out", "run"] if i % 2 else []
        arguments = ["train", "--data", str(text), *OPTIONS, *named]
        processes = []
        for _ in range(2):
            processes.append(Process(lambda: main(arguments), folder=own))
            time.sleep(draws.random() / 20)
        ended = [process.wait() for process in processes]
        fault = next(filter(None, (end.fault(0, 2) for end in ended)), None)
        expected = [0, 2] if named else [0, 0]
        if fault or sorted(end.code for end in ended) != expected:
            return fault or f"exit codes {[end.code for end in ended]}"
        runs = [own / "run"] if named else [own / "runs" / "001", own / "runs" / "002"]
        same = all(Attacked(run, text).content() == content for run in runs)
        return None if same else "a run ends with other bits"

    return Outcome.of(map(trial, range(count)))


def full_disks(count: int, draws: Random, folder: Path) -> Outcome:
    """Forbid files above a random size: the run ends with a line, and goes on without it."""
    text = write_text(folder)
    content, _ = whole(folder / "whole", text)

    def trial(i: int) -> str | None:
        run = Attacked(folder / str(i), text)
        limit = draws.randrange(1000, 100_000)

        def limited(train: object) -> int:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            return train()  # type: ignore[operator]

        (process,) = run.start(limited)
        return process.wait().fault(0, 2) or _compared(run, content)

    return Outcome.of(map(trial, range(count)))
