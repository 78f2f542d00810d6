"""`python -m speedrun train`: options, the folder of a run, interrupts and error messages.

What training itself does is in `loop.py`; what is printed at the end, in `report.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import retrograd as rg
from retrograd.budget import human
from retrograd.cli.mistakes import INTERRUPTED, Mistake, of_file
from retrograd.cli.terminal import printable, tell
from retrograd.files import write_whole
from speedrun import folders, report
from speedrun.checkpoints import CheckpointError
from speedrun.loop import Run, TrainingError
from speedrun.metrics import Metrics
from speedrun.ranks import (
    SaidForAll,
    agree,
    alike,
    exit_at_once,
    process_group,
    together,
    with_rank,
)
from speedrun.settings import DTYPES, Settings
from speedrun.text import Text, TextError, fingerprint, read_text

PROMPT = b"def "  # of the sample at the end
LONG_TO_READ = 2**30  # bytes
BUDGET = r"Budget\(limit='(.*?)'\)"  # in messages of `rg.BudgetError`
MEMORY = r"--memory \1"


# --- options


def add(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a language model; activation memory does not grow with its depth",
        description="Trains a byte-level language model of reversible layers on a file, or on all "
        "files of a folder; by default on the source of Python's standard library. Writes a "
        "folder: configuration.json, metrics.jsonl, checkpoints (the last three), summary.json, "
        "loss.png, memory.png. It may be killed at any moment: --resume continues, and ends with "
        "the same bits.",
        epilog="Several processes: torchrun --nproc-per-node 2 -m speedrun train ... shares each "
        "batch between them, on one machine or on many; with --shard also weights, gradients and "
        "optimizer.",
        argument_default=argparse.SUPPRESS,
    )
    _add_model_options(train)
    _add_training_options(train)
    _add_memory_options(train)
    _add_run_options(train)
    train.set_defaults(run=run)


def _add_model_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data", metavar="PATH", help="a file, or a folder with files (Python's standard library)"
    )
    train.add_argument("--depth", type=int, help="layers: attention and feed-forward (48)")
    train.add_argument("--width", type=int, help="channels of a stream (64)")
    train.add_argument("--heads", type=int, help="of attention (4)")
    train.add_argument("--context", type=int, help="bytes of a training sequence (128)")
    train.add_argument("--dropout", type=float, help="(0)")


def _add_training_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("--batch", type=int, help="sequences per step, over all processes (8)")
    train.add_argument(
        "--accumulate", type=int, metavar="N", help="split each batch in N parts (1)"
    )
    train.add_argument("--steps", type=int, help="(300)")
    train.add_argument(
        "--lr", type=float, help="the highest learning rate: warm-up, then cosine decay (3e-3)"
    )
    train.add_argument("--warmup", type=int, help="steps of warm-up (30)")
    train.add_argument("--seed", type=int, help="of weights, batches and dropout (0)")
    train.add_argument(
        "--dtype", choices=DTYPES, help="bfloat16 is autocast; weights stay float32 (float32)"
    )


def _add_memory_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--memory",
        metavar="{reverse,keep,SIZE}",
        help='reverse: the least memory; keep: plain autograd; a size such as "200 MiB" or "25%%": '
        "the fastest step within it (reverse)",
    )
    train.add_argument(
        "--exact",
        action="store_true",
        help="gradients bit-identical to those of --memory keep --exact, for 2 %% of time",
    )
    train.add_argument(
        "--compile",
        action="store_true",
        help="compile the layers (takes a minute before the first step)",
    )
    train.add_argument(
        "--shard",
        action="store_true",
        help="FSDP2: every process has a part of the weights (with torchrun)",
    )


def _add_run_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (50)")
    train.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="continue the run in --out, or the newest one",
    )
    train.add_argument(
        "--out", type=_folder, default=None, help="the folder of the run (runs/001, and so on)"
    )
    train.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="print a summary as JSON when done, and nothing else",
    )


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: name a folder.")
    return Path(text)


# --- the command


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("safetensors") is None:
        raise Mistake("checkpoints need safetensors: pip install -c constraints.txt -e '.[train]'.")
    with _errors_as_mistakes(), contextlib.ExitStack() as held:
        with process_group():
            trained = _train(options, held)
        finished = trained.done == trained.settings.steps
        if finished and trained.rank == 0:
            _finish(_in_one_process(trained), options)
    code = 0 if finished else INTERRUPTED
    if trained.world > 1:
        exit_at_once(code)
    return code


@contextlib.contextmanager
def _errors_as_mistakes() -> Iterator[None]:
    """Turn the errors that a user can correct into messages of one line."""
    try:
        yield
    except SaidForAll as said:
        message = _message(said.error)
        if message is None:
            raise said.error from None
        raise Mistake(message) from said.error
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        raise Mistake(with_rank(message) if message else "") from error


def _message(error: Exception) -> str | None:
    """What a user can correct, in one line. None for any other error."""
    if isinstance(error, (Mistake, CheckpointError, TrainingError, TextError)):
        return str(error)
    if isinstance(error, rg.BudgetError):
        first = str(error).split("\n", 1)[0]
        return f"{re.sub(BUDGET, MEMORY, first)} Allow more, or use --memory reverse."
    if isinstance(error, (rg.RetrogradError, FloatingPointError)):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        return of_file(error)
    text = str(error)
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return (
            "there is not enough memory for such a model: use a smaller --width, --depth, --batch "
            "or --context."
        )
    if isinstance(error, dist.DistError) or "gloo" in text:
        why = text.strip().splitlines()[0].rstrip(".")
        return f"another process is lost ({why}). Go on from the last checkpoint with --resume."
    return None


def _train(options: argparse.Namespace, held: contextlib.ExitStack) -> Run:
    """The run of these options, trained to its end or interrupted.

    `held` gets what is held until the run has ended: the lock of its folder.
    """
    choose = _of_existing_run if options.resume else _of_new_run
    settings, folder = agree(lambda: choose(options, held))
    trained = _prepared(settings, folder, options.resume)
    is_first = trained.rank == 0

    def say(line: str) -> None:
        if is_first:
            tell(f"speedrun train: {line}")

    if options.resume:
        _resume(trained, say)
    elif is_first:
        _begin(trained, say)
    _train_steps(trained, quiet=options.json or not is_first)
    if trained.done < trained.settings.steps:
        resume = f"{_program(trained.world)} train --resume --out {folders.quoted(folder)}"
        say(f"interrupted after step {trained.done}, and saved. Go on with: {resume}")
    return trained


def _prepared(settings: Settings, folder: Path, resume: bool) -> Run:
    """A run that has its text, its model and its optimizer, and has taken no step."""
    text, held_out, found = together(lambda: _text(settings, folder))
    first = agree(lambda: found)
    together(lambda: _check_text(settings, folder, resume, found, first))
    settings = dataclasses.replace(settings, fingerprint=found)
    if resume and not dist.is_initialized():  # one process may continue what several began
        settings = dataclasses.replace(settings, shard=False)
    with alike():
        return Run(settings, folder, text, held_out)


def _text(settings: Settings, folder: Path) -> tuple[Text, Text, str]:
    """The text to train on, the text held out, and the fingerprint of both."""
    source = None if settings.data is None else Path(settings.data)
    text, held_out = read_text(source, without=(folder, folders.RUNS))
    if len(text) > LONG_TO_READ:
        tell(f"speedrun train: reading {human(len(text))} of text, to know it again with --resume")
    return text, held_out, fingerprint(text, held_out)


def _check_text(settings: Settings, folder: Path, resume: bool, found: str, first: str) -> None:
    if found != first:
        raise Mistake(
            f"{settings.data}: the text is not the one that the first process has. Copy it there."
        )
    if resume and settings.fingerprint != found:
        raise Mistake(
            f"--resume: the text of {folder} is not what it was when the run was begun. Put it "
            "back, or begin anew."
        )


def _begin(run: Run, say: Callable[[str], None]) -> None:
    settings = run.settings
    settings.write(run.folder / "configuration.json")
    (run.folder / "metrics.jsonl").write_text("")
    parameters = sum(p.numel() for p in run.model.parameters())
    source = settings.data or "Python's standard library"
    say(f"{parameters:,} parameters, {settings.depth} layers; {len(run.text):,} bytes of {source}")


def _resume(run: Run, say: Callable[[str], None]) -> None:
    run.resume(say)
    steps = run.settings.steps
    with alike():
        if steps < run.done:
            raise Mistake(
                f"--steps {steps}: the run in {run.folder} has taken {run.done} steps. Give more, "
                "or begin a new run."
            )
    if run.rank == 0:
        _store_steps(run)
    if run.done:
        say(f"going on after step {run.done} of {steps}")
    else:
        say("no checkpoint yet: beginning again")


def _store_steps(run: Run) -> None:
    """Store the number of steps, if it is another than the run was begun with."""
    configuration = run.folder / "configuration.json"
    stored = Settings.read(configuration)
    if stored.steps != run.settings.steps:
        dataclasses.replace(stored, steps=run.settings.steps).write(configuration)


def _train_steps(run: Run, quiet: bool) -> None:
    """Train to the end, or until a signal interrupts it. Shows progress."""
    with _signals() as caught:
        progress = report.Progress(run.settings.steps, run.done, quiet)
        log = report.tensorboard(run.folder, run.done) if run.rank == 0 else None

        def after_step(taken: Metrics) -> bool:
            progress.show(taken)
            if log is not None:
                log(taken)
            return bool(caught)

        try:
            run.train(after_step)
        finally:
            progress.close()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that the current step can be finished and saved.

    Signals that are ignored, as `nohup` has SIGHUP ignored, stay so. A second Ctrl-C raises
    KeyboardInterrupt.
    """
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        caught.append(number)
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- settings of a run


