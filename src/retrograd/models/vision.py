"""A reversible vision transformer, in one file.

    input:    x1 = x2 = patches(image) + places    (places: a learned vector for each patch)
    layer:    x1 = x1 + attention(norm(x2))
              x2 = x2 + feed_forward(norm(x1))
    output:   scores = head(mean over patches of norm((x1 + x2) / 2))

The layers are a `ReversibleSequence`, so activation memory does not grow with `depth`.

    >>> config = Config(size=8, patch=2, channels=1, classes=10, depth=4, width=32, heads=2)
    >>> model = VisionTransformer(config)
    >>> model(torch.randn(3, 1, 8, 8)).shape
    torch.Size([3, 10])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    size: int = 224  # height and width of an image, in pixels
    patch: int = 16  # height and width of a patch
    channels: int = 3
    classes: int = 1000
    depth: int = 12
    width: int = 192
    heads: int = 3
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise ValueError(
                f"size={self.size}, patch={self.patch}: patches must cover the image; choose a "
                "divisor of its size."
            )
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width}, heads={self.heads}: width must be a multiple of heads."
            )


def init_output_layer(layer: nn.Linear, depth: int) -> nn.Linear:
    """Initialize the last layer of a function, with smaller weights in a deeper network."""
    nn.init.normal_(layer.weight, std=(2 * depth * layer.in_features) ** -0.5)
    nn.init.zeros_(layer.bias)
    return layer


class Attention(nn.Module):
    """Multi-head self-attention over all patches, with the norm before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = init_output_layer(nn.Linear(config.width, config.width), config.depth)

    def forward(self, x: Tensor) -> Tensor:
        batch, patches, width = x.shape
        qkv = self.qkv(self.norm(x))
        qkv = qkv.view(batch, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, patches, width / heads
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, patches, width))


class FeedForward(nn.Sequential):
    """Two linear layers for each patch, with the norm before them."""

    def __init__(self, config: Config) -> None:
        hidden = 4 * config.width
        super().__init__(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, hidden),
            nn.GELU(),
            init_output_layer(nn.Linear(hidden, config.width), config.depth),
            nn.Dropout(config.dropout),
        )


class VisionTransformer(nn.Module):
    """An embedding of patches, reversible layers, and a classifier on the mean over patches.

    Args:
        config: the shape of the model.
        **options: arguments of `ReversibleSequence` for the layers, such as `memory` and `exact`.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__()
        self.config = config
        patches = (config.size // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.places = nn.Parameter(0.3 * torch.randn(patches, config.width))
        pairs = [(Attention(config), FeedForward(config)) for _ in range(config.depth)]
        self.layers = rg.ReversibleSequence(pairs, **options)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `batch, classes` for images `batch, channels, size, size`."""
        x = self.patches(images)  # batch, width, rows, columns
        x = x.flatten(2).transpose(1, 2) + self.places  # batch, patches, width
        x = self.norm(self.layers(x))
        return self.head(x.mean(1))


def example() -> tuple[VisionTransformer, tuple[Tensor, ...]]:
    """A model and images for it: `retrograd check retrograd.models.vision:example`."""
    torch.manual_seed(0)
    config = Config()
    model = VisionTransformer(config)
    images = torch.randn(8, config.channels, config.size, config.size)
    return model, (images,)
