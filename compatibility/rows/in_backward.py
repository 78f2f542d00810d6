"""The optimizer inside backward.

Each parameter is updated as soon as its gradient exists, and the gradient is freed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.cases import CONTESTANTS, Size, pairs
from compatibility import networks
from compatibility.networks import Model
from compatibility.verdict import Noted, Rows, Scene
from retrograd.measure import LiveBytes

ROWS = Rows("Optimizer in backward")
STEPS = 3


def step_in_backward(model: nn.Module) -> list[int]:
    """Register hooks that update parameters in backward.

    Returns a list that gets, for each gradient that arrives, the bytes of all gradients alive.
    """
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    alive: list[int] = []

    def step(parameter: torch.Tensor) -> None:
        alive.append(sum(p.grad.nbytes for p in optimizers if p.grad is not None))
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    return alive


def inside(scene: Scene) -> Any:
    model = Model(scene.contestant, shared=True)
    alive = step_in_backward(model)
    for step in range(STEPS):
        networks.loss(model, step).backward()
    every = sum(p.nbytes for p in model.parameters())
    together = {"all gradients alive at once": max(alive) == every}
    return Noted(networks.parameters(model) | together, peaks(scene.contestant))


def afterwards(scene: Scene) -> Any:
    model = Model("plain", shared=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        networks.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return networks.parameters(model) | {"all gradients alive at once": False}


ROWS.add("`register_post_accumulate_grad_hook`", inside, afterwards)

# More bytes in weights than in activations.
SIZE = Size("wide", blocks=8, width=64, batch=1, tokens=16)


def peaks(contestant: str) -> str:
    after, _ = peak(contestant, in_backward=False)
    within, alive = peak(contestant, in_backward=True)
    every = sum(p.nbytes for pair in pairs(SIZE) for fn in pair for p in fn.parameters())
    return (
        f"a step of {SIZE.blocks} transformer blocks, gradients and activations together: "
        f"{after // 1024:,} KiB with the optimizer after backward, {within // 1024:,} KiB with it "
        f"inside; gradients alive at once: {alive // 1024:,} of {every // 1024:,} KiB"
    )


def peak(contestant: str, in_backward: bool) -> tuple[int, int]:
    """The peak of live bytes in the second step, and the peak of bytes of gradients.

    What the first step leaves, such as the optimizer's state, is not counted.
    """
    network = CONTESTANTS[contestant](pairs(SIZE)).to(networks.DEVICE)
    live = LiveBytes()
    alive = step_in_backward(network) if in_backward else [0]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(SIZE.batch, SIZE.tokens, 2 * SIZE.width).to(networks.DEVICE).requires_grad_()
    for watch in (nullcontext(), live):
        with watch:
            network(x * 1.0).square().mean().backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
    return live.peak, max(alive)
