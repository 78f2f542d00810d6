"""Which keyword argument of a call goes to which function.

Arguments go by the function's signature, unless a route says otherwise. An argument that no
function accepts raises `TypeError`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from retrograd.compiling.seams import run_while_tracing

Function = Callable[..., Any]
Route = Mapping[str, "str | Sequence[str]"] | Sequence[Mapping[str, str]]


class Accepted(NamedTuple):
    """The keyword arguments that a function accepts: these names, or any (`**kwargs`)."""

    names: frozenset[str]
    any_name: bool


class Step(Protocol):
    """What `check_all_taken` needs of an update."""

    @property
    def fn(self) -> Function: ...
    @property
    def reads(self) -> Sequence[str]: ...


def accepted(fn: Function, reads: int) -> Accepted:
    """The keyword arguments that `fn` accepts besides its first `reads` positional ones."""
    while hasattr(fn, "_orig_mod"):  # torch.compile's wrapper has a signature of its own
        fn = fn._orig_mod  # type: ignore[attr-defined]
    fn = getattr(fn, "takes_arguments_of", fn)  # a wrapper: `Chunked`
    if isinstance(fn, nn.Module):
        fn = fn.forward
    # A bound method is a new object on each access, so its function is the cache key. The
    # function has one more positional argument, `self`.
    function = getattr(fn, "__func__", None)
    if function is None:
        return _cached(fn, reads)
    return _cached(function, reads + 1)


# Keys are weak references, because a closure may hold a whole model.
_cache: weakref.WeakKeyDictionary[Function, dict[int, Accepted]] = weakref.WeakKeyDictionary()


def _cached(fn: Function, reads: int) -> Accepted:
    try:
        by_reads = _cache.setdefault(fn, {})
    except TypeError:  # `fn` cannot be hashed, or has no weak references
        by_reads = {}
    if reads not in by_reads:
        by_reads[reads] = _inspect(fn, reads)
    return by_reads[reads]


def _inspect(fn: Function, reads: int) -> Accepted:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return Accepted(frozenset(), False)
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Accepted(frozenset(names.difference(positional[:reads])), any_name)


def by_signature(fn: Function, reads: int, given: Iterable[str]) -> dict[str, str]:
    """The arguments of the call that `fn` accepts, as a dict from its name to the caller's."""
    given = tuple(given)
    return {name: name for name in taken_by(fn, reads, given)} if given else {}


@run_while_tracing
def taken_by(fn: Function, reads: int, given: tuple[str, ...]) -> tuple[str, ...]:
    """The names among `given` that `fn` accepts."""
    names, any_name = accepted(fn, reads)
    return tuple(name for name in given if any_name or name in names)


def by_update(
    route: Mapping[str, str] | Iterable[str] | None, fn: Function, reads: int, given: Iterable[str]
) -> dict[str, str]:
    """`by_signature` for an `Update`, whose `route` may choose and rename arguments."""
    if route is None:
        return by_signature(fn, reads, given)
    names = route if isinstance(route, Mapping) else {name: name for name in route}
    present = set(given)
    return {inner: outer for inner, outer in names.items() if outer in present}


class PairRoute:
    """The `route=` of a stack of `(f, g)`: which of the two functions get an argument.

    A dict such as `{"mask": "f", "context": "fg"}`. A value may be a list with an entry for each
    block, `{"mask": ["f", ""]}`. Or a list of dicts, one for each block. Arguments that it does not
    mention go by signature.
    """

    def __init__(self, route: Route | None, blocks: int) -> None:
        self.route = route
        self.rows = None if route is None else _rows(route, blocks)

    def fit(self, blocks: int) -> None:
        """The stack has so many blocks now."""
        if self.route is not None and self.rows is not None and len(self.rows) != blocks:
            self.rows = _rows(self.route, blocks)

    def mentioned(self) -> set[str]:
        """The arguments that the route decides about, including those that it sends nowhere."""
        return {name for row in self.rows or () for name in row}

    def keywords(
        self, block: int, function: str, fn: Function, given: Iterable[str]
    ) -> dict[str, str]:
        """The arguments that a function, "f" or "g", of a block gets."""
        if self.rows is None:
            return by_signature(fn, 1, given)
        row = self.rows[block]
        chosen = by_signature(fn, 1, [name for name in given if name not in row])
        chosen.update({name: name for name in given if function in row.get(name, "")})
        return chosen


def _rows(route: Route, blocks: int) -> Sequence[Mapping[str, str]]:
    """A route as one dict for each block, checked."""
    if isinstance(route, Mapping):
        by_argument = {name: _entries(name, functions, blocks) for name, functions in route.items()}
        rows = [
            {name: entries[block] for name, entries in by_argument.items()}
            for block in range(blocks)
        ]
    else:
        rows = list(route)
        _check_length("route", len(rows), blocks)
    for row in rows:
        for name, functions in row.items():
            if not isinstance(functions, str) or set(functions) - set("fg"):
                raise ValueError(f'route[{name!r}] is {functions!r}; write "f", "g", "fg" or "".')
    return rows


def _entries(name: str, functions: str | Sequence[str], blocks: int) -> Sequence[str]:
    """The functions that get an argument, for each block."""
    if isinstance(functions, str):
        return [functions] * blocks
    _check_length(f"route[{name!r}]", len(functions), blocks)
    return functions


def _check_length(what: str, entries: int, blocks: int) -> None:
    if entries != blocks:
        raise ValueError(f"{what} has {entries} entries for {blocks} blocks; give one for each.")


def check_all_taken(
    given: Iterable[str], taken: set[str], program: Sequence[Step], route: str
) -> None:
    """Raise for arguments that no function takes. The message lists those that functions accept.

    `route` is the code that would send an argument somewhere, with a place for its name.
    """
    unknown = [name for name in given if name not in taken]
    if not unknown:
        return
    known = {name for step in program for name in accepted(step.fn, len(step.reads)).names}
    what = "arguments" if len(unknown) > 1 else "an argument"
    raise TypeError(
        f"got {what} that none of the functions accepts: {_quoted(unknown)}. They accept "
        f"{_quoted(sorted(known)) or 'none by name'}. If a function takes it under another "
        f"signature, route it: {route.format(unknown[0])}."
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
