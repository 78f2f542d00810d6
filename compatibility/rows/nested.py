"""Checkpoints inside and around a stack, stacks inside stacks, offloading, counters, profilers and
hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from compatibility import networks
from compatibility.networks import WIDTH, Layer, Model, build
from compatibility.verdict import Rows, Scene

ROWS = Rows("Nested and watched")


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def keep_products(*_: Any, **__: Any) -> Any:
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE
            if op is torch.ops.aten.addmm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


class Selective(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=keep_products)


class Inner(nn.Module):
    """A function that is a stack."""

    def __init__(self, contestant: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.stack = build(contestant, [Layer(dropout) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.stack(self.widen(x)))


def two_steps(
    model: Model,
    run: Callable[..., Tensor] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Gradients of two steps."""
    with around():
        return dict(networks.steps(run or model, model, 2))


def with_layer(layer: Any, scene: Scene) -> Any:
    return two_steps(Model(scene.contestant, layer=layer))


def plain(scene: Scene) -> Any:
    return two_steps(Model("plain"))


ROWS.add(
    "`torch.utils.checkpoint` inside f and g", functools.partial(with_layer, Checkpointed), plain
)
ROWS.add("selective checkpointing inside f and g", functools.partial(with_layer, Selective), plain)


def around_stack(scene: Scene, **options: Any) -> Any:
    model = Model(scene.contestant)

    def run(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        return model.head(checkpoint(model.stack, x, use_reentrant=False, **options))

    return two_steps(model, run)


ROWS.add("`torch.utils.checkpoint` around the stack", around_stack, plain)
ROWS.add(
    "selective checkpointing around the stack",
    functools.partial(around_stack, context_fn=keep_products),
    plain,
)


def stack_in_stack(scene: Scene) -> Any:
    model = Model(scene.contestant, layer=functools.partial(Inner, scene.contestant))
    # Names of inner parameters depend on the contestant, their order does not.
    return {name: list(found.values()) for name, found in two_steps(model).items()}


ROWS.add("a stack inside a block of a stack", stack_in_stack, stack_in_stack)


def inside(context: Callable[[], AbstractContextManager[Any]], scene: Scene) -> Any:
    return two_steps(Model(scene.contestant), around=context)


ROWS.add(
    "`torch.autograd.graph.save_on_cpu`",
    functools.partial(inside, torch.autograd.graph.save_on_cpu),
    plain,
)
ROWS.add("anomaly mode", functools.partial(inside, torch.autograd.detect_anomaly), plain)


def flops(scene: Scene) -> Any:
    """The counter must also count the products of backward and of recompute."""
    counter = FlopCounterMode(display=False)
    found = two_steps(Model(scene.contestant), around=lambda: counter)
    return found | {"all of the step was seen": counter.get_total_flops() >= counted()}


@functools.cache
def counted() -> int:
    """The FLOPs of the same steps in plain autograd."""
    counter = FlopCounterMode(display=False)
    two_steps(Model("plain"), around=lambda: counter)
    return counter.get_total_flops()


def flops_of_plain(scene: Scene) -> Any:
    return plain(scene) | {"all of the step was seen": True}


ROWS.add("`FlopCounterMode`", flops, flops_of_plain)


def profiled(scene: Scene) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        found = two_steps(Model(scene.contestant))
    names = {event.key for event in profile.key_averages()}
    return found | {"layers seen": "aten::addmm" in names}


ROWS.add("the profiler", profiled, profiled)


# --- hooks


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return 2 * output


def forward_hooks(scene: Scene) -> Any:
    """Hooks that change the input of f and the output of g. They must run in recompute, too."""
    model = Model(scene.contestant)
    for i, function in enumerate(model.functions):
        if i % 2:
            function.register_forward_hook(doubled)
        else:
            function.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return two_steps(model)


def backward_hooks(scene: Scene) -> Any:
    """The gradients that full backward hooks on f and g see; one of the hooks changes them."""
    model = Model(scene.contestant)
    seen = {}
    for i, function in enumerate(model.functions):

        def look(module: nn.Module, inputs: Any, outputs: Any, i: int = i) -> Any:
            seen.setdefault(i, []).append((inputs[0].clone(), outputs[0].clone()))
            return (inputs[0] * 2,) if i == 1 else None

        function.register_full_backward_hook(look)
    return two_steps(model) | {"seen by hooks": seen}


def gradient_hooks(scene: Scene) -> Any:
    """Hooks on shared parameters run once per backward, with the whole gradient."""
    model = Model(scene.contestant, shared=True)
    seen = {}
    for name, parameter in model.named():
        parameter.register_hook(
            lambda grad, name=name: seen.setdefault(name, []).append(grad.clone())
        )
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone())
        )
    return two_steps(model) | {"seen by hooks": seen}


def module_hooks(scene: Scene) -> Any:
    """Hooks on the stack itself."""
    model = Model(scene.contestant)
    seen = []
    model.stack.register_forward_hook(doubled)
    model.stack.register_full_backward_pre_hook(lambda module, grads: seen.append(grads[0].clone()))
    return two_steps(model) | {"seen by hooks": seen}


for title, run in {
    "forward hooks on f and g": forward_hooks,
    "backward hooks on f and g": backward_hooks,
    "gradient hooks, with shared weights": gradient_hooks,
    "hooks on the stack": module_hooks,
}.items():
    ROWS.add(title, run, run)
