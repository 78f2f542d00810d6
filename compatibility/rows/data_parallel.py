"""DistributedDataParallel in two processes.

Every rank must have the gradients that one process has for the whole batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compatibility import networks
from compatibility.networks import Layer, Model
from compatibility.verdict import Rows, Scene

ROWS = Rows("DDP")
STEPS = 3  # DDP rebuilds its buckets after the first, and records a static graph in it


class Spare(Layer):
    """A layer with a parameter that never gets a gradient."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.spare = nn.Parameter(torch.ones(3))


class Synchronized(Layer):
    """A layer that subtracts the mean over all processes and keeps a running average of it.

    SyncBatchNorm does so on GPUs.
    """

    average: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.register_buffer("average", torch.zeros(networks.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 1))
        if dist.is_initialized():
            mean = collectives.all_reduce(mean) / dist.get_world_size()  # type: ignore[operator]
        self.average.lerp_(mean.detach(), 0.1)
        return super().forward(x - mean)


def train(
    ddp: dict[str, Any], options: dict[str, Any], scene: Scene, compiled: bool = False
) -> Any:
    model = Model(scene.contestant, **options)
    if compiled:
        model.stack.compile(backend="aot_eager")
    return networks.steps(DistributedDataParallel(model, **ddp), model, STEPS, scene.rank)


def alone(options: dict[str, Any], scene: Scene) -> Any:
    return networks.steps(Model("plain", **options), count=STEPS)


SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of DDP, options of the model
    "as it comes": ({}, {}),
    "`find_unused_parameters`": ({"find_unused_parameters": True}, {}),
    "`static_graph`": ({"static_graph": True}, {}),
    "a parameter that is not used": ({"find_unused_parameters": True}, {"layer": Spare}),
    "weights shared between blocks": ({}, {"shared": True}),
    "a frozen embedding before the stack": ({}, {"frozen": True}),
    "`gradient_as_bucket_view`": ({"gradient_as_bucket_view": True}, {}),
}
for title, (ddp, options) in SETUPS.items():
    ROWS.add(
        title,
        functools.partial(train, ddp, options),
        functools.partial(alone, options),
        processes=2,
    )


ROWS.add(
    "`stack.compile()` before",
    functools.partial(train, {}, {}, compiled=True),
    functools.partial(alone, {}),
    processes=2,
)


def accumulate(scene: Scene) -> Any:
    inner = Model(scene.contestant)
    model = DistributedDataParallel(inner)
    with model.no_sync():
        networks.loss(model, 0, scene.rank).backward()
        networks.loss(model, 1, scene.rank).backward()
    networks.loss(model, 2, scene.rank).backward()
    return networks.gradients(inner)


def accumulated(scene: Scene) -> Any:
    model = Model("plain")
    for step in range(3):
        networks.loss(model, step).backward()
    return networks.gradients(model)


ROWS.add("accumulation under `no_sync`", accumulate, accumulated, processes=2)


def state_of(model: Model) -> dict[str, Any]:
    return {
        "buffers": {f"function {i}, average": fn.average for i, fn in enumerate(model.functions)}
    }


def synchronize(scene: Scene) -> Any:
    model = Model(scene.contestant, layer=Synchronized)
    found = networks.steps(DistributedDataParallel(model), model, STEPS, scene.rank)
    return found | state_of(model)


def synchronized(scene: Scene) -> Any:
    model = Model("plain", layer=Synchronized)
    return networks.steps(model, count=STEPS) | state_of(model)


ROWS.add(
    "statistics of all processes in a buffer, as SyncBatchNorm",
    synchronize,
    synchronized,
    processes=2,
)


def seeded(model: nn.Module, inner: Model, rank: int) -> dict[str, Tensor | None]:
    torch.manual_seed(100 + rank)
    networks.loss(model, 0, rank).backward()
    return networks.gradients(inner)


def drop(scene: Scene) -> Any:
    inner = Model(scene.contestant, dropout=0.5)
    found = seeded(DistributedDataParallel(inner), inner, scene.rank)
    return found | {"random state": networks.random_state()}


def dropped(scene: Scene) -> Any:
    """The mean of both ranks' gradients, and this rank's random state afterwards."""
    inner = Model("plain", dropout=0.5)
    other = seeded(inner, inner, 1 - scene.rank)
    own = seeded(inner, inner, scene.rank)
    mean = {name: (own[name] + other[name]) / 2 for name in own}  # type: ignore[operator]
    return mean | {"random state": networks.random_state()}


ROWS.add("dropout, another seed in each process", drop, dropped, processes=2)
