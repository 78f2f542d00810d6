"""The call that runs a package's reversible blocks, `SomeFunction.apply(..., blocks, ...)`, on
retrograd.

The package's own `SomeFunction.forward` still runs, twice, with stand-ins for its blocks. The first
time is a rehearsal: it shows which keyword arguments each block gets. Then the updates of all
blocks are known (`learning`), and run as one `rg.Reversible`. The second time the stand-ins hand
out its results. So whatever the package does around its blocks stays its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.learning import (
    Learned,
    LearnedCall,
    NotAdditive,
    Slot,
    at_path,
    join,
    learn,
    split,
    structure_of,
)
from retrograd.compat.pairs import Engine, Engines, UpdateSpec
from retrograd.core.private import bare_copy, pytree, without_compiler
from retrograd.recent import Recent

STRUCTURES = 8  # that are remembered of a block: shapes, training or not, which arguments

_learned: weakref.WeakKeyDictionary[nn.Module, Recent[Any, Learned]] = weakref.WeakKeyDictionary()


class Visit(NamedTuple):
    """One call of a block by the package's forward."""

    block: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    learned: Learned


@dataclass(frozen=True)
class BlockFunction:
    """A function of a block, with the arguments that the block itself gives it."""

    fn: nn.Module
    args: tuple[Slot, ...]
    kwargs: tuple[tuple[str, Slot], ...]
    has_aux: bool

    def __call__(self, *reads: Any, **given: Any) -> Any:
        streams = iter(reads)

        def value_of(slot: Slot, name: str) -> Any:
            if slot.kind == "stream":
                return next(streams)
            if slot.kind == "given":
                return given[name]
            if slot.kind == "signal":
                return rg.is_recomputing()
            return getattr(slot.value, "value", slot.value)

        args = [value_of(slot, positional(i)) for i, slot in enumerate(self.args)]
        kwargs = {name: value_of(slot, name) for name, slot in self.kwargs}
        output = self.fn(*args, **kwargs)
        if not self.has_aux:
            return output
        output, aux = output if isinstance(output, tuple) else (output, None)
        return rg.WithAux(output, no_loss(output) if aux is None else aux)


def positional(index: int) -> str:
    """The name under which an argument of the call reaches a function that takes it by place."""
    return f"argument_{index}"


def no_loss(value: Any) -> Tensor:
    return pytree.tree_leaves(value)[0].new_zeros(())


