"""The loop: AdamW, warm-up and cosine decay, clipping, accumulation, autocast; one process or
several; killed and taken up again.

Nothing in a step depends on anything but the parameters, the optimizer, the seed and the number of
the step. So a run that goes on from a checkpoint ends with the bits of one that was never
interrupted.
"""

from __future__ import annotations

import contextlib
import json
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

from retrograd.files import write_whole
from retrograd.models.lm import LanguageModel
from retrograd.training import checkpoints
from retrograd.training.settings import Settings
from retrograd.training.text import Text

EVALUATED = 64  # stretches of held-out text


class TrainingError(RuntimeError):
    """Training cannot go on; the text says what to do."""


class Objective(nn.Module):
    """The model with its loss: what is wrapped for several processes, so that all of a step is
    inside.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, stretches: Tensor) -> Tensor:
        return self.model.loss(stretches[:, :-1], stretches[:, 1:])


class Run:
    """One training run in a folder: `configuration.json`, `metrics.jsonl`, `checkpoints/`."""

    def __init__(self, settings: Settings, folder: Path, text: Text, held_out: Text) -> None:
        self.settings, self.folder, self.text, self.held_out = settings, folder, text, held_out
        self.rank, self.world = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        if settings.batch % (self.world * settings.accumulate):
            several = f"{self.world} processes" if self.world > 1 else "1 process"
            shares = self.world * settings.accumulate
            raise TrainingError(
                f"a batch of {settings.batch} cannot be shared by {several} with --accumulate "
                f"{settings.accumulate}: use --batch {math.ceil(settings.batch / shares) * shares}."
            )
        for what, part in (("text", text), ("held-out text", held_out)):
            if len(part) < settings.context + 2:
                raise TrainingError(
                    f"the {what} has {len(part):,} bytes, less than a context of "
                    f"{settings.context}: use more data, or a smaller "
                    "--context."
                )
        torch.manual_seed(settings.seed)
        self.model = LanguageModel(
            settings.config(), memory=settings.choice(), exact=settings.exact
        )
        if settings.compile:
            self.model.layers.compile()
        self.objective: nn.Module = Objective(self.model)
        if settings.shard:
            if not dist.is_initialized():
                raise TrainingError(
                    "--shard needs several processes: torchrun --nproc-per-node 2 -m retrograd "
                    "train --shard ..."
                )
            for block in self.model.layers.blocks:
                fully_shard(block)
            fully_shard(self.objective)
        elif self.world > 1:
            self.objective = DistributedDataParallel(self.objective)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=(0.9, 0.95), fused=not settings.shard
        )
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        self.done = 0  # steps

    # --- one step

    def rate(self, step: int) -> float:
        """The learning rate of a step: up over the first ones, then down to a tenth along a
        cosine.
        """
        warmup = min(self.settings.warmup, self.settings.steps)
        if step < warmup:
            return self.settings.lr * (step + 1) / warmup
        share = (step - warmup) / max(self.settings.steps - warmup, 1)
        return self.settings.lr * (0.55 + 0.45 * math.cos(math.pi * share))

    def step(self) -> dict[str, float]:
        """The next one, and what became of it."""
        settings, number, start = self.settings, self.done, time.perf_counter()
        torch.manual_seed((settings.seed << 32) + number * self.world + self.rank)  # dropout
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        stretches = self.text.batch(
            number, seed=settings.seed, count=settings.batch, context=settings.context
        )
        pieces = stretches.chunk(self.world)[self.rank].chunk(settings.accumulate)
        total = torch.zeros(())
        for i, piece in enumerate(pieces):
            with self.communicating(i == len(pieces) - 1):
                with self.autocast():
                    loss = self.objective(piece) / len(pieces)
                loss.backward()
            total += loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
            total /= self.world
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not (total.isfinite() and norm.isfinite()):
            raise TrainingError(
                f"step {number + 1}: the loss is {total.item():.4g} and its gradient "
                f"{norm.item():.4g}, and no step was taken. "
                f"Try a smaller --lr than {settings.lr:g}; the last checkpoint is as it was."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        seconds = time.perf_counter() - start
        bits = total.item() / math.log(2)
        return {
            "step": self.done,
            "bits_per_byte": bits,
            "learning_rate": self.rate(number),
            "gradient_norm": norm.item(),
            "bytes_per_second": settings.batch * settings.context / seconds,
        }

    def communicating(self, last: bool) -> Any:
        """Gradients are shared in the last piece of a batch only."""
        if self.settings.shard:
            self.objective.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.world > 1 and not last:
            return self.objective.no_sync()  # type: ignore[operator]
        return contextlib.nullcontext()

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.settings.dtype == "bfloat16")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits a byte on held-out text."""
        self.model.eval()
        found = []
        with self.autocast():
            for stretches in _batches(
                self.held_out.windows(self.settings.context, EVALUATED), self.settings.batch
            ):
                found += [self.objective(stretches).item()] * len(stretches)
        self.model.train()
        return sum(found) / len(found) / math.log(2)

    # --- all of them

    def train(self, after: Callable[[dict[str, float]], bool]) -> None:
        """To the end, or until `after` says to stop; it is told of every step."""
        self.model.train()
        while self.done < self.settings.steps:
            metrics = self.step()
            if self.rank == 0:
                with (self.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(metrics) + "\n")
            stop = self.agreed(after(metrics))
            if (
                stop
                or self.done % self.settings.save_every == 0
                or self.done == self.settings.steps
            ):
                self.save()
            if stop:
                return

    def agreed(self, stop: bool) -> bool:
        """Whether any process wants to stop."""
        if self.world == 1:
            return stop
        flag = torch.tensor(float(stop))
        dist.all_reduce(flag)
        return bool(flag)

    # --- interrupted

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All that a checkpoint has."""
        optimizer = checkpoints.optimizer_tensors(self.optimizer, self.names)
        return {"model": dict(self.model.named_parameters()), "optimizer": optimizer}

    def save(self) -> None:
        if self.settings.shard:
            checkpoints.save_shards(self.folder, self.done, self.tensors())
        elif self.rank == 0:
            checkpoints.save(self.folder, self.done, self.tensors())
        if self.world > 1:
            dist.barrier()

    def resume(self, say: Callable[[str], None]) -> None:
        """Go on from the newest checkpoint that is whole."""
        found = agree(
            lambda: checkpoints.newest(self.folder, say) if checkpoints.steps(self.folder) else None
        )
        if found is None:  # it was interrupted before its first checkpoint
            if self.rank == 0:
                keep_lines(self.folder / "metrics.jsonl", 0)
            return
        folder, facts = found
        for parameter in self.model.parameters():
            zeros = {key: torch.zeros_like(parameter) for key in checkpoints.MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(facts["step"])), **zeros}
        try:
            checkpoints.load_into(folder, self.tensors())
        except checkpoints.ShapeError as error:
            raise checkpoints.CheckpointError(
                f"{self.folder}: its checkpoint is of another shape than {self.settings.config()} "
                f"({error}). Resume with the "
                "settings that the run was begun with, or choose another --out."
            ) from error
        self.done = facts["step"]
        if self.rank == 0:
            keep_lines(self.folder / "metrics.jsonl", self.done)


def agree(decide: Callable[[], Any]) -> Any:
    """What the first process decides, or its error; for all of them."""
    if not dist.is_initialized():
        return decide()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = decide()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def keep_lines(path: Path, steps: int) -> None:
    """Metrics of steps after the checkpoint are of a future that will be run again."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")][:steps]
        write_whole(path, "".join(f"{line}\n" for line in lines))


def _batches(stretches: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    some: list[Tensor] = []
    for stretch in stretches:
        some.append(stretch)
        if len(some) == count:
            yield torch.stack(some)
            some = []
    if some:
        yield torch.stack(some)
