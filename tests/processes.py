"""Real processes for the distributed tests, and a model to train in them.

The processes are started once for a test file and run all its cases one after another; each test looks at one result.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import retrograd as rg
from tests import zoo

WORLD = 2
LIMIT = 300.0  # seconds for a whole file: only a hang takes that long
REVERSED = {name: memory for name, memory in zoo.MEMORY.items() if name != "keep"}

Case = Callable[[int], Any]  # from the rank to whatever torch.save can store


# --- the processes


class Results:
    """What each case returned, rank by rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: dict[str, list[tuple[Any, str]]] = {}

    def __getitem__(self, case: str) -> list[Any]:
        if case not in self.loaded:
            self.loaded[case] = [torch.load(self.folder / f"{case}-{rank}.pt", weights_only=False) for rank in range(WORLD)]
        stored = self.loaded[case]
        errors = [f"--- rank {rank}\n{error}" for rank, (_, error) in enumerate(stored) if error]
        if errors:
            pytest.fail(f"case {case!r} raised in its process:\n" + "\n".join(errors), pytrace=False)
        return [value for value, _ in stored]


def run(cases: Mapping[str, Case], folder: Path, ignore: Iterable[str] = ()) -> Results:
    """Run every case in `WORLD` processes that form a gloo group. A process that dies raises here, with its traceback.

    Warnings are errors there too, except those that match `ignore`.
    """
    context = mp.spawn(_worker, (dict(cases), folder, list(ignore)), nprocs=WORLD, join=False)
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0), grace_period=5):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes of {folder.name} were still running after {LIMIT:.0f} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return Results(folder)


def _worker(rank: int, cases: dict[str, Case], folder: Path, ignore: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in ignore:
        warnings.filterwarnings("ignore", message)
    for name, case in cases.items():
        # A group for each case: closing that of a failed case wakes the partner that still waits in it, and both go on.
        store = f"file://{folder}/{name}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
        value, error = None, ""
        try:
            value = case(rank)
        except Exception:
            error = traceback.format_exc()
        finally:
            dist.destroy_process_group()
        torch.save((value, error), folder / f"{name}-{rank}.pt")


# --- the model


class Unused(zoo.Mix):
    """One of its parameters never gets a gradient."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.spare = nn.Parameter(torch.ones(width))


class Model(nn.Module):
    """An embedding, a stack and a head; the same weights at every call."""

    def __init__(
        self,
        memory: Any = rg.Keep(),
        *,
        shared: bool = False,
        frozen: bool = False,
        unused: bool = False,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.embedding = nn.Embedding(11, 4).requires_grad_(not frozen)
        fns = [(Unused if unused and i == 2 else zoo.Mix)(4, dropout) for i in range(3 if shared else 8)]
        order = [0, 1, 2, 0, 1, 2] if shared else range(8)
        self.stack = rg.ReversibleSequence([(fns[i], fns[j]) for i, j in zip(order[::2], order[1::2])], memory=memory)
        self.head = nn.Linear(4, 3)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(tokens)))


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step: those of one rank, or of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (
        torch.randint(11, (4, 5), generator=generator),
        torch.randn(4, 5, 3, generator=generator, dtype=torch.float64),
    )
    return (tokens, targets) if rank is None else (tokens.chunk(WORLD)[rank], targets.chunk(WORLD)[rank])


def loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    tokens, targets = batch(step, rank)
    return nn.functional.mse_loss(model(tokens).double(), targets)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """The gradients of all parameters, whole, and then none: ready for the next step."""
    grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    model.zero_grad()
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
