"""`Residual`: a residual network, a list of single layers, under a rule of your choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.exact import DriftAction, Grid, Precision
from retrograd.core.memory import Anchor, Keep, MemoryMode, Reverse
from retrograd.core.private import pytree
from retrograd.core.program import Pass, Step, make_step
from retrograd.core.structure import VerifyCalls
from retrograd.core.updates import (
    Additive,
    BdiaUpdate,
    Coupling,
    Overwrite,
    TwoStepUpdate,
    WithAux,
)
from retrograd.routing import by_update, check_all_taken
from retrograd.rules import ORDINARY, Coefficients, Euler, Rule, checked_steps, growth
from retrograd.stack import Blocks, Stack, check_function, detached, on_grid

ERRORS = 1e3  # how much undoing may enlarge rounding errors between two kept states


class Residual(Stack):
    """A residual network `x = x + f(x)`, a list of single layers, under a rule.

    With `Euler()`, it is the ordinary network, and the input of each layer is kept: checkpointing,
    but with buffers updated once and every random draw replayed. The other rules keep two states
    and rebuild the rest, so activation memory does not grow with depth.

    Args:
        functions: an iterable of modules (or callables), each giving what a layer adds. Parameters
            are named `functions.<i>.…`. One may return a tuple whose first item is that; the rest
            comes back as aux.
        rule: `Euler()`, `Midpoint(h)`, `Leapfrog(h)`, `Blend(a)`, `Bdia(gamma)` or
            `TwoStep(previous, current, scale)`. May be assigned at any time.
        skip: True if each function is a whole layer that adds its input itself. Then
            `f(x) = layer(x) - x`, and under `Euler` the layer just runs.
        route: which keyword arguments go to the functions: a sequence of names, or a dict from the
            name that functions use to the name that the call uses. None: by signature.
        memory, exact, drift, stream_dtype, verify: as for `ReversibleSequence`. Rules that divide
            when they are undone (`Blend`, `Bdia`) need `exact=True`.

    Example:
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(6)]
        >>> net = rg.Residual(layers, rule=rg.Blend(1/4), exact=True)
        >>> net(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        *,
        rule: Rule = Euler(),
        skip: bool = False,
        route: Mapping[str, str] | Sequence[str] | None = None,
        memory: MemoryMode | str = Reverse(),
        exact: bool | Grid = False,
        drift: DriftAction = "warn",
        stream_dtype: torch.dtype | None = None,
        verify: VerifyCalls = "first",
    ) -> None:
        if not isinstance(skip, bool):
            raise TypeError(f"skip={skip!r}: pass True if each function is a whole layer.")
        self._rule: Rule = Euler()
        self._checked: list[Coefficients] = []  # the steps that were checked last
        self.skip = skip
        super().__init__(memory, exact, drift, stream_dtype, verify)
        self.functions = FunctionList(functions)
        self.route = route
        self.rule = rule

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        if not callable(getattr(rule, "steps", None)) or isinstance(rule, type):
            raise TypeError(
                f"rule={rule!r}: pass rg.Euler(), rg.Midpoint(h), rg.Leapfrog(h), rg.Blend(a), "
                "rg.Bdia(gamma) or rg.TwoStep(previous, current, scale)."
            )
        before = self._rule
        self._rule = rule
        try:
            self._check(self.memory, self.precision)
        except Exception:
            self._rule = before
            raise

    def _check(self, memory: MemoryMode, precision: Precision) -> None:
        """Raise if rounding errors would grow too much."""
        super()._check(memory, precision)
        depth = len(getattr(self, "functions", ()))
        factor = growth(checked_steps(self.rule, depth, True))
        if precision.grid is not None or factor == 1 or isinstance(memory, Keep):
            return
        layers = 2 * memory.every if isinstance(memory, Anchor) else depth
        if factor**layers > ERRORS:
            other = "rg.Anchor(1) or rg.Keep()" if factor**2 <= ERRORS else "rg.Keep()"
            raise ValueError(
                f"rule={self.rule!r}: undoing a layer divides by {1 / factor:.3g}, so rounding "
                f"errors grow by {factor:.3g} for each layer, and {layers} layers are undone. "
                f"Build it with exact=True, which rounds nothing; or with memory={other}."
            )

    # --- what a stack defines

    def _name(self, layer: int) -> str:
        """What messages call the function of a layer."""
        return f"functions.{layer}"

    def _couplings(self) -> Iterable[tuple[str, Coupling]]:
        steps = checked_steps(self.rule, len(getattr(self, "functions", ())), True)
        has_two = any(step.previous for step in steps)
        return [(f"rule, layer {i}", self._coupling(step, has_two)) for i, step in enumerate(steps)]

    def _functions(self) -> Iterable[tuple[nn.Module, str]]:
        return self.functions.places()

    def extra_repr(self) -> str:
        skip = ", skip=True" if self.skip else ""
        return f"rule={self.rule!r}{skip}, memory={self.memory!r}{self.precision}"

    def forward(self, x: Any, /, **kwargs: Any) -> Any:
        """The last state, for an input `x`: a tensor or a pytree of tensors.

        `(output, aux)` where functions return more than what a layer adds.
        """
        return super().forward(x, **kwargs)

    def states(self, x: Any, /, *, after: Sequence[int], **kwargs: Any) -> tuple[Any, list[Any]]:
        """The output, and the state after each of these layers: hidden states, deep supervision.

        Gradients flow through all of them. Each costs the memory of one state.
        """
        return self._states(
            x, kwargs, after, lambda layer, run: run.read(run.program[layer].target)
        )

    def inverse(self, previous: Any, last: Any, /, **kwargs: Any) -> Any:
        """The input that gave these last two states, detached.

        `last, (previous,) = net.states(x, after=[-2])`. Only for rules that multiply by 1 or -1:
        `Midpoint`, `Leapfrog`.
        """
        self._check_invertible()
        streams = {"a": previous, "b": last}
        if self._last_stream() == "a":
            streams = {"a": last, "b": previous}
        return self._inverse({name: detached(value) for name, value in streams.items()}, kwargs)

    def _check_invertible(self) -> None:
        steps = self._steps()
        if any(step.draws_sign for step in steps):
            why = "draws signs, and other ones each time"
        elif len(steps) < 2 or not all(step.previous for step in steps[1:]):
            why = "has one state only at some layer, and the one before it is not known"
        else:
            return
        raise ValueError(
            f"inverse: rule={self.rule!r} {why}. Use rg.Midpoint(h), rg.Leapfrog(h) or "
            "rg.TwoStep(1, current, scale), with two layers or more."
        )

    def _steps(self) -> list[Coefficients]:
        return checked_steps(self.rule, len(self.functions), self.training)

    def _has_two_streams(self) -> bool:
        return any(step.previous for step in self._steps())

    def _last_stream(self) -> str:
        """The stream that has the last state. The first layer changes the stream b."""
        is_even = len(self.functions) % 2 == 0
        return "a" if is_even or not self._has_two_streams() else "b"

    def _first_coupling(self, step: Coefficients) -> Coupling:
        """Of the first layer, if there are two streams: both start as the input."""
        if step == ORDINARY:
            return Additive()
        return TwoStepUpdate(previous=1.0, current=step.current - 1, scale=step.scale)

    def _coupling(self, step: Coefficients, has_two: bool) -> Coupling:
        if step.draws_sign:
            return BdiaUpdate(step.previous)
        if step == ORDINARY and not has_two:
            return Overwrite() if self.skip else Additive()
        return TwoStepUpdate(previous=step.previous, current=step.current, scale=step.scale)

    def _open(self, value: Any, name: str) -> dict[str, Any]:
        if name == "the output":
            return value
        return {"a": value, "b": value} if self._has_two_streams() else {"a": value}

    def _close(self, run: Pass) -> Any:
        if run.index == 0 and run.program:  # all updates were taken back
            return run.read("a")
        return run.read(self._last_stream())

    def _run_blocks(self, run: Pass, blocks: Blocks, undo: bool = False) -> None:
        if undo:
            for step in reversed(blocks[0]):
                run.undo(step)
            return
        for i, step in enumerate(blocks[0]):
            run.update(step)
            for look in self._lookers:
                look(i, run)

    def _blocks(self, value: Any, kwargs: dict[str, Any]) -> Blocks:
        steps = self._steps()
        # The numbers of a rule may be assigned. What is traced was checked before: `_prepare`.
        if steps != self._checked and not torch.compiler.is_compiling():
            self._check(self.memory, self.precision)
            self._checked = steps
        has_two = self._has_two_streams()
        program: list[Step] = []
        for i, (fn, step) in enumerate(zip(self._layers(steps), steps)):
            name = self._name(i)
            reads = "ab"[i % 2] if has_two else "a"
            target = "ba"[i % 2] if has_two else "a"
            keywords = by_update(self.route, fn, 1, kwargs)
            is_first = has_two and i == 0
            coupling = self._first_coupling(step) if is_first else self._coupling(step, has_two)
            program.append(make_step(name, target, (reads,), fn, coupling, keywords))
        if kwargs and program:
            taken = {outer for step in program for outer in step.keywords.values()}
            check_all_taken(kwargs, taken, program, "route=({!r},)")
        return on_grid([program], self.precision)

    def _prepare(self) -> None:
        steps = self._steps()
        self._check(self.memory, self.precision)
        self._layers(steps)

    def _layers(self, steps: Sequence[Coefficients]) -> list[Layer]:
        """What the updates call: the same object in every call, as long as a function stays."""
        kept: dict[Any, Layer] = self._cache.layers
        layers = {}
        found = []
        has_two = self._has_two_streams()
        for fn, step in zip(self.functions, steps):
            is_whole = self.skip and step == ORDINARY and not has_two
            key = (id(fn), self.skip and not is_whole, step.draws_sign)
            layer = layers.get(key) or kept.get(key)
            if layer is None or layer.fn is not fn:
                layer = Layer(fn, *key[1:])
            layers[key] = layer
            found.append(layer)
        if not torch.compiler.is_compiling():  # a compiled graph would depend on the cache
            self._cache.layers = layers
        return found

    # --- a list of functions

    def __len__(self) -> int:
        return len(self.functions)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __getitem__(self, index: int | slice) -> Any:
        """A function; of a slice, a network of these functions with the same settings."""
        if not isinstance(index, slice):
            return self.functions[index]
        rule = self.rule.part(index) if hasattr(self.rule, "part") else self.rule  # type: ignore[attr-defined]
        return Residual(
            list(self.functions)[index],
            rule=rule,
            skip=self.skip,
            route=self.route,
            **self._settings(),
        ).train(self.training)

    def append(self, function: Callable[..., Any]) -> Residual:
        """Add a function at the end."""
        self.functions.append(function)
        try:
            self._check(self.memory, self.precision)
        except Exception:
            self.functions.pop()
            raise
        return self


