"""What a run prints and draws: progress while it trains; a table and two pictures at the end."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import retrograd as rg
from retrograd.cli.terminal import discard, printable, tell
from retrograd.files import save_figure
from retrograd.line_labels import LineLabel, label_lines
from retrograd.measure import activation_bytes
from speedrun import metrics
from speedrun.loop import Objective, Run
from speedrun.model import LanguageModel, angles
from speedrun.text import bigram_bits

MIB = 2**20
MEASURED = 2**30  # plain autograd is measured if it needs less than this, else counted by the plan
BETWEEN_LINES = 10  # seconds
BETWEEN_DRAWINGS = 0.2

Facts = dict[str, Any]  # what summary.json has


def peak_memory() -> int:
    """The peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- while it trains


class Progress:
    """A bar on a terminal; a line every ten seconds elsewhere; nothing if `quiet`.

    What cannot be written, because the terminal is closed or the disk is full, is dropped.
    """

    def __init__(self, steps: int, done: int, quiet: bool = False) -> None:
        self.steps = steps
        self.first = done
        self.start = time.monotonic()
        self.printed = 0.0
        self.quiet = quiet
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            self.bar = _bar()
        if self.bar is not None:
            self.task = self.bar.add_task("", total=steps, completed=done)
            with self._dropped():
                self.bar.start()

    def show(self, taken: metrics.Metrics) -> None:
        step = int(taken["step"])
        text = (
            f"{taken['bits_per_byte']:.3f} bits/byte  {taken['bytes_per_second']:,.0f} "
            f"bytes/s  {peak_memory() / MIB:,.0f} MiB"
        )
        if self.bar is not None:
            self._draw(step, text)
        elif not self.quiet:
            self._print(step, text)

    def _draw(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, description=text)
        now = time.monotonic()
        if now - self.printed > BETWEEN_DRAWINGS or step == self.steps:
            self.printed = now
            with self._dropped():
                self.bar.refresh()

    @contextlib.contextmanager
    def _dropped(self) -> Iterator[None]:
        """Errors of the terminal end the progress, not the training."""
        try:
            yield
        except (OSError, ValueError):
            self.bar = None
            self.quiet = True
            discard(2)

    def _print(self, step: int, text: str) -> None:
        now = time.monotonic()
        if now - self.printed > BETWEEN_LINES or step == self.steps:
            per_step = (now - self.start) / max(step - self.first, 1)
            left = per_step * (self.steps - step)
            tell(f"{step}/{self.steps}  {text}  {left:.0f} s left")
            self.printed = now

    def close(self) -> None:
        if self.bar is not None:
            with self._dropped():
                self.bar.stop()


