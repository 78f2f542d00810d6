"""What a block of another package computes, learned from its own `forward`.

The block runs once on made-up tensors (`noise`), with probes in place of its functions. Probes note
what they are given, and return noise. All noise is different, so it shows

- which part of which input (a *stream*) each function reads, or which argument of the block,
- to which stream its output is added,
- which streams change names, and what the block returns besides its streams.

A block that computes anything else than "stream plus outputs" is refused: `NotAdditive` says why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.core.private import bare_copy, pytree

Value = Any  # a tensor, or a pytree of tensors
Path = tuple[Any, ...]  # from a block's keyword arguments to a value in them
Dims = tuple["int | None", ...]  # along which each input is split; None: it is one stream

MOST_FUNCTIONS = 10  # of one block: all sums of their outputs are tried
REPLAY_FLAGS = ("record_rng", "set_rng")  # for the package's own replay, which does not run
SIGNAL = "_reverse"  # tells a function whether it runs again
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class NotAdditive(Exception):
    """The block is not a list of updates `stream += function(...)`. The text says why."""


class Slot(NamedTuple):
    """Where an argument of a function comes from.

    "stream": the stream of this name. "given": the value at this path of the block's keyword
    arguments. "constant": always this value. "signal": whether the function runs again.
    """

    kind: str
    value: Any = None


class Same(NamedTuple):
    """A constant that equals itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class LearnedCall(NamedTuple):
    """One function of a block: `target += function(*args, **kwargs)`."""

    function: str
    target: str
    args: tuple[Slot, ...]
    kwargs: tuple[tuple[str, Slot], ...]

    @property
    def reads(self) -> tuple[str, ...]:
        slots = [*self.args, *(slot for _, slot in self.kwargs)]
        return tuple(slot.value for slot in slots if slot.kind == "stream")


class Learned(NamedTuple):
    """A block as data."""

    calls: tuple[LearnedCall, ...]
    dims: Dims
    sources: dict[str, str]  # from a stream after the block to the one before it that it continues
    extras: tuple[int, ...]  # the calls whose auxiliary values the block returns, in this order


# --- noise


def noise(like: Tensor, salt: int) -> Tensor:
    """Different numbers for each salt, without any generator."""
    count = torch.arange(1, like.numel() + 1, device="cpu", dtype=torch.float64)
    return (count * (12.9898 + math.sqrt(salt + 1)) + salt).sin().view(like.shape)