class Layer(nn.Module):
    """What a layer adds to its input, for the update of a rule."""

    def __init__(self, fn: Callable[..., Any], is_difference: bool, draws_sign: bool) -> None:
        super().__init__()
        self.fn = fn
        self.is_difference = is_difference  # the function is a layer that adds its input itself
        self.draws_sign = draws_sign  # see `Bdia`

    @property
    def takes_arguments_of(self) -> Callable[..., Any]:
        """Keyword arguments go by the signature of this function."""
        return self.fn

    def forward(self, x: Any, **kwargs: Any) -> Any:
        sign = pytree.tree_map(random_sign, x) if self.draws_sign else None
        returned = self.fn(x, **kwargs)
        output, aux = without_rest(returned, x)
        if self.is_difference:
            output = pytree.tree_map(torch.sub, output, x)
        if sign is not None:
            output = (output, sign)
        return WithAux(output, *aux) if aux else output


def without_rest(returned: Any, x: Any) -> tuple[Any, list[Any]]:
    """What a function returned for a stream `x`, and a list with the rest, if there is any."""
    if isinstance(returned, WithAux):
        return returned.output, [returned.aux]
    if not isinstance(returned, tuple) or isinstance(x, tuple) or not returned:
        return returned, []
    first, *rest = returned
    return first, [tuple(rest)] if rest else []


