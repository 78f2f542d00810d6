"""What a run tells: a bar while it trains, and at the end what it took, what it learned,
pictures.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retrograd.core.memory import Keep
from retrograd.measure import activation_bytes
from retrograd.models.lm import LanguageModel, angles
from retrograd.stepplan import StepPlan
from retrograd.training.loop import Objective, Run
from retrograd.training.text import bigram_bits

MIB = 2**20
MEASURED = 2**30  # bytes: what plain autograd needs is measured up to here, and counted beyond


def peak_memory() -> int:
    """Of the process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, steps: int, done: int, quiet: bool = False) -> None:
        self.steps, self.begun, self.start = steps, done, time.monotonic()
        self.shown = 0.0
        self.bar: Any = None
        self.quiet = quiet
        if not quiet and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )
            except ImportError:
                return
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=steps, completed=done)
            self.bar.start()

    def show(self, metrics: dict[str, float]) -> None:
        step, now = int(metrics["step"]), time.monotonic()
        speed, memory = metrics["bytes_per_second"], peak_memory() / MIB
        text = f"{metrics['bits_per_byte']:.3f} bits/byte  {speed:,.0f} bytes/s  {memory:,.0f} MiB"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        elif not self.quiet and (now - self.shown > 10 or step == self.steps):
            left = (now - self.start) / max(step - self.begun, 1) * (self.steps - step)
            print(f"{step}/{self.steps}  {text}  {left:.0f} s left", file=sys.stderr, flush=True)
            self.shown = now

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def events(folder: Path, done: int) -> Callable[[dict[str, float]], None]:
    """Where metrics go besides their file: to TensorBoard, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return lambda metrics: None
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def write(metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                writer.add_scalar(name, value, int(metrics["step"]))

    return write


def plans(run: Run) -> tuple[StepPlan, StepPlan]:
    """What the layers keep in a step of the run; and with plain autograd."""
    settings, layers = run.settings, run.model.layers
    tokens = run.text.read(0, settings.context)[None].expand(
        settings.batch // settings.accumulate, -1
    )
    rotary = angles(0, settings.context, settings.width // settings.heads, tokens.device)
    with torch.no_grad():
        x = run.model.embedding(tokens)
    found, memory = [], layers.memory
    for layers.memory in (memory, Keep()):
        with run.autocast():
            found.append(layers.plan(x, rotary=rotary))
    layers.memory = memory
    return found[0], found[1]


def summary(run: Run, plan: StepPlan) -> dict[str, Any]:
    """What the run learned, and the activation memory of a step: as it is, four times as deep, and
    with plain autograd.

    That is measured, unless `plan` says that it is too much.
    """
    settings, layers = run.settings, run.model.layers
    deeper = replace(settings.config(), depth=4 * settings.depth)
    counted, memory = plan.plain, layers.memory
    layers.memory = Keep()
    plain = measured_bytes(run.model, run) if counted < MEASURED else counted
    layers.memory = memory
    return {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.done,
        "bits_per_byte": run.evaluate(),
        "bigram_bits_per_byte": bigram_bits(run.text, run.held_out),
        "activation_bytes": measured_bytes(run.model, run),
        "depth": settings.depth,
        "deeper": deeper.depth,
        "deeper_activation_bytes": measured_bytes(
            LanguageModel(deeper, memory=memory, exact=settings.exact), run
        ),
        "plain_activation_bytes": plain,
        "plain_is": "measured" if counted < MEASURED else "counted, not measured",
        "peak_process_bytes": peak_memory(),
    }


def measured_bytes(model: LanguageModel, run: Run) -> int:
    """The activations of one step, at their peak; the model is left without gradients."""
    settings = run.settings
    stretches = run.text.batch(
        0, seed=settings.seed, count=settings.batch, context=settings.context
    )[: settings.batch // settings.accumulate]
    objective = Objective(model)

    def step() -> None:
        with run.autocast():
            loss = objective(stretches)
        loss.backward()

    found = activation_bytes(step, model.parameters())
    model.zero_grad(set_to_none=True)
    return found


def table(facts: dict[str, Any], sample: str) -> str:
    """For the end of a run."""
    rows = [
        (
            f"activations of a step, {facts['depth']} layers",
            f"{facts['activation_bytes'] / MIB:,.1f} MiB",
            "measured",
        ),
        (
            f"the same with {facts['deeper']} layers",
            f"{facts['deeper_activation_bytes'] / MIB:,.1f} MiB",
            "measured",
        ),
        (
            f"plain autograd, {facts['depth']} layers",
            f"{facts['plain_activation_bytes'] / MIB:,.1f} MiB",
            facts["plain_is"],
        ),
        (
            "held-out text",
            f"{facts['bits_per_byte']:.3f} bits/byte",
            f"{facts['parameters']:,} parameters",
        ),
        (
            "the same by counting pairs of bytes",
            f"{facts['bigram_bits_per_byte']:.3f} bits/byte",
            "",
        ),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join([*lines, "", "a sample:", *(f"    {line}" for line in sample.splitlines())])


def draw(run: Run, facts: dict[str, Any], own: StepPlan, plain: StepPlan) -> list[Path]:
    """`loss.png` and `memory.png`, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    pictures = [run.folder / "loss.png", run.folder / "memory.png"]
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [m["step"] for m in metrics],
        [m["bits_per_byte"] for m in metrics],
        linewidth=0.8,
        label="training text",
    )
    pairs = facts["bigram_bits_per_byte"]
    axes.axhline(
        pairs, color="gray", linestyle="--", linewidth=0.8, label="counting pairs of bytes"
    )
    axes.plot(
        facts["steps"], facts["bits_per_byte"], "o", color="tab:orange", label="held-out text"
    )
    axes.set(
        xlabel="step",
        ylabel="bits per byte",
        ylim=(0, None),
        title=f"{facts['depth']} reversible layers",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(pictures[0], dpi=150)
    own.draw(pictures[1], plain)
    return pictures
