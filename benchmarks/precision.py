"""How precisely each coupling is undone in float32: gradients of a deep stack, rebuilt against
kept.

    python -m benchmarks.precision [--depth 24]

Prints, for each coupling and kind of streams, the largest difference of any gradient, relative to
the largest gradient; beside it what float32 itself costs: the same, kept, against float64. Blocks
are attention and feed-forward, width 64, as initialised.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.cases import Attention, FeedForward

COUPLINGS: dict[str, Any] = {
    "Additive()": rg.Additive(),
    "Affine()": rg.Affine(),
    "Momentum(0.9)": rg.Momentum(0.9),
}
STREAMS: dict[str, Any] = {
    "Duplicate()": rg.Duplicate(),
    "Split()": rg.Split(),
    "AtRest()": rg.AtRest(),
}


class Twice(nn.Module):
    """Two functions side by side: a scale and a shift."""

    def __init__(self, scale: nn.Module, shift: nn.Module) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale(x), self.shift(x)


def build(
    coupling: Any, streams: Any, depth: int, width: int = 64
) -> tuple[rg.ReversibleSequence, Tensor]:
    torch.manual_seed(0)
    pairs = []
    for _ in range(depth):
        f, g = Attention(width, 4), FeedForward(width)
        if isinstance(coupling, rg.Affine):
            f, g = Twice(FeedForward(width), f), Twice(FeedForward(width), g)
        pairs.append((f, g))
    stack = rg.ReversibleSequence(pairs, streams=streams, coupling=coupling)
    return stack, torch.randn(2, 32, width * (2 if isinstance(streams, rg.Split) else 1))


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: Any) -> list[Tensor]:
    stack.memory = memory
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(stack(x).square().mean(), [x, *stack.parameters()]))


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest gradient. NaN if there is a NaN."""
    largest = torch.stack([gradient.abs().max() for gradient in expected]).max()
    worst = torch.stack([(a.double() - b.double()).abs().max() for a, b in zip(got, expected)])
    return (worst.max() / largest).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=24, help="blocks")
    depth = parser.parse_args().depth
    print(
        "| coupling | streams | rebuilt against kept | float32 against float64 |\n| --- | --- | "
        "---: | ---: |"
    )
    for coupling_name, coupling in COUPLINGS.items():
        for streams_name, streams in STREAMS.items():
            stack, x = build(coupling, streams, depth)
            rebuilt, kept = gradients(stack, x, rg.Reverse()), gradients(stack, x, rg.Keep())
            exact = gradients(stack.double(), x.double(), rg.Keep())
            row = f"{difference(rebuilt, kept):.0e} | {difference(kept, exact):.0e}"
            print(f"| `{coupling_name}` | `{streams_name}` | {row} |", flush=True)


if __name__ == "__main__":
    main()
