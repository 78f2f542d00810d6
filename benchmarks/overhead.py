"""What the engine costs beyond the least that reversal on the real autograd graph can do.

    python -m benchmarks.overhead [--rounds 60] [--promises] [--inspected] [--other CHECKOUT]

On tiny blocks, where bookkeeping shows: microseconds per update, forward and backward, of plain
autograd, of `Floor` (hooks, recompute and subtraction; no checks, no replay of anything, no
errors), of retrograd, and of the peers that are installed. With `--promises`, also retrograd
without the guards of one promise or another: what that promise costs. With `--inspected`, also
steps that are watched and verified, as the first step of a stack is. With `--other`, only plain
autograd and retrograd, here and in another checkout: whether a change made it slower.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.cases import SIZES, contestants, pairs
from benchmarks.steps import example
from retrograd import ReversibleSequence, Split
from retrograd.core.guard import Guard
from retrograd.core.guards.autocast import Autocast
from retrograd.core.guards.buffers import Buffers
from retrograd.core.guards.drift import Drift
from retrograd.core.guards.modules import ModuleState
from retrograd.core.guards.random_state import RandomState
from retrograd.core.guards.versions import InputVersions, ParameterVersions
from retrograd.core.observe import Observer
from retrograd.core.program import Program
from retrograd.core.structure import VerifyCalls


class Floor(nn.Module):
    """Reversal with nothing around it: right for this one network, and wrong for nearly everything
    a user may do.
    """

    def __init__(self, blocks: list[tuple[nn.Module, nn.Module]]) -> None:
        super().__init__()
        self.functions = nn.ModuleList(fn for pair in blocks for fn in pair)

    def forward(self, x: Tensor) -> Tensor:
        state, walked, last = [half.clone() for half in x.chunk(2, -1)], [], len(self.functions) - 2
        for i, fn in enumerate(self.functions):
            if i == last:  # the last block is kept
                walked += [stream.detach() for stream in state]
            if i >= last:
                state[i % 2] = state[i % 2] + fn(state[1 - i % 2])
                continue
            hooks = _Hooks(walked, i % 2, fn)
            with saved_tensors_hooks(hooks.pack, hooks.unpack):
                out = fn(state[1 - i % 2])
            hooks.store = None
            state[i % 2] = state[i % 2] + out
        return torch.cat(state, -1)


class _Hooks:
    def __init__(self, walked: list[Tensor], target: int, fn: nn.Module) -> None:
        self.walked, self.target, self.fn = walked, target, fn
        self.store: list[Any] | None = []

    def pack(self, tensor: Tensor) -> int:
        assert self.store is not None
        self.store.append(tensor)
        return len(self.store) - 1

    def unpack(self, slot: int) -> Tensor:
        if self.store is None:
            store: list[Any] = []
            leaf = self.walked[1 - self.target].detach().requires_grad_()
            torch.set_grad_enabled(True)
            with saved_tensors_hooks(store.append, store.__getitem__):
                out = self.fn(leaf.view_as(leaf))
            torch.set_grad_enabled(False)
            self.walked[self.target].sub_(out)
            self.store = store
        tensor, self.store[slot] = self.store[slot], None
        return tensor


# What each promise asks the engine to do for every update: a guard, or a check.
PROMISES: dict[str, tuple[type[Guard], ...]] = {
    "4, random draws replay": (RandomState,),
    "6, autocast is replayed": (Autocast,),
    "7, buffers are replayed": (Buffers,),
    "12, edited inputs raise": (InputVersions,),
    "12, edited parameters raise": (ParameterVersions,),
    "12, a walk that ends elsewhere raises": (Drift,),
    "flags and members of modules are replayed": (ModuleState,),
}
PROMISES["all of these"] = tuple(kind for kinds in PROMISES.values() for kind in kinds)


class Without(Observer):
    """Leaves guards out. (Never done outside this file.)"""

    def __init__(self, kinds: tuple[type[Guard], ...]) -> None:
        self.kinds = kinds

    def verify(self, stack: nn.Module, verify: VerifyCalls) -> VerifyCalls:
        return "never"

    def guards(self, stack: nn.Module, program: Program, guards: list[Guard]) -> list[Guard]:
        return [guard for guard in guards if not isinstance(guard, self.kinds)]


def other_retrograd(checkout: Path) -> Any:
    """The retrograd of another checkout, beside the one that is imported."""
    ours = {name: module for name, module in sys.modules.items() if is_ours(name)}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(checkout / "src"))
    try:
        found = importlib.import_module("retrograd")
    finally:
        sys.path.pop(0)
        for name in list(filter(is_ours, sys.modules)):
            del sys.modules[name]
        sys.modules.update(ours)
    if not Path(found.__file__ or "").is_relative_to(checkout):
        raise SystemExit(f"{checkout} is no checkout of retrograd: {found.__file__} was imported.")
    return found


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "retrograd"


Times = dict[str, list[tuple[float, float]]]  # of each network, seconds of forward and of backward


def measure(
    networks: dict[str, nn.Module],
    observers: dict[str, AbstractContextManager[object]],
    x: Tensor,
    rounds: int,
) -> Times:
    """Steps of all networks in turn; every other round the other way round."""
    times: Times = {name: [] for name in networks}
    for i in range(rounds + 5):
        for name in list(networks)[:: -1 if i % 2 else 1]:
            network = networks[name]
            network.zero_grad(set_to_none=True)
            with observers.get(name, nullcontext()):
                start = time.perf_counter()
                loss = network(x * 1.0).square().mean()
                middle = time.perf_counter()
                loss.backward()
                end = time.perf_counter()
            if i >= 5:
                times[name].append((middle - start, end - middle))
    return times


def show(times: Times, reference: str, updates: int) -> None:
    per_step = [sum(pair) for pair in times[reference]]
    print(
        f"| | forward, µs per update | backward, µs per update | step, {reference} = 1 |\n"
        "| --- | ---: | ---: | ---: |"
    )
    for name, pairs_ in times.items():
        forward, backward = (1e6 * statistics.median(column) / updates for column in zip(*pairs_))
        ratio = statistics.median(sum(pair) / step for pair, step in zip(pairs_, per_step))
        print(f"| {name} | {forward:.0f} | {backward:.0f} | {ratio:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each contestant")
    parser.add_argument("--promises", action="store_true", help="also what each promise costs")
    parser.add_argument("--inspected", action="store_true", help="also a step like the first one")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the network")
    parser.add_argument("--other", type=Path, help="another checkout to compare with")
    options = parser.parse_args()
    size = SIZES[options.size]
    x, networks = example(size), contestants(size)
    networks = {"plain": networks.pop("plain"), "floor": Floor(pairs(size)), **networks}
    observers: dict[str, AbstractContextManager[object]] = {}
    reference = "plain"
    if options.other is not None:
        torch.set_num_threads(1)
        reference = "other"
        rg = other_retrograd(options.other.resolve())
        other = rg.ReversibleSequence(pairs(size), streams=rg.Split())
        networks = {"plain": networks["plain"], "other": other, "retrograd": networks["retrograd"]}
    if options.inspected:
        networks = {name: networks[name] for name in ("plain", "retrograd")}
        networks["retrograd, inspected"] = ReversibleSequence(
            pairs(size), streams=Split(), verify="always"
        )
    if options.promises:
        for promise, kinds in PROMISES.items():
            networks[f"without {promise}"] = networks["retrograd"]
            observers[f"without {promise}"] = Without(kinds)
    show(measure(networks, observers, x, options.rounds), reference, updates=2 * size.blocks)


if __name__ == "__main__":
    main()
