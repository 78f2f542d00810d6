"""Ctrl-C at random instructions of the trainer, and a long run that must not grow."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch

import speedrun
from retrograd.cli.mistakes import INTERRUPTED
from speedrun.attacks.forks import Process
from speedrun.attacks.outcome import Outcome
from speedrun.attacks.runs import Attacked, descriptors, whole, write_text
from speedrun.loop import Run
from speedrun.settings import Settings
from speedrun.text import read_text

HOME = str(Path(speedrun.__file__).parent)
NOT_INTERRUPTED = ("__main__.py", "attacks")  # what starts the trainer


def interrupts(count: int, draws: Random, folder: Path) -> Outcome:
    """Raise KeyboardInterrupt before a random line of the trainer runs, and resume the run."""
    text = write_text(folder)
    content, _ = whole(folder / "whole", text)
    total = _lines(Attacked(folder / "counted", text))

    def trial(i: int) -> str | None:
        run = Attacked(folder / str(i), text)
        moment = draws.randrange(total)
        (process,) = run.start(lambda train: _interrupted(train, moment)[0])
        fault = process.wait().fault(0, INTERRUPTED) or run.is_like(content)
        return None if fault is None else f"line {moment}: {fault}"

    return Outcome.of(map(trial, range(count)))


def _lines(run: Attacked) -> int:
    """How many lines of the trainer a run executes."""

    def counted(train: Callable[[], int]) -> int:
        code, lines = _interrupted(train, sys.maxsize)
        print(f"\n{lines}")
        return code

    (process,) = run.start(counted)
    return int(process.wait().out.split()[-1])


def _interrupted(train: Callable[[], int], moment: int) -> tuple[int, int]:
    """Run `train` with an interrupt before its line number `moment`. Returns its exit code, and
    how many lines it executed.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not _is_trainer(frame.f_code.co_filename):
            return None
        if event == "line":
            lines += 1
            if lines == moment + 1:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        return train(), lines
    finally:
        sys.settrace(None)


def _is_trainer(filename: str) -> bool:
    if not filename.startswith(HOME):
        return False
    return not any(part in NOT_INTERRUPTED for part in Path(filename).parts)


def soak(steps: int, draws: Random, folder: Path) -> Outcome:
    """Train for many steps. Tensors, their bytes and open files may not become more."""
    text = write_text(folder)
    process = Process(lambda: _train_and_count(steps, text, folder))
    ended = process.wait(timeout=7200)
    if ended.code:
        return Outcome(steps, (ended.err.strip()[-300:],))
    first, last = json.loads(ended.out)
    return Outcome(steps, () if first == last else (f"{first} became {last}",))


def _train_and_count(steps: int, text: Path, folder: Path) -> int:
    settings = Settings(
        data=str(text),
        depth=2,
        width=8,
        heads=1,
        context=8,
        batch=2,
        steps=steps,
        save_every=max(steps // 20, 1),
    )
    moments = (steps // 4, steps)
    seen = []

    def count(taken: dict[str, float]) -> bool:
        if taken["step"] in moments:
            gc.collect()
            tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
            seen.append((len(tensors), sum(t.nbytes for t in tensors), descriptors()))
        return False

    own = folder / "soak"
    own.mkdir()
    Run(settings, own, *read_text(text)).train(count)
    print(json.dumps(seen))
    return 0
