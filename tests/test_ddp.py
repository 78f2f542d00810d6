"""Promise 2: DistributedDataParallel gives the gradients of one process in plain autograd."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from tests import processes, zoo
from tests.processes import REVERSED, WORLD, Gradients, Model

pytestmark = pytest.mark.distributed

STEPS = 3  # DDP lays out its buckets anew after the first step, and takes down a static graph in it
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the model, of DDP
    "default": ({}, {}),
    "many-buckets": ({}, {"bucket_cap_mb": 1e-4}),
    "find-unused": ({}, {"find_unused_parameters": True}),
    "static-graph": ({}, {"static_graph": True}),
    "unused-parameter": ({"second": processes.Unused}, {"find_unused_parameters": True}),
    "unused-parameter-static-graph": ({"second": processes.Unused}, {"static_graph": True}),
    "shared-weights": ({"shared": True}, {}),
    "shared-weights-static-graph": ({"shared": True}, {"static_graph": True}),
    "frozen-embedding": ({"frozen": True}, {}),
    "saves-nothing": ({"second": processes.Shift}, {}),
    "bucket-views": ({}, {"gradient_as_bucket_view": True}),
}


# --- in the processes


def train(
    model_options: dict[str, Any], ddp_options: dict[str, Any], memory: Any, rank: int
) -> list[Gradients]:
    """The gradients of each step."""
    model = DistributedDataParallel(Model(memory, **model_options), **ddp_options)
    steps = []
    for step in range(STEPS):
        processes.loss(model, step, rank).backward()
        steps.append(processes.gradients(model))
    return steps


def accumulate(memory: Any, rank: int) -> Gradients:
    model = DistributedDataParallel(Model(memory))
    with model.no_sync():
        processes.loss(model, 0, rank).backward()
        processes.loss(model, 1, rank).backward()
    processes.loss(model, 2, rank).backward()
    return processes.gradients(model)


def drop(memory: Any, rank: int) -> Gradients:
    return processes.dropout_gradients(DistributedDataParallel(Model(memory, dropout=0.5)), rank)


def normalize(memory: Any, rank: int) -> tuple[Gradients, list[Tensor]]:
    """Two steps: before the second, DDP gives all ranks the buffers of rank 0."""
    model = DistributedDataParallel(batch_norm(memory))
    for step in range(2):
        model.zero_grad()
        batch_norm_loss(model, step, rank).backward()
    return processes.gradients(model), list(model.buffers())


def batch_norm(memory: Any) -> rg.ReversibleSequence:
    torch.manual_seed(17)
    fns = [nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()).double() for _ in range(6)]
    return rg.ReversibleSequence(zip(fns[::2], fns[1::2]), memory=memory)


def batch_norm_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(6, 4, generator=generator, dtype=torch.float64)).square().mean()


def whole_zoo(rank: int) -> dict[str, Gradients]:
    return {
        str(case): processes.zoo_gradients(case, rank, DistributedDataParallel)
        for case in zoo.REVERSED
    }


CASES: dict[str, processes.Case] = {"zoo": whole_zoo}
for name, memory in REVERSED.items():
    CASES |= {
        f"{setup}-{name}": functools.partial(train, *options, memory)
        for setup, options in SETUPS.items()
    }
    CASES |= {
        f"{case.__name__}-{name}": functools.partial(case, memory)
        for case in (accumulate, drop, normalize)
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.run(CASES, tmp_path_factory.mktemp("ddp"))


# --- against one process in plain autograd


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize("setup", SETUPS)
def test_every_step_has_the_gradients_of_one_process(results, setup, memory):
    model = Model(**SETUPS[setup][0])
    for step in range(STEPS):
        processes.loss(model, step).backward()
        expected = processes.gradients(model)
        for steps in results[f"{setup}-{memory}"]:
            assert zoo.worst(steps[step], expected) < 1e-9


@pytest.mark.parametrize("memory", REVERSED)
def test_no_sync_accumulates(results, memory):
    expected = processes.accumulated(3)
    for got in results[f"accumulate-{memory}"]:
        assert zoo.worst(got, expected) < 1e-9


@pytest.mark.parametrize("memory", REVERSED)
def test_dropout_replays_the_draws_of_each_rank(results, memory):
    expected = processes.mean(
        processes.dropout_gradients(Model(dropout=0.5), rank) for rank in range(WORLD)
    )
    for got in results[f"drop-{memory}"]:
        assert zoo.worst(got, expected) < 1e-9


@pytest.mark.parametrize("memory", REVERSED)
def test_buffers_are_broadcast_and_updated_once(results, memory):
    models = [batch_norm(rg.Keep()) for _ in range(WORLD)]
    for step in range(2):
        models[1].load_state_dict(models[0].state_dict())
        for rank, model in enumerate(models):
            model.zero_grad()
            batch_norm_loss(model, step, rank).backward()
    expected = processes.mean(processes.gradients(model) for model in models)
    for (got, buffers), model in zip(results[f"normalize-{memory}"], models):
        assert zoo.worst(got, expected) < 1e-9
        assert zoo.worst(buffers, list(model.buffers())) < 1e-14


@pytest.mark.parametrize("case", zoo.REVERSED, ids=str)
def test_whole_zoo(results, case):
    plain = zoo.Case(case.coupling, case.streams, case.value, "keep")
    expected = processes.mean(processes.zoo_gradients(plain, rank) for rank in range(WORLD))
    for got in results["zoo"]:
        assert zoo.worst(got[str(case)], expected) < 1e-9
