"""A converted list of layers: what replaces the `forward` of its layers, and of what runs them.

Nothing else of the model is touched: modules, classes, names and hooks stay. Each layer gets a
`forward` of its own (`LayerForward`), which is inside of all hooks on the layer. Each module that
may run the list gets one, too (`CallerForward`): a run of the layers begins and ends with it.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from retrograd.converting.finding import LayerList
from retrograd.converting.layers import ConvertedLayers, LayerBody, OtherShape, not_a_chain
from retrograd.converting.run import LayerRun, is_ordinary_pass
from retrograd.core.errors import ConversionError
from retrograd.core.memory import MemoryMode
from retrograd.core.observe import observed_memory
from retrograd.core.private import break_graph, without_compiler
from retrograd.shared_budget import release, without_last_block

log = logging.getLogger("retrograd")

ATTRIBUTE = "retrograd"  # of a list of layers: its conversion


class Replacement:
    """What stands in for the `forward` of a module."""

    __name__ = "forward"

    def __init__(self, conversion: Conversion, module: nn.Module) -> None:
        self.conversion = conversion
        self.module = module
        self.before = module.__dict__.get("forward")  # that somebody set on the instance

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`."""
        return self.original

    @property
    def original(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        return functools.partial(type(self.module).forward, self.module)


class LayerForward(Replacement):
    """The `forward` of a layer: an update, if the model runs its layers."""

    def __init__(self, conversion: Conversion, index: int) -> None:
        super().__init__(conversion, conversion.bodies[index].layer)
        self.index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.conversion.runs:
            return self.original(*args, **kwargs)
        return self._update(args, kwargs)

    @without_compiler
    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.conversion.runs.get(threading.get_ident())
        if run is None:
            return self.original(*args, **kwargs)
        return run.layer(self.index, args, kwargs)


class CallerForward(Replacement):
    """The `forward` of a module that runs the layers, or has a part that does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        conversion = self.conversion
        is_outer = self.module is not conversion.callers[0]
        if conversion.is_reverted or conversion.is_ordinary():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling() and is_outer:
            return self.original(*args, **kwargs)
        break_graph(
            "retrograd runs the layers of a converted model outside the compiler, because backward "
            "must run the functions that forward ran: compile them with stack.compile(), for each "
            "stack of rg.stacks_of(model), and the model around them without fullgraph=True."
        )
        return self._run(args, kwargs)

    @without_compiler
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.conversion.run(functools.partial(self._with_strided_tensors(), *args, **kwargs))

    def _with_strided_tensors(self) -> Callable[..., Any]:
        """The original forward, on strided tensors.

        In evaluation, torch's encoder makes nested tensors of a padded batch. Streams cannot be
        nested.
        """
        is_torchs = type(self.module).forward is nn.TransformerEncoder.forward
        if self.before is not None or not is_torchs:
            return self.original
        encoder: Any = copy.copy(self.module)  # with the same layers
        encoder.use_nested_tensor = False
        return functools.partial(type(encoder).forward, encoder)


class Conversion:
    """What is known of one converted list."""

    def __init__(self, found: LayerList, settings: dict[str, Any]) -> None:
        self.name = found.name
        self.module = found.module
        self.callers = found.callers
        names = [f"{found.name}.{i}".lstrip(".") for i in found.module._modules]
        self.bodies = [LayerBody(*pair) for pair in zip(names, found.layers)]
        whole = ConvertedLayers(self.bodies, **settings)
        self.parts: list[tuple[int, ConvertedLayers]] = [(0, whole)]  # by their first layers
        self.group = [self]  # the conversions that were made together
        self.unchecked = set(range(len(self.bodies)))  # layers that have not run yet
        self.is_reverted = False
        self.shared: MemoryMode | None = None  # a budget that the lists share
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.runs: dict[int, LayerRun] = {}  # under way, by thread
        self.left_out: weakref.WeakSet[Any] = weakref.WeakSet()  # caches: see `LayerRun`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "runs": None, "left_out": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    @property
    def training(self) -> bool:
        return self.module.training

    @property
    def stacks(self) -> list[ConvertedLayers]:
        return [stack for _, stack in self.parts]

    def stacks_by_path(self, path: str) -> dict[str, ConvertedLayers]:
        """The stacks, by their paths in a model that has the list at `path`."""
        if len(self.parts) == 1:
            return {path: self.parts[0][1]}
        return {f"{path}[{i}:{i + len(stack)}]": stack for i, stack in self.parts}

    def place_of(self, index: int) -> tuple[ConvertedLayers, int] | None:
        """The stack that a layer belongs to, and its position there. None: an ordinary layer."""
        for first, stack in self.parts:
            if first <= index < first + len(stack):
                return stack, index - first
        return None

    def is_ordinary(self) -> bool:
        """Whether a forward now is just that of the model."""
        return all(
            is_ordinary_pass(stack, observed_memory(stack, stack.memory), self.training)
            for stack in self.stacks
        )

    # --- installing

    def install(self) -> None:
        self.module.__dict__[ATTRIBUTE] = self
        for index, body in enumerate(self.bodies):
            body.layer.forward = LayerForward(self, index)
        for caller in self.callers:
            caller.forward = CallerForward(self, caller)

    def revert(self) -> None:
        """Give every `forward` back. Those that somebody has wrapped since then pass calls on."""
        self.is_reverted = True
        release(self.shared)
        self.module.__dict__.pop(ATTRIBUTE, None)
        for module in (*self.callers, *(body.layer for body in self.bodies)):
            take_out(module, self)

    # --- the first batch

    def leave_out(self, index: int, error: OtherShape) -> None:
        """A layer changes the shape of the hidden state: it stays an ordinary layer."""
        place = self.place_of(index)
        assert place is not None
        stack, position = place
        first = index - position
        before = stack.part(0, position)
        after = stack.part(position + 1, len(stack))
        if len(after):
            before.memory = without_last_block(before.memory)
        kept = [(first, before), (index + 1, after)]
        others = [part for part in self.parts if part[1] is not stack]
        self.parts = sorted([*others, *(part for part in kept if len(part[1]))], key=first_of)
        log.info("%s; it stays an ordinary layer.", error)
        if max((len(stack) for stack in self.stacks), default=0) < 2:
            what = f"no two layers in a row keep the shape of the hidden state ({error})."
            why = "a layer can be undone only if its output has the shape of its input."
            fix = 'name other layers: layers="...". The model was left as it was.'
            raise not_a_chain(self.name, what, why, fix)

    # --- a forward of the model

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run what calls the layers."""
        thread = threading.get_ident()
        before = self.runs.get(thread)
        self.runs[thread] = run = LayerRun(self)
        try:
            returned = forward()
            run.close()
        except ConversionError:
            if self.unchecked:
                revert_all(self.group)
            raise
        finally:
            if before is None:
                del self.runs[thread]
            else:
                self.runs[thread] = before
        return returned


def take_out(module: nn.Module, conversion: Conversion) -> None:
    """Take the replacement that a conversion made out of those of a module."""
    outer, own = None, module.__dict__.get("forward")
    while isinstance(own, Replacement) and own.conversion is not conversion:
        outer, own = own, own.before
    if not isinstance(own, Replacement):
        return
    if outer is not None:
        outer.before = own.before
    elif own.before is not None:
        module.__dict__["forward"] = own.before
    else:
        del module.__dict__["forward"]


def revert_all(conversions: Sequence[Conversion]) -> None:
    """Take conversions back, the last one first."""
    for conversion in reversed(conversions):
        conversion.revert()


def first_of(part: tuple[int, ConvertedLayers]) -> int:
    return part[0]
