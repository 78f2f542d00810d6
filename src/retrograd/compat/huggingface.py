"""Hugging Face's Reformer: the engine call of its encoder, on retrograd.

Its own backward is wrong in three ways. It runs attention again with the buckets of forward, so it
leaves out the draw of hash rotations, and dropout gets other masks. It seeds the global generator
for each function, from the clock, so that runs do not repeat. And it raises in `eval()`.

Here a layer is `x1 += attention(x2)`, `x2 += feed_forward(x1)`. Nothing is seeded. A recompute
draws what forward drew, and takes the buckets of forward, so rounding moves no token to another
bucket.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.engine_calls import EngineCall
from retrograd.compat.pairs import UpdateSpec
from retrograd.core.private import without_compiler

HOME = "transformers.models.reformer.modeling_reformer"

_here = threading.local()  # the hashes of the attention that runs in this thread


class Hashes:
    """The buckets of one attention in one forward, in the order in which it asked for them.

    A recompute reads them in the same order, and leaves them alone.
    """

    def __init__(self) -> None:
        self.buckets: list[Tensor] = []

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, what hashes in this thread takes part."""
        if not rg.is_recomputing():
            self.buckets.clear()
        _here.earlier = iter(tuple(self.buckets)) if rg.is_recomputing() else None
        _here.hashes = self
        try:
            yield
        finally:
            _here.hashes = None

    def next(self, buckets: Tensor) -> Tensor:
        if _here.earlier is None:
            self.buckets.append(buckets)
            return buckets
        return next(_here.earlier)


def remembering(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method that hashes, but a recompute gets what forward got."""

    @functools.wraps(theirs)
    def hash_vectors(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        buckets = theirs(self, *args, **kwargs)  # also in a recompute: it draws
        hashes = getattr(_here, "hashes", None)
        return buckets if hashes is None else hashes.next(buckets)

    return hash_vectors


class Record:
    """What one call of the encoder collects besides its output."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self.hashes = [Hashes() for _ in call["layers"]]
        self.hidden_states = call["all_hidden_states"] if call["output_hidden_states"] else None
        self.attentions = call["all_attentions"] if call["output_attentions"] else None
        past = call["past_buckets_states"]
        self.options = {
            "num_hashes": call["num_hashes"],
            "past_buckets_states": None if past is None else DetachedCache(past),
            "use_cache": call["use_cache"],
            "orig_sequence_length": call["orig_sequence_length"],
            "output_attentions": call["output_attentions"],
        }


class DetachedCache:
    """The cache of a call. It takes states without their graph, as under the original engine."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def __len__(self) -> int:
        return len(self.cache)

    def update(self, buckets: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.cache.update(buckets, states.detach(), *args, **kwargs)


@dataclass(frozen=True)
class LayerAttention:
    """The attention of a layer, as a function of one stream."""

    attention: nn.Module
    index: int

    def __call__(self, x: Tensor, attention_mask: Tensor | None, record: Record) -> Tensor:
        options = record.options
        if rg.is_recomputing():  # the cache has its states, and the lists have theirs
            options = {"num_hashes": options["num_hashes"]}
        elif record.hidden_states is not None:
            record.hidden_states.append(x.detach())
        with record.hashes[self.index].here():
            output = self.attention(hidden_states=x, attention_mask=attention_mask, **options)
        if record.attentions is not None and not rg.is_recomputing():
            record.attentions.append(output.attention_probs.detach())
        return output.hidden_states


class ReformerCall(EngineCall):
    """In place of the autograd function of Hugging Face's Reformer."""

    def __init__(self, theirs: type[torch.autograd.Function], settings: Mapping[str, Any]) -> None:
        super().__init__(theirs, settings)
        self.names = list(inspect.signature(theirs.forward).parameters)[1:]

    def others(self) -> list[tuple[Any, str, Any]]:
        """What else is replaced: a holder, a name and the new value."""
        attention = importlib.import_module(HOME).LSHSelfAttention
        return [(attention, "_hash_vectors", remembering(attention._hash_vectors))]

    @without_compiler
    def apply(self, *args: Any) -> Tensor:
        call = dict(zip(self.names, args))
        record = Record(call)
        updates = []
        for index, layer in enumerate(call["layers"]):
            attention = LayerAttention(layer.attention, index)
            given = {"attention_mask": "attention_mask", "record": "record"}
            updates.append(UpdateSpec("x1", attention, ("x2",), given))
            updates.append(UpdateSpec("x2", layer.feed_forward, ("x1",), {}))
        x2, x1 = call["hidden_states"].chunk(2, -1)
        kwargs = {"attention_mask": call["attention_mask"], "record": record}
        past = call["past_buckets_states"]
        is_fresh = past is None or len(past) == 0  # a recompute has no states of earlier tokens
        engine = self.engines.of(call["layers"])
        streams = engine(updates, {"x1": x1, "x2": x2}, kwargs, reverse=is_fresh)
        output = torch.cat((streams["x1"], streams["x2"]), -1)
        if record.hidden_states is not None:
            record.hidden_states.append(output.detach().chunk(2, -1)[1])
        return output
