"""One run of converted layers: the model calls them one by one, and each call is one update.

The hidden state that a layer returns is the newest stream, as the model sees it. What the model
passes to the next layer has to be that: then the stream goes on as the tensor that the layer got,
after hooks on both layers ran (those of FSDP among them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from retrograd.converting.layers import (
    ARGUMENTS,
    ConvertedLayers,
    LayerBody,
    OtherShape,
    not_a_chain,
)
from retrograd.core.memory import Keep, MemoryMode
from retrograd.core.observe import observed_memory
from retrograd.core.private import surrounding_hooks
from retrograd.core.program import Pass
from retrograd.core.streams import flatten
from retrograd.stack import alias, flat, is_plain
from retrograd.trace import TakeBack

if TYPE_CHECKING:
    from retrograd.converting.conversion import Conversion


class Handed(NamedTuple):
    """The hidden state that a layer returned to the model."""

    value: Tensor
    version: int


class LayerRun:
    """The layers of one forward of the model. Consecutive ones share a pass over the streams."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self.chain: Chain | None = None
        self.ordinary: ConvertedLayers | None = None  # layers that just run
        self.left_out: list[Any] = []  # caches that layers did not get

    def layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer of the model."""
        conversion = self.conversion
        body = conversion.bodies[index]
        x, args, kwargs = split_arguments(body, args, kwargs)
        place = conversion.place_of(index)
        is_first = index in conversion.unchecked
        if self.chain is not None and not self.chain.goes_on(place, x, is_first):
            self.finish()
        if place is None:
            return body.run(x, *args, **kwargs)
        if self.chain is None:
            self._begin(body.name, *place, (args, kwargs))
        if self.chain is None:
            return body.run(x, *args, **kwargs)
        if not is_first:
            return self.chain.layer(x, (args, kwargs))
        returned = self._first_time(self.chain, index, x, (args, kwargs))
        conversion.unchecked.discard(index)
        return returned

    def _first_time(self, chain: Chain, index: int, x: Tensor, arguments: Any) -> Any:
        """Run a layer that may turn out to change the shape: then it stays an ordinary layer."""
        body = self.conversion.bodies[index]
        with torch.no_grad():
            take_back = TakeBack([body])
        try:
            return chain.layer(x, arguments)
        except OtherShape as error:
            take_back.run()
            self.finish()
            self.conversion.leave_out(index, error)
            args, kwargs = arguments
            return body.run(x, *args, **kwargs)

    def _begin(self, name: str, stack: ConvertedLayers, position: int, arguments: Any) -> None:
        """Begin a chain, unless the layers just run."""
        if position != 0 and stack is self.ordinary:
            return
        self.ordinary = None
        memory = self._memory(name, stack, arguments)
        if is_ordinary_pass(stack, memory, self.conversion.training):
            self.ordinary = stack
        elif position != 0:
            raise out_of_order(name, stack.bodies[0].name)
        else:
            self.chain = Chain(stack, self.conversion, memory)

    def _memory(self, name: str, stack: ConvertedLayers, arguments: Any) -> MemoryMode:
        """What to keep: everything if the layers need their cache of keys and values.

        A second run would fill it once more. While training, it is empty and nothing reads it, so
        layers do not get it.
        """
        args, kwargs = arguments
        caches = list(filter(is_cache, (*args, *kwargs.values())))
        memory = observed_memory(stack, stack.memory)
        if is_plain(memory) or not caches:
            return memory
        for cache in caches:
            if cache in self.conversion.left_out:
                raise without_its_content(name)
        if not self.conversion.training or any(cache.get_seq_length() > 0 for cache in caches):
            return Keep()
        self.left_out += caches
        return memory

    def finish(self) -> None:
        """No later layer goes on with these streams."""
        if self.chain is not None:
            self.chain.finish()
            self.chain = None

    def close(self) -> None:
        """The model has run."""
        self.finish()
        self.conversion.left_out.update(self.left_out)


class Chain:
    """Consecutive layers that share a pass."""

    def __init__(self, stack: ConvertedLayers, conversion: Conversion, memory: MemoryMode) -> None:
        self.stack = stack
        self.conversion = conversion
        self.memory = memory
        self.is_recorded = not is_plain(memory)
        self.hooks = surrounding_hooks()
        self.run: Pass | None = None
        self.is_over = False
        self.handed: Handed | None = None
        self.arguments: Any = None
        self.made: set[int] = set()  # what the layer before returned besides, by identity
        self.largest: Tensor | None = None  # value of a hidden state

    # --- what the model does between two layers

    def goes_on(self, place: tuple[ConvertedLayers, int] | None, x: Tensor, is_first: bool) -> bool:
        """Whether a layer of the model goes on with this chain. Raises if it has to, but cannot.

        `is_first` if that layer has not run yet.
        """
        if self.is_over or place is None or place[0] is not self.stack or place[1] == 0:
            return False
        assert self.run is not None
        name = self.stack.bodies[place[1]].name
        if place[1] != self.run.index:
            raise out_of_order(name, self.stack.bodies[self.run.index].name)
        if self._is_handed(x) or self._may_be_another(x, is_first):
            return True
        raise changed_between(name)

    def _is_handed(self, x: Tensor) -> bool:
        """Whether this is what the layer before returned, perhaps after hooks."""
        assert self.handed is not None
        value, version = self.handed
        if version_of(value) != version:
            return False
        if x is value:
            return True
        if x.shape != value.shape:
            return False
        if x.dtype != value.dtype:
            return True  # that is compared when the stream goes on
        return x.data_ptr() == value.data_ptr() and (self.stack.is_ordinary or is_alias(x, value))

    def _may_be_another(self, x: Tensor, is_first: bool) -> bool:
        """Whether the pass goes on with what the layer got, although it is another tensor.

        Where nothing is recorded, a hook may move it to another device. Its values are compared
        when the layer runs for the first time.
        """
        if torch.is_grad_enabled() or not is_first:
            return not torch.is_grad_enabled()
        assert self.handed is not None
        value, version = self.handed
        if version_of(value) != version or x.shape != value.shape:
            return False
        return torch.equal(x.to(value.device, value.dtype), value)

    # --- a layer

    def layer(self, x: Tensor, arguments: Any) -> Any:
        """Apply the update of the next layer. The new hidden state, with the rest of a tuple."""
        if self.run is None:
            arguments = self._checked_arguments(0, arguments)
            self.run = run = self._begin(x, arguments)
        else:
            run = self.run
            arguments = self._checked_arguments(run.index, arguments)
            if not is_same(arguments, self.arguments):
                run.use_keywords({ARGUMENTS: arguments})
            step = run.program[run.index]
            run.enter_block({**run.state, step.reads[0]: (x,)})
        self.arguments = arguments
        step = run.program[run.index]
        run.update(step)
        run.leave_block(run.state)
        rest = run.aux.pop() if run.aux else None
        if run.index == len(run.program):
            self.finish()
        value, rest = run.hand_out((alias(run.read(step.target)), rest))
        self.handed = Handed(value, version_of(value))
        self._look(value, rest)
        return value if rest is None else (value, *rest)

    def _begin(self, x: Tensor, arguments: Any) -> Pass:
        stack = self.stack
        stack.training = self.conversion.training
        keywords = {ARGUMENTS: arguments}
        program = flat(stack._blocks(x, keywords))
        streams = stack._open(x, "the input")
        if self.is_recorded:
            run: Pass = stack._tape(program, streams, keywords, self.memory)
        else:
            run = stack._pass(program, streams, keywords)
        run.start()
        return run

    def finish(self) -> None:
        if self.run is not None and not self.is_over:
            self.is_over = True
            self.run.finish()
            if self.largest is not None:
                self.stack.choose_grid(self.largest)

    # --- checks

    def _checked_arguments(self, position: int, arguments: Any) -> Any:
        """The arguments of a layer, without caches. Raises if it cannot run in a chain."""
        body = self.stack.bodies[position]
        if self.is_recorded and surrounding_hooks() != self.hooks:
            raise checkpointed(body.name)
        if getattr(body.layer, "gradient_checkpointing", False) and self.conversion.training:
            raise checkpointed(body.name)
        args, kwargs = arguments
        if self.is_recorded:
            args = tuple(map(without_cache, args))
            kwargs = {name: without_cache(value) for name, value in kwargs.items()}
        if self.made and not self.stack.is_ordinary:
            self._check_one_state(position, (args, kwargs))
        return args, kwargs

    def _check_one_state(self, position: int, arguments: Any) -> None:
        """Raise if the layer before made another value for this layer."""
        if position < 2:
            return  # what the first layer makes for all others does not change
        for leaf in flatten(arguments)[0]:
            if id(leaf) in self.made:
                raise two_states(self.stack.bodies[position - 1].name)

    def _look(self, value: Tensor, rest: Any) -> None:
        """Remember what the checks and the choice of a grid ask for."""
        given = {id(leaf) for leaf in flatten(self.arguments)[0] if isinstance(leaf, Tensor)}
        self.made = {id(leaf) for leaf in flatten(rest)[0] if isinstance(leaf, Tensor)} - given
        if self.stack.chooses_grid and value.numel():
            largest = value.detach().abs().max()
            self.largest = largest if self.largest is None else largest.maximum(self.largest)


def is_ordinary_pass(stack: ConvertedLayers, memory: MemoryMode, training: bool) -> bool:
    """Whether the layers just run: nothing is rebuilt, and the rule is that of the model."""
    stack.training = training
    return stack.is_ordinary and is_plain(memory)


def split_arguments(
    body: LayerBody, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden state that a layer got, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    name = body.first_argument
    return kwargs[name], (), {other: value for other, value in kwargs.items() if other != name}


def is_same(arguments: Any, before: Any) -> bool:
    """Whether a layer gets the very same objects as the layer before."""
    leaves, spec = flatten(arguments)
    others, other_spec = flatten(before)
    return spec == other_spec and all(map(is_identical, leaves, others))


def is_identical(value: Any, other: Any) -> bool:
    is_plain_value = isinstance(value, (int, float, str)) and type(value) is type(other)
    return value is other or (is_plain_value and value == other)


def without_cache(value: Any) -> Any:
    """None in place of a cache."""
    return None if is_cache(value) else value


def is_cache(value: Any) -> bool:
    """Whether this is a cache of keys and values, as Hugging Face passes to layers."""
    is_named_so = any(kind.__name__ == "Cache" for kind in type(value).__mro__)
    return is_named_so and hasattr(value, "get_seq_length")


def version_of(value: Tensor) -> int:
    """How often a tensor was edited. Tensors of inference mode do not say."""
    return 0 if value.is_inference() else value._version


def is_alias(x: Tensor, value: Tensor) -> bool:
    """Whether one tensor at the memory of another has its elements in their places, and passes
    gradients on.
    """
    return x.stride() == value.stride() and x.requires_grad >= value.requires_grad


# --- errors


def out_of_order(name: str, wanted: str) -> Exception:
    what = f"this layer was called where {wanted} comes next."
    why = "the rule of a converted model needs its layers one after the other, from the first."
    return not_a_chain(name, what, why, "set the probability of skipping layers (layerdrop) to 0.")


def changed_between(name: str) -> Exception:
    what = "this layer did not get what the layer before it returned."
    why = "what happens to the hidden state between two layers cannot be undone in backward."
    fix = "move it into a layer; hook modules inside of layers; or name the layers up to here."
    return not_a_chain(name, what, why, fix)


def two_states(name: str) -> Exception:
    what = "this layer passes more than one changing value on to the next layer."
    why = "only the first of them, the hidden state, follows the rule."
    return not_a_chain(name, what, why, "rule=rg.Euler() works with it.")


def without_its_content(name: str) -> Exception:
    what = "this layer got a cache that an earlier call left empty."
    why = "while training, layers get no cache: backward would run them again and fill it twice."
    return not_a_chain(name, what, why, "call model.eval() before you use a cache.")


def checkpointed(name: str) -> Exception:
    what = "this layer runs under gradient checkpointing of its own."
    why = "backward rebuilds its input, and checkpointing would keep it."
    return not_a_chain(name, what, why, "model.gradient_checkpointing_disable().")
