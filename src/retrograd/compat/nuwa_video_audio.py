"""The reversible layers of nuwa-pytorch for video and audio.

Video and audio may differ in length; each has two streams. A block has four functions and one of
three types:

    intra_modality_self_attn     v1 += f(v2)       v2 += g(v1)    a1 += j(a2)       a2 += k(a1)
    intra_modality_cross_attn    v1 += f(v2)       v2 += g(v1)    a1 += j(a2)       a2 += k(a1)
    inter_modality_cross_attn    v1 += f(v2, a2)   v2 += k(v1)    a1 += j(a2, v2)   a2 += g(a1)

In the second type, f and j also get the text, its mask and the mask of their modality. In the
third type, g and k change places: k updates the video and g the audio.

*Same*: names, signatures, defaults, state-dict keys (`blocks.0.f.net.…`), outputs, gradients and
random draws; block types by name, with `ValueError` for an unknown one; `reverse=False` for plain
autograd.

*Differs*:

- These work: inputs that need no gradient, backward in `eval()`, several forwards before a
  backward, `autograd.grad`, double backward, DDP and autocast.
- Buffers are updated once.
- The text encoder's backward runs once, not once per block.
- Blocks have no `backward_pass`, because autograd runs the backward. The sequence does not call
  its blocks, so hooks and `fully_shard` belong on `f`, `g`, `j` and `k`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Deterministic, Engine, Function, UpdateSpec

# Which keyword arguments f and j get: their name for each, and the caller's.
VIDEO = {"mask": "video_mask"}
AUDIO = {"mask": "audio_mask"}
TEXT = {"context": "context", "context_mask": "context_mask"}


class FourFunctionBlock(nn.Module):
    def __init__(self, f: Function, g: Function, j: Function, k: Function) -> None:
        super().__init__()
        self.f = Deterministic(f)
        self.g = Deterministic(g)
        self.j = Deterministic(j)
        self.k = Deterministic(k)
        self.engine = Engine()

    def updates(self) -> list[UpdateSpec]:
        raise NotImplementedError

    def run(self, x: Tensor, m: Tensor, reverse: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Run this block by itself. The streams of the video `x` and of the audio `m` are their
        halves along axis 2.
        """
        return _run([self], self.engine, x, m, kwargs, reverse)


class ReversibleSelfAttnBlock(FourFunctionBlock):
    def updates(self) -> list[UpdateSpec]:
        return [
            UpdateSpec("v1", self.f, ("v2",), {}),
            UpdateSpec("v2", self.g, ("v1",), {}),
            UpdateSpec("a1", self.j, ("a2",), {}),
            UpdateSpec("a2", self.k, ("a1",), {}),
        ]

    def forward(
        self, x: Tensor, m: Tensor, _reverse: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.run(x, m, _reverse)


class ReversibleCrossAttnBlock(FourFunctionBlock):
    def updates(self) -> list[UpdateSpec]:
        return [
            UpdateSpec("v1", self.f, ("v2",), TEXT | VIDEO),
            UpdateSpec("v2", self.g, ("v1",), {}),
            UpdateSpec("a1", self.j, ("a2",), TEXT | AUDIO),
            UpdateSpec("a2", self.k, ("a1",), {}),
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
        return self.run(
            x,
            m,
            _reverse,
            context=context,
            context_mask=context_mask,
            video_mask=video_mask,
            audio_mask=audio_mask,
        )


class ReversibleCrossModalityAttnBlock(FourFunctionBlock):
    def updates(self) -> list[UpdateSpec]:
        return [
            UpdateSpec("v1", self.f, ("v2", "a2"), VIDEO | {"context_mask": "audio_mask"}),
            UpdateSpec("v2", self.k, ("v1",), {}),
            UpdateSpec("a1", self.j, ("a2", "v2"), AUDIO | {"context_mask": "video_mask"}),
            UpdateSpec("a2", self.g, ("a1",), {}),
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


BLOCK_TYPES: dict[str, type[FourFunctionBlock]] = {
    "intra_modality_self_attn": ReversibleSelfAttnBlock,
    "intra_modality_cross_attn": ReversibleCrossAttnBlock,
    "inter_modality_cross_attn": ReversibleCrossModalityAttnBlock,
}


class DualModalityReversibleSequence(nn.Module):
    def __init__(
        self, input_blocks: Iterable[Sequence[Function]], block_types: Sequence[str]
    ) -> None:
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
        streams = self.engine(_updates(self.blocks), streams, kwargs, reverse)
        mean = rg.Duplicate("mean").join
        return [mean(streams["v1"], streams["v2"]), mean(streams["a1"], streams["a2"])]


def reversible_apply(
    inp: Tensor, ind: int, blocks: Iterable[nn.Module], kwargs: dict[str, Any]
) -> Tensor:
    """Run blocks on one tensor that holds video and audio.

    The first `ind` positions of axis 1 are the video. The streams of each are its halves along
    axis 2.
    """
    return _apply(inp, ind, blocks, kwargs, reverse=True)


def irreversible_apply(
    inputs: Tensor, ind: int, blocks: Iterable[nn.Module], kwargs: dict[str, Any]
) -> Tensor:
    """`reversible_apply` in plain autograd."""
    return _apply(inputs, ind, blocks, kwargs, reverse=False)


def _apply(
    inputs: Tensor, ind: int, blocks: Iterable[nn.Module], kwargs: dict[str, Any], reverse: bool
) -> Tensor:
    video = inputs[:, :ind]
    audio = inputs[:, ind:]
    return torch.cat(_run(blocks, Engine(), video, audio, kwargs, reverse), 1)


def _run(
    blocks: Iterable[nn.Module],
    engine: Engine,
    video: Tensor,
    audio: Tensor,
    kwargs: dict[str, Any],
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    halves = rg.Split(2)
    v1, v2 = halves.split(video)
    a1, a2 = halves.split(audio)
    streams = {"v1": v1, "v2": v2, "a1": a1, "a2": a2}
    streams = engine(_updates(blocks), streams, kwargs, reverse)
    return halves.join(streams["v1"], streams["v2"]), halves.join(streams["a1"], streams["a2"])


def _updates(blocks: Iterable[nn.Module]) -> list[UpdateSpec]:
    updates = []
    for block in blocks:
        updates += _block_updates(cast("FourFunctionBlock", block))
    return updates


def _block_updates(block: FourFunctionBlock) -> list[UpdateSpec]:
    """The updates of a block, which may be one of the original package.

    A model that was built before `install` has the original's blocks, and looks up
    `reversible_apply` when it runs. Our class of the same name then gives the updates.
    """
    if hasattr(block, "updates"):
        return block.updates()
    ours = {cls.__name__: cls for cls in BLOCK_TYPES.values()}
    names = [cls.__name__ for cls in type(block).__mro__]
    our_class = next(ours[name] for name in names if name in ours)
    return our_class.updates(block)
