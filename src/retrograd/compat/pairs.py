"""The parts that the five systems share.

A block is a list of updates, `target += fn(*reads)`. Each block describes its updates as data
(`UpdateSpec`), and an `Engine` runs the updates of all blocks as one `rg.Reversible`. The block
modules only hold the functions, under the names that the original package's checkpoints use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg

Function = Callable[..., Any]
Stream = Any  # a tensor or a pytree of tensors
ArgumentNames = Mapping[str, str]  # from the function's name for an argument to the caller's name


class Deterministic(nn.Module):
    """A function that can repeat its random draws.

    `record_rng=True` stores the random states before the call; `set_rng=True` runs the call from
    the stored states. retrograd does not use these flags, because it replays random draws itself.
    The class is here for its name in state-dict keys, `blocks.0.f.net.…`, and the flags still work.
    """

    def __init__(self, net: Function) -> None:
        super().__init__()
        self.net = net
        self.cpu_state: Tensor | None = None
        self.device_states: dict[torch.device, Tensor] = {}

    def record_rng(self, *args: Any) -> None:
        self.cpu_state = torch.get_rng_state()
        self.device_states = {}
        for arg in args:
            if isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta"):
                device_module = torch.get_device_module(arg.device)
                self.device_states[arg.device] = device_module.get_rng_state(arg.device)

    def forward(
        self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any
    ) -> Any:
        if record_rng:
            self.record_rng(*args)
        if not set_rng:
            return self.net(*args, **kwargs)
        if self.cpu_state is None:
            raise RuntimeError(
                "Deterministic(..., set_rng=True): nothing was recorded. Call it with "
                "record_rng=True first."
            )
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(self.cpu_state)
            for device, state in self.device_states.items():
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
                torch.get_device_module(device).set_rng_state(state, device)
            return self.net(*args, **kwargs)


class UpdateSpec(NamedTuple):
    """One update as data: `target += fn(*reads, **arguments)`.

    `names` maps the function's name for a keyword argument to the caller's name for it.
    """

    target: str
    fn: Function
    reads: tuple[str, ...]
    names: ArgumentNames
    coupling: rg.Coupling = rg.Additive()


class Engine:
    """Runs a list of updates as an `rg.Reversible`, which is rebuilt only when the list changes.

    `memory` and `exact` are those of `rg.Reversible` and may be assigned at any time:
    `sequence.engine.memory = rg.Keep()`.
    """

    def __init__(self, memory: Any = rg.Reverse(), exact: bool | rg.Grid = False) -> None:
        self.memory = memory
        self.exact = exact
        # The stack of the last call, and what it was built from. It is one tuple, replaced as a
        # whole, because threads may share an engine.
        self._built: tuple[object, rg.Reversible] | None = None

    def __reduce__(self) -> Any:
        return Engine, (self.memory, self.exact)  # a copy or a pickle builds a stack of its own

    def __call__(
        self,
        updates: list[UpdateSpec],
        streams: dict[str, Stream],
        kwargs: Mapping[str, Any],
        reverse: bool = True,
    ) -> dict[str, Stream]:
        if not updates:
            return streams
        stack = self._stack(updates, self.memory if reverse else rg.Keep())
        used = {callers_name for update in updates for callers_name in update.names.values()}
        arguments = {name: _copy_mask(value) for name, value in kwargs.items() if name in used}
        return stack(streams, **arguments)

    def _stack(self, updates: list[UpdateSpec], memory: Any) -> rg.Reversible:
        built_from = (updates, memory, self.exact)
        built = self._built
        if built is None or built[0] != built_from:
            program = [
                rg.Update(u.target, u.fn, u.reads, coupling=u.coupling, route=dict(u.names))
                for u in updates
            ]
            built = (built_from, rg.Reversible(program, memory=memory, exact=self.exact))
            self._built = built
        return built[1]


def run_halves(engine: Engine, updates: list[UpdateSpec], x: Tensor, dim: int) -> Tensor:
    """Run updates of `x1` and `x2`, the halves of a tensor along a dimension."""
    halves = rg.Split(dim)
    x1, x2 = halves.split(x)
    streams = engine(updates, {"x1": x1, "x2": x2}, {})
    return halves.join(streams["x1"], streams["x2"])


class Engines:
    """The engines of an installed package: one for each list of blocks.

    They are found by the blocks, because packages hand over lists that lack some of them (layer
    dropout). Blocks are held by weak references: a copy or a pickle of a model takes nothing along.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._by_block: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()

    def of(self, blocks: Iterable[nn.Module]) -> Engine:
        """The engine of these blocks, which may be made here."""
        blocks = list(blocks)
        known = (self._by_block.get(block) for block in blocks)
        engine = next((each for each in known if each is not None), None) or Engine(**self.settings)
        for block in blocks:
            self._by_block.setdefault(block, engine)
        return engine


