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
from retrograd.cli.mistakes import INTERRUPTED, Mistake
from retrograd.files import write_whole
from speedrun import report
from speedrun.checkpoints import CheckpointError
from speedrun.loop import Run, TrainingError, agree
from speedrun.settings import DTYPES, Settings
from speedrun.text import TextError, read_text

RUNS = Path("runs")
PROMPT = b"def "  # of the sample at the end

Metrics = dict[str, float]


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
        "--out", type=Path, default=None, help="the folder of the run (runs/001, and so on)"
    )
    train.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="print a summary as JSON when done, and nothing else",
    )


# --- the command


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("safetensors") is None:
        raise Mistake("checkpoints need safetensors: pip install -c constraints.txt -e '.[train]'.")
    with _errors_as_mistakes():
        with _process_group():
            trained = _train(options)
        finished = trained.done == trained.settings.steps
        if finished and trained.rank == 0:
            _finish(_in_one_process(trained), options)
    code = 0 if finished else INTERRUPTED
    if trained.world > 1:
        _exit_at_once(code)
    return code


@contextlib.contextmanager
def _errors_as_mistakes() -> Iterator[None]:
    """Turn the errors that a user can correct into messages of one line."""
    try:
        yield
    except (CheckpointError, TrainingError, TextError) as error:
        raise Mistake(str(error)) from error
    except rg.BudgetError as error:
        message, _ = str(error).split("\n", 1)
        message = re.sub(r"Budget\(limit='(.*?)'\)", r"--memory \1", message)
        raise Mistake(f"{message} Allow more, or use --memory reverse.") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise Mistake(
            "there is not enough memory for such a model: use a smaller --width, --depth, --batch "
            "or --context."
        ) from error
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise Mistake(f"{error.strerror or error}{where}.") from error


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """A process group, if torchrun started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _exit_at_once(code: int) -> None:
    """Exit without the interpreter's own clean-up, which sometimes aborts in gloo's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(options: argparse.Namespace) -> Run:
    """The run of these options, trained to its end or interrupted."""
    settings, folder = agree(lambda: _settings_and_folder(options))
    trained = _prepared(settings, folder, options.resume)
    is_first = trained.rank == 0

    def say(line: str) -> None:
        if is_first:
            print(f"speedrun train: {line}", file=sys.stderr)

    if options.resume:
        _resume(trained, say)
    elif is_first:
        _begin(trained, say)
    _train_steps(trained, quiet=options.json or not is_first)
    if trained.done < trained.settings.steps:
        resume = f"{_program(trained.world)} train --resume --out {shlex.quote(str(folder))}"
        say(f"interrupted after step {trained.done}, and saved. Go on with: {resume}")
    return trained


def _prepared(settings: Settings, folder: Path, resume: bool) -> Run:
    """A run that has its text, its model and its optimizer, and has taken no step."""
    source = None if settings.data is None else Path(settings.data)
    text, held_out = read_text(source, without=(folder, RUNS))
    fingerprint = text.fingerprint()
    if settings.fingerprint not in ("", fingerprint):
        raise Mistake(
            f"--resume: the text of {folder} is not what it was when the run was begun. Put it "
            "back, or begin anew."
        )
    settings = dataclasses.replace(settings, fingerprint=fingerprint)
    if resume and not dist.is_initialized():  # one process may continue what several began
        settings = dataclasses.replace(settings, shard=False)
    return Run(settings, folder, text, held_out)


def _begin(run: Run, say: Callable[[str], None]) -> None:
    settings = run.settings
    run.folder.mkdir(parents=True, exist_ok=True)
    settings.write(run.folder / "configuration.json")
    (run.folder / "metrics.jsonl").write_text("")
    parameters = sum(p.numel() for p in run.model.parameters())
    source = settings.data or "Python's standard library"
    say(f"{parameters:,} parameters, {settings.depth} layers; {len(run.text):,} bytes of {source}")


def _resume(run: Run, say: Callable[[str], None]) -> None:
    run.resume(say)
    if run.done:
        say(f"going on after step {run.done} of {run.settings.steps}")
    else:
        say("no checkpoint yet: beginning again")


def _train_steps(run: Run, quiet: bool) -> None:
    """Train to the end, or until a signal interrupts it. Shows progress."""
    with _signals() as caught:
        progress = report.Progress(run.settings.steps, run.done, quiet)
        log = report.tensorboard(run.folder, run.done) if run.rank == 0 else None

        def after_step(metrics: Metrics) -> bool:
            progress.show(metrics)
            if log is not None:
                log(metrics)
            return bool(caught)

        try:
            run.train(after_step)
        finally:
            progress.close()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that the current step can be finished and saved.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- settings and folder of a run


def _settings_and_folder(options: argparse.Namespace) -> tuple[Settings, Path]:
    if options.resume:
        return _of_existing_run(options)
    return _of_new_run(options)


def _of_new_run(options: argparse.Namespace) -> tuple[Settings, Path]:
    """The settings of the command line, and a folder without a run in it."""
    folder = options.out
    if folder is None:
        runs = _numbered_runs()
        number = int(runs[-1].name) + 1 if runs else 1
        folder = RUNS / f"{number:03d}"
    _check_new_folder(folder)
    try:
        return Settings(**_given(options)), folder
    except ValueError as error:
        raise Mistake(str(error)) from error


def _check_new_folder(folder: Path) -> None:
    if not str(folder).strip():
        raise Mistake("--out is empty: name a folder.")
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"--out {folder} is a file; name a folder.")
    for name in ("configuration.json", "metrics.jsonl", "checkpoints"):
        if (folder / name).exists():
            raise Mistake(
                f"--out {folder}: there is a run in it. Add --resume to go on with it, or name "
                "another folder."
            )


def _of_existing_run(options: argparse.Namespace) -> tuple[Settings, Path]:
    """The settings of the run in --out, or of the newest one."""
    runs = _numbered_runs()
    folder = options.out or (runs[-1] if runs else RUNS)
    configuration = folder / "configuration.json"
    if not configuration.exists():
        raise Mistake(f"--resume: there is no run in {folder}. Leave it out to begin one.")
    try:
        settings = Settings.read(configuration)
    except (ValueError, TypeError) as error:
        raise Mistake(f"{configuration} cannot be read: {error}") from error
    _check_same(settings, _given(options), folder)
    return settings, folder


def _check_same(settings: Settings, given: dict[str, Any], folder: Path) -> None:
    """A resumed run keeps its settings: the command line may not ask for other ones."""
    others = [name for name, value in given.items() if value != getattr(settings, name)]
    if others:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise Mistake(
            f"{names}: the run in {folder} was begun with another value. Leave it out, or begin a "
            "new run."
        )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line names."""
    names = {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if given.get("data") is not None:
        given["data"] = os.path.abspath(given["data"])
    return given


def _numbered_runs() -> list[Path]:
    """The folders runs/001, runs/002 and so on, in order."""
    if not RUNS.is_dir():
        return []
    return sorted(path for path in RUNS.glob("[0-9][0-9][0-9]") if path.is_dir())


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
    print(f"\n{run.folder}: {', '.join(names)}")
    folder = shlex.quote(str(run.folder))
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
