"""`retrograd train`: a language model on any text, in constant activation memory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrograd.cli.mistakes import Mistake
from retrograd.files import write_whole

RUNS = Path("runs")
INTERRUPTED = 130


def add(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a language model on text, in activation memory that does not grow with its "
        "depth",
        description="Trains a byte-level language model of reversible layers on a file, or on all "
        "files of a folder; by default "
        "on the source of Python's own library. Writes a folder: configuration.json, "
        "metrics.jsonl, checkpoints (the last "
        "three), loss.png, memory.png. It may be killed at any moment: --resume goes on, and ends "
        "with the same bits.",
        epilog="Several processes: torchrun --nproc-per-node 2 -m retrograd train ... shares each "
        "batch between them, on one "
        "machine or on many; with --shard also weights, gradients and optimizer.",
        argument_default=argparse.SUPPRESS,
    )
    train.add_argument(
        "--data", metavar="PATH", help="a file, or a folder with files (Python's own library)"
    )
    train.add_argument(
        "--depth", type=int, help="layers, each an attention and a feed forward (48)"
    )
    train.add_argument("--width", type=int, help="channels of a stream (64)")
    train.add_argument("--heads", type=int, help="of attention (4)")
    train.add_argument("--context", type=int, help="bytes that it looks back on (128)")
    train.add_argument(
        "--batch", type=int, help="stretches of text a step, of all processes together (8)"
    )
    train.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="take each batch in N pieces, one after another (1)",
    )
    train.add_argument("--steps", type=int, help="(300)")
    train.add_argument(
        "--lr",
        type=float,
        help="the highest learning rate: up to it, then down along a cosine (3e-3)",
    )
    train.add_argument("--warmup", type=int, help="steps on the way up (30)")
    train.add_argument("--dropout", type=float, help="(0)")
    train.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="bfloat16 is autocast; weights stay float32 (float32)",
    )
    train.add_argument(
        "--memory",
        metavar="{reverse,keep,SIZE}",
        help='reverse: the least; keep: plain autograd; a size such as "200 MiB" or "25%%": the '
        "fastest step within it (reverse)",
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
    train.add_argument("--seed", type=int, help="of weights, batches and dropout (0)")
    train.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (50)")
    train.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="go on with the run in --out, or with the newest one",
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
    train.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from retrograd.budget import BudgetError
    from retrograd.training.checkpoints import CheckpointError
    from retrograd.training.loop import TrainingError
    from retrograd.training.text import TextError

    try:
        import safetensors  # noqa: F401  # type: ignore[import-not-found]
    except ImportError as error:
        raise Mistake("checkpoints need safetensors: pip install 'retrograd[train]'.") from error
    try:
        with process_group():
            trained = _train(options)
        finished = trained.done == trained.settings.steps
        if finished and trained.rank == 0:
            _finish(_alone(trained), options)
        if trained.world > 1:
            _leave(0 if finished else INTERRUPTED)
        return 0 if finished else INTERRUPTED
    except (CheckpointError, TrainingError, TextError) as error:
        raise Mistake(str(error)) from error
    except BudgetError as error:
        what, _ = re.sub(r"Budget\(limit='(.*?)'\)", r"--memory \1", str(error)).split("\n", 1)
        raise Mistake(f"{what} Allow more, or use --memory reverse.") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise Mistake(
            "there is not enough memory for such a model: a smaller --width, --depth, --batch or "
            "--context."
        ) from error
    except OSError as error:
        raise Mistake(
            f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}."
        ) from error


def _leave(code: int) -> None:
    """End one of several processes. The interpreter would take apart gloo's threads that FSDP
    holds, and abort at times.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Of several processes, if torchrun started this one."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _train(options: argparse.Namespace) -> Any:
    """The run, trained to its end or interrupted."""
    import torch.distributed as dist

    from retrograd.training import report
    from retrograd.training.loop import Run, agree
    from retrograd.training.text import read_text

    settings, folder = agree(lambda: _settings(options))
    text, held_out = read_text(
        None if settings.data is None else Path(settings.data), (folder, RUNS)
    )
    fingerprint = text.fingerprint()
    if settings.fingerprint not in ("", fingerprint):
        raise Mistake(
            f"--resume: the text of {folder} is not what it was when the run was begun. Put it "
            "back, or begin anew."
        )
    settings = dataclasses.replace(settings, fingerprint=fingerprint)
    if options.resume and not dist.is_initialized():  # one process can go on where several were
        settings = dataclasses.replace(settings, shard=False)
    run = Run(settings, folder, text, held_out)
    first = run.rank == 0
    quiet = options.json or not first

    def say(line: str) -> None:
        if first:
            print(f"retrograd train: {line}", file=sys.stderr)

    if options.resume:
        run.resume(say)
        say(
            f"going on after step {run.done} of {settings.steps}"
            if run.done
            else "no checkpoint yet: beginning again"
        )
    elif first:
        folder.mkdir(parents=True, exist_ok=True)
        settings.write(folder / "configuration.json")
        (folder / "metrics.jsonl").write_text("")
        where = settings.data or "Python's own library"
        count = sum(p.numel() for p in run.model.parameters())
        say(f"{count:,} parameters, {settings.depth} layers; {len(text):,} bytes of {where}")
    progress = report.Progress(settings.steps, run.done, quiet)
    log = report.events(folder, run.done) if first else lambda metrics: None

    def after(metrics: dict[str, float]) -> bool:
        progress.show(metrics)
        log(metrics)
        return bool(interrupted)

    with interrupts() as interrupted:
        try:
            run.train(after)
        finally:
            progress.close()
    if run.done < settings.steps:
        launch = (
            "retrograd" if run.world == 1 else f"torchrun --nproc-per-node {run.world} -m retrograd"
        )
        say(
            f"interrupted after step {run.done}, and saved. Go on with: {launch} train --resume "
            f"--out {shlex.quote(str(folder))}"
        )
    return run


