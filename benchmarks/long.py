"""An 8B Llama's geometry with long sequences: bytes and FLOPs, counted without memory.

    python -m benchmarks.long [--layers 32] [--tokens 131072 524288] [--write]     2 minutes

Width 4,096, 32 heads (8 of keys and values), feed-forward 14,336, 128,256 words, bfloat16, one
sequence. All tensors are on the device `meta`: they have shapes and no values, so every byte and
every FLOP is counted and nothing is computed. Bytes are the peak of a step, less parameters and
their gradients. FLOPs are relative to plain autograd, attention included. What offloading moves
over the bus is counted both ways. The loss head is measured by itself, against its own FLOPs with
all logits at once. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from benchmarks.page import write_table
from benchmarks.steps import FlopsOfAll
from retrograd.measure import LiveBytes

GIB = 2**30
CHUNKS = 16
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Geometry(NamedTuple):
    layers: int = 32
    width: int = 4096
    heads: int = 32
    pairs: int = 8  # of keys and values
    hidden: int = 14_336
    words: int = 128_256


class Attention(nn.Module):
    """Without rotary embeddings, which keep nothing."""

    def __init__(self, of: Geometry) -> None:
        super().__init__()
        self.of = of
        size = of.width // of.heads
        self.norm = nn.RMSNorm(of.width)
        self.query = nn.Linear(of.width, of.width, bias=False)
        self.both = nn.Linear(of.width, 2 * of.pairs * size, bias=False)
        self.out = nn.Linear(of.width, of.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        x = self.norm(x)
        size = width // self.of.heads
        query = self.query(x).view(batch, tokens, self.of.heads, size).transpose(1, 2)
        both = self.both(x).view(batch, tokens, 2 * self.of.pairs, size).transpose(1, 2)
        key, value = both.repeat_interleave(self.of.heads // self.of.pairs, 1).chunk(2, 1)
        y, _ = flash(query, key, value, is_causal=True)  # what no device on `meta` would choose
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class FeedForward(nn.Module):
    def __init__(self, of: Geometry) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(of.width)
        self.gate = nn.Linear(of.width, of.hidden, bias=False)
        self.up = nn.Linear(of.width, of.hidden, bias=False)
        self.down = nn.Linear(of.hidden, of.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Tiled(nn.Module):
    """A feed-forward function in pieces, each under checkpointing."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([again(self.fn, piece) for piece in x.chunk(CHUNKS, 1)], 1)


again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Layers(nn.Module):
    """Residual layers, each as it is or under checkpointing."""

    def __init__(self, pairs: Any, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            step = functools.partial(both_of, layer)
            x = step(x) if self.run is None else self.run(step, x)
        return x


def both_of(layer: Any, x: Tensor) -> Tensor:
    attention, feed_forward = layer
    x = x + attention(x)
    return x + feed_forward(x)


def functions(of: Geometry, wrap: Callable[[nn.Module], nn.Module] = nn.Sequential) -> Any:
    return [(Attention(of), wrap(FeedForward(of))) for _ in range(of.layers)]


def chunked(fn: nn.Module) -> nn.Module:
    return rg.Chunked(fn, CHUNKS)


def flat(pairs: Any) -> list[nn.Module]:
    return [fn for pair in pairs for fn in pair]


QUIET: Any = {"drift": "ignore", "verify": "never"}  # `meta` has no values to compare
EXACT: Any = {**QUIET, "exact": True}
LEAST = rg.Reverse(keep_last=False)

NETWORKS: dict[str, Callable[[Geometry], nn.Module]] = {
    "plain autograd": lambda of: Layers(functions(of)),
    "checkpoint per layer": lambda of: Layers(functions(of), again),
    "checkpoint, offloaded": lambda of: Layers(functions(of), again),
    "checkpoint, tiled feed-forward": lambda of: Layers(functions(of, Tiled), again),
    "checkpoint, tiled, offloaded": lambda of: Layers(functions(of, Tiled), again),
    "retrograd, pairs": lambda of: rg.ReversibleSequence(functions(of), memory=LEAST, **QUIET),
    "retrograd, pairs, `Chunked`": lambda of: rg.ReversibleSequence(
        functions(of, chunked), memory=LEAST, **QUIET
    ),
    "retrograd, `Euler()`, `Chunked`": lambda of: rg.Residual(
        flat(functions(of, chunked)), memory=LEAST, **QUIET
    ),
    "retrograd, `Midpoint()`, `Chunked`": lambda of: rg.Residual(
        flat(functions(of, chunked)), rule=rg.Midpoint(), memory=LEAST, **QUIET
    ),
    "retrograd, `Blend(1/4)`, `Chunked`": lambda of: rg.Residual(
        flat(functions(of, chunked)), rule=rg.Blend(1 / 4), memory=LEAST, **EXACT
    ),
}


def of_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    nn.functional.cross_entropy(nn.functional.linear(hidden, weight), targets).backward()


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """What `torch.nn.functional.linear_cross_entropy` runs. The operator itself shows nothing of
    what it needs inside. Its forward makes the gradients.
    """
    from torch.nn.modules import linear_cross_entropy  # since torch 2.13

    run = linear_cross_entropy._linear_cross_entropy_batch_chunked._init_fn
    ignored, smoothing, needs_grad = -100, 0.0, (True, True, False)
    _, hidden.grad, weight.grad, *_ = run(
        *(hidden.detach(), weight.detach(), targets, None, None, "mean", ignored, smoothing),
        *(HEAD_CHUNK, "compact", torch.float32, False, *needs_grad),
    )


HEAD_CHUNK = 2048  # tokens
HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "loss head, all logits": of_logits,
    "loss head, `linear_cross_entropy`": in_chunks,
}


