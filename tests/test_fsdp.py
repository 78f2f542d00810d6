"""Promise 2: FSDP2 (`fully_shard`) gives the gradients of one process in plain autograd, wherever it is applied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import retrograd as rg
from tests import processes, zoo
from tests.processes import WORLD, Model

pytestmark = pytest.mark.distributed

STEPS = 2
PLACES: dict[str, Callable[[Model], list[nn.Module]]] = {  # in the order in which fully_shard wants them: inner ones first
    "f-and-g": lambda model: functions(model.stack),
    "blocks": lambda model: [*model.stack.blocks],
    "stack": lambda model: [model.stack],
    "root": lambda model: [model],
    "f-and-g-and-root": lambda model: [*functions(model.stack), model],
    "blocks-and-root": lambda model: [*model.stack.blocks, model],
    "everywhere": lambda model: [*functions(model.stack), *model.stack.blocks, model.stack, model],
}
MODELS: dict[str, dict[str, Any]] = {
    "shared-weights": {"shared": True},
    "frozen-embedding": {"frozen": True},
    "unused-parameter": {"unused": True},
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SEEDS = (100, 200)  # of dropout, one for each rank


def functions(stack: rg.ReversibleSequence) -> list[nn.Module]:
    return list(dict.fromkeys(fn for block in stack.blocks for fn in (block.f, block.g)))


# --- in the processes


def shard(modules: list[nn.Module], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in modules:
        fully_shard(module, mesh=mesh, **options)


def average(model: nn.Module) -> None:
    """Average the gradients that FSDP does not: those of parameters outside the modules it was applied to."""
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD


def train(place: str, reshard: bool, memory: Any, model_options: dict[str, Any], rank: int) -> list[Any]:
    """The gradients of each step and, at the end, the parameters."""
    model = Model(memory, **model_options)
    shard(PLACES[place](model), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(STEPS):
        processes.loss(model, step, rank).backward()
        average(model)
        optimizer.step()
        steps.append(processes.gradients(model))
    return [*steps, [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]]


def accumulate(memory: Any, rank: int) -> list[Any]:
    model = Model(memory)
    shard(PLACES["f-and-g-and-root"](model))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        processes.loss(model, step, rank).backward()
    return processes.gradients(model)


def drop(memory: Any, rank: int) -> list[Any]:
    model = Model(memory, dropout=0.5)
    shard(PLACES["f-and-g-and-root"](model))
    torch.manual_seed(SEEDS[rank])
    processes.loss(model, 0, rank).backward()
    return processes.gradients(model)


def two_forwards(memory: Any, rank: int) -> list[Any]:
    model = Model(memory)
    shard(PLACES["f-and-g-and-root"](model))
    first, second = processes.loss(model, 0, rank), processes.loss(model, 1, rank)
    (first + second).backward()
    return processes.gradients(model)


def mixed(place: str, memory: Any, rank: int) -> list[Any]:
    """Everything in float32 but what runs under the policy."""
    model = Model(memory, dtype=torch.float32)
    shard(PLACES[place](model), mp_policy=BF16)
    processes.loss(model, 0, rank).backward()
    average(model)
    return processes.gradients(model)


def cast_streams(memory: Any, rank: int) -> str:
    model = Model(memory, dtype=torch.float32)
    shard(PLACES["blocks"](model), mp_policy=BF16)
    try:
        processes.loss(model, 0, rank).backward()
    except rg.RetrogradError as error:
        return str(error)
    return "no error"


def whole_zoo(place: str, rank: int) -> dict[str, Any]:
    return {str(case): zoo_gradients(case, rank, place) for case in zoo.REVERSED}


def zoo_gradients(case: zoo.Case, rank: int, place: str | None = None) -> list[Any]:
    stack, x = case.build()
    x = [leaf.detach() * (1 + rank) for leaf in zoo.leaves(x)]
    if place:
        shard(functions(stack) if place == "f-and-g" else [*stack.blocks])
    zoo.loss(stack({"a": x[0], "b": x[1]} if case.value == "tree" else x[0])).backward()
    return processes.gradients(stack)


RESHARD = {"reshard": True, "keep-unsharded": False}
CASES: dict[str, processes.Case] = {f"zoo-{place}": functools.partial(whole_zoo, place) for place in ("f-and-g", "blocks")}
for name, memory in zoo.MEMORY.items():
    for place in PLACES:
        CASES |= {f"{place}-{when}-{name}": functools.partial(train, place, flag, memory, {}) for when, flag in RESHARD.items()}
    CASES |= {f"{model}-{name}": functools.partial(train, "f-and-g-and-root", True, memory, o) for model, o in MODELS.items()}
    CASES |= {
        f"{case.__name__}-{name}": functools.partial(case, memory) for case in (accumulate, drop, two_forwards, cast_streams)
    }
    CASES |= {
        f"mixed-{place}-{name}": functools.partial(mixed, place, memory)
        for place in ("f-and-g", "f-and-g-and-root", "blocks-and-root")
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    view = "FSDP2-wrapped module .* returned a view tensor"  # a chunk, for the affine coupling; nothing edits it in place
    return processes.run(CASES, tmp_path_factory.mktemp("fsdp"), ignore=[view])
