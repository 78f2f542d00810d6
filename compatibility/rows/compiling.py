"""torch.compile of f and g, of the stack and of the model.

The backend is aot_eager, which traces as inductor does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
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
ROWS.add(
    "the whole model, `fullgraph=True`", functools.partial(train, whole_graph, "aot_eager"), plain
)
