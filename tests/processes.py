"""Real processes for the distributed tests, and a model to train in them.

The processes are started once for a test file and run all its cases one after another; each test
looks at one result.
"""

from __future__ import annotations

import os
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
from retrograd.core import private
from tests import zoo

WORLD = 2
# In torch 2.9 a pipeline itself sends 8 bytes where it receives 4, which gloo refuses.
PIPELINES_WORK = private.VERSION >= (2, 10)
NO_PIPELINES = "torch 2.9 cannot run a pipeline with gloo, of whatever modules"
LIMIT = 300.0  # seconds for a whole file: only a hang takes that long
REVERSED = {name: memory for name, memory in zoo.MEMORY.items() if name != "keep"}

Case = Callable[[int], Any]  # from the rank to whatever torch.save can store
Gradients = list[Tensor | None]  # of all parameters of a model


# --- the processes


class Results:
    """What each case returned, rank by rank. Fails the test that asks for a case that raised, with
    the traceback.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: dict[str, list[tuple[Any, str]]] = {}

    def __getitem__(self, case: str) -> list[Any]:
        if case not in self.loaded:
            self.loaded[case] = [
                torch.load(self.folder / f"{case}-{rank}.pt", weights_only=False)
                for rank in range(WORLD)
            ]
        errors = [
            f"--- rank {rank}\n{error}"
            for rank, (_, error) in enumerate(self.loaded[case])
            if error
        ]
        if errors:
            pytest.fail(
                f"case {case!r} raised in its process:\n" + "\n".join(errors), pytrace=False
            )
        return [value for value, _ in self.loaded[case]]


def run(cases: Mapping[str, Case], folder: Path, ignore: Iterable[str] = ()) -> Results:
    """Run every case in `WORLD` processes that form a gloo group. A process that dies raises here,
    and none is left behind.

    Warnings are errors there too, except those that match `ignore`. Under load gloo's threads abort
    now and then ("terminate called without an active exception"), which says nothing about what is
    tested: then all cases run once more.
    """
    try:
        return _run(cases, folder, ignore, "first")
    except mp.ProcessExitedException as error:
        if error.signal_name != "SIGABRT":
            raise
        return _run(cases, folder, ignore, "second")


def _run(cases: Mapping[str, Case], folder: Path, ignore: Iterable[str], attempt: str) -> Results:
    context = mp.spawn(
        _worker, (dict(cases), folder, list(ignore), attempt), nprocs=WORLD, join=False
    )
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0), grace_period=5):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the processes of {folder.name} were still running after {LIMIT:.0f} s"
                )
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return Results(folder)


def _worker(
    rank: int, cases: dict[str, Case], folder: Path, ignore: list[str], attempt: str
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in ignore:
        warnings.filterwarnings("ignore", message)
    for name, case in cases.items():
        # A group for each case: closing that of a failed case wakes the partner that still waits in
        # it, and both go on.
        store = f"file://{folder}/{name}-{attempt}.store"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
        )
        value, error = None, ""
        try:
            value = case(rank)
        except Exception:
            error = traceback.format_exc()
        finally:
            dist.destroy_process_group()
        torch.save((value, error), folder / f"{name}-{rank}.pt")
    # Everything is written. The interpreter's own end would take apart gloo's threads while FSDP
    # still holds their groups, and now and then aborts ("terminate called without an active
    # exception").
    os._exit(0)


# --- the model. Without a rank, on the batch of all ranks together: the oracle


class Unused(zoo.Mix):
    """One of its parameters never gets a gradient."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.spare = nn.Parameter(torch.ones(width))


class Shift(nn.Module):
    """It has a parameter, and yet autograd saves nothing for it: backward never asks for its
    recompute while it is there.
    """

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, -1) + self.bias


class Model(nn.Module):
    """An embedding, a stack and a head; the same weights at every call. The second block may be of
    another kind.
    """

    def __init__(
        self,
        memory: Any = rg.Keep(),
        *,
        second: Callable[[int, float], nn.Module] = zoo.Mix,
        shared: bool = False,
        frozen: bool = False,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.embedding = nn.Embedding(11, 4).requires_grad_(not frozen)
        fns = [(second if i in (2, 3) else zoo.Mix)(4, dropout) for i in range(8)]
        if shared:
            fns = [fns[i] for i in (0, 1, 1, 0, 0, 2, 2, 1)]
        self.stack = rg.ReversibleSequence(zip(fns[::2], fns[1::2]), memory=memory)
        self.head = nn.Linear(4, 3)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(tokens)))


def loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """The mean over the batch of a step: over one rank's part of it, or over all."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (2 * WORLD, 5), generator=generator)
    targets = torch.randn(2 * WORLD, 5, 3, generator=generator, dtype=torch.float64)
    if rank is not None:
        tokens, targets = tokens.chunk(WORLD)[rank], targets.chunk(WORLD)[rank]
    return nn.functional.mse_loss(model(tokens).double(), targets)


def gradients(model: nn.Module) -> Gradients:
    """The gradients of all parameters, whole; the model has none afterwards, ready for the next
    step.
    """
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def accumulated(steps: int) -> Gradients:
    """What one process has after so many backwards and no step."""
    model = Model()
    for step in range(steps):
        loss(model, step).backward()
    return gradients(model)


def dropout_gradients(model: nn.Module, rank: int) -> Gradients:
    """Each rank has a seed of its own."""
    torch.manual_seed(100 + rank)
    loss(model, 0, rank).backward()
    return gradients(model)


def zoo_gradients(
    case: zoo.Case, rank: int, wrap: Callable[[Any], Any] = lambda stack: stack
) -> Gradients:
    """Each rank has an input of its own, which needs no gradient."""
    stack, x = case.build()
    model = wrap(stack)
    zoo.loss(model(zoo.pytree.tree_map(lambda leaf: leaf.detach() * (1 + rank), x))).backward()
    return gradients(model)


def mean(of_ranks: Iterable[Gradients]) -> Gradients:
    """What every rank should have, given what each would have alone."""
    return [None if grads[0] is None else sum(grads) / WORLD for grads in zip(*of_ranks)]
