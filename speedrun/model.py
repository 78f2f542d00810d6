"""A reversible language model, in one file.

    x1 = x2 = embedding(tokens)
    layer:    x1 = x1 + attention(norm(x2))
              x2 = x2 + swiglu(norm(x1))
    logits = norm((x1 + x2) / 2) @ embedding.T

The layers are a `ReversibleSequence`, so activation memory does not grow with `depth`. What is left
are the logits, batch x context x vocabulary numbers. `loss` computes them in chunks, so that they
never exist all at once (`torch.nn.functional.linear_cross_entropy`).

    >>> model = LanguageModel(Config(depth=4, width=32, heads=2, context=16))
    >>> tokens = torch.randint(256, (2, 17))
    >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> len(list(model.generate(b"def ", 8, temperature=0.0)))
    8
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    vocabulary: int = 256  # bytes
    depth: int = 48
    width: int = 128
    heads: int = 4
    context: int = 256  # tokens in a training sequence; sampling looks back as far
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "depth", "width", "heads", "context"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")
        step = 2 * self.heads
        if self.width % step:
            nearest = max(step, self.width // step * step)
            raise ValueError(
                f"width={self.width}, heads={self.heads}: each head needs an even number of "
                f"channels, so width must be a multiple of {step}, such as {nearest}."
            )


class Cache(dict[Any, tuple[Tensor, Tensor]]):
    """The keys and values of each attention, for the tokens seen so far."""

    length = 0  # number of tokens seen


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.context = config.context
        self.dropout = config.dropout
        self.norm = nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: Cache | None = None) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm(x)).view(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: b, heads, n, channels
        q = rotate(q, rotary)
        k = rotate(k, rotary)
        if cache is not None:
            k, v = self.extended(cache, k, v)
        dropout = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=n > 1, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(b, n, d))

    def extended(self, cache: Cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The cached keys and values followed by new ones, at most `context` of them."""
        if self in cache:  # the prompt was seen before; now comes one token at a time
            old_k, old_v = cache[self]
            k = torch.cat((old_k, k), 2)[:, :, -self.context :]
            v = torch.cat((old_v, v), 2)[:, :, -self.context :]
        cache[self] = (k, v)
        return k, v


class SwiGLU(nn.Module):
    """Gated feed-forward: (silu(a) * b) @ out, where a, b = x @ into."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        # 8/3 of the width, rounded up to a multiple of 16: as many weights as a feed-forward of
        # four times the width has without a gate.
        hidden = -(-8 * config.width // (3 * 16)) * 16
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
        config: the shape.
        rule: None for pairs on two streams; or a rule under which attention and feed-forward follow
            each other as single layers (`rg.Residual`). `rg.Euler()` is an ordinary transformer.
        **options: passed to the stack, such as `memory` and `exact`.
    """

    def __init__(self, config: Config, rule: Any = None, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        pairs = [(Attention(config), SwiGLU(config)) for _ in range(config.depth)]
        if rule is None:
            self.layers: rg.ReversibleSequence | rg.Residual
            self.layers = rg.ReversibleSequence(pairs, **options)
        else:
            layers = [layer for pair in pairs for layer in pair]
            self.layers = rg.Residual(layers, rule=rule, **options)
        self.norm = nn.RMSNorm(config.width)
        self.initialize()

    def initialize(self) -> None:
        """Draw the weights. Output layers are scaled down by depth, so that streams stay small."""
        nn.init.normal_(self.embedding.weight, std=self.config.width**-0.5)
        for name, parameter in self.layers.named_parameters():
            if parameter.ndim == 2:
                scale = (2 * self.config.depth) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The input of the head, `batch, n, width`, for tokens `batch, n`.

        With a cache, the tokens follow those that the cache has seen.
        """
        start = 0 if cache is None else cache.length
        channels = self.config.width // self.config.heads
        rotary = angles(start, tokens.shape[1], channels, tokens.device)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.norm(self.layers(self.embedding(tokens), rotary=rotary, cache=cache))

    def logits(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Scores of the next token, `batch, n, vocabulary`."""
        return nn.functional.linear(self(tokens, cache), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next token, in nats. The logits are computed in chunks."""
        hidden = self(tokens).flatten(0, 1)  # batch * n, width
        weight = self.embedding.weight.to(hidden.dtype)
        return cross_entropy_of_linear(hidden, weight, targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """Yield `count` tokens that follow `prompt`.

        Keys and values are cached, so each token costs a forward of one token.
        """
        was_training = self.training
        cache = Cache()
        self.eval()
        try:
            device = self.embedding.weight.device
            tokens = torch.tensor([list(prompt)[-self.config.context :] or [0]], device=device)
            for _ in range(count):
                logits = self.logits(tokens, cache)[0, -1].float()
                token = draw(logits, temperature, generator)
                yield token
                tokens = torch.tensor([[token]], device=device)
        finally:
            self.train(was_training)


def cross_entropy_of_linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the logits `hidden @ weight.T`, which are computed in chunks."""
    size = max(hidden.shape[0] // 8, 1)
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=size)
        return nn.functional.linear_cross_entropy(hidden, weight, targets, options=options)

    # torch before 2.13
    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden, weight)
        return nn.functional.cross_entropy(logits, targets, reduction="sum")

    parts = zip(hidden.split(size), targets.split(size))
    losses = [checkpoint(part, *pair, use_reentrant=False) for pair in parts]
    return torch.stack(losses).sum() / targets.numel()


def draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """A token drawn from its probabilities; the likeliest one if `temperature` is 0."""
    if not logits.isfinite().all():
        raise FloatingPointError("the scores of the next byte are not finite")
    if temperature <= 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / max(temperature, 1e-6)
    return int(torch.multinomial(scaled.softmax(-1).cpu(), 1, generator=generator))


def angles(start: int, n: int, channels: int, device: torch.device) -> Tensor:
    """Cosines and sines that rotate positions `start` to `start + n`: 2, n, channels / 2."""
    even = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    frequencies = 10_000.0 ** (-even / channels)
    positions = torch.arange(start, start + n, device=device, dtype=torch.float32)
    turns = torch.outer(positions, frequencies)
    return torch.stack((turns.cos(), turns.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs of channels by an angle that grows with the position.

    A product of two rotated vectors then depends on the distance of their positions only.
    """
    cos, sin = rotary.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def example() -> tuple[LanguageModel, tuple[Tensor, ...]]:
    """A small model and tokens to call it with: `retrograd check speedrun.model:example`."""
    torch.manual_seed(0)
    config = Config(depth=24, width=64, heads=4, context=64)
    return LanguageModel(config), (torch.randint(config.vocabulary, (4, config.context)),)
