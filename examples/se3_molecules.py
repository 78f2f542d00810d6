"""Atomization energies of molecules from their coordinates, on SE(3)-Transformer's reversible
layers (`retrograd.compat.se3`). Atoms have scalars (degree "0") and vectors (degree "1"); f passes
messages between atoms near each other, g works on each alone. The energies are measured (G2/97,
shipped with ase), and every fifth molecule is held out: python examples/se3_molecules.py    (20
seconds; draws examples/out/se3_molecules.png)"""

import argparse
from pathlib import Path

import torch
from ase.build import molecule
from ase.data.g2 import data as g2
from matplotlib.figure import Figure
from torch import nn
from tqdm import trange

import retrograd as rg
from retrograd.measure import LiveBytes

WIDTH, DEPTH, REACH, ELEMENTS = (
    12,
    8,
    3.0,
    {"H", "C", "N", "O", "F", "S", "Cl"},
)  # reach in ångström; elements with enough data


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.LayerNorm(inputs), nn.Linear(inputs, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, outputs)
    )


class Messages(
    nn.ModuleDict
):  # f. A ModuleDict, so that its parts are given where it is made, and used by name
    def forward(self, x, pairs, radial, direction):
        weights = self.speak(x["0"][..., 0])[pairs[0]] * self.distance(
            radial
        )  # made of invariants, so they are invariant
        (a, b, c, d), vectors = weights.unsqueeze(-1).chunk(4, dim=1), x["1"][pairs[0]]
        messages = {"0": a + b * (vectors @ direction.mT), "1": c * direction + d * vectors}
        return {
            degree: torch.zeros_like(x[degree]).index_add(0, pairs[1], messages[degree])
            for degree in x
        }


class Gate(nn.ModuleDict):  # g
    def forward(self, x):
        vectors = self.mix(
            x["1"].mT
        ).mT  # without a bias, which would be a direction in space that all molecules share
        scalars, gates = (
            self.net(torch.cat((x["0"][..., 0], vectors.norm(dim=-1)), 1))
            .unsqueeze(-1)
            .chunk(2, dim=1)
        )
        return {"0": scalars, "1": gates * vectors}


class Model(nn.ModuleDict):
    def forward(self, positions, numbers, pairs, owner):
        offset = positions[pairs[0]] - positions[pairs[1]]
        distance = offset.norm(dim=-1, keepdim=True)
        radial = (
            torch.exp(-((distance - torch.linspace(0.6, REACH, 8)) * 3).square())
            * (1 - (distance / REACH) ** 2).relu()
        )
        x = {"0": self.elements(numbers).unsqueeze(-1), "1": torch.zeros(len(numbers), WIDTH, 3)}
        y = self.stack(x, pairs=pairs, radial=radial, direction=(offset / distance).unsqueeze(1))
        return torch.zeros(owner[-1] + 1).index_add(
            0, owner, 100 * self.head(y["0"][..., 0])[:, 0]
        ), y["0"]  # in kcal/mol


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument(
        "--out", type=Path, default=Path("examples/out"), help="folder of the picture"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    molecules = {
        name: molecule(name)
        for name in g2
        if "ZPE" in g2[name] and ELEMENTS.issuperset(molecule(name).symbols)
    }
    heat = {name: entry["enthalpy"] - entry["thermal correction"] for name, entry in g2.items()}
    true = torch.tensor(
        [
            sum(heat[s] for s in m.symbols) - heat[name] + g2[name]["ZPE"]
            for name, m in molecules.items()
        ]
    )
    positions, numbers = (
        torch.cat([torch.tensor(getattr(m, k)) for m in molecules.values()])
        for k in ("positions", "numbers")
    )
    owner = torch.arange(len(true)).repeat_interleave(
        torch.tensor([len(m) for m in molecules.values()])
    )
    pairs = (
        (
            (owner[:, None] == owner).fill_diagonal_(False)
            & (torch.cdist(positions, positions) < REACH)
        )
        .nonzero()
        .T
    )
    positions, graph, held = (
        positions.float(),
        (numbers, pairs, owner),
        torch.arange(len(true)) % 5 == 0,
    )
    fs = [
        Messages({"speak": mlp(WIDTH, 4 * WIDTH), "distance": nn.Linear(8, 4 * WIDTH)})
        for _ in range(DEPTH)
    ]
    gs = [
        Gate({"mix": nn.Linear(WIDTH, WIDTH, bias=False), "net": mlp(2 * WIDTH, 2 * WIDTH)})
        for _ in range(DEPTH)
    ]
    stack, losses, peaks = rg.compat.se3.ReversibleSequence(zip(fs, gs)), [], []
    model = Model({"elements": nn.Embedding(18, WIDTH), "stack": stack, "head": mlp(WIDTH, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in trange(
        arguments.steps
    ):  # on shaken coordinates, so that no molecule is learned by heart
        loss = (
            (model(positions + 0.1 * torch.randn_like(positions), *graph)[0] - true)[~held]
            .abs()
            .mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        (guess, scalars), (_, turned) = (
            model(positions, *graph),
            model(positions @ torch.linalg.qr(torch.randn(3, 3)).Q, *graph),
        )
    counts = torch.zeros(len(true), 18).index_add(0, owner, torch.eye(18)[numbers])
    counting = (
        counts @ torch.linalg.lstsq(counts[~held], true[~held], driver="gelsd").solution
    )  # the best energy per element
    error, by_count, by_mean = (
        (x - true)[held].abs().mean() for x in (guess, counting, true[~held].mean())
    )
    for model["stack"] in (
        stack,
        rg.ReversibleSequence(zip(fs, gs), memory=rg.Keep()),
    ):  # Keep: what plain autograd does
        with LiveBytes() as live:  # gradients are there since training, so they do not count
            model(positions, *graph)[0].sum().backward()
        peaks.append(live.peak / 2**20)
    print(
        f"a random rotation changes scalars by {(scalars - turned).abs().max():.0e}; the largest "
        f"is {scalars.abs().max():.0f}"
    )
    print(
        f"activations of one step: {peaks[0]:.1f} MiB with retrograd, {peaks[1]:.1f} MiB without "
        "reversal"
    )
    print(
        f"held out: mean error {error:.0f} kcal/mol (counting atoms: {by_count:.0f}, mean: "
        f"{by_mean:.0f})"
    )
    left, right = Figure(figsize=(11, 5), layout="tight").subplots(1, 2)
    left.plot(
        true,
        true,
        "C7-",
        true[~held],
        guess[~held],
        "C0.",
        true[held],
        guess[held],
        "C1o",
        linewidth=0.8,
    )
    left.legend(
        ["as measured", f"{(~held).sum()} molecules to learn from", f"{held.sum()} held out"],
        frameon=False,
    )
    left.set(
        title="Atomization energies", xlabel="measured, kcal/mol", ylabel="predicted, kcal/mol"
    )
    right.semilogy(
        losses, "C0-", [len(losses)], [error], "C1o", [0, len(losses)], [by_count] * 2, "C7--"
    )
    right.legend(
        [
            "training, on shaken coordinates",
            f"held out: {error:.0f}",
            f"counting atoms: {by_count:.0f}",
        ],
        frameon=False,
    )
    right.set(title="Learning", xlabel="step", ylabel="mean error, kcal/mol")
    arguments.out.mkdir(parents=True, exist_ok=True)
    left.figure.savefig(arguments.out / "se3_molecules.png", dpi=130)


if __name__ == "__main__":
    main()