def _copy_mask(value: Any) -> Any:
    """A copy of a mask or index tensor; any other value as it is.

    These packages edit masks in place after the call, and recompute must see what forward saw.
    """
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return value
    # A dimension of stride 0 is expanded: copy one element of it and expand the copy.
    distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())
    return value[distinct].clone().expand(value.shape)


@dataclass(frozen=True)
class WithSignal:
    """A function that is also given its block's number and whether the call is a recompute."""

    fn: Function
    depth: int | None

    def __call__(self, x: Any, **kwargs: Any) -> Any:
        kwargs["_reverse"] = rg.is_recomputing()
        kwargs["_depth"] = self.depth
        return self.fn(x, **kwargs)


class PairBlock(nn.Module):
    """A block `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`, with both functions in `Deterministic`."""

    def __init__(self, f: Function, g: Function) -> None:
        super().__init__()
        self.f = Deterministic(f)
        self.g = Deterministic(g)
        self.engine = Engine()

    def updates(self, f_names: ArgumentNames, g_names: ArgumentNames) -> list[UpdateSpec]:
        """The two updates, given the names of the keyword arguments of f and of g."""
        return [
            UpdateSpec("x1", self.f, ("x2",), f_names),
            UpdateSpec("x2", self.g, ("x1",), g_names),
        ]

    def run(
        self, x1: Stream, x2: Stream, f_args: Mapping[str, Any], g_args: Mapping[str, Any]
    ) -> tuple[Stream, Stream]:
        """Run this block by itself."""
        f_names = {name: f"f_{name}" for name in f_args}
        g_names = {name: f"g_{name}" for name in g_args}
        kwargs = {f_names[name]: value for name, value in f_args.items()}
        kwargs |= {g_names[name]: value for name, value in g_args.items()}
        streams = self.engine(self.updates(f_names, g_names), {"x1": x1, "x2": x2}, kwargs)
        return streams["x1"], streams["x2"]


class SplitBlock(PairBlock):
    """A block whose streams are the two halves of a tensor along `dim`."""

    dim: int

    def forward(
        self, x: Tensor, f_args: Mapping[str, Any] = {}, g_args: Mapping[str, Any] = {}
    ) -> Tensor:
        streams = rg.Split(self.dim)
        x1, x2 = streams.split(x)
        y1, y2 = self.run(x1, x2, f_args, g_args)
        return streams.join(y1, y2)


class PlainBlock(nn.Module):
    """The same block in plain autograd, without `Deterministic`."""

    dim: int

    def __init__(self, f: Function, g: Function) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor, f_args: Mapping[str, Any], g_args: Mapping[str, Any]) -> Tensor:
        x1, x2 = x.chunk(2, self.dim)
        y1 = x1 + self.f(x2, **f_args)
        y2 = x2 + self.g(y1, **g_args)
        return torch.cat((y1, y2), self.dim)


def route_names(
    arg_route: Iterable[bool], kwargs: Mapping[str, Any]
) -> tuple[ArgumentNames, ArgumentNames]:
    """The names of the arguments that f gets, and those that g gets: all of them or none."""
    to_f, to_g = arg_route
    names = {name: name for name in kwargs}
    return (names if to_f else {}), (names if to_g else {})