class EngineCall:
    """In place of an autograd function that runs blocks one after another.

    `apply` is what packages call. Everything else is the autograd function's own.
    """

    def __init__(self, theirs: type[torch.autograd.Function], settings: Mapping[str, Any]) -> None:
        self.theirs = theirs
        self.engines = Engines(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def others(self) -> list[tuple[Any, str, Any]]:
        """What else is replaced: a holder, a name and the new value."""
        return []

    @without_compiler
    def apply(self, *args: Any) -> Any:
        position = position_of_blocks(args)
        if position is None:
            return self.theirs.apply(*args)
        engine = self.engines.of(args[position])
        return Walk(self.theirs, args, position, engine).run()


def position_of_blocks(args: Sequence[Any]) -> int | None:
    """Which argument is the list of blocks."""
    for position, value in enumerate(args):
        is_list = isinstance(value, (list, tuple, nn.ModuleList)) and len(value) > 0
        if is_list and all(isinstance(block, nn.Module) for block in value):
            return position
    return None


class Context:
    """In place of the `ctx` of an autograd function: takes everything, and does nothing."""

    needs_input_grad: tuple[bool, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@dataclass
class Walk:
    """One call of the package's forward over its blocks."""

    theirs: type[torch.autograd.Function]
    args: Sequence[Any]
    position: int
    engine: Engine
    visits: list[Visit] = field(default_factory=list)
    has_new: bool = False  # whether a block had to be learned

    def run(self) -> Any:
        with torch.no_grad():
            before = torch.get_rng_state()
            self._forward(self._rehearse)
            if self.has_new:
                self._check_middle()
                self._check_draws(before)
        performance = Performance(self.visits, self.engine)
        output = self._forward(performance.block)
        self._check_gradients(performance, output)
        return output

    def _forward(self, stand_in: Callable[..., Any]) -> Any:
        """The package's forward, with a stand-in for each block."""
        args = [copied(value) for value in self.args]
        args[self.position] = self._stand_ins(stand_in)
        return self.theirs.forward(Context(), *args)

    def _stand_ins(self, stand_in: Callable[..., Any]) -> Any:
        """The list of blocks, in which `stand_in(block, ...)` is the forward of each."""
        blocks = self.args[self.position]
        twins = []
        for block in blocks:
            twin = bare_copy(block)

            def forward(*inputs: Any, block: nn.Module = block, **kwargs: Any) -> Any:
                return stand_in(block, inputs, kwargs)

            twin.__dict__["forward"] = forward
            twins.append(twin)
        return nn.ModuleList(twins) if isinstance(blocks, nn.ModuleList) else type(blocks)(twins)

    def _rehearse(self, block: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what a block is called with; its streams pass."""
        learned = self._learned(block, inputs, kwargs)
        if self.visits and not is_handed_on(self.visits[-1].inputs, inputs):
            raise self._refusal(block, "something else changes the streams between two blocks")
        if self.visits and self.visits[-1].learned.dims != learned.dims:
            raise self._refusal(block, "the blocks split their inputs along different dimensions")
        self.visits.append(Visit(block, inputs, kwargs, learned))
        return returned(inputs, [no_loss(inputs)] * len(learned.extras))

    def _learned(self, block: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Learned:
        known = _learned.setdefault(block, Recent(STRUCTURES))
        key = structure_of(block, inputs, kwargs)
        learned = known.find(key)
        if learned is None:
            self.has_new = True
            try:
                learned = known.add(key, learn(block, inputs, kwargs))
            except NotAdditive as refused:
                raise self._refusal(block, str(refused)) from None
        return learned

    def _refusal(self, block: nn.Module, reason: str) -> rg.ConversionError:
        package = self.theirs.__module__.partition(".")[0]
        return rg.ConversionError(
            f"rg.compat.install({package!r}): {type(block).__module__}.{type(block).__name__} "
            f"cannot run on retrograd: {reason}.\n"
            "  Why: a block must be a list of updates, stream += function(other streams). Only "
            "then are its inputs known from its outputs.\n"
            f"  Fix: rg.compat.uninstall({package!r}) puts the package's own engine back. "
            "docs/migrate/README.md shows how networks are written for retrograd."
        )

    def _check_middle(self) -> None:
        """Raise if the package's forward uses what a block in the middle returns.

        It would get something else: all blocks run at once, and the last stand-in has the result.
        """
        results = []
        for shift in (0.0, 1.0):
            count = 0

            def stand_in(block: Any, inputs: Any, kwargs: Any, shift: float = shift) -> Any:
                nonlocal count
                count += 1
                if count == len(self.visits):
                    shift = 2.0
                extras = [no_loss(inputs)] * len(self.visits[count - 1].learned.extras)
                return returned(
                    pytree.tree_map(lambda t: torch.full_like(t, shift), inputs), extras
                )

            args = [copied(value) for value in self.args]
            args[self.position] = self._stand_ins(stand_in)
            results.append((self.theirs.forward(Context(), *args), args))
        one, other = map(tensors_in, results)
        if len(one) != len(other) or not all(map(is_same, one, other)):
            raise self._refusal(
                self.visits[0].block, "its outputs are also used before the last block has run"
            )

    def _check_draws(self, before: Tensor) -> None:
        if not torch.equal(torch.get_rng_state(), before):
            raise self._refusal(
                self.visits[0].block,
                f"{self.theirs.__name__}.forward draws random numbers, and it runs twice",
            )

    def _check_gradients(self, performance: Performance, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        into, out = performance.inputs, performance.outputs
        direct = [value for value in self.args if isinstance(value, Tensor)]
        lost_before = requires_grad(direct) and not requires_grad(into)
        lost_after = requires_grad(out) and not requires_grad(output)
        if lost_before or lost_after:
            raise self._refusal(
                self.visits[0].block, f"{self.theirs.__name__}.forward detaches its tensors"
            )


class Performance:
    """The second time: the first stand-in runs all updates, and the last one has their result."""

    def __init__(self, visits: Sequence[Visit], engine: Engine) -> None:
        self.visits = visits
        self.engine = engine
        self.count = 0
        self.inputs: tuple[Any, ...] = ()
        self.outputs: tuple[Any, ...] = ()
        self.aux: list[Any] = []

    def block(self, block: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.count == 0:
            self.inputs = inputs
            self._run()
        visit = self.visits[self.count]
        before = sum(len(v.learned.calls) for v in self.visits[: self.count])
        extras = [self.aux[before + number] for number in visit.learned.extras]
        self.count += 1
        is_last = self.count == len(self.visits)
        return returned(self.outputs if is_last else inputs, extras)

    def _run(self) -> None:
        updates, given, at = program_of(self.visits)
        dims = self.visits[0].learned.dims
        result: Any = self.engine(updates, split(self.inputs, dims), given)
        has_aux = any(visit.learned.extras for visit in self.visits)
        streams, self.aux = result if has_aux else (result, [])
        self.outputs = tuple(join({name: streams[at[name]] for name in at}, dims))


def program_of(
    visits: Sequence[Visit],
) -> tuple[list[UpdateSpec], dict[str, Any], dict[str, str]]:
    """The updates of all blocks, the arguments of the call, and where each stream ends."""
    has_aux = any(visit.learned.extras for visit in visits)
    at = {stream: stream for stream in visits[0].learned.sources}
    names: dict[int, str] = {}
    given: dict[str, Any] = {}

    def name_of(value: Any) -> str:
        name = names.setdefault(id(value), f"given_{len(names)}")
        given[name] = value
        return name

    updates = []
    for visit in visits:
        for call in visit.learned.calls:
            route = {
                inner: name_of(at_path(visit.kwargs, slot.value))
                for inner, slot in arguments(call)
                if slot.kind == "given"
            }
            fn = function_of(visit.block, call, has_aux)
            reads = tuple(at[read] for read in call.reads)
            updates.append(UpdateSpec(at[call.target], fn, reads, route))
        at = {stream: at[source] for stream, source in visit.learned.sources.items()}
    return updates, given, at


def arguments(call: LearnedCall) -> list[tuple[str, Slot]]:
    return [*((positional(i), slot) for i, slot in enumerate(call.args)), *call.kwargs]


def function_of(block: nn.Module, call: LearnedCall, has_aux: bool) -> Any:
    """The function itself where retrograd calls it as its block does."""
    fn = block.get_submodule(call.function)
    is_plain = all(slot.kind == "stream" for slot in call.args)
    is_plain &= all(slot.kind == "given" for _, slot in call.kwargs)
    return fn if is_plain and not has_aux else BlockFunction(fn, call.args, call.kwargs, has_aux)


# --- values


def copied(value: Any) -> Any:
    """A copy of dicts and lists; the values in them are the same. Packages write to them."""
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def returned(values: Sequence[Any], extras: Sequence[Any]) -> Any:
    """What a block returns: one value, or a tuple."""
    results = (*values, *extras)
    return results[0] if len(results) == 1 else results


def is_handed_on(before: Any, after: Any) -> bool:
    one, other = pytree.tree_leaves(before), pytree.tree_leaves(after)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def requires_grad(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(value))
