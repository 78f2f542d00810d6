"""`ReversibleSequence`: a stack of `(f, g)` pairs over two streams."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.exact import DriftAction, Grid
from retrograd.core.memory import MemoryMode, Reverse
from retrograd.core.program import Pass, Step, make_step
from retrograd.core.streams import (
    Duplicate,
    Split,
    State,
    StreamRule,
    flatten_stream,
    read,
    unflatten,
)
from retrograd.core.structure import VerifyCalls
from retrograd.core.updates import Additive, Coupling
from retrograd.routing import PairRoute, Route, check_all_taken
from retrograd.stack import (
    ADD,
    Blocks,
    Stack,
    check_function,
    checked_coupling,
    on_grid,
)

IDENTITY = nn.Identity()


class ReversibleSequence(Stack):
    """A stack of blocks `(f, g)`, each computing `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`.

    Backward rebuilds each block's input from its output, so activation memory does not grow with
    depth. A step costs 4/3 of plain autograd, less the last block. Gradients, random draws, buffers
    and hooks are those of the same equations in plain autograd. The output is a tensor of its own,
    which the caller may edit in place.

    Args:
        blocks: an iterable of pairs of modules (or callables). Parameters are named
            `blocks.<i>.f.…` and `blocks.<i>.g.…`.
        streams: how the input becomes `x1, x2`, and these one output: `Duplicate()`, `Split()` or
            `AtRest()`.
        memory: `Reverse()` rebuilds; `Budget("2 GiB")` keeps what makes a step fastest within so
            many bytes; `Anchor(every)` rebuilds from states that it keeps; `Keep()` stores
            everything, as plain autograd does. May be assigned at any time.
        coupling: how a function's output enters its stream: `Additive()`, `Affine()`,
            `Momentum(0.9)` or your own.
        route: which keyword argument goes to which function, e.g. `{"mask": "f", "context": "fg"}`,
            or a list of such dicts, one for each block. Arguments that it does not mention go to
            every function whose signature accepts them.
        exact: True makes gradients bit-identical to those of `memory=Keep()`: streams live on a
            grid, see `rg.Grid`.
        drift: what happens when rebuilt streams are further off than their dtype explains: "warn"
            or "raise". "ignore" switches the comparison off; then a function that does something
            else in recompute may go unnoticed.
        stream_dtype: streams are at least this wide, float32 by default; functions read them in the
            input's dtype. With `torch.bfloat16`, bfloat16 inputs stay as they are, and drift ten
            times as much.
        verify: when backward compares what each function does the second time with what it did in
            forward, and raises `RecomputeError` if that differs. "first": in the first backward,
            after a change and now and then; "always"; "never".

    Example:
        >>> blocks = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence(blocks, streams=rg.Split())
        >>> x = torch.randn(2, 16)
        >>> torch.allclose(stack.inverse(stack(x)), x, atol=1e-5)
        True
    """

    def __init__(
        self,
        blocks: Iterable[tuple[Callable[..., Any], Callable[..., Any]]],
        *,
        streams: StreamRule = Duplicate(merge="mean"),
        memory: MemoryMode | str = Reverse(),
        coupling: Coupling = Additive(),
        route: Route | None = None,
        exact: bool | Grid = False,
        drift: DriftAction = "warn",
        stream_dtype: torch.dtype | None = None,
        verify: VerifyCalls = "first",
    ) -> None:
        super().__init__(memory, exact, drift, stream_dtype, verify)
        self.blocks = nn.ModuleList([_block(pair, i) for i, pair in enumerate(blocks)])
        self.streams = _checked_streams(streams)
        self.coupling = checked_coupling(coupling)
        self._set_precision(self.precision)
        self.route = PairRoute(route, len(self.blocks))

    def _couplings(self) -> Iterable[tuple[str, Coupling]]:
        return [("coupling", self.coupling)]

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        return [(block, name) for block in self.blocks for name in "fg"]

    def extra_repr(self) -> str:
        settings = f"streams={self.streams!r}, memory={self.memory!r}, coupling={self.coupling!r}"
        return f"{settings}{self.precision}"

    def forward(self, x: Any, /, **kwargs: Any) -> Any:
        """The output for `x`, a tensor or a pytree of tensors.

        `(output, aux)` where functions return `WithAux`.
        """
        return super().forward(x, **kwargs)

    def inverse(self, y: Any, /, **kwargs: Any) -> Any:
        """The input that gave `y`, detached. Needs `streams=Split()`: `ValueError` otherwise.

        Runs each function once. Functions that draw random numbers or use batch statistics do
        something else each time; call `eval()` first. With `exact`, it is the input to the bit if
        that was on the grid, and if `y` has the dtype of the streams (a narrower input has a
        narrower output, which has lost bits).
        """
        if not getattr(self.streams, "invertible", False):
            raise ValueError(
                f"inverse needs both streams, and with {self.streams!r} the output does not have "
                "them. Build the stack with streams=rg.Split(), or use rg.Reversible, whose "
                "output is its streams."
            )
        return self._inverse(y, kwargs)

    def _open(self, value: Any, name: str) -> dict[str, Any]:
        leaves, spec = flatten_stream(value, name)
        split = self.streams.split
        if name == "the output":
            split = getattr(self.streams, "unjoin", split)
        halves = [split(leaf) for leaf in leaves]
        x1 = unflatten([half[0] for half in halves], spec)
        x2 = unflatten([half[1] for half in halves], spec)
        return {"x1": x1, "x2": x2}

    def _close(self, run: Pass) -> Any:
        return self._join(run, self.streams.join)

    def _close_inverse(self, run: Pass) -> Any:
        return self._join(run, getattr(self.streams, "rejoin", self.streams.join))

    def _join(self, run: Pass, join: Callable[..., Tensor]) -> Any:
        pairs = zip(run.state["x1"], run.state["x2"])
        joined = [join(y1, y2) for y1, y2 in pairs]
        return read(joined, run.specs["x1"], run.dtypes["x1"])

    def states(self, x: Any, /, *, after: Sequence[int], **kwargs: Any) -> tuple[Any, list[Any]]:
        """The output, and what it would be if the stack ended after each of these blocks.

        For deep supervision and hidden states. Gradients flow through all of them. Each costs the
        memory of one output.

        Example:
            >>> stack = rg.ReversibleSequence([(torch.tanh, torch.sin)] * 4)
            >>> y, (early, late) = stack.states(torch.ones(2), after=(0, 2))
        """
        return self._states(x, kwargs, after, lambda _, run: self._close(run))

    def _run_blocks(self, run: Pass, blocks: Blocks, undo: bool = False) -> None:
        pairs = list(enumerate(zip(self.blocks, blocks)))
        for i, (block, steps) in reversed(pairs) if undo else pairs:
            run.leave_block(block(dict(run.state), run, steps, undo))
            for look in self._lookers:
                look(i, run)

    def _blocks(self, value: Any, kwargs: dict[str, Any]) -> Blocks:
        """The updates of each block. Looked up in each call, because users replace modules."""
        functions = [fn for block in self.blocks for fn in (block.f, block.g)]
        if kwargs or torch.compiler.is_compiling():  # a compiled graph would depend on the cache
            return self._routed_blocks(functions, kwargs)
        cache = self._cache
        key = [*functions, self.coupling, self.precision]
        if len(key) != len(cache.program_key) or not all(map(operator.is_, key, cache.program_key)):
            cache.program = self._routed_blocks(functions, {})
            cache.program_key = key
        return cache.program

    def _routed_blocks(self, functions: Sequence[Any], kwargs: dict[str, Any]) -> Blocks:
        coupling = self.coupling
        route = self.route
        route.fit(len(self.blocks))
        updates = coupling.pair() if hasattr(coupling, "pair") else ADD.pair()
        blocks: list[list[Step]] = []
        for i in range(len(self.blocks)):
            steps = []
            for target, function, reads in updates:
                if function is None:
                    name = f"blocks.{i}, the step of {target}"
                    steps.append(make_step(name, target, reads, IDENTITY, ADD, {}))
                    continue
                fn = functions[2 * i + (function == "g")]
                keywords = route.keywords(i, function, fn, kwargs) if kwargs else {}
                name = f"blocks.{i}.{function}"
                steps.append(make_step(name, target, reads, fn, coupling, keywords))
            blocks.append(steps)
        if kwargs and blocks:
            steps = [step for block in blocks for step in block]
            taken = {name for step in steps for name in step.keywords}
            check_all_taken(kwargs, taken | route.mentioned(), steps, 'route={{{!r}: "f"}}')
        return on_grid(blocks, self.precision)

    # --- a list of blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.blocks)

    def __getitem__(self, index: int | slice) -> Any:
        """A block, with its functions `f` and `g`; of a slice, a stack of these blocks with the
        same settings.
        """
        if not isinstance(index, slice):
            return self.blocks[index]
        rows = self.route.rows
        return ReversibleSequence(
            [tuple(block) for block in list(self.blocks)[index]],  # type: ignore[arg-type]
            streams=self.streams,
            coupling=self.coupling,
            route=None if rows is None else list(rows)[index],
            **self._settings(),
        ).train(self.training)

    def append(self, pair: tuple[Callable[..., Any], Callable[..., Any]]) -> ReversibleSequence:
        """Add a pair of functions at the end."""
        self.blocks.append(_block(pair, len(self.blocks)))
        return self


class Block(nn.Module):
    """One pair of functions. Its stack calls it, so that hooks on it (FSDP's among them) run."""

    def __init__(self, f: Callable[..., Any], g: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def __iter__(self) -> Iterator[Any]:
        """`f, g = stack[0]`"""
        return iter((self.f, self.g))

    def extra_repr(self) -> str:
        functions = {"f": self.f, "g": self.g}.items()
        return ", ".join(f"{k}={fn!r}" for k, fn in functions if not isinstance(fn, nn.Module))

    def forward(self, state: State, run: Pass, steps: Sequence[Step], undo: bool) -> State:
        """Apply the updates of the block, or take them back.

        A copy of the state goes in and a copy comes out, so that what a hook does to it shows.
        """
        run.enter_block(state)
        if undo:
            for step in reversed(steps):
                run.undo(step)
        else:
            for step in steps:
                run.update(step)
        return dict(run.state)


def _block(pair: Any, index: int) -> Block:
    """`pair` as a block, or an error that says what a block is."""
    if not isinstance(pair, (tuple, list, nn.ModuleList)):
        raise TypeError(
            f"blocks[{index}] is {type(pair).__name__}, not a pair. Pass an iterable of (f, g), "
            "such as [(f0, g0), (f1, g1)]."
        )
    if len(pair) != 2:
        raise ValueError(
            f"blocks[{index}] has {len(pair)} functions, not a pair. Pass an iterable of (f, g)."
        )
    for name, fn in zip("fg", pair):
        check_function(fn, f"blocks[{index}].{name}")
    return Block(*pair)


def _checked_streams(streams: Any) -> StreamRule:
    is_rule = hasattr(streams, "split") and hasattr(streams, "join")
    if isinstance(streams, (type, str)) or not is_rule:
        raise TypeError(f"streams={streams!r}: pass rg.Duplicate(), rg.Split() or rg.AtRest().")
    if isinstance(streams, Split) and streams.count != 2:
        raise ValueError(
            f"streams={streams!r}: a stack of pairs has two streams. Use rg.Split(parts=2), or "
            "rg.Reversible for more."
        )
    return streams
