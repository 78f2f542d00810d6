"""A network built with retrograd: a reversible vision transformer reads handwritten digits.

The model is `retrograd.models.vision`. A quarter of the digits is held out.

    python examples/vision_digits.py    (draws examples/out/vision_digits.png)
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.nn import functional as F
from tqdm import trange

import retrograd as rg
from retrograd.measure import activation_bytes
from retrograd.models.vision import Config, VisionTransformer

CONFIG = Config(size=8, patch=2, channels=1, classes=10, depth=8, width=64, heads=4, dropout=0.1)


def load_data():
    """Images and labels: those for training, and those held out."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels).long()
    order = torch.randperm(len(images))
    test = order[: len(images) // 4]
    train = order[len(images) // 4 :]
    return (images[train], labels[train]), (images[test], labels[test])


def batch_loss(model, images, labels):
    batch = torch.randint(len(images), (128,))
    return F.cross_entropy(model(images[batch]), labels[batch])


def train_model(model, data, steps):
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for _ in trange(steps):
        optimizer.zero_grad()
        loss = batch_loss(model, *data)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def activation_mib(model, data, memory):
    """Peak of the activations in one step."""
    model.layers.memory = memory
    peak = activation_bytes(lambda: batch_loss(model, *data).backward(), model.parameters())
    return peak / 2**20


def draw(losses, images, labels, predicted):
    """The loss, and 24 held-out digits with the mistakes first."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    axes.plot(losses)
    axes.set(title="Learning to read digits", xlabel="step", ylabel="cross entropy", yscale="log")
    right.suptitle("Held-out digits and predictions (red: wrong)")
    mistakes_first = (predicted == labels).int().argsort(stable=True)
    for axes, i in zip(right.subplots(4, 6).flat, mistakes_first):
        axes.imshow(images[i, 0], cmap="gray_r")
        axes.set_title(predicted[i].item(), color="k" if predicted[i] == labels[i] else "r")
        axes.axis("off")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=220, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("examples/out"), help="folder of the plot")
    args = parser.parse_args()
    torch.manual_seed(0)
    train, (images, labels) = load_data()
    model = VisionTransformer(CONFIG)
    losses = train_model(model, train, args.steps)
    with torch.no_grad():
        predicted = model.eval()(images).argmax(-1)
    accuracy = (predicted == labels).float().mean()
    reversed_mib = activation_mib(model, train, rg.Reverse())
    plain_mib = activation_mib(model, train, rg.Keep())  # as plain autograd does
    print(f"held out: {accuracy:.1%} of {len(labels)} digits right (chance: 10 %)")
    print(f"activations: {reversed_mib:.1f} MiB with retrograd, {plain_mib:.1f} MiB without")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(losses, images, labels, predicted).savefig(args.out / "vision_digits.png", dpi=120)


if __name__ == "__main__":
    main()
