"""A reversible vision transformer, in one file.

    x1 = x2 = patches(image) + places
    layer:    x1 = x1 + attention(norm(x2))
              x2 = x2 + feed_forward(norm(x1))
    classes = head(norm((x1 + x2) / 2), averaged over the patches)

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

    size: int = 224  # of an image, in pixels a side
    patch: int = 16
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


def small(last: nn.Linear, config: Config) -> nn.Linear:
    """A function's last layer, so that what enters the streams is smaller the more layers there
    are.
    """
    nn.init.normal_(last.weight, std=(2 * config.depth * last.in_features) ** -0.5)
    nn.init.zeros_(last.bias)
    return last


class Attention(nn.Module):
    """Every patch looks at every other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = small(nn.Linear(config.width, config.width), config)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)  # b, heads, n, channels
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class FeedForward(nn.Sequential):
    def __init__(self, config: Config) -> None:
        wide = 4 * config.width
        super().__init__(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, wide),
            nn.GELU(),
            small(nn.Linear(wide, config.width), config),
            nn.Dropout(config.dropout),
        )


class VisionTransformer(nn.Module):
    """Patches, reversible layers, and a head on their average.

    Args:
        config: its shape.
        **options: how the layers are reversed: `memory`, `exact`, and the others of
            `ReversibleSequence`.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__()
        self.config = config
        patches = (config.size // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.places = nn.Parameter(0.3 * torch.randn(patches, config.width))
        self.layers = rg.ReversibleSequence(
            [(Attention(config), FeedForward(config)) for _ in range(config.depth)], **options
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes, `batch, classes`, for images `batch, channels, size, size`."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places  # batch, patches, width
        return self.head(self.norm(self.layers(x)).mean(1))


def example() -> tuple[VisionTransformer, tuple[Tensor, ...]]:
    """A small one and images to call it with: `retrograd check retrograd.models.vision:example`."""
    torch.manual_seed(0)
    config = Config()
    return VisionTransformer(config), (torch.randn(8, config.channels, config.size, config.size),)
