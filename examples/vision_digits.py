"""Handwritten digits, read by a reversible vision transformer (`retrograd.models.vision`).

A quarter of the digits is held out: python examples/vision_digits.py    (draws
examples/out/vision_digits.png)
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.nn import functional as F
from tqdm import tqdm

import retrograd as rg
from retrograd.measure import activation_bytes
from retrograd.models.vision import Config, VisionTransformer

SHAPE = Config(size=8, patch=2, channels=1, classes=10, depth=8, width=64, heads=4, dropout=0.1)
BATCH = 128


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=220, help="training steps")
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
    model, losses, mib = VisionTransformer(SHAPE), [], []
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)

    def backward():
        batch = train[torch.randint(len(train), (BATCH,))]
        losses.append(F.cross_entropy(model(images[batch]), labels[batch]))
        losses[-1].backward()

    for _ in tqdm(range(options.steps), desc="training"):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        found = model(images[test]).argmax(-1)
    for model.layers.memory in (
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
    figure.savefig(options.out / "vision_digits.png", dpi=120)


if __name__ == "__main__":
    main()
