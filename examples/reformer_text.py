"""Run an installed package on retrograd: a language model of reformer-pytorch.

`rg.compat.install` replaces the package's reversible layers; everything else is the package's own
code. The model learns Python source code, byte by byte, from the standard library. Every tenth
module is held out.

    pip install reformer-pytorch
    python examples/reformer_text.py    (draws examples/out/reformer_text.png)
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from tqdm import trange

import retrograd as rg
from retrograd.measure import activation_bytes

rg.compat.install("reformer_pytorch")

from reformer_pytorch import ReformerLM  # noqa: E402

LENGTH = 64
ATTENTION = {"heads": 4, "dim_head": 16, "bucket_size": 16, "n_hashes": 1, "causal": True}


def load_text():
    """The standard library as two tensors of bytes: for training, and held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    train = b"".join(module for i, module in enumerate(modules) if i % 10)
    test = b"".join(modules[::10])
    return as_tokens(train), as_tokens(test)


def as_tokens(text):
    return torch.tensor(list(text.replace(b"    ", b"\t"))).clamp(max=127)


def loss_in_bits(model, text, batch=16):
    """Bits per byte on random windows of the text."""
    starts = torch.randint(len(text) - LENGTH, (batch, 1))
    tokens = text[starts + torch.arange(LENGTH + 1)]
    return F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:]) / math.log(2)


def train_model(model, text, steps):
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-2, total_steps=steps)
    losses = []
    for _ in trange(steps):
        optimizer.zero_grad()
        loss = loss_in_bits(model, text)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def activation_mib(model, text, plain_up_to):
    """Peak of the activations in one step; inputs up to a length run in plain autograd."""
    model.reformer.layers.reverse_thres = plain_up_to
    peak = activation_bytes(lambda: loss_in_bits(model, text).backward(), model.parameters())
    return peak / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("examples/out"), help="folder of the plot")
    parser.add_argument("--steps", type=int, default=160, help="training steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    train, test = load_text()
    model = ReformerLM(128, dim=64, depth=6, max_seq_len=LENGTH, ff_chunks=1, **ATTENTION)
    losses = train_model(model, train, args.steps)
    with torch.no_grad():
        held_out = loss_in_bits(model, test, batch=400).item()
    reversed_mib = activation_mib(model, train, plain_up_to=0)
    plain_mib = activation_mib(model, train, plain_up_to=LENGTH)
    print(f"held out: {held_out:.2f} bits per byte (chance: 7)")
    print(f"activations: {reversed_mib:.1f} MiB with retrograd, {plain_mib:.1f} MiB without")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses)
    axes.axhline(held_out, color="tab:red")
    axes.text(0, held_out, "held out, after training", color="tab:red", va="bottom")
    axes.set(title="Learning Python source code", xlabel="step", ylabel="bits per byte")
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "reformer_text.png", dpi=120)


if __name__ == "__main__":
    main()