class Row(NamedTuple):
    name: str
    tokens: int
    bytes: int
    flops: int
    bus: int


class Bus:
    """Hooks that move what autograd saves to a host, and count it."""

    def __init__(self) -> None:
        self.moved = 0

    def out(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or tensor._base is not None:
            return tensor
        self.moved += 2 * tensor.nbytes
        return tuple(tensor.shape), tensor.dtype

    def back(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, dtype = packed
        return torch.empty(shape, dtype=dtype, device="meta")

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.out, self.back):
            yield


def measure(name: str, of: Geometry, tokens: int) -> Row:
    with torch.device("meta"):
        network = NETWORKS[name](of).bfloat16()
        x = torch.empty(1, tokens, of.width, dtype=torch.bfloat16)
    bus = Bus()

    def step() -> None:
        network.zero_grad()
        given = x.clone().requires_grad_()
        if "offloaded" in name:
            with bus.active():
                y = network(given)
        else:
            y = network(given)
        y.backward(torch.empty_like(y))

    with LiveBytes() as live:
        step()
    moved = bus.moved
    gradients = sum(p.grad.nbytes for p in network.parameters() if p.grad is not None)
    with FlopsOfAll() as flops:
        step()
    return Row(name, tokens, live.peak - gradients, flops.total, moved)


def measure_head(name: str, of: Geometry, tokens: int) -> Row:
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(of.words, of.width, dtype=torch.bfloat16))
        hidden = torch.empty(tokens, of.width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)

    def step() -> None:
        hidden.grad = weight.grad = None
        HEADS[name](hidden, weight, targets)

    with LiveBytes() as live:
        step()
    with FlopsOfAll() as flops:
        step()
    return Row(name, tokens, live.peak - weight.nbytes, flops.total, 0)


def table(rows: list[Row]) -> str:
    lengths = list(dict.fromkeys(row.tokens for row in rows))
    titles = " | ".join(f"{n:,} tokens: GiB | FLOPs | over the bus, GiB" for n in lengths)
    lines = [f"| | {titles} |", "| --- |" + " ---: | ---: | ---: |" * len(lengths)]
    for name in dict.fromkeys(row.name for row in rows):
        cells = [name]
        for row in (row for row in rows if row.name == name):
            group: Any = HEADS if name in HEADS else NETWORKS
            plain = next(r for r in rows if r.name in group and r.tokens == row.tokens)
            bus = f"{row.bus / GIB:.0f}" if row.bus else ""
            cells += [f"{row.bytes / GIB:.1f}", f"{row.flops / plain.flops:.3f}", bus]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131_072, 524_288])
    parser.add_argument("--write", action="store_true", help="write it to docs/benchmarks.md")
    options = parser.parse_args()
    of = Geometry(layers=options.layers)
    rows = []
    for tokens in options.tokens:
        for name in NETWORKS:
            rows.append(measure(name, of, tokens))
            print(rows[-1], flush=True)
        for name in HEADS:
            rows.append(measure_head(name, of, tokens))
            print(rows[-1], flush=True)
    text = table(rows)
    print(text)
    if options.write:
        write_table("long", text, "benchmarks.md")


if __name__ == "__main__":
    main()