def _bar() -> Any:
    """A progress bar of rich on stderr; None if rich is not installed.

    It is refreshed by `Progress`: a thread of its own could not drop its errors.
    """
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def tensorboard(folder: Path, done: int) -> Callable[[metrics.Metrics], None]:
    """A function that sends metrics to TensorBoard, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return lambda taken: None
    try:
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
    except UnicodeEncodeError:  # it takes no names that are not UTF-8
        return lambda taken: None

    def write(taken: metrics.Metrics) -> None:
        for name, value in taken.items():
            if name != "step":
                writer.add_scalar(name, value, int(taken["step"]))

    return write


# --- at the end


def plans(run: Run) -> tuple[rg.StepPlan, rg.StepPlan]:
    """What the layers keep in a step: with the memory mode of the run, and with plain autograd."""
    settings = run.settings
    layers = run.model.layers
    count = settings.batch // settings.accumulate
    tokens = run.text.read(0, settings.context)[None].expand(count, -1)
    rotary = angles(0, settings.context, settings.width // settings.heads, tokens.device)
    with torch.no_grad():
        x = run.model.embedding(tokens)
    with run.autocast():
        own_plan = layers.plan(x, rotary=rotary)
    own = layers.memory
    layers.memory = rg.Keep()
    with run.autocast():  # anew: autocast caches the weights that it casts
        plain_plan = layers.plan(x, rotary=rotary)
    layers.memory = own
    return own_plan, plain_plan


def summary(run: Run, plan: rg.StepPlan) -> Facts:
    """What the run learned, and the activation memory of a step.

    Memory is given for the run, for a model four times as deep, and for plain autograd. The last is
    measured, unless `plan` counts too many bytes.
    """
    settings = run.settings
    own = run.model.layers.memory
    deeper = replace(settings.config(), depth=4 * settings.depth)
    deeper_model = LanguageModel(deeper, memory=own, exact=settings.exact)
    is_measured = plan.plain < MEASURED
    return {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.done,
        "bits_per_byte": run.evaluate(),
        "bigram_bits_per_byte": bigram_bits(run.text, run.held_out),
        "activation_bytes": measured_bytes(run.model, run),
        "depth": settings.depth,
        "deeper": deeper.depth,
        "deeper_activation_bytes": measured_bytes(deeper_model, run),
        "plain_activation_bytes": _plain_bytes(run) if is_measured else plan.plain,
        "plain_is": "measured" if is_measured else "counted, not measured",
        "peak_process_bytes": peak_memory(),
    }


def measured_bytes(model: LanguageModel, run: Run) -> int:
    """The peak of activations in one step. The model is left without gradients."""
    settings = run.settings
    sequences = run.text.batch(
        0, seed=settings.seed, count=settings.batch, context=settings.context
    )
    part = sequences[: settings.batch // settings.accumulate]
    objective = Objective(model)

    def step() -> None:
        with run.autocast():
            loss = objective(part)
        loss.backward()

    found = activation_bytes(step, model.parameters())
    model.zero_grad(set_to_none=True)
    return found


def _plain_bytes(run: Run) -> int:
    """As `measured_bytes`, with plain autograd."""
    layers = run.model.layers
    own = layers.memory
    layers.memory = rg.Keep()
    found = measured_bytes(run.model, run)
    layers.memory = own
    return found


def table(facts: Facts, sample: str) -> str:
    """The facts and a sample, to print."""

    def mib(name: str) -> str:
        return f"{facts[name] / MIB:,.1f} MiB"

    def bits(name: str) -> str:
        return f"{facts[name]:.3f} bits/byte"

    depth = facts["depth"]
    rows = [
        (f"activations of a step, {depth} layers", mib("activation_bytes"), "measured"),
        (f"the same with {facts['deeper']} layers", mib("deeper_activation_bytes"), "measured"),
        (f"plain autograd, {depth} layers", mib("plain_activation_bytes"), facts["plain_is"]),
        ("held-out text", bits("bits_per_byte"), f"{facts['parameters']:,} parameters"),
        ("the same by counting pairs of bytes", bits("bigram_bits_per_byte"), ""),
    ]
    left = max(len(name) for name, _, _ in rows)
    right = max(len(value) for _, value, _ in rows)
    lines = [f"{name:<{left}}  {value:>{right}}  {note}".rstrip() for name, value, note in rows]
    written = [f"    {line}" for line in printable(sample).split("\n")]
    return "\n".join([*lines, "", "a sample:", *written])


def draw(run: Run, facts: Facts, own: rg.StepPlan, plain: rg.StepPlan) -> list[Path]:
    """Draw `loss.png` and `memory.png`, if matplotlib is installed."""
    loss = run.folder / "loss.png"
    memory = run.folder / "memory.png"
    try:
        _draw_loss(run, facts, loss)
    except ImportError:
        return []
    own.draw(memory, plain)
    return [loss, memory]


def _draw_loss(run: Run, facts: Facts, path: Path) -> None:
    from matplotlib.figure import Figure

    rows = metrics.read(run.folder / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    losses = [row["bits_per_byte"] for row in rows]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, linewidth=0.8)
    pairs, held_out = facts["bigram_bits_per_byte"], facts["bits_per_byte"]
    axes.axhline(pairs, color="gray", linestyle="--", linewidth=0.8)
    axes.plot(facts["steps"], held_out, "o", color="tab:orange")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.set_title(f"{facts['depth']} reversible layers")
    end = facts["steps"]
    axes.set_xlim(right=1.35 * end)  # room for names
    last = sum(losses[-20:]) / len(losses[-20:])
    labels = [
        LineLabel(end, held_out, "held-out text", "tab:orange"),
        LineLabel(end, last, "training text", "tab:blue"),
        LineLabel(end, pairs, "counting pairs of bytes", "gray"),
    ]
    label_lines(axes, labels)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, dpi=150)
