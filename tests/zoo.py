"""Every coupling, stream type and memory mode, listed once; and the oracle: the same equations in
plain autograd.

A behaviour is tested over the whole zoo: `@pytest.mark.parametrize("case", zoo.CASES, ids=str)`,
then `case.build()`. The oracle shares nothing with the library but the modules f and g.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograd as rg


class Mix(nn.Module):
    """A small function of one tensor, with everything that makes life hard: dropout, a context,
    several outputs.
    """

    def __init__(self, width: int, dropout: float = 0.0, outputs: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, outputs * width)
        self.outputs = outputs

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        h = self.up(self.norm(x))
        if context is not None:
            h = h + context.mean()
        y = self.down(self.drop(torch.tanh(h)))
        return y if self.outputs == 1 else y.chunk(self.outputs, -1)


class TreeMix(nn.Module):
    """The same for a dict of two tensors of different shape, each of which also sees the other."""

    def __init__(self, width: int, dropout: float = 0.0, outputs: int = 1) -> None:
        super().__init__()
        self.a, self.b = Mix(width, dropout, outputs), Mix(width + 2, dropout, outputs)
        self.outputs = outputs

    def forward(self, x: dict[str, Tensor], context: Tensor | None = None) -> Any:
        a = self.a(x["a"] + x["b"].mean(), context)
        b = self.b(x["b"] * x["a"].mean(), context)
        if self.outputs == 1:
            return {"a": a, "b": b}
        return tuple({"a": a[i], "b": b[i]} for i in range(self.outputs))


class Scaled(rg.Coupling):
    """A user's own coupling, with a scale of its own."""

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        return 0.8 * x + out * 1.5

    def inverse(self, y: Tensor, out: Tensor) -> Tensor:
        return (y - out * 1.5) / 0.8


COUPLINGS: dict[str, tuple[Any, int]] = {  # and how many outputs a function has
    "additive": (rg.Additive(), 1),
    "affine": (rg.Affine(), 2),
    "momentum": (rg.Momentum(0.9), 1),
    "own": (Scaled(), 1),
}
if hasattr(rg, "Scaled"):  # `benchmarks.compare_checkouts` runs this file with older checkouts, too
    COUPLINGS["scaled"] = (rg.Scaled(-0.8), 1)
STREAMS = {
    "mean": rg.Duplicate("mean"),
    "sum": rg.Duplicate("sum"),
    "split": rg.Split(-1),
    "at-rest": rg.AtRest(),
}
MEMORY = {"keep": rg.Keep(), "reverse": rg.Reverse(), "reverse-all": rg.Reverse(keep_last=False)}
VALUES = ("tensor", "tree")


