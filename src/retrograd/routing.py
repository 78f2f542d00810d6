"""Which keyword argument of a call goes to which function.

By the function's signature, unless a route says otherwise. An argument that no function takes is an
error, never ignored.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

Route = Mapping[str, "str | Sequence[str]"] | Sequence[Mapping[str, str]]


def accepted(fn: Callable[..., Any], reads: int) -> tuple[frozenset[str], bool]:
    """The keyword arguments that `fn` takes besides its first `reads` positional ones; and whether
    it takes any at all.
    """
    while hasattr(fn, "_orig_mod"):  # torch.compile's wrapper has a signature of its own
        fn = fn._orig_mod  # type: ignore[attr-defined]
    if isinstance(fn, nn.Module):
        fn = fn.forward
    # A bound method is made anew on each access; the function behind it is not, and `self` is one
    # more positional argument.
    method = getattr(fn, "__func__", None)
    return _accepted(fn, reads) if method is None else _accepted(method, reads + 1)


# By function, weakly: a closure may hold a whole model.
_known: weakref.WeakKeyDictionary[Any, dict[int, tuple[frozenset[str], bool]]] = (
    weakref.WeakKeyDictionary()
)


def _accepted(fn: Callable[..., Any], reads: int) -> tuple[frozenset[str], bool]:
    try:
        known = _known.setdefault(fn, {})
    except TypeError:  # cannot be hashed, or not weakly
        known = {}
    if reads not in known:
        known[reads] = _inspected(fn, reads)
    return known[reads]


def _inspected(fn: Callable[..., Any], reads: int) -> tuple[frozenset[str], bool]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return frozenset(), False
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(names.difference(positional[:reads])), any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )


def by_signature(fn: Callable[..., Any], reads: int, given: Iterable[str]) -> dict[str, str]:
    """What `fn` calls an argument → what the caller called it, for those of the `given` names that
    it takes.
    """
    given = list(given)
    if not given:
        return {}
    names, anything = accepted(fn, reads)
    return {name: name for name in given if anything or name in names}


def by_update(
    route: Any, fn: Callable[..., Any], reads: int, given: Iterable[str]
) -> dict[str, str]:
    """The same for an `Update`, whose route is None, a sequence of names, or a dict of inner to
    outer names.
    """
    if route is None:
        return by_signature(fn, reads, given)
    pairs = route.items() if isinstance(route, Mapping) else ((name, name) for name in route)
    present = set(given)
    return {inner: outer for inner, outer in pairs if outer in present}


class PairRoute:
    """The `route=` of a stack of `(f, g)`: a dict from argument to functions, or a list of such
    dicts, one for each block.

    `{"mask": "f", "context": "fg"}`; a dict's value may be a list too, with an entry for each
    block: `{"mask": ["f", ""]}`. Arguments that it does not mention go by signature.
    """

    def __init__(self, route: Route | None, blocks: int) -> None:
        self.rows: list[Mapping[str, str]] | None = None
        if route is None:
            return
        if isinstance(route, Mapping):
            for name, value in route.items():
                if not isinstance(value, str) and len(value) != blocks:
                    raise ValueError(
                        f"route[{name!r}] has {len(value)} entries for {blocks} blocks; give one "
                        "for each."
                    )
            self.rows = [
                {k: v if isinstance(v, str) else v[i] for k, v in route.items()}
                for i in range(blocks)
            ]
        else:
            self.rows = list(route)
            if len(self.rows) != blocks:
                raise ValueError(
                    f"route has {len(self.rows)} entries for {blocks} blocks; give one for each."
                )
        for row in self.rows:
            for name, functions in row.items():
                if not isinstance(functions, str) or set(functions) - set("fg"):
                    raise ValueError(
                        f'route[{name!r}] is {functions!r}; write "f", "g", "fg" or "".'
                    )

    def mentioned(self) -> set[str]:
        """Arguments that the route sends somewhere, or nowhere, on purpose."""
        return {name for row in self.rows or () for name in row}

    def keywords(
        self, block: int, function: str, fn: Callable[..., Any], given: Iterable[str]
    ) -> dict[str, str]:
        if self.rows is None:
            return by_signature(fn, 1, given)
        row = self.rows[block]
        chosen = by_signature(fn, 1, [name for name in given if name not in row])
        chosen.update({name: name for name in given if function in row.get(name, "")})
        return chosen


def check_all_taken(
    given: Iterable[str], taken: set[str], program: Sequence[Any], route: str
) -> None:
    """Raise for arguments that no function takes, with those that functions do take."""
    unknown = [name for name in given if name not in taken]
    if unknown:
        known = sorted({name for step in program for name in accepted(step.fn, len(step.reads))[0]})
        names = ", ".join(map(repr, unknown))
        raise TypeError(
            f"got {'arguments' if len(unknown) > 1 else 'an argument'} that none of the functions "
            f"accepts: {names}. They accept "
            f"{', '.join(map(repr, known)) or 'none by name'}. Where a function takes it under "
            "another signature, say so with "
            f"{route.format(unknown[0])}."
        )
