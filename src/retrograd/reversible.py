"""`Reversible`: a program of updates over any number of named streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrograd.core.exact import DriftAction, Grid
from retrograd.core.memory import MemoryMode, Reverse
from retrograd.core.program import Pass, make_step
from retrograd.core.structure import VerifyCalls
from retrograd.core.updates import Additive, Coupling, Mapped
from retrograd.routing import by_update, check_all_taken
from retrograd.stack import (
    Blocks,
    Stack,
    check_function,
    checked_coupling,
    detached,
    on_grid,
)


class Update(nn.Module):
    """One update of a `Reversible` program.

    It computes `target = coupling.forward(target, fn(*reads, **kwargs))`.

    Args:
        target: name of the stream that changes.
        fn: a module or any callable. It must not change its inputs.
        reads: names of the streams that `fn` gets, in order. If the target is among them, its
            earlier value cannot be rebuilt and is kept: one stream.
        coupling: how the output enters the target; `Additive()` by default.
        route: which keyword arguments of the call `fn` gets. None: those its signature accepts. A
            sequence of names: just those. A dict: from the name `fn` uses to the name the call
            uses, e.g. `{"mask": "video_mask"}`.

    Example:
        >>> update = rg.Update("v1", torch.nn.Linear(8, 8), reads=("v2",))
        >>> update
        Update(
          target='v1', reads=('v2',), coupling=Additive()
          (fn): Linear(in_features=8, out_features=8, bias=True)
        )
    """

    def __init__(
        self,
        target: str,
        fn: Callable[..., Any],
        reads: tuple[str, ...] | list[str] = (),
        *,
        coupling: Coupling = Additive(),
        route: Mapping[str, str] | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(target, str):
            raise TypeError(
                f"{type(self).__name__}({target!r}, ...): target is the name of a stream."
            )
        if isinstance(reads, str):
            raise TypeError(
                f"Update({target!r}, reads={reads!r}): reads is a tuple of names; write "
                f"reads=({reads!r},)."
            )
        check_function(fn, f"Update({target!r}), fn")
        self.target = target
        self.inverse: Callable[..., Any] | None = None
        self.fn = fn
        self.reads = tuple(reads)
        self.coupling = checked_coupling(coupling)
        self.route = route

    def extra_repr(self) -> str:
        route = "" if self.route is None else f", route={self.route!r}"
        return f"target={self.target!r}, reads={self.reads!r}, coupling={self.coupling!r}{route}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns; the program couples it."""
        return self.fn(*args, **kwargs)


class Transform(Update):
    """An invertible map of one stream: `target = fn(target, **kwargs)`.

    A permutation, a 1x1 convolution, a pixel shuffle, a wavelet. It may change the shape of the
    stream, and its parameters train. Nothing is kept: backward calls `inverse` on the stream, then
    runs `fn` again for its gradient.

    Args:
        target: name of the stream that changes.
        fn: a module or any callable. `rg.WithAux(output, aux)` returns more: a log-determinant.
        inverse: takes what `fn` returned, and the same keyword arguments, and returns what `fn` was
            given. It is tried on live data. With `exact=True` it must be exact to the bit.
        route: as for `Update`.

    Example:
        >>> flip = lambda x: x.flip(-1)
        >>> net = rg.Reversible([
        ...     rg.Update("a", torch.nn.Linear(8, 8), reads=("b",)),
        ...     rg.Transform("a", flip, inverse=flip),
        ... ])
        >>> sorted(net({"a": torch.zeros(2, 8), "b": torch.ones(2, 8)}))
        ['a', 'b']
    """

    def __init__(
        self,
        target: str,
        fn: Callable[..., Any],
        *,
        inverse: Callable[..., Any],
        route: Mapping[str, str] | Sequence[str] | None = None,
    ) -> None:
        super().__init__(target, fn, (target,), coupling=Mapped(), route=route)
        check_function(inverse, f"Transform({target!r}), inverse")
        self.inverse = inverse

    def extra_repr(self) -> str:
        route = "" if self.route is None else f", route={self.route!r}"
        return f"target={self.target!r}{route}"