@dataclass(frozen=True)
class Case:
    coupling: str
    streams: str
    value: str
    memory: str

    def __str__(self) -> str:
        return f"{self.coupling}-{self.streams}-{self.value}-{self.memory}"

    def build(
        self, depth: int = 3, dropout: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> tuple[rg.ReversibleSequence, Any]:
        """A stack and an input that requires grad, the same at every call."""
        torch.manual_seed(17)
        coupling, outputs = COUPLINGS[self.coupling]
        fn: Callable[..., nn.Module] = {"tensor": Mix, "tree": TreeMix}[self.value]
        blocks = [(fn(4, dropout, outputs), fn(4, dropout, outputs)) for _ in range(depth)]
        stack = rg.ReversibleSequence(
            blocks, streams=STREAMS[self.streams], memory=MEMORY[self.memory], coupling=coupling
        )
        times = 2 if self.streams == "split" else 1
        x: Any = torch.randn(2, 3, 4 * times, dtype=dtype, requires_grad=True)
        if self.value == "tree":
            x = {"a": x, "b": torch.randn(5, 6 * times, dtype=dtype, requires_grad=True)}
        return stack.to(dtype), x


CASES = [Case(*names) for names in itertools.product(COUPLINGS, STREAMS, VALUES, MEMORY)]
REVERSED = [case for case in CASES if case.memory != "keep"]


# --- the oracle


def leaves(value: Any) -> list[Tensor]:
    return pytree.tree_leaves(value)


def couple(coupling: Any, x: Any, out: Any) -> Any:
    """What the docstrings of the couplings promise, written out once more."""
    if isinstance(coupling, rg.Additive):
        return pytree.tree_map(lambda x, o: x + o, x, out)
    if isinstance(coupling, rg.Momentum):
        return pytree.tree_map(lambda x, o: coupling.gamma * x + (1 - coupling.gamma) * o, x, out)
    if hasattr(coupling, "a"):
        return pytree.tree_map(lambda x, o: coupling.a * x + o, x, out)
    if isinstance(coupling, rg.Affine):
        scale, shift = out
        return pytree.tree_map(
            lambda x, s, t: x * torch.exp(coupling.limit * torch.tanh(s / coupling.limit)) + t,
            x,
            scale,
            shift,
        )
    return pytree.tree_map(lambda x, o: 0.8 * x + o * 1.5, x, out)


def plain_stack(stack: rg.ReversibleSequence, x: Any, **kwargs: Any) -> Any:
    """A stack in plain autograd."""
    kind = stack.streams
    if isinstance(kind, rg.Split):
        x1, x2 = (pytree.tree_map(lambda t, i=i: t.chunk(2, kind.dim)[i], x) for i in (0, 1))
    elif isinstance(kind, rg.AtRest):
        x1, x2 = pytree.tree_map(torch.zeros_like, x), x
    else:
        x1, x2 = x, x
    add = rg.Additive()
    for block in stack.blocks:
        x1 = couple(stack.coupling, x1, block.f(x2, **kwargs))
        if isinstance(stack.coupling, rg.Momentum):
            x2 = couple(add, x2, x1)
            x1 = couple(stack.coupling, x1, block.g(x2, **kwargs))
            x2 = couple(add, x2, x1)
        else:
            x2 = couple(stack.coupling, x2, block.g(x1, **kwargs))
    if isinstance(kind, rg.Split):
        return pytree.tree_map(lambda a, b: torch.cat((a, b), kind.dim), x1, x2)
    if isinstance(kind, rg.AtRest):
        return x2
    return pytree.tree_map(lambda a, b: (a + b) / (2 if kind.merge == "mean" else 1), x1, x2)


def plain_program(net: rg.Reversible, streams: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """A program in plain autograd."""
    streams = dict(streams)
    for update in net.updates:
        out = update.fn(*[streams[name] for name in update.reads], **kwargs)
        streams[update.target] = couple(update.coupling, streams[update.target], out)
    return streams


def loss(value: Any) -> Tensor:
    """A scalar whose gradient differs for every element."""
    return sum((leaf.sin() * _weights(leaf)).sum() for leaf in leaves(value))


def _weights(leaf: Tensor) -> Tensor:
    return torch.arange(leaf.numel(), dtype=leaf.dtype, device=leaf.device).view_as(leaf).cos()


def gradients(module: nn.Module, output: Any, *inputs: Any) -> list[Tensor | None]:
    """Gradients of `loss(output)`: of the inputs' leaves, then of the module's parameters. Leaves
    `.grad` alone.
    """
    wanted = [*leaves(list(inputs)), *module.parameters()]
    return list(
        torch.autograd.grad(loss(output), [t for t in wanted if t.requires_grad], allow_unused=True)
    )


def worst(got: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest difference, relative to the largest value of its tensor. Infinite where one has a
    gradient and one has not.

    Gradients that are zero but for rounding (a bias before BatchNorm) are measured against the
    largest of all, times 1e-6.
    """
    assert len(got) == len(expected)
    assert got
    floor = (
        1e-6 * max((b.abs().max().item() for b in expected if b is not None), default=0.0) + 1e-30
    )
    errors = [0.0]
    for a, b in zip(got, expected):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            errors.append(((a - b).abs().max() / b.abs().max().clamp(min=floor)).item())
    return max(errors)
