"""What the five systems have in common: functions wrapped in `Deterministic`, and blocks that are
lists of updates.

Each block says what it does as data, a list of `Line`s; an `Engine` makes an `rg.Reversible` of the
lines of all blocks. The modules themselves only hold the functions, under the names that the
original's checkpoints have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg


class Deterministic(nn.Module):
    """A function that can repeat its random draws: `record_rng=True` remembers the states before
    it, `set_rng=True` uses them.

    Here it is a name in state-dict keys, `blocks.0.f.net.…`: retrograd replays every draw of every
    call by itself, and does not pass these flags. They work for whoever does.
    """

    def __init__(self, net: Callable[..., Any]) -> None:
        super().__init__()
        self.net = net
        self.cpu_state: Tensor | None = None
        self.device_states: dict[torch.device, Tensor] = {}

    def record_rng(self, *args: Any) -> None:
        self.cpu_state = torch.get_rng_state()
        devices = {
            arg.device
            for arg in args
            if isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta")
        }
        self.device_states = {
            device: torch.get_device_module(device).get_rng_state(device) for device in devices
        }

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


class Line(NamedTuple):
    """One update: `target += fn(*reads, **{inner: kwargs[outer]})` for each `inner, outer` of
    `route`.
    """

    target: str
    fn: Callable[..., Any]
    reads: tuple[str, ...]
    route: dict[str, str]


class Engine:
    """Lines, run by an `rg.Reversible` that is made anew only when they change.

    `memory` and `exact` are those of every `rg` module, and may be assigned:
    `sequence.engine.memory = rg.Keep()`.
    """

    def __init__(self, memory: Any = rg.Reverse(), exact: Any = False) -> None:
        self.memory = memory
        self.exact = exact
        self.last: tuple[Any, rg.Reversible] | None = (
            None  # replaced as a whole: threads may share it
        )

    def __reduce__(self) -> Any:
        return Engine, (self.memory, self.exact)  # copies and pickles make theirs anew

    def __call__(
        self,
        lines: list[Line],
        streams: dict[str, Any],
        kwargs: Mapping[str, Any],
        reverse: bool = True,
    ) -> dict[str, Any]:
        if not lines:
            return streams
        last, memory = self.last, self.memory if reverse else rg.Keep()
        if last is None or last[0] != (lines, memory, self.exact):
            updates = [
                rg.Update(target, fn, reads, route=route) for target, fn, reads, route in lines
            ]
            last = self.last = (
                (lines, memory, self.exact),
                rg.Reversible(updates, memory=memory, exact=self.exact),
            )
        taken = {outer for line in lines for outer in line.route.values()}
        return last[1](
            streams, **{name: _own(value) for name, value in kwargs.items() if name in taken}
        )


def _own(value: Any) -> Any:
    """Masks are copied: packages of this family edit them in place after the call, and recompute
    must see what forward saw.
    """
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return value
    distinct = tuple(
        slice(0, 1) if stride == 0 else slice(None) for stride in value.stride()
    )  # an expanded mask stays one
    return value[distinct].clone().expand(value.shape)


@dataclass(frozen=True)
class Signalled:
    """A function that is told which block it is in, and whether it is recomputed."""

    fn: Callable[..., Any]
    depth: int | None

    def __call__(self, x: Any, **kwargs: Any) -> Any:
        return self.fn(x, **{**kwargs, "_reverse": rg.is_recomputing(), "_depth": self.depth})


class Pair(nn.Module):
    """A block `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`, of functions in `Deterministic`."""

    def __init__(self, f: Callable[..., Any], g: Callable[..., Any]) -> None:
        super().__init__()
        self.f = Deterministic(f)
        self.g = Deterministic(g)
        self.engine = Engine()

    def lines(self, f_names: Mapping[str, str], g_names: Mapping[str, str]) -> list[Line]:
        """Its updates, given the keyword arguments of each function: what it calls them, and what
        the caller does.
        """
        return [
            Line("x1", self.f, ("x2",), dict(f_names)),
            Line("x2", self.g, ("x1",), dict(g_names)),
        ]

    def run(
        self, x1: Any, x2: Any, f_args: Mapping[str, Any], g_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The block alone."""
        lines = self.lines(
            {name: f"f_{name}" for name in f_args}, {name: f"g_{name}" for name in g_args}
        )
        kwargs = {f"f_{k}": v for k, v in f_args.items()} | {f"g_{k}": v for k, v in g_args.items()}
        streams = self.engine(lines, {"x1": x1, "x2": x2}, kwargs)
        return streams["x1"], streams["x2"]


class SplitPair(Pair):
    """A pair on the two halves of a tensor along `dim`."""

    dim: int

    def forward(
        self, x: Tensor, f_args: Mapping[str, Any] = {}, g_args: Mapping[str, Any] = {}
    ) -> Tensor:
        streams = rg.Split(self.dim)
        return streams.join(*self.run(*streams.split(x), f_args, g_args))


class PlainPair(nn.Module):
    """The same block in plain autograd, and without `Deterministic`."""

    dim: int

    def __init__(self, f: Callable[..., Any], g: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor, f_args: Mapping[str, Any], g_args: Mapping[str, Any]) -> Tensor:
        x1, x2 = x.chunk(2, self.dim)
        y1 = x1 + self.f(x2, **f_args)
        return torch.cat((y1, x2 + self.g(y1, **g_args)), self.dim)


def routed(
    arg_route: Iterable[bool], kwargs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """What f and g get of the keyword arguments: all of them or none."""
    names = {name: name for name in kwargs}
    to_f, to_g = arg_route
    return (names if to_f else {}), (names if to_g else {})