def random_sign(x: Tensor) -> Tensor:
    """1 or -1 for each sample: the first dimension of `x`."""
    shape = (*x.shape[:1], *[1] * (x.ndim - 1))
    return torch.randint(2, shape, device=x.device).mul_(2).sub_(1).to(x.dtype)


class FunctionList(nn.Module):
    """Functions by number. Modules among them are registered under it."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        super().__init__()
        self.count = 0
        if not isinstance(functions, Iterable):
            raise TypeError(
                f"functions={type(functions).__name__}(...): pass an iterable of layers, such as a "
                "list or an nn.Sequential."
            )
        for fn in functions:
            self.append(fn)

    def append(self, fn: Callable[..., Any]) -> None:
        check_function(fn, f"functions[{self.count}]")
        setattr(self, str(self.count), fn)
        self.count += 1

    def pop(self) -> None:
        """Remove the last function."""
        self.count -= 1
        delattr(self, str(self.count))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter([getattr(self, str(i)) for i in range(self.count)])

    def __getitem__(self, index: int) -> Callable[..., Any]:
        return list(self)[index]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Where each function is: an attribute of a module."""
        return [(self, str(i)) for i in range(self.count)]

    def extra_repr(self) -> str:
        others = [(i, fn) for i, fn in enumerate(self) if not isinstance(fn, nn.Module)]
        return ", ".join(f"{i}={fn!r}" for i, fn in others)
