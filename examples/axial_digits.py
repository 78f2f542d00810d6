"""Handwritten digits, read by axial attention on reversible layers (`retrograd.compat.axial`).

Images keep their channels on axis 1. In every block f attends along rows and along columns, and g
is a small convolutional feed-forward. A quarter of the digits is held out: python
examples/axial_digits.py    (draws examples/out/axial_digits.png)
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import retrograd as rg
from retrograd.measure import activation_bytes

DEPTH, WIDTH, HEADS, BATCH = 6, 32, 1, 32


class AxialAttention(nn.Module):
    """Attention along rows plus attention along columns: [batch, channels, rows, columns] in and
    out.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, WIDTH)
        self.qkv, self.out = nn.Conv2d(WIDTH, 6 * WIDTH, 1), nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        results = []
        for axis, qkv in zip((2, 3), self.qkv(self.norm(x)).chunk(2, 1)):
            # the other axis joins the batch: [batch, other, heads, length, channels of a head]
            q, k, v = qkv.movedim(axis, -1).unflatten(1, (3, HEADS, -1)).permute(1, 0, 4, 2, 5, 3)
            results.append(
                F.scaled_dot_product_attention(q, k, v)
                .permute(0, 2, 4, 1, 3)
                .flatten(1, 2)
                .movedim(-1, axis)
            )
        return self.out(torch.cat(results, 1))


def feed_forward():
    near = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
    return nn.Sequential(
        nn.GroupNorm(1, WIDTH),
        near,
        nn.Conv2d(WIDTH, 2 * WIDTH, 1),
        nn.GELU(),
        nn.Conv2d(2 * WIDTH, WIDTH, 1),
    )


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = (
            nn.Conv2d(1, WIDTH, 1),
            nn.Parameter(0.1 * torch.randn(WIDTH, 8, 8)),
        )
        self.stack = rg.compat.axial.ReversibleSequence(
            [(AxialAttention(), feed_forward()) for _ in range(DEPTH)]
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images):
        return self.head(self.stack(self.embed(images) + self.place).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument(
        "--out", type=Path, default=Path("examples/out"), help="where the picture goes"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = (torch.tensor(values).float() for values in load_digits(return_X_y=True))
    images, labels = images.view(-1, 1, 8, 8) / 8 - 1, labels.long()
    test, train = torch.randperm(len(images)).split(
        [len(images) // 4, len(images) - len(images) // 4]
    )
    model, losses, mib = Reader(), [], []
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=options.steps)

    def backward():
        batch = train[torch.randint(len(train), (BATCH,))]
        losses.append(F.cross_entropy(model(images[batch]), labels[batch]))
        losses[-1].backward()

    for _ in tqdm(range(options.steps), desc="training"):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = model(images[test]).argmax(-1)
    for model.stack.engine.memory in (
        rg.Reverse(),
        rg.Keep(),
    ):  # `Keep` stores everything, as plain autograd does
        mib.append(activation_bytes(backward, model.parameters()) / 2**20)
    print(
        f"held out: {(found == labels[test]).float().mean():.1%} of {len(test)} digits right "
        "(chance: 10 %)"
    )
    print(
        f"activations of one step: {mib[0]:.1f} MiB with retrograd, {mib[1]:.1f} MiB without "
        "reversal"
    )
    left, right = (figure := Figure(figsize=(10, 4.5), layout="constrained")).subfigures(1, 2)
    (axes := left.subplots()).plot(torch.stack(losses).detach())
    axes.set(title="Learning to read digits", xlabel="step", ylabel="cross entropy", yscale="log")
    right.suptitle("Held out, mistakes first (read as; red: wrong)")
    for axes, i in zip(
        right.subplots(4, 6).flat, (found == labels[test]).int().argsort(stable=True)
    ):
        axes.imshow(images[test[i], 0].numpy(), cmap="gray_r")
        axes.set_title(
            str(found[i].item()),
            color="tab:red" if found[i] != labels[test[i]] else "black",
            fontsize=9,
        )
        axes.axis("off")
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "axial_digits.png", dpi=120)


if __name__ == "__main__":
    main()