def _of_new_run(options: argparse.Namespace, held: contextlib.ExitStack) -> tuple[Settings, Path]:
    """The settings of the command line, and a folder without a run in it."""
    try:
        settings = Settings(**_given(options))
        settings.check_memory()
    except ValueError as error:
        raise Mistake(str(error)) from error
    return settings, held.enter_context(folders.begun(options.out))


def _of_existing_run(
    options: argparse.Namespace, held: contextlib.ExitStack
) -> tuple[Settings, Path]:
    """The settings of the run in --out, or of the newest one."""
    folder = held.enter_context(folders.resumed(options.out))
    given = _given(options)
    steps = given.pop("steps", None)
    settings = _stored(folder)
    _check_same(settings, given, folder)
    if steps is not None:  # the run is made longer
        settings = dataclasses.replace(settings, steps=steps)
    return settings, folder


def _stored(folder: Path) -> Settings:
    configuration = folder / "configuration.json"
    try:
        settings = Settings.read(configuration)
        settings.check_memory()
    except ValueError as error:
        raise Mistake(f"{configuration} cannot be read: {error}") from error
    return settings


def _check_same(settings: Settings, given: dict[str, Any], folder: Path) -> None:
    """A resumed run keeps its settings: the command line may not ask for other ones."""
    for name, value in given.items():
        there = getattr(settings, name)
        if value != there:
            option = f"--{name.replace('_', '-')}"
            raise Mistake(
                f"{option} {value}: the run in {folder} was begun with {there}. Leave {option} "
                "out, or begin a new run. Only --steps can be changed."
            )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line names."""
    names = {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if given.get("data") is not None:
        given["data"] = os.path.abspath(given["data"])
    return given


# --- the end


def _in_one_process(run: Run) -> Run:
    """The same run without other processes, loaded from what they saved."""
    if run.world == 1:
        return run
    settings = dataclasses.replace(run.settings, shard=False)
    alone = Run(settings, run.folder, run.text, run.held_out)
    alone.resume(lambda line: None)
    return alone


def _finish(run: Run, options: argparse.Namespace) -> None:
    """Evaluate, sample, draw; write `summary.json`; print the result."""
    if not options.json:
        tell("speedrun train: evaluating, measuring a step, sampling")
    own_plan, plain_plan = report.plans(run)
    facts = report.summary(run, plain_plan)
    generator = torch.Generator().manual_seed(run.settings.seed)
    written = PROMPT + bytes(run.model.generate(PROMPT, 300, generator=generator))
    sample = written.decode(errors="replace")
    pictures = report.draw(run, facts, own_plan, plain_plan)
    content = json.dumps({**facts, "sample": sample}, indent=1)
    write_whole(run.folder / "summary.json", content + "\n")
    if options.json:
        print(json.dumps({**facts, "out": str(run.folder)}))
        return
    names = ["configuration.json", "metrics.jsonl", "checkpoints", "summary.json"]
    names += [path.name for path in pictures]
    print(report.table(facts, sample))
    print(printable(f"\n{run.folder}: {', '.join(names)}"))
    folder = folders.quoted(run.folder)
    print(f"sample more: {_program()} sample {folder} --prompt 'import '")


def _program(processes: int = 1) -> str:
    """What starts this program again, with so many processes."""
    if processes > 1:
        return f"torchrun --nproc-per-node {processes} -m speedrun"
    found = shutil.which("python")
    if found is not None and Path(found).absolute() == Path(sys.executable):
        return "python -m speedrun"
    with contextlib.suppress(ValueError):  # .venv/bin/python, where `make train` has put it
        return f"{shlex.quote(str(Path(sys.executable).relative_to(Path.cwd())))} -m speedrun"
    return f"{shlex.quote(sys.executable)} -m speedrun"
