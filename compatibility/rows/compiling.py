"""torch.compile of f and g, of the stack and of the model.

The backend is aot_eager, which traces as inductor does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from compatibility import networks
from compatibility.networks import Layer, Model
from compatibility.verdict import Rows, Scene

ROWS = Rows("torch.compile")
STEPS = 2


def functions(model: Model, backend: Any) -> nn.Module:
    for function in model.functions:
        function.compile(backend=backend)
    return model


def stack(model: Model, backend: Any) -> nn.Module:
    model.stack.compile(backend=backend)
    return model


def everything(model: Model, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def whole_graph(model: Model, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def not_at_all(model: Model, backend: Any) -> nn.Module:
    return model


Way = Callable[[Model, Any], nn.Module]
WAYS: dict[str, Way] = {
    "f and g": functions,
    "`stack.compile()`": stack,
    "the whole model": everything,
}


def train(way: Way, backend: str, scene: Scene) -> Any:
    model = Model(scene.contestant)
    return networks.steps(way(model, backend), model, STEPS)


def plain(scene: Scene) -> Any:
    return networks.steps(Model("plain"), count=STEPS)


def drop(way: Way, scene: Scene) -> Any:
    model = Model(scene.contestant, dropout=0.5)
    compiled = way(model, "aot_eager")
    torch.manual_seed(3)
    return networks.steps(compiled, model, STEPS) | {"random state": networks.random_state()}


def autocast(way: Way, scene: Scene) -> Any:
    model = Model(scene.contestant, dtype=torch.float32)
    return networks.autocast_step(way(model, "aot_eager"), model)


def recompilations(way: Way, scene: Scene) -> Any:
    """How many graphs are compiled after the first forward, in its backward or in later steps."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = way(Model(scene.contestant), counter)
    counts = []
    for step in range(3):
        value = networks.loss(compiled, step)
        counts.append(counter.frame_count)
        value.backward()
    return {
        "graphs in forward": counts[0] > 0,
        "graphs compiled after the first forward": counter.frame_count - counts[0],
    }


def compiled_once(scene: Scene) -> Any:
    return {"graphs in forward": True, "graphs compiled after the first forward": 0}


def whole_step(scene: Scene) -> Any:
    """A compiled function that calls backward."""
    model = Model(scene.contestant)
    found = {}
    step = torch.compile(lambda step: networks.loss(model, step).backward(), backend="aot_eager")
    for i in range(STEPS):
        step(i)
        found[f"step {i + 1}"] = networks.gradients(model)
    return found


def one_block(compiled: bool, scene: Scene) -> Any:
    """Backward is traced, too. The stack has one block, because each takes seconds."""
    torch.manual_seed(17)
    functions = [Layer().to(networks.DEVICE, torch.float64) for _ in range(2)]
    stack = networks.build(scene.contestant, functions)  # type: ignore[arg-type]
    x = networks.stack_input().requires_grad_()

    def step() -> None:
        stack(x * 1.0).sin().sum().backward()

    if not compiled:
        step()
    else:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(step, backend="aot_eager")()
        assert counters["compiled_autograd"]["captures"]
    return [x.grad, *(p.grad for fn in functions for p in fn.parameters())]


EPS = torch.finfo(torch.bfloat16).eps
for title, way in WAYS.items():
    ROWS.add(title, functools.partial(train, way, "aot_eager"), plain)
    ROWS.add(
        f"{title}, with dropout", functools.partial(drop, way), functools.partial(drop, not_at_all)
    )
    ROWS.add(
        f"{title}, under autocast",
        functools.partial(autocast, way),
        functools.partial(autocast, not_at_all),
        limit=4 * EPS,
    )
    ROWS.add(
        f"{title}: compiled once, nothing in recompute",
        functools.partial(recompilations, way),
        compiled_once,
    )
ROWS.add("a step with its backward", whole_step, plain)
ROWS.add(
    "compiled autograd, one block",
    functools.partial(one_block, True),
    functools.partial(one_block, False),
)
ROWS.add("f and g, by inductor", functools.partial(train, functions, "inductor"), plain)


class Normalized(Layer):
    """A layer with running statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.statistics = nn.BatchNorm1d(networks.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x.flatten(0, 1)).view_as(x))


class Adapted(Layer):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(networks.WIDTH, 2), nn.Linear(2, networks.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


def train_with(options: dict[str, Any], way: Way, scene: Scene) -> Any:
    """Two steps, and the buffers after them."""
    model = Model(scene.contestant, **options)
    found = networks.steps(way(model, "aot_eager"), model, STEPS)
    buffers = [list(fn.buffers()) for fn in model.functions]
    return found | {"buffers": {str(i): list(map(torch.clone, b)) for i, b in enumerate(buffers)}}


def plain_with(options: dict[str, Any], scene: Scene) -> Any:
    return train_with(options, not_at_all, dataclasses.replace(scene, contestant="plain"))


def other_sizes(way: Way, scene: Scene) -> Any:
    """Batches of several sizes, with dynamic shapes from the second size on."""
    model = Model(scene.contestant)
    run = way(model, "aot_eager")
    found = {}
    for size in (4, 3, 2):
        tokens, targets = networks.batch()
        nn.functional.mse_loss(run(tokens[:size]), targets[:size]).backward()
        found[f"batch of {size}"] = networks.gradients(model)
    return found


def plain_sizes(scene: Scene) -> Any:
    return other_sizes(not_at_all, dataclasses.replace(scene, contestant="plain"))


WHOLE = "the whole model, `fullgraph=True`"
ROWS.add(WHOLE, functools.partial(train, whole_graph, "aot_eager"), plain)
ROWS.add(
    f"{WHOLE}, with dropout",
    functools.partial(drop, whole_graph),
    functools.partial(drop, not_at_all),
)
ROWS.add(
    f"{WHOLE}, under autocast",
    functools.partial(autocast, whole_graph),
    functools.partial(autocast, not_at_all),
    limit=4 * EPS,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "BatchNorm's statistics": {"layer": Normalized},
    "a frozen stack with adapters": {"layer": Adapted, "frozen": True},
}
for title, options in OPTIONS.items():
    ROWS.add(
        f"{WHOLE}, {title}",
        functools.partial(train_with, options, whole_graph),
        functools.partial(plain_with, options),
    )
ROWS.add(
    f"{WHOLE}, batches of several sizes",
    functools.partial(other_sizes, whole_graph),
    plain_sizes,
)
