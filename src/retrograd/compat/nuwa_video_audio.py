"""nuwa-pytorch's reversible layers for video and audio: two modalities of their own lengths, each
with two streams.

Blocks of four functions, in three types:

    intra_modality_self_attn     v1 += f(v2)       v2 += g(v1)    a1 += j(a2)       a2 += k(a1)
    intra_modality_cross_attn    the same; f and j also get the text and its mask, and the mask of
    their modality inter_modality_cross_attn    v1 += f(v2, a2)   v2 += k(v1)    a1 += j(a2, v2)
    a2 += g(a1)

Mind g and k: in the third type, k serves the video and g the audio.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`), outputs, gradients,
random draws; block types by name, with `ValueError` for an unknown one; `reverse=False` for the
ordinary path.

*Differs*: inputs that need no gradient, backward in `eval()`, several forwards before a backward,
`autograd.grad`, double backward, DDP and autocast work; buffers are updated once; the text
encoder's backward runs once, not once a block; blocks have no `backward_pass`, because autograd
walks back itself, and are not called: hooks and `fully_shard` belong on `f` and `g`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic, Engine, Line

# What f and j get of the call's keyword arguments: their name for it, and the caller's.
VIDEO = {"mask": "video_mask"}
AUDIO = {"mask": "audio_mask"}
TEXT = {"context": "context", "context_mask": "context_mask"}


class Quad(nn.Module):
    """A block of four functions."""

    def __init__(
        self,
        f: Callable[..., Any],
        g: Callable[..., Any],
        j: Callable[..., Any],
        k: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.f = Deterministic(f)
        self.g = Deterministic(g)
        self.j = Deterministic(j)
        self.k = Deterministic(k)
        self.engine = Engine()

    def lines(self) -> list[Line]:
        raise NotImplementedError

    def run(self, x: Tensor, m: Tensor, reverse: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The block alone, on a video and an audio whose halves along axis 2 are their streams."""
        return _run([self], self.engine, x, m, kwargs, reverse)


class ReversibleSelfAttnBlock(Quad):
    def lines(self) -> list[Line]:
        return [
            Line("v1", self.f, ("v2",), {}),
            Line("v2", self.g, ("v1",), {}),
            Line("a1", self.j, ("a2",), {}),
            Line("a2", self.k, ("a1",), {}),
        ]

    def forward(
        self, x: Tensor, m: Tensor, _reverse: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.run(x, m, _reverse)


class ReversibleCrossAttnBlock(Quad):
    def lines(self) -> list[Line]:
        return [
            Line("v1", self.f, ("v2",), TEXT | VIDEO),
            Line("v2", self.g, ("v1",), {}),
            Line("a1", self.j, ("a2",), TEXT | AUDIO),
            Line("a2", self.k, ("a1",), {}),
        ]

    def forward(
        self,
        x: Tensor,
        m: Tensor,
        *,
        context: Any,
        context_mask: Any,
        video_mask: Any = None,
        audio_mask: Any = None,
        _reverse: bool = True,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        masks = {"context_mask": context_mask, "video_mask": video_mask, "audio_mask": audio_mask}
        return self.run(x, m, _reverse, context=context, **masks)


class ReversibleCrossModalityAttnBlock(Quad):
    def lines(self) -> list[Line]:
        return [
            Line("v1", self.f, ("v2", "a2"), VIDEO | {"context_mask": "audio_mask"}),
            Line("v2", self.k, ("v1",), {}),
            Line("a1", self.j, ("a2", "v2"), AUDIO | {"context_mask": "video_mask"}),
            Line("a2", self.g, ("a1",), {}),
        ]

    def forward(
        self,
        x: Tensor,
        m: Tensor,
        *,
        video_mask: Any = None,
        audio_mask: Any = None,
        _reverse: bool = True,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return self.run(x, m, _reverse, video_mask=video_mask, audio_mask=audio_mask)


def reversible_apply(
    inp: Tensor, ind: int, blocks: Sequence[Quad], kwargs: dict[str, Any]
) -> Tensor:
    """Video and audio in one tensor, the first `ind` of axis 1 being the video, each with its
    streams side by side.
    """
    return _apply(inp, ind, blocks, kwargs, reverse=True)


def irreversible_apply(
    inputs: Tensor, ind: int, blocks: Sequence[Quad], kwargs: dict[str, Any]
) -> Tensor:
    """The same in plain autograd."""
    return _apply(inputs, ind, blocks, kwargs, reverse=False)


BLOCK_TYPES = {
    "intra_modality_self_attn": ReversibleSelfAttnBlock,
    "intra_modality_cross_attn": ReversibleCrossAttnBlock,
    "inter_modality_cross_attn": ReversibleCrossModalityAttnBlock,
}


class DualModalityReversibleSequence(nn.Module):
    def __init__(self, input_blocks: Iterable[Sequence[Any]], block_types: Sequence[str]) -> None:
        super().__init__()
        self.block_types = block_types
        for name in block_types:
            if name not in BLOCK_TYPES:
                raise ValueError(
                    f"unknown layer type {name}; the types are {', '.join(BLOCK_TYPES)}"
                )
        self.blocks = nn.ModuleList(
            [BLOCK_TYPES[name](*block) for block, name in zip(input_blocks, block_types)]
        )
        self.engine = Engine()

    def forward(
        self,
        video: Tensor,
        audio: Tensor,
        *,
        context: Any,
        context_mask: Any = None,
        video_mask: Any = None,
        audio_mask: Any = None,
        reverse: bool = True,
    ) -> list[Tensor]:
        kwargs = {
            "context": context,
            "context_mask": context_mask,
            "video_mask": video_mask,
            "audio_mask": audio_mask,
        }
        streams = {"v1": video, "v2": video, "a1": audio, "a2": audio}
        lines: list[Line] = [line for block in self.blocks for line in block.lines()]  # type: ignore[operator]
        streams = self.engine(lines, streams, kwargs, reverse)
        merge = rg.Duplicate("mean").join
        return [merge(streams["v1"], streams["v2"]), merge(streams["a1"], streams["a2"])]


def _lines(block: Any) -> list[Line]:
    """Of a block of ours, or of the original's: a model built before `install` looks up
    `reversible_apply` when it runs.
    """
    ours = {cls.__name__: cls for cls in BLOCK_TYPES.values()}
    return (
        block.lines()
        if isinstance(block, Quad)
        else next(
            ours[cls.__name__].lines(block) for cls in type(block).__mro__ if cls.__name__ in ours
        )
    )


def _run(
    blocks: Sequence[Quad],
    engine: Engine,
    x: Tensor,
    m: Tensor,
    kwargs: dict[str, Any],
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    halves = rg.Split(2)
    streams: dict[str, Tensor] = dict(
        zip(("v1", "v2", "a1", "a2"), halves.split(x) + halves.split(m))
    )
    streams = engine([line for block in blocks for line in _lines(block)], streams, kwargs, reverse)
    return halves.join(streams["v1"], streams["v2"]), halves.join(streams["a1"], streams["a2"])


def _apply(
    inputs: Tensor, ind: int, blocks: Sequence[Quad], kwargs: dict[str, Any], reverse: bool
) -> Tensor:
    x, m = _run(list(blocks), Engine(), inputs[:, :ind], inputs[:, ind:], kwargs, reverse)
    return torch.cat((x, m), 1)
