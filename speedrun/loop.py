"""The training loop: AdamW, warm-up and cosine decay, gradient clipping, accumulation, autocast.

It runs in one process or in several (data parallel, or FSDP2), and can be killed and resumed. A
step depends on the parameters, the optimizer, the seed and the number of the step, and on nothing
else. So a resumed run ends with the same bits as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from speedrun import checkpoints, metrics
from speedrun.model import LanguageModel
from speedrun.ranks import agree, alike, any_process, together
from speedrun.settings import Settings
from speedrun.text import Text

EVALUATED = 64  # sequences of held-out text
LAST_RATE = 0.1  # the last learning rate, as a share of the highest


class TrainingError(RuntimeError):
    """Training cannot go on. The text says what to do."""


class Objective(nn.Module):
    """The model with its loss. This is what DDP and FSDP2 wrap, so that they see a whole step."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, sequences: Tensor) -> Tensor:
        return self.model.loss(sequences[:, :-1], sequences[:, 1:])


class Run:
    """One training run in a folder: `configuration.json`, `metrics.jsonl`, `checkpoints/`."""

    def __init__(self, settings: Settings, folder: Path, text: Text, held_out: Text) -> None:
        self.settings = settings
        self.folder = folder
        self.text = text
        self.held_out = held_out
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.done = 0  # steps
        self._check_sizes()
        torch.manual_seed(settings.seed)
        self.model = LanguageModel(
            settings.config(), memory=settings.memory_mode(), exact=settings.exact
        )
        if settings.compile:
            self.model.layers.compile()
        self.objective = self._parallel(Objective(self.model))
        self.optimizer = self._optimizer()
        self.names = {id(p): name for name, p in self.model.named_parameters()}

    def _check_sizes(self) -> None:
        settings = self.settings
        parts = self.world * settings.accumulate
        if settings.batch % parts:
            processes = f"{self.world} processes" if self.world > 1 else "1 process"
            raise TrainingError(
                f"a batch of {settings.batch} cannot be shared by {processes} with --accumulate "
                f"{settings.accumulate}: use --batch {math.ceil(settings.batch / parts) * parts}."
            )
        for name, text in (("text", self.text), ("held-out text", self.held_out)):
            if len(text) < settings.context + 2:
                raise TrainingError(
                    f"the {name} has {len(text):,} bytes, less than a context of "
                    f"{settings.context}: use more data, or a smaller --context."
                )

    def _parallel(self, objective: nn.Module) -> nn.Module:
        """The objective, sharded or data parallel if there are several processes."""
        if self.settings.shard:
            if not dist.is_initialized():
                raise TrainingError(
                    "--shard needs several processes: torchrun --nproc-per-node 2 -m speedrun "
                    "train --shard ..."
                )
            for block in self.model.layers:
                fully_shard(block)
            fully_shard(objective)
        elif self.world > 1:
            objective = DistributedDataParallel(objective)
        return objective

    def _optimizer(self) -> torch.optim.AdamW:
        """AdamW. Matrices get weight decay, the scales of norms do not."""
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.ndim > 1]
        scales = [p for p in parameters if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.settings.decay},
            {"params": scales, "weight_decay": 0.0},
        ]
        fused = not self.settings.shard
        return torch.optim.AdamW(groups, lr=self.settings.lr, betas=(0.9, 0.95), fused=fused)

    # --- one step

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
        settings = self.settings
        warmup = min(settings.warmup, settings.steps)
        if step < warmup:
            return settings.lr * (step + 1) / warmup
        progress = (step - warmup) / max(settings.steps - warmup, 1)
        middle = (1 + LAST_RATE) / 2
        swing = (1 - LAST_RATE) / 2
        return settings.lr * (middle + swing * math.cos(math.pi * progress))

    def step(self) -> dict[str, float]:
        """Take the next step, and return its metrics."""
        settings = self.settings
        number = self.done
        start = time.perf_counter()
        torch.manual_seed((settings.seed << 32) + number * self.world + self.rank)  # for dropout
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        loss, norm = self._loss_and_norm(number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        seconds = time.perf_counter() - start
        return {
            "step": self.done,
            "bits_per_byte": loss / math.log(2),
            "learning_rate": self.rate(number),
            "gradient_norm": norm,
            "bytes_per_second": settings.batch * settings.context / seconds,
        }

    def _loss_and_norm(self, number: int) -> tuple[float, float]:
        """Compute the gradients of a step. Raises `TrainingError` if training diverges."""
        try:
            loss = self._backward(number)
        except rg.GridError as error:  # with --exact, a stream beyond its range
            why = str(error).splitlines()[0].rstrip(".")
            raise self._diverged(number, why) from error
        norm = self._clip_gradients()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            with alike():  # both are sums over all processes
                why = f"the loss is {loss:.4g} and the norm of its gradient {norm:.4g}"
                raise self._diverged(number, why)
        return loss, norm

    def _diverged(self, number: int, why: str) -> TrainingError:
        return TrainingError(
            f"step {number + 1}: {why}; no step was taken. Try a smaller --lr than "
            f"{self.settings.lr:g}; the last checkpoint is as it was."
        )

    def _backward(self, number: int) -> float:
        """Compute the gradients of a step, and return the mean loss over all processes."""
        settings = self.settings
        sequences = self.text.batch(
            number, seed=settings.seed, count=settings.batch, context=settings.context
        )
        own = sequences.chunk(self.world)[self.rank]
        parts = own.chunk(settings.accumulate)
        total = torch.zeros(())
        for i, part in enumerate(parts):
            with self._gradient_sync(i == len(parts) - 1):
                with self.autocast():
                    loss = self.objective(part) / len(parts)
                loss.backward()
            total += loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
            total /= self.world
        return total.item()

    def _clip_gradients(self) -> float:
        """Clip the gradients, and return the norm that they had."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.item()

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Processes exchange gradients in the last part of a batch only."""
        if self.settings.shard:
            self.objective.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.world > 1 and not last:
            return self.objective.no_sync()  # type: ignore[operator]
        return contextlib.nullcontext()

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.settings.dtype == "bfloat16")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte on held-out text."""
        self.model.eval()
        windows = self.held_out.windows(self.settings.context, EVALUATED)
        losses = []
        with self.autocast():
            for sequences in _batches(windows, self.settings.batch):
                losses += [self.objective(sequences).item()] * len(sequences)
        self.model.train()
        return sum(losses) / len(losses) / math.log(2)

    # --- all steps

    def train(self, after_step: Callable[[dict[str, float]], bool]) -> None:
        """Train to the last step. `after_step` gets the metrics; training stops if it returns True.

        A run that stops early is saved first.
        """
        self.model.train()
        stop = False
        while self.done < self.settings.steps and not stop:
            taken = self.step()
            if self.rank == 0:
                metrics.append(self.folder / "metrics.jsonl", taken)
            stop = any_process(after_step(taken))
            is_due = self.done % self.settings.save_every == 0
            if stop or is_due or self.done == self.settings.steps:
                self.save()

    # --- saving and resuming

    def tensors(self) -> checkpoints.Tensors:
        """What a checkpoint stores."""
        optimizer = checkpoints.optimizer_tensors(self.optimizer, self.names)
        return {"model": dict(self.model.named_parameters()), "optimizer": optimizer}

    def save(self) -> None:
        if self.settings.shard:
            with alike():  # if one process fails, it raises in all
                digest = self.settings.digest()
                checkpoints.save_shards(self.folder, self.done, self.tensors(), digest)
        elif self.rank == 0:
            checkpoints.save(self.folder, self.done, self.tensors(), self.settings.digest())
        if self.world > 1:
            dist.barrier()

    def resume(self, say: Callable[[str], None]) -> None:
        """Load the newest checkpoint that is not damaged; start at step 0 if there is none."""
        found = agree(
            lambda: checkpoints.newest(self.folder, say) if checkpoints.steps(self.folder) else None
        )
        if found is not None:
            folder, state = found
            self._load(folder, state["step"])
            self._check_settings(folder, state["settings"])
            self.done = state["step"]
        if self.rank == 0:
            lost = metrics.keep(self.folder / "metrics.jsonl", self.done)
            if lost:
                say(f"metrics.jsonl is damaged: {lost} of {self.done} steps are lost from it")

    def _check_settings(self, folder: Path, digest: str) -> None:
        if digest != self.settings.digest():
            with alike():
                raise checkpoints.CheckpointError(
                    f"{self.folder / 'configuration.json'} is damaged or was changed: {folder} was "
                    "written with other settings. Put it back, or begin anew."
                )

    def _load(self, folder: Path, step: int) -> None:
        for parameter in self.model.parameters():  # AdamW has no state before its first step
            zeros = {key: torch.zeros_like(parameter) for key in checkpoints.MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **zeros}
        try:
            if self.settings.shard:  # communicates
                checkpoints.load_into(folder, self.tensors())
            else:
                together(lambda: checkpoints.load_into(folder, self.tensors()))
        except checkpoints.ShapeError as error:
            raise checkpoints.CheckpointError(
                f"{self.folder}: its checkpoint is of another shape than {self.settings.config()} "
                f"({error}). Resume with the settings that the run was begun with, or choose "
                "another --out."
            ) from error


def _batches(sequences: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    """Stacks of `count` sequences; the last one may be smaller."""
    while some := list(itertools.islice(sequences, count)):
        yield torch.stack(some)
