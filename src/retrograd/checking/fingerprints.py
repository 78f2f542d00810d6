"""What changed: small fingerprints of all Python state in reach, taken twice and compared.

A counter, a cache that grows, a tensor that was written to, a generator that drew: each is a
`Change`, with the path of the value and what happened to it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from retrograd.checking.compare import has_no_values, raw_bytes
from retrograd.checking.crawl import MAX_ITEMS, PLAIN_TYPES, crawl
from retrograd.checking.generators import is_generator, is_numpy, state_of
from retrograd.core.private import identity_of_generator
from retrograd.core.tensors import local, storage_of

MAX_BYTES = 1 << 24  # of a larger tensor, only a sample of elements is compared
MUTABLE_CONTAINERS = (dict, list, set, deque, bytearray)

ChangeKind = Literal["random", "cache", "tensor", "counter", "value"]


@dataclass(frozen=True)
class Fingerprint:
    """Differs if the value differs. Of an `object` nothing is known but that it is there."""

    kind: Literal["plain", "tensor", "container", "random", "array", "object", "missing"]
    content: object = None
    shape: tuple[int, ...] = ()
    identity: int = field(default=0, compare=False)  # of a tensor: its id


class Change(NamedTuple):
    """What happened to a value between two sets of fingerprints."""

    path: str
    kind: ChangeKind
    text: str
    is_new_tensor: bool = False  # another tensor was put in its place


_MISSING = Fingerprint("missing")
_OBJECT = Fingerprint("object")


def fingerprints(path: str, root: object, replayed: Collection[int] = ()) -> dict[str, Fingerprint]:
    """The fingerprint of everything that `root` can reach, by path.

    `replayed` has the ids of modules and generators that the engine replays: their tensors and
    their random state are left out.
    """
    return {
        reference.path: fingerprint(reference.value, replayed)
        for reference in crawl(path, root, replayed)
    }


def changes_between(
    before: Mapping[str, Fingerprint], after: Mapping[str, Fingerprint]
) -> list[Change]:
    """What differs. Where a container changed, its items are not listed as well."""
    changes: list[Change] = []
    for path, now in after.items():
        then = before.get(path, _MISSING)
        if then != now and not any(_covers(change.path, path) for change in changes):
            changes.append(_change(path, then, now))
    return changes


def _covers(container: str, path: str) -> bool:
    return path == container or path.startswith(f"{container}[")


def fingerprint(value: Any, replayed: Collection[int] = ()) -> Fingerprint:
    """A small value that differs if `value` differs."""
    if isinstance(value, PLAIN_TYPES):
        return Fingerprint("plain", _comparable(value))
    if isinstance(value, Tensor) and storage_of(value) in replayed:
        return Fingerprint("tensor", None, tuple(value.shape), id(value))
    if isinstance(value, Tensor):
        content = (str(value.dtype), _hash(value))
        return Fingerprint("tensor", content, tuple(value.shape), id(value))
    if isinstance(value, (*MUTABLE_CONTAINERS, tuple, frozenset)):
        return _of_container(value)
    if is_generator(value):
        return _of_generator(value, replayed)
    if is_numpy(value, "ndarray"):
        content = value.tobytes() if value.nbytes <= MAX_BYTES else None
        return Fingerprint("array", content, value.shape)
    return _of_object(value)


def _comparable(value: object) -> object:
    """The value itself; a float as text, because NaN does not equal NaN."""
    return repr(value) if isinstance(value, (float, complex)) else value


def _hash(tensor: Tensor) -> int | None:
    """A hash of a tensor's values."""
    if has_no_values(tensor):
        return None
    tensor = local(tensor.detach()).as_subclass(Tensor)
    if tensor.nbytes > MAX_BYTES:
        tensor = tensor.flatten()[:: tensor.nbytes // MAX_BYTES * 16]
    return hash(raw_bytes(tensor.resolve_conj().resolve_neg().cpu().contiguous()))


def _of_container(container: Any) -> Fingerprint:
    """Its type and its length; and its items, if they are ordered and all of them plain."""
    items = container.values() if isinstance(container, dict) else container
    is_short = len(container) <= MAX_ITEMS
    content = None
    if is_short and not isinstance(container, (set, frozenset)):
        if all(isinstance(item, PLAIN_TYPES) for item in items):
            content = tuple(map(_comparable, items))
    return Fingerprint("container", (type(container).__name__, content), (len(container),))


def _of_generator(generator: object, replayed: Collection[int]) -> Fingerprint:
    if isinstance(generator, random.SystemRandom):
        return _OBJECT
    if isinstance(generator, torch.Generator) and identity_of_generator(generator) in replayed:
        return _OBJECT
    return Fingerprint("random", state_of(generator))


def _of_object(value: Any) -> Fingerprint:
    module = type(value).__module__
    if module == "numpy" and hasattr(value, "item"):
        return Fingerprint("plain", _comparable(value.item()))
    if module == "itertools":  # such as count(3), which says where it is
        return Fingerprint("plain", repr(value))
    return _OBJECT


def _change(path: str, then: Fingerprint, now: Fingerprint) -> Change:
    if now.kind == "container":
        return _changed_container(path, then, now)
    if now.kind == "tensor":
        return _changed_tensor(path, then, now)
    if now.kind == "plain":
        return _changed_plain(path, then, now)
    if now.kind == "array":
        return Change(path, "tensor", f"`{path}`, a NumPy array, was changed")
    if now.kind == "random":
        return Change(path, "random", f"`{path}` drew random numbers")
    return Change(path, "value", f"`{path}` was replaced")


def _changed_container(path: str, then: Fingerprint, now: Fingerprint) -> Change:
    if then.kind == now.kind and then.shape == now.shape:
        return Change(path, "value", f"`{path}` holds other values than before")
    had = then.shape[0] if then.kind == now.kind else "none"
    return Change(path, "cache", f"`{path}` has {now.shape[0]} entries and had {had} before")


def _changed_tensor(path: str, then: Fingerprint, now: Fingerprint) -> Change:
    if then.kind == "tensor" and then.shape != now.shape:
        text = f"`{path}` grew from {list(then.shape)} to {list(now.shape)}"
        return Change(path, "cache", text)
    if then.kind == "tensor" and then.identity == now.identity:
        text = f"`{path}`, a tensor that is not a registered buffer, was changed"
        return Change(path, "tensor", text)
    text = f"`{path}` was replaced by a tensor with other values"
    return Change(path, "tensor", text, is_new_tensor=True)


def _changed_plain(path: str, then: Fingerprint, now: Fingerprint) -> Change:
    was = f"{then.content!r:.40}" if then.kind == "plain" else "not defined"
    is_counter = isinstance(now.content, (int, str)) and not isinstance(now.content, bool)
    kind = "counter" if is_counter else "value"
    return Change(path, kind, f"`{path}` is {now.content!r:.40} and was {was} before")
