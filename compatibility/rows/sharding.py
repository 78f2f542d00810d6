"""FSDP2 and distributed checkpoints.

Gradients and parameters must be those of one process, whichever modules are sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from compatibility import networks
from compatibility.networks import Model, blocks_of
from compatibility.verdict import Rows, Scene

ROWS = Rows("FSDP2")
CHECKPOINTS = Rows("Distributed checkpoints")
STEPS = 2


def shard(modules: list[nn.Module], **options: Any) -> None:
    mesh = init_device_mesh(networks.DEVICE, (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh, **options)


def average(model: nn.Module) -> None:
    """Average the gradients of parameters outside the sharded modules, as FSDP does inside."""
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_steps(
    model: Model, optimizer: torch.optim.Optimizer, count: range, rank: int | None = None
) -> Any:
    """The gradients of each step, and the parameters at the end."""
    found = {}
    for step in count:
        networks.loss(model, step, rank).backward()
        if rank is not None:
            average(model)
        optimizer.step()
        found[f"step {step + 1}"] = networks.gradients(model)
    return found | {"parameters": networks.parameters(model)}


def train(
    choose: Callable[[Model], list[nn.Module]],
    options: dict[str, Any],
    scene: Scene,
    compiled: bool = False,
) -> Any:
    model = Model(scene.contestant)
    if compiled:
        model.stack.compile(backend="aot_eager")
    shard(choose(model), **options)
    return train_steps(model, optimizer_of(model), range(STEPS), scene.rank)


def alone(scene: Scene) -> Any:
    model = Model("plain")
    return train_steps(model, optimizer_of(model), range(STEPS))


# Which modules are sharded, inner ones first, and the options of `fully_shard`.
PLACES: dict[str, tuple[Callable[[Model], list[nn.Module]], dict[str, Any]]] = {
    "on f and g": (lambda model: [*model.functions], {}),
    "on each block": (lambda model: blocks_of(model.stack), {}),
    "on the stack": (lambda model: [model.stack], {}),
    "at the root": (lambda model: [model], {}),
    "on f, g and the root": (lambda model: [*model.functions, model], {}),
    "on each block and the root": (lambda model: [*blocks_of(model.stack), model], {}),
    "`reshard_after_forward=True`": (
        lambda model: [*model.functions, model],
        {"reshard_after_forward": True},
    ),
    "`reshard_after_forward=False`": (
        lambda model: [*model.functions, model],
        {"reshard_after_forward": False},
    ),
}
for title, (choose, options) in PLACES.items():
    ROWS.add(title, functools.partial(train, choose, options), alone, processes=2)
ROWS.add(
    "`stack.compile()` before",
    functools.partial(train, PLACES["on f, g and the root"][0], {}, compiled=True),
    alone,
    processes=2,
)


def mixed(choose: Callable[[Model], list[nn.Module]], scene: Scene) -> Any:
    """bfloat16 in f and g."""
    model = Model(scene.contestant, dtype=torch.float32)
    shard(choose(model), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    networks.loss(model, 0, scene.rank).backward()
    average(model)
    return networks.gradients(model)


def in_full(scene: Scene) -> Any:
    return networks.steps(Model("plain", dtype=torch.float32))["step 1"]


# f and g round to bfloat16, so the limit is a few of its rounding steps.
EPS = torch.finfo(torch.bfloat16).eps
for place in ("on f and g", "on each block and the root"):
    ROWS.add(
        f"mixed precision policy {place}",
        functools.partial(mixed, PLACES[place][0]),
        in_full,
        processes=2,
        limit=8 * EPS,
    )


# --- checkpoints: two steps, saved; loaded by other processes, two more steps


def prepared(scene: Scene) -> tuple[Model, torch.optim.Optimizer, int | None]:
    """A model and its optimizer, sharded if there are two processes."""
    model = Model(scene.contestant)
    if not dist.is_initialized():
        return model, optimizer_of(model), None
    shard([*model.functions, model])
    return model, optimizer_of(model), scene.rank


def save(scene: Scene) -> None:
    model, optimizer, rank = prepared(scene)
    train_steps(model, optimizer, range(STEPS), rank)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=scene.folder / "checkpoint")


def load(scene: Scene) -> Any:
    model, optimizer, rank = prepared(scene)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=scene.folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return train_steps(model, optimizer, range(STEPS, 2 * STEPS), rank)


def uninterrupted(scene: Scene) -> Any:
    model = Model("plain")
    optimizer = optimizer_of(model)
    train_steps(model, optimizer, range(STEPS))
    return train_steps(model, optimizer, range(STEPS, 2 * STEPS))


CHECKPOINTS.add("saved by 2 processes, loaded by 1", load, uninterrupted, before=((2, save),))
CHECKPOINTS.add(
    "saved by 1 process, loaded by 2", load, uninterrupted, before=((1, save),), processes=2
)