def _alone(run: Any) -> Any:
    """The same run in one process, from what it saved, if it was of several: to look at it needs no
    others.
    """
    from retrograd.training.loop import Run

    if run.world == 1:
        return run
    alone = Run(dataclasses.replace(run.settings, shard=False), run.folder, run.text, run.held_out)
    alone.resume(lambda line: None)
    return alone


def _settings(options: argparse.Namespace) -> tuple[Any, Path]:
    """Those of the command line; or those of the run that goes on, if the command line does not
    want others.
    """
    from retrograd.training.settings import Settings

    names = {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if given.get("data") is not None:
        given["data"] = os.path.abspath(given["data"])
    runs = (
        sorted(path for path in RUNS.glob("[0-9][0-9][0-9]") if path.is_dir())
        if RUNS.is_dir()
        else []
    )
    if not options.resume:
        folder = options.out or RUNS / f"{int(runs[-1].name) + 1 if runs else 1:03d}"
        if not str(options.out or "x").strip():
            raise Mistake("--out is empty: name a folder.")
        if any(
            (folder / name).exists()
            for name in ("configuration.json", "metrics.jsonl", "checkpoints")
        ):
            raise Mistake(
                f"--out {folder}: there is a run in it. Add --resume to go on with it, or name "
                "another folder."
            )
        if folder.exists() and not folder.is_dir():
            raise Mistake(f"--out {folder} is a file; name a folder.")
        try:
            return Settings(**given), folder
        except ValueError as error:
            raise Mistake(str(error)) from error
    folder = options.out or (runs[-1] if runs else None)
    if folder is None or not (folder / "configuration.json").exists():
        raise Mistake(f"--resume: there is no run in {folder or RUNS}. Leave it out to begin one.")
    try:
        settings = Settings.read(folder / "configuration.json")
    except (ValueError, TypeError) as error:
        raise Mistake(f"{folder / 'configuration.json'} cannot be read: {error}") from error
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in given.items()
        if value != getattr(settings, name)
    ]
    if others:
        raise Mistake(
            f"{', '.join(others)}: the run in {folder} was begun with another value. Leave it out, "
            "or begin a new run."
        )
    return settings, folder


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the step under way, and then the run; a second Ctrl-C ends it
    at once.
    """
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    numbers = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    before = {number: signal.signal(number, note) for number in dict.fromkeys(numbers)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(run: Any, options: argparse.Namespace) -> None:
    import torch

    from retrograd.training import report

    own, plain = report.plans(run)
    facts = report.summary(run, plain)
    generator = torch.Generator().manual_seed(run.settings.seed)
    sample = bytes(run.model.generate(b"def ", 300, generator=generator)).decode(errors="replace")
    pictures = report.draw(run, facts, own, plain)
    write_whole(
        run.folder / "summary.json",
        json.dumps({**facts, "sample": f"def {sample}"}, indent=1) + "\n",
    )
    if options.json:
        print(json.dumps({**facts, "out": str(run.folder)}))
        return
    print(report.table(facts, f"def {sample}"))
    names = ", ".join(
        ["configuration.json", "metrics.jsonl", "checkpoints", *(path.name for path in pictures)]
    )
    started = Path(sys.argv[0])
    program = (
        "retrograd"
        if shutil.which("retrograd") or started.name != "retrograd"
        else shlex.quote(str(started))
    )
    print(
        f"\n{run.folder}: {names}\ngo on writing: {program} sample {run.folder} --prompt 'import '"
    )