class Reversible(Stack):
    """A program of updates over any number of named streams: a dict in, a dict out.

    Each update changes one stream, `stream[target] = coupling.forward(stream[target],
    fn(*reads, **kwargs))`, and backward undoes the updates one by one. What is kept: the streams at
    the end. Backward starts from them, so they must not be edited in place.

    Args:
        updates: an iterable of `Update`. Parameters are named `updates.<i>.fn.…`.
        memory: `Reverse()` rebuilds; `Budget("2 GiB")` keeps what makes a step fastest within so
            many bytes; `Anchor(every)` rebuilds from states that it keeps; `Keep()` stores
            everything, as plain autograd does. May be assigned at any time.
        exact, drift, stream_dtype, verify: as for `ReversibleSequence`.

    Example:
        >>> f, g = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> net = rg.Reversible([rg.Update("a", f, reads=("b",)), rg.Update("b", g, reads=("a",))])
        >>> streams = net({"a": torch.zeros(2, 8), "b": torch.ones(2, 8)})
        >>> sorted(streams)
        ['a', 'b']
    """

    _hands_out_streams = True

    def __init__(
        self,
        updates: Iterable[Update],
        *,
        memory: MemoryMode | str = Reverse(),
        exact: bool | Grid = False,
        drift: DriftAction = "warn",
        stream_dtype: torch.dtype | None = None,
        verify: VerifyCalls = "first",
    ) -> None:
        super().__init__(memory, exact, drift, stream_dtype, verify)
        self.updates = nn.ModuleList([_checked_update(u, i) for i, u in enumerate(updates)])
        self._set_precision(self.precision)

    def _list(self) -> list[Update]:
        return list(self.updates)  # type: ignore[arg-type]

    def _couplings(self) -> Iterable[tuple[str, Coupling]]:
        return [(f"updates[{i}]", update.coupling) for i, update in enumerate(self._list())]

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        return [(update, "fn") for update in self.updates]

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}{self.precision}"

    def forward(self, streams: dict[str, Any], /, **kwargs: Any) -> Any:
        """The streams after all updates; `(streams, aux)` where functions return `WithAux`."""
        return super().forward(streams, **kwargs)

    def inverse(self, streams: dict[str, Any], /, **kwargs: Any) -> dict[str, Any]:
        """The streams that gave these, detached.

        See `ReversibleSequence.inverse` on randomness and exactness.
        """
        return self._inverse(streams, kwargs)

    def _open(self, value: dict[str, Any], name: str) -> dict[str, Any]:
        if name == "the output":
            return {stream: detached(streams) for stream, streams in value.items()}
        return value

    def _close(self, run: Pass) -> dict[str, Any]:
        return run.streams()

    def _run_blocks(self, run: Pass, blocks: Blocks, undo: bool = False) -> None:
        for step in reversed(blocks[0]) if undo else blocks[0]:
            if undo:
                run.undo(step)
            else:
                run.update(step)

    def _blocks(self, value: Any, kwargs: dict[str, Any]) -> Blocks:
        updates = self._list()
        _check_streams(value, updates)
        program = []
        for i, update in enumerate(updates):
            keywords = by_update(update.route, update.fn, len(update.reads), kwargs)
            # Through the update, not to its function: hooks on it run, FSDP's among them.
            step = make_step(
                name=f"updates.{i}",
                target=update.target,
                reads=update.reads,
                fn=update,
                coupling=update.coupling,
                keywords=keywords,
                inverse=update.inverse,
            )
            program.append(step)
        if program:
            taken = {outer for step in program for outer in step.keywords.values()}
            check_all_taken(kwargs, taken, program, "rg.Update(..., route=({!r},))")
        return on_grid([program], self.precision)

    # --- a list of updates

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.updates)

    def __getitem__(self, index: int | slice) -> Any:
        """An update; of a slice, a program of these updates with the same settings."""
        if not isinstance(index, slice):
            return self.updates[index]
        return Reversible(self._list()[index], **self._settings()).train(self.training)

    def append(self, update: Update) -> Reversible:
        """Add an update at the end."""
        self.updates.append(_checked_update(update, len(self.updates)))
        try:
            self._check(self.memory, self.precision)
        except Exception:
            del self.updates[-1]
            raise
        return self


def _checked_update(update: Any, index: int) -> Update:
    if not isinstance(update, Update):
        raise TypeError(
            f"updates[{index}] is {update!r:.80}; write rg.Update(target, fn, reads=(...))."
        )
    return update


def _check_streams(streams: Any, updates: Sequence[Update]) -> None:
    """Raise unless the streams are those that the updates use."""
    if not isinstance(streams, dict):
        kind = type(streams).__name__
        raise TypeError(f"Reversible takes a dict from stream name to value, not {kind}.")
    if not updates:
        return
    wanted = {name for update in updates for name in (update.target, *update.reads)}
    missing = sorted(wanted - set(streams))
    unknown = sorted(set(streams) - wanted)
    faults = [
        f"{what} {names}" for what, names in (("missing", missing), ("unknown", unknown)) if names
    ]
    if faults:
        raise ValueError(
            f"the streams do not fit the program: {' and '.join(faults)}. Updates use "
            f"{sorted(wanted)}; the call gave {sorted(streams)}."
        )
