"""A reversible language model, in one file.

    x1 = x2 = embedding(tokens)
    layer:    x1 = x1 + attention(norm(x2))
              x2 = x2 + swiglu(norm(x1))
    logits = norm((x1 + x2) / 2) @ embedding.T

The layers are a `ReversibleSequence`, so activation memory does not grow with `depth`. Then the
logits are what is left: bytes of batch x context x vocabulary. `loss` therefore never has them all
(`torch.nn.functional.linear_cross_entropy`, in chunks).

    >>> model = LanguageModel(Config(depth=4, width=32, heads=2, context=16))
    >>> tokens = torch.randint(256, (2, 17))
    >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> len(model.generate(b"def ", 8, temperature=0.0))
    12
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    vocabulary: int = 256  # bytes
    depth: int = 48
    width: int = 128
    heads: int = 4
    context: int = 256  # tokens that it is trained on, and that sampling looks back on
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "depth", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: one at least.")
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width={self.width}, heads={self.heads}: each head needs an even number of "
                "channels, so width must be a "
                f"multiple of {2 * self.heads}, such as "
                f"{max(2 * self.heads, self.width // (2 * self.heads) * 2 * self.heads)}."
            )


class Cache(dict[Any, tuple[Tensor, Tensor]]):
    """What attention has seen of a text so far: keys and values of each layer."""

    length = 0  # of the text


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.context, self.dropout = config.heads, config.context, config.dropout
        self.norm = nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: Cache | None = None) -> Tensor:
        b, n, d = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )  # b, heads, n, channels
        q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            if self in cache:  # n is 1 then
                k, v = (
                    torch.cat(pair, 2)[:, :, -self.context :] for pair in zip(cache[self], (k, v))
                )
            cache[self] = k, v
        dropout = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=n > 1, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class SwiGLU(nn.Module):
    """Feed forward, gated: (silu(a) * b) @ out, where a, b = x @ into."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = (
            -(-8 * config.width // (3 * 16)) * 16
        )  # 8/3 of the width, in multiples of 16: as many weights as without a gate
        self.norm = nn.RMSNorm(config.width)
        self.into = nn.Linear(config.width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, config.width, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(self.norm(x)).chunk(2, -1)
        return self.drop(self.out(nn.functional.silu(gate) * value))


class LanguageModel(nn.Module):
    """Embedding, reversible layers, and a head that shares the embedding's weights.

    Args:
        config: its shape.
        **options: how the layers are reversed: `memory`, `exact`, and the others of
            `ReversibleSequence`.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = rg.ReversibleSequence(
            [(Attention(config), SwiGLU(config)) for _ in range(config.depth)], **options
        )
        self.norm = nn.RMSNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        for name, parameter in self.layers.named_parameters():
            if parameter.ndim == 2:  # what enters the streams is smaller the more layers there are
                share = (2 * config.depth) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=share * parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """What the head reads: `batch, n, width` for tokens `batch, n`. With a cache, the tokens go
        on from those before.
        """
        start = 0 if cache is None else cache.length
        channels = self.config.width // self.config.heads
        rotary = angles(start, tokens.shape[1], channels, tokens.device)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.norm(self.layers(self.embedding(tokens), rotary=rotary, cache=cache))

    def logits(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return nn.functional.linear(self(tokens, cache), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next token, in nats; the logits exist in chunks only."""
        read = self(tokens).flatten(0, 1)
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=max(read.shape[0] // 8, 1))
        weight = self.embedding.weight.to(read.dtype)
        return nn.functional.linear_cross_entropy(read, weight, targets.flatten(), options=options)

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """`count` tokens that follow `prompt`, one by one. Each costs one token's work: keys and
        values are remembered.
        """
        training, cache = self.training, Cache()
        self.eval()
        try:
            device = self.embedding.weight.device
            tokens = torch.tensor([list(prompt)[-self.config.context :] or [0]], device=device)
            for _ in range(count):
                logits = self.logits(tokens, cache)[0, -1].float()
                if temperature > 0:
                    chances = ((logits - logits.max()) / max(temperature, 1e-6)).softmax(-1).cpu()
                    token = int(torch.multinomial(chances, 1, generator=generator))
                else:
                    token = int(logits.argmax())
                yield token
                tokens = torch.tensor([[token]], device=device)
        finally:
            self.train(training)


def angles(start: int, n: int, channels: int, device: torch.device) -> Tensor:
    """The rotations of positions `start` to `start + n`, as cosines and sines: 2, n,
    channels / 2.
    """
    frequencies = 10_000.0 ** (
        -torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
    )
    turned = torch.outer(
        torch.arange(start, start + n, device=device, dtype=torch.float32), frequencies
    )
    return torch.stack((turned.cos(), turned.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turns pairs of channels, by an angle that grows with the position: products of two then
    depend on their distance alone.
    """
    cos, sin = rotary.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def example() -> tuple[LanguageModel, tuple[Tensor, ...]]:
    """A small one and tokens to call it with: `retrograd check retrograd.models.lm:example`."""
    torch.manual_seed(0)
    config = Config(depth=24, width=64, heads=4, context=64)
    return LanguageModel(config), (torch.randint(config.vocabulary, (4, config.context)),)
