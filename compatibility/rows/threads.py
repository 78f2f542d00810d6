"""Threads and forked processes, which autograd, the data loader and users use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compatibility import networks
from compatibility.networks import Model
from compatibility.verdict import Rows, Scene

ROWS = Rows("Threads and fork")
STEPS = 3


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def backward_elsewhere(scene: Scene) -> Any:
    model = Model(scene.contestant)
    found = {}
    for step in range(STEPS):
        value = networks.loss(model, step)
        in_threads(value.backward)
        found[f"step {step + 1}"] = networks.gradients(model)
    return found


def here(scene: Scene) -> Any:
    return networks.steps(Model("plain"), count=STEPS)


def two_stacks(scene: Scene) -> Any:
    models = [Model(scene.contestant) for _ in range(2)]
    jobs = [functools.partial(networks.steps, model, count=20) for model in models]
    return dict(enumerate(in_threads(*jobs)))


def twice(scene: Scene) -> Any:
    return dict.fromkeys(range(2), networks.steps(Model("plain"), count=20))


def one_stack(scene: Scene) -> Any:
    """Forward and backward of one model in two threads at once; the gradients add up."""
    model = Model(scene.contestant)

    def work(step: int) -> None:
        for _ in range(10):
            networks.loss(model, step).backward()

    in_threads(lambda: work(0), lambda: work(1))
    return networks.gradients(model)


def one_after_another(scene: Scene) -> Any:
    model = Model("plain")
    for step in [0, 1] * 10:
        networks.loss(model, step).backward()
    return networks.gradients(model)


ROWS.add("backward from another thread", backward_elsewhere, here)
ROWS.add("two stacks training in two threads", two_stacks, twice)
ROWS.add("one stack in two threads at once", one_stack, one_after_another)


class Batches(Dataset[Any]):
    """A batch for each step. With a model, its output is added to the targets: it runs in the
    worker, after a fork.
    """

    def __init__(self, model: Model | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = networks.batch(step)
        if self.model is not None:
            torch.set_num_threads(1)
            with torch.no_grad():
                targets = targets + self.model(tokens)
        return tokens.cpu(), targets.cpu()


def loaded(model: Model, batches: Iterable[Any]) -> Any:
    found = {}
    for step, (tokens, targets) in enumerate(batches, 1):
        output = model(tokens.to(networks.DEVICE))
        torch.nn.functional.mse_loss(output, targets.to(networks.DEVICE)).backward()
        found[f"step {step}"] = networks.gradients(model)
    return found


def workers(scene: Scene) -> Any:
    model = Model(scene.contestant)
    networks.steps(model)  # so that autograd has its threads before the fork
    return loaded(
        model, DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    )


def forked(scene: Scene) -> Any:
    """The workers run a stack, too."""
    model = Model(scene.contestant)
    networks.steps(model)
    return loaded(
        model,
        DataLoader(Batches(model), batch_size=None, num_workers=2, multiprocessing_context="fork"),
    )


def unforked(scene: Scene) -> Any:
    batches = Batches(Model("plain"))
    return loaded(Model("plain"), [batches[step] for step in range(STEPS)])


ROWS.add("`DataLoader` with forked workers", workers, here)
ROWS.add("a stack that runs in forked workers", forked, unforked)
