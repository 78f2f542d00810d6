"""Two threads that train, with dropout, on torch's one default generator.

`docs/limits.md` says what to type: a lock around all that draws, forward and backward. With it no
step may raise, and every gradient must be that of plain autograd with the same masks.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

import retrograd as rg
from speedrun.attacks.forks import Process
from speedrun.attacks.outcome import Outcome


class Dropped(nn.Module):
    """Linear, dropout, linear. Keeps the mask of its forward, so that it can be applied again."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.mask = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        if not rg.is_recomputing():
            self.mask = mask
        return self.again(x, mask)

    def again(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.b(self.a(x) * (self.mask if mask is None else mask)) * 0.1


def threads(count: int, draws: Random, folder: Path) -> Outcome:
    """Train two stacks in two threads, with a lock around each step."""
    process = Process(lambda: _train_in_threads(count))
    ended = process.wait(timeout=3600)
    return Outcome(count, () if ended.code == 0 else tuple(ended.err.strip().splitlines()[-5:]))


def _train_in_threads(count: int) -> int:
    lock = threading.Lock()
    lost: list[str] = []

    def train() -> None:
        pairs = [(Dropped(), Dropped()) for _ in range(4)]
        stack = rg.ReversibleSequence(pairs, memory=rg.Reverse(keep_last=False)).double()
        for _ in range(count // 2):
            stack.zero_grad()
            try:
                with lock:  # all that draws, data too
                    x = torch.randn(4, 16, dtype=torch.float64)
                    stack(x).square().sum().backward()
            except rg.RetrogradError as error:
                lost.append(str(error).splitlines()[0])
                continue
            if not _is_plain(stack, x):
                lost.append("a gradient is not that of plain autograd")

    both = [threading.Thread(target=train) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    for line in lost:
        print(line, file=sys.stderr)
    return 1 if lost else 0


def _is_plain(stack: rg.ReversibleSequence, x: Tensor) -> bool:
    x1 = x2 = x
    for block in stack.blocks:
        x1 = x1 + block.f.again(x2)  # type: ignore[operator,union-attr]
        x2 = x2 + block.g.again(x1)  # type: ignore[operator,union-attr]
    parameters = list(stack.parameters())
    expected = torch.autograd.grad(((x1 + x2) / 2).square().sum(), parameters)
    got = [parameter.grad for parameter in parameters]
    return all(torch.allclose(g, e, 1e-9) for g, e in zip(got, expected) if g is not None)
