"""Training without any tool."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from compatibility import networks
from compatibility.networks import WIDTH, Layer, Model
from compatibility.verdict import Rows, Scene

ROWS = Rows("Autograd itself")


def train(options: dict[str, Any], scene: Scene) -> Any:
    return networks.steps(Model(scene.contestant, **options), count=2)


def drop(scene: Scene) -> Any:
    model = Model(scene.contestant, dropout=0.5)
    torch.manual_seed(3)
    return networks.steps(model, count=2) | {"random state": networks.random_state()}


class Normalized(Layer):
    """A layer with running statistics, which forward updates."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.flatten(0, 1)).view_as(x))


def statistics(scene: Scene) -> Any:
    model = Model(scene.contestant, layer=Normalized)
    found = networks.steps(model, count=2)
    return found | {"buffers": [buffer for fn in model.functions for buffer in fn.buffers()]}


def autocast(scene: Scene) -> Any:
    model = Model(scene.contestant, dtype=torch.float32)
    return networks.autocast_step(model, model)


def only_gradients(scene: Scene) -> Any:
    """`autograd.grad` gives gradients and leaves `.grad` alone."""
    model = Model(scene.contestant)
    parameters = dict(model.named())
    found = torch.autograd.grad(networks.loss(model), list(parameters.values()))
    return dict(zip(parameters, found)) | {"grad": [p.grad for p in parameters.values()]}


def retained(scene: Scene) -> Any:
    model = Model(scene.contestant)
    value = networks.loss(model)
    value.backward(retain_graph=True)
    value.backward()
    return networks.gradients(model)


def second_order(scene: Scene) -> Any:
    """A penalty on the gradient of the stack's input."""
    model = Model(scene.contestant)
    x = networks.stack_input().requires_grad_()
    loss = model.head(model.stack(x * 1.0)).sin().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    return networks.gradients(model)


def two_forwards(scene: Scene) -> Any:
    """Forwards in train and eval, then the backward of the first."""
    model = Model(scene.contestant, dropout=0.5)
    torch.manual_seed(3)
    first = networks.loss(model, 0)
    model.eval()
    networks.loss(model, 1)
    first.backward()
    return networks.gradients(model)


for title, run in {
    "dropout": drop,
    "BatchNorm's statistics": statistics,
    "autocast to bfloat16": autocast,
    "an input that needs no gradient": functools.partial(train, {"frozen": True}),
    "weights shared between blocks": functools.partial(train, {"shared": True}),
    "`torch.autograd.grad`": only_gradients,
    "`retain_graph` and a second backward": retained,
    "double backward": second_order,
    "another forward, in `eval()`, before backward": two_forwards,
}.items():
    limit = 4 * torch.finfo(torch.bfloat16).eps if run is autocast else 1e-9
    ROWS.add(title, run, run, limit=limit)