class Noise:
    """Makes noise that was not there before."""

    def __init__(self) -> None:
        self.salt = 0

    def like(self, value: Value) -> Value:
        return pytree.tree_map(self._leaf, value)

    def number(self) -> Tensor:
        return self._leaf(torch.zeros((), device="cpu"))

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        self.salt += 1
        return noise(leaf, self.salt)

    def instead(self, value: Any, known: dict[int, Any]) -> Any:
        """A copy of keyword arguments in which other tensors stand for the tensors.

        A mask of ones would hide that the block multiplies by it. The same object gives the same
        copy.
        """
        if id(value) not in known:
            known[id(value)] = self._copy(value, known)
        return known[id(value)]

    def _copy(self, value: Any, known: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            return self._of_its_kind(value)
        if type(value) is dict:
            return {key: self.instead(inner, known) for key, inner in value.items()}
        if type(value) in (list, tuple) and not is_simple(value):
            return type(value)(self.instead(inner, known) for inner in value)
        return value

    def _of_its_kind(self, value: Tensor) -> Tensor:
        made = self._leaf(value)
        if value.is_floating_point() or value.is_complex():
            return made
        if value.dtype == torch.bool:
            return made > 0
        return (3 * made).abs().to(value.dtype)


class Probed(NamedTuple):
    """What a probe was given, and what it returned."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Value
    aux: Tensor


class Probe(nn.Module):
    """In place of a function: notes its arguments, and returns noise."""

    def __init__(self, name: str, made: Noise, log: list[Probed], has_aux: bool) -> None:
        super().__init__()
        self.name = name
        self.made = made
        self.log = log
        self.has_aux = has_aux

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        first = next((value for value in values if is_value(value)), None)
        if first is None:
            raise NotAdditive(f"its function {self.name} is given no tensor")
        output = self.made.like(first)
        aux = self.made.number()
        self.log.append(Probed(self.name, args, kwargs, output, aux))
        return (output, aux) if self.has_aux else output


def is_value(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)


def same(one: Value, other: Value) -> bool:
    """Whether two values agree up to rounding."""
    if pytree.tree_structure(one) != pytree.tree_structure(other):
        return False
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other)))
    if not pairs or not all(isinstance(leaf, Tensor) for pair in pairs for leaf in pair):
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=1e-9)
        for a, b in pairs
    )


# --- streams


def stream_name(index: int, part: int | None) -> str:
    """`x1` and `x2` are the halves of the first input, `m1` and `m2` of the second one."""
    letter = "xmuvw"[index] if index < 5 else f"input{index}_"
    return letter if part is None else f"{letter}{part + 1}"


def split(inputs: Sequence[Value], dims: Dims) -> dict[str, Value]:
    """The streams that inputs, or outputs, consist of."""
    streams = {}
    for index, (value, dim) in enumerate(zip(inputs, dims)):
        if dim is None:
            streams[stream_name(index, None)] = value
            continue
        for part in (0, 1):
            half = pytree.tree_map(lambda leaf, d=dim, p=part: leaf.chunk(2, d)[p], value)
            streams[stream_name(index, part)] = half
    return streams


def join(streams: Mapping[str, Value], dims: Dims) -> list[Value]:
    """The values that streams make."""
    values = []
    for index, dim in enumerate(dims):
        if dim is None:
            values.append(streams[stream_name(index, None)])
            continue
        halves = [streams[stream_name(index, part)] for part in (0, 1)]
        values.append(pytree.tree_map(lambda a, b, d=dim: torch.cat((a, b), d), *halves))
    return values


def possible_dims(value: Value) -> list[int | None]:
    """The dimensions, counted from the end, along which all leaves have halves; None at last."""
    leaves = pytree.tree_leaves(value)
    last = min(leaf.ndim for leaf in leaves)
    found: list[int | None] = []
    for dim in range(-1, -last - 1, -1):
        if all(leaf.shape[dim] % 2 == 0 and leaf.shape[dim] > 0 for leaf in leaves):
            found.append(dim)
    return [*found, None]


# --- running a block on noise


def with_probes(block: nn.Module, made: Noise, probe: Callable[[str], Probe]) -> nn.Module:
    """A copy of the block that has a probe in place of each function, and noise in place of its own
    parameters, buffers and tensors.
    """
    twin = bare_copy(block)
    for name in vars(block):
        twin.__dict__[name] = made.instead(twin.__dict__[name], {})
    parts: dict[str, nn.Module | None] = {}
    for name, part in block.named_children():
        if isinstance(part, nn.ModuleList):
            parts[name] = nn.ModuleList([probe(f"{name}.{i}") for i in range(len(part))])
        else:
            parts[name] = probe(name)
    twin.__dict__["_modules"] = parts
    return twin


def learn(block: nn.Module, inputs: Sequence[Value], kwargs: Mapping[str, Any]) -> Learned:
    """The updates of a block that is called with such inputs and keyword arguments.

    Raises `NotAdditive` if it is not a list of updates.
    """
    if not inputs or not all(is_value(value) for value in inputs):
        raise NotAdditive("its inputs are not tensors, or dicts or lists of tensors")
    reasons = []
    for has_aux in (False, True):
        try:
            return Trial(block, inputs, kwargs, has_aux).learned()
        except NotAdditive as refused:
            reasons.append(str(refused))
        except Exception as error:
            reasons.append(f"on an example its forward raised {type(error).__name__}: {error}")
    raise NotAdditive(reasons[0])


class Trial:
    """One run of a block on noise, and what it shows."""

    def __init__(
        self,
        block: nn.Module,
        inputs: Sequence[Value],
        kwargs: Mapping[str, Any],
        has_aux: bool,
    ) -> None:
        made = Noise()
        self.log: list[Probed] = []
        self.inputs = [made.like(value) for value in inputs]
        copied = made.instead(dict(kwargs), {})
        self.given = paths_by_id(copied)
        twin = with_probes(block, made, lambda name: Probe(name, made, self.log, has_aux))
        before = random_states()
        with torch.no_grad():
            result = twin.forward(*self.inputs, **copied)
        if random_states() != before:
            raise NotAdditive("it draws or seeds random numbers outside of its functions")
        returned = list(result) if isinstance(result, tuple) else [result]
        self.outputs = returned[: len(inputs)]
        self.extras = self._extras(returned[len(inputs) :], has_aux)
        if len(self.outputs) < len(inputs) or not all(map(is_value, self.outputs)):
            raise NotAdditive(f"it returns {len(returned)} values for {len(inputs)} inputs")
        if [shapes(value) for value in self.outputs] != [shapes(value) for value in self.inputs]:
            raise NotAdditive("its outputs have other shapes than its inputs")
        if len(self.log) > MOST_FUNCTIONS:
            raise NotAdditive(f"it has {len(self.log)} functions, and {MOST_FUNCTIONS} are tried")

    def _extras(self, returned: Sequence[Any], has_aux: bool) -> tuple[int, ...]:
        if not returned:
            if has_aux and self.log:
                raise NotAdditive("its functions return tuples of which it returns one value")
            return ()
        by_id = {id(probed.aux): number for number, probed in enumerate(self.log)}
        found = [by_id.get(id(value)) for value in returned]
        if not has_aux or None in found:
            raise NotAdditive(
                f"it returns {len(returned)} values besides its streams, which are not what its "
                "functions return"
            )
        return tuple(number for number in found if number is not None)

    def learned(self) -> Learned:
        reason = "its functions read none of its inputs"
        for dims in itertools.product(*map(possible_dims, self.inputs)):
            try:
                return self._with_dims(dims)
            except NotAdditive as refused:
                if None not in dims and self._reads_a_half(dims):
                    reason = str(refused)
        raise NotAdditive(reason)

    def _reads_a_half(self, dims: Dims) -> bool:
        """Whether the first function reads a stream: then the dimensions are likely right."""
        if not self.log:
            return False
        streams = split(self.inputs, dims)
        values = [*self.log[0].args, *self.log[0].kwargs.values()]
        return any(same(stream, value) for stream in streams.values() for value in values)

    def _with_dims(self, dims: Dims) -> Learned:
        start = split(self.inputs, dims)
        sources: dict[str, str] = {}
        targets: dict[int, str] = {}
        for stream, final in split(self.outputs, dims).items():
            source, added = self._sum(stream, final, start)
            if source in sources.values() or set(added) & set(targets):
                raise NotAdditive(f"it adds the same value to {stream} and to another stream")
            sources[stream] = source
            targets.update(dict.fromkeys(added, source))
        unused = [p.function for number, p in enumerate(self.log) if number not in targets]
        if unused:
            raise NotAdditive(f"what its function {unused[0]} returns is added to no stream")
        return Learned(self._calls(start, targets), dims, sources, self.extras)

    def _sum(
        self, stream: str, final: Value, start: Mapping[str, Value]
    ) -> tuple[str, tuple[int, ...]]:
        """The stream, and the outputs added to it, of which `final` is the sum."""
        for source, value in start.items():
            for added in self._subsets(value):
                if close_at_first(final, value, [self.log[k].output for k in added]) and same(
                    final, plus(value, [self.log[k].output for k in added])
                ):
                    return source, added
        raise NotAdditive(
            f"its stream {stream} is not what it was plus what functions return: f(x) may be "
            "scaled, normalised or combined otherwise"
        )

    def _subsets(self, value: Value) -> Iterator[tuple[int, ...]]:
        like = shapes(value)
        fitting = [k for k, probed in enumerate(self.log) if shapes(probed.output) == like]
        for size in range(len(fitting) + 1):
            yield from itertools.combinations(fitting, size)

    def _calls(
        self, start: Mapping[str, Value], targets: Mapping[int, str]
    ) -> tuple[LearnedCall, ...]:
        now = dict(start)
        calls = []
        for number, probed in enumerate(self.log):
            args = tuple(self._slot(probed, "", value, now) for value in probed.args)
            kwargs = tuple(
                (name, self._slot(probed, name, value, now))
                for name, value in probed.kwargs.items()
                if name not in REPLAY_FLAGS
            )
            target = targets[number]
            calls.append(LearnedCall(probed.function, target, args, kwargs))
            now[target] = plus(now[target], [probed.output])
        return tuple(calls)

    def _slot(self, probed: Probed, name: str, value: Any, now: Mapping[str, Value]) -> Slot:
        if name == SIGNAL and isinstance(value, bool):
            return Slot("signal")
        if is_simple(value):
            return Slot("constant", value)
        if id(value) in self.given:
            return Slot("given", self.given[id(value)])
        for stream, current in now.items():
            if same(current, value):
                return Slot("stream", stream)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            raise NotAdditive(
                f"its function {probed.function} is given a tensor that is neither a stream nor an "
                "argument of the block: the block computes it"
            )
        return Slot("constant", Same(value))


def plus(value: Value, outputs: Sequence[Value]) -> Value:
    for output in outputs:
        value = pytree.tree_map(lambda a, b: a + b, value, output)
    return value


def close_at_first(final: Value, value: Value, outputs: Sequence[Value]) -> bool:
    """Whether the first numbers agree: cheap, and wrong for most sums."""
    first = [pytree.tree_leaves(each)[0].reshape(-1)[:1] for each in (value, *outputs)]
    expected = pytree.tree_leaves(final)[0].reshape(-1)[:1]
    return torch.allclose(torch.stack(first).sum(0), expected, rtol=0, atol=1e-9)


def shapes(value: Value) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    return str(spec), [leaf.shape for leaf in leaves]


def random_states() -> list[int]:
    """What the default generator of the CPU is at, to compare."""
    return torch.get_rng_state().tolist()


# --- arguments


def is_simple(value: Any) -> bool:
    """Whether a value is compared by what it is worth: a number, a text, None, a tuple of them."""
    if type(value) in (tuple, torch.Size):
        return all(map(is_simple, value))
    return isinstance(value, SIMPLE)


def paths_by_id(kwargs: Mapping[str, Any]) -> dict[int, Path]:
    """For each object in keyword arguments, and in dicts and lists in them, the path to it."""
    found: dict[int, Path] = {}

    def walk(value: Any, path: Path) -> None:
        if is_simple(value):
            return
        found.setdefault(id(value), path)
        for key, inner in inside(value):
            walk(inner, (*path, key))

    for name, value in kwargs.items():
        walk(value, (name,))
    return found


def inside(value: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a container."""
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (list, tuple):
        return list(enumerate(value))
    return []


def at_path(kwargs: Any, path: Path) -> Any:
    for key in path:
        kwargs = kwargs[key]
    return kwargs


def structure_of(block: nn.Module, inputs: Sequence[Value], kwargs: Mapping[str, Any]) -> Any:
    """What decides about the updates of a block: a key for what was learned."""
    aliases: dict[int, int] = {}

    def shape_of(value: Any) -> Any:
        if is_simple(value):
            return type(value), value
        known = aliases.setdefault(id(value), len(aliases))
        content = tuple((key, shape_of(inner)) for key, inner in inside(value))
        return type(value), known, content

    attributes = tuple((k, v) for k, v in vars(block).items() if is_simple(v))
    functions = tuple(name for name, _ in block.named_children())
    values = tuple((str(spec), tuple(sizes)) for spec, sizes in map(shapes, inputs))
    return attributes, functions, values, shape_of(dict(kwargs))
