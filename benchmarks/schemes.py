"""Published reversible networks, each in a few lines, and each beside its formula as a plain loop.

    python -m benchmarks.schemes            prints the table of docs/rules.md
    python -m benchmarks.schemes --write    writes it there

A scheme builds a network from a list of functions. `formula` is the paper's recurrence in plain
autograd. `tests/test_schemes.py` compares the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.page import write_table
from retrograd import measure

Functions = Sequence[Any]
Network = Callable[[Tensor], Tensor]


class Scheme(NamedTuple):
    name: str
    equation: str
    source: str
    build: Callable[..., nn.Module]
    formula: Callable[[Functions, Tensor], Tensor]
    exact: bool  # whether exact=True works


# --- one state: the ordinary network


def euler(functions: Functions, **options: Any) -> nn.Module:
    return rg.Residual(functions, rule=rg.Euler(), **options)


def euler_formula(functions: Functions, x: Tensor) -> Tensor:
    for f in functions:
        x = x + f(x)
    return x


# --- two states: one recurrence


def recurrence(rule: Any) -> Callable[..., nn.Module]:
    def build(functions: Functions, **options: Any) -> nn.Module:
        return rg.Residual(functions, rule=rule, **options)

    return build


def recurrence_formula(
    previous: float, current: float, scale: float, first: float = 1.0
) -> Callable[[Functions, Tensor], Tensor]:
    def formula(functions: Functions, x: Tensor) -> Tensor:
        before, now = x, x + first * functions[0](x)
        for f in functions[1:]:
            before, now = now, previous * before + current * now + scale * f(now)
        return now

    return formula


def bdia_formula(functions: Functions, x: Tensor) -> Tensor:
    before, now = x, x + functions[0](x)
    for f in functions[1:]:
        sign = torch.randint(2, (len(x), *[1] * (x.ndim - 1)), device=x.device) * 2 - 1
        gamma = 0.5 * sign.to(x.dtype)
        before, now = now, gamma * before + (1 - gamma) * now + (1 + gamma) * f(now)
    return now


# --- pairs


def pairs_of(functions: Functions) -> list[tuple[Any, Any]]:
    return list(zip(functions[::2], functions[1::2]))


def revnet(functions: Functions, **options: Any) -> nn.Module:
    return rg.ReversibleSequence(pairs_of(functions), streams=rg.Duplicate("mean"), **options)


def revnet_formula(functions: Functions, x: Tensor) -> Tensor:
    x1 = x2 = x
    for f, g in pairs_of(functions):
        x1 = x1 + f(x2)
        x2 = x2 + g(x1)
    return (x1 + x2) / 2


def momentum(functions: Functions, **options: Any) -> nn.Module:
    return rg.ReversibleSequence(
        pairs_of(functions), coupling=rg.Momentum(0.9), streams=rg.AtRest(), **options
    )


def momentum_formula(functions: Functions, x: Tensor) -> Tensor:
    velocity = torch.zeros_like(x)
    for f in functions:
        velocity = 0.9 * velocity + (1 - 0.9) * f(x)
        x = x + velocity
    return x


def meft(functions: Functions, **options: Any) -> nn.Module:
    return rg.ReversibleSequence(pairs_of(functions), coupling=rg.Scaled(0.9), **options)


def meft_formula(functions: Functions, x: Tensor) -> Tensor:
    x1 = x2 = x
    for f, g in pairs_of(functions):
        x1 = 0.9 * x1 + f(x2)
        x2 = 0.9 * x2 + g(x1)
    return (x1 + x2) / 2


# --- programs


class Last(nn.Module):
    """A program whose streams start as the input; the output is one of them."""

    def __init__(self, program: rg.Reversible, names: Sequence[str], last: str) -> None:
        super().__init__()
        self.program = program
        self.names = names
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.program(dict.fromkeys(self.names, x))[self.last]


def heun(functions: Functions, **options: Any) -> nn.Module:
    updates = []
    for f in functions:
        updates.append(rg.Update("y", Times(f, 0.5), ("z",)))
        updates.append(rg.Update("z", Times(nn.Identity(), 2.0), ("y",), coupling=rg.Scaled(-1)))
        updates.append(rg.Update("y", Times(f, 0.5), ("z",)))
    return Last(rg.Reversible(updates, **options), ("y", "z"), "y")


class Times(nn.Module):
    def __init__(self, fn: Any, factor: float) -> None:
        super().__init__()
        self.fn = fn
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.fn(x)


def heun_formula(functions: Functions, x: Tensor) -> Tensor:
    y = z = x
    for f in functions:
        before = f(z)
        following = 2 * y - z + before
        y, z = y + (before + f(following)) / 2, following
    return y


SCHEMES = [
    Scheme("Euler: the ordinary network", "p' = p + f(p)", "", euler, euler_formula, True),
    Scheme("RevNet", "x1 += f(x2), x2 += g(x1)", "1707.04585", revnet, revnet_formula, True),
    Scheme(
        "midpoint",
        "p'' = p + 2h f(p')",
        "2512.02056",
        recurrence(rg.Midpoint(0.25)),
        recurrence_formula(1, 0, 0.5, first=0.25),
        True,
    ),
    Scheme(
        "leapfrog",
        "p'' = 2p' - p + h² f(p')",
        "2512.02056",
        recurrence(rg.Leapfrog(0.25)),
        recurrence_formula(-1, 2, 0.0625, first=0.25),
        True,
    ),
    Scheme(
        "blend of 1/4",
        "p'' = a p + (1 - a) p' + (1 + a) f(p')",
        "",
        recurrence(rg.Blend(1 / 4)),
        recurrence_formula(0.25, 0.75, 1.25),
        True,
    ),
    Scheme(
        "Re2TAL's rewiring",
        "p'' = p + f(p')",
        "2211.14053",
        recurrence(rg.TwoStep(1, 0, 1)),
        recurrence_formula(1, 0, 1),
        True,
    ),
    Scheme(
        "Dr2Net, halfway",
        "p'' = β p + α p' + f(p')",
        "2401.04105",
        recurrence(rg.TwoStep(0.5, 0.5, 1)),
        recurrence_formula(0.5, 0.5, 1),
        True,
    ),
    Scheme(
        "BDIA",
        "p'' = γ p + (1 - γ) p' + (1 + γ) f(p'), γ = ±½",
        "2407.09093",
        recurrence(rg.Bdia(0.5)),
        bdia_formula,
        True,
    ),
    Scheme(
        "momentum",
        "v = γ v + (1 - γ) f(x), x += v",
        "2102.07870",
        momentum,
        momentum_formula,
        True,
    ),
    Scheme("MEFT", "x1 = λ x1 + f(x2), x2 = λ x2 + g(x1)", "2306.00477", meft, meft_formula, True),
    Scheme(
        "reversible Heun (a neural ODE)",
        "y += ½ f(z), z = 2y - z, y += ½ f(z)",
        "2105.13493",
        heun,
        heun_formula,
        True,
    ),
]


# --- the table


def functions(count: int, width: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        for _ in range(count)
    )


def streams_at_the_peak(scheme: Scheme, depth: int, x: Tensor) -> float:
    """The peak of a step with `exact=True`, in tensors of the size of the input.

    Parameters are frozen: gradients that grow as activations shrink would hide what is kept.
    """
    layers = functions(depth, x.shape[-1]).requires_grad_(False)
    network = scheme.build(layers, exact=scheme.exact)

    def step() -> None:
        network(x).square().mean().backward()

    step()
    step()
    return measure.activation_bytes(step, [x]) / x.nbytes


def flops(run: Network, x: Tensor) -> int:
    with measure.Flops() as counted:
        run(x).square().mean().backward()
    return counted.total


def row(scheme: Scheme) -> str:
    x = torch.randn(8, 128, 32, requires_grad=True)
    layers = functions(24, 32)
    network = scheme.build(layers, exact=scheme.exact)
    network(x).sum().backward()
    ratio = flops(network, x) / flops(lambda x: scheme.formula(list(layers), x), x)
    peaks = [f"{streams_at_the_peak(scheme, depth, x):.1f}" for depth in (12, 24, 48)]
    source = f"arXiv {scheme.source}" if scheme.source else ""
    return f"| {scheme.name} | `{scheme.equation}` | {source} | {' / '.join(peaks)} | {ratio:.2f} |"


def table() -> str:
    lines = [
        "| scheme | one step | source | streams at the peak, 12 / 24 / 48 layers "
        "| FLOPs, plain = 1 |",
        "| --- | --- | --- | ---: | ---: |",
        *map(row, SCHEMES),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table to docs/rules.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = table()
    print(text)
    if options.write:
        write_table("schemes", text)


if __name__ == "__main__":
    main()
