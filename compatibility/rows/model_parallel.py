"""Tensor parallel functions, and a stack cut into the stages of a pipeline; two processes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compatibility import networks
from compatibility.networks import BATCH, DEPTH, Model, blocks_of
from compatibility.verdict import Rows, Scene

ROWS = Rows("Tensor parallel and pipelines")


def split_layers(scene: Scene) -> Any:
    """Each process has half of the hidden units of f and g, and runs the whole batch."""
    model = Model(scene.contestant)
    mesh = init_device_mesh(networks.DEVICE, (2,))
    for function in model.functions:
        parallelize_module(function, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return networks.steps(model, count=2)


def alone(scene: Scene) -> Any:
    return networks.steps(Model("plain"), count=2)


ROWS.add("`parallelize_module` on f and g", split_layers, alone, processes=2)


# --- pipelines


class Start(nn.Module):
    """The embedding and the first half of the stack."""

    def __init__(self, model: Model, stack: nn.Module) -> None:
        super().__init__()
        self.embedding = model.embedding
        self.stack = stack

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stack(self.embedding(tokens))


class End(nn.Module):
    """The other half, and the head."""

    def __init__(self, model: Model, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack
        self.head = model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stack(x))


def stages(schedule: Any, scene: Scene) -> Any:
    """Two stacks of half the depth; both streams pass from one to the other."""
    model = Model(scene.contestant)
    first = networks.build(scene.contestant, model.functions[:DEPTH])
    second = networks.build(scene.contestant, model.functions[DEPTH:])
    module = Start(model, first) if scene.rank == 0 else End(model, second)
    run_schedule(
        schedule, PipelineStage(module, scene.rank, 2, torch.device(networks.DEVICE)), scene.rank
    )
    return {name: p.grad for name, p in own_part(model, scene.rank).items()}


def run_schedule(schedule: Any, stage: Any, rank: int) -> None:
    tokens, targets = networks.batch()
    steps = schedule(stage, n_microbatches=BATCH, loss_fn=nn.functional.mse_loss)
    steps.step(tokens) if rank == 0 else steps.step(target=targets)


def own_part(model: Model, rank: int) -> dict[str, nn.Parameter]:
    """The parameters of one process."""
    parts = (*model.functions[DEPTH * rank :][:DEPTH], model.head if rank else model.embedding)
    ours = {id(p) for part in parts for p in part.parameters()}
    return {name: p for name, p in model.named() if id(p) in ours}


def whole(scene: Scene) -> Any:
    model = Model("plain")
    networks.loss(model).backward()
    return {name: p.grad for name, p in own_part(model, scene.rank).items()}


ROWS.add(
    "a stack cut into two pipeline stages, GPipe",
    functools.partial(stages, ScheduleGPipe),
    whole,
    processes=2,
)
ROWS.add(
    "a stack cut into two pipeline stages, 1F1B",
    functools.partial(stages, Schedule1F1B),
    whole,
    processes=2,
)


def traced(scene: Scene) -> Any:
    """torch cuts the model, which it exports for that."""
    model = Model(scene.contestant)
    middle = blocks_of(model.stack)[len(blocks_of(model.stack)) // 2]
    block = next(name for name, part in model.named_modules() if part is middle)
    tokens, _ = networks.batch()
    pipe = pipeline(model, (tokens[:1],), split_spec={block: SplitPoint.BEGINNING})
    stage = pipe.build_stage(scene.rank, torch.device(networks.DEVICE))
    run_schedule(ScheduleGPipe, stage, scene.rank)
    grads = {name: p.grad for name, p in stage.submod.named_parameters()}
    paths = {id(p): path for path, p in model.named_parameters()}
    return {name: grads.get(paths[id(p)]) for name, p in own_part(model, scene.rank).items()}


ROWS.add("a pipeline cut by `torch.distributed.pipelining.pipeline`", traced, whole, processes=2)
