"""Python state: what functions can get at besides their arguments, and nobody replays.

Attributes, globals, closures, class attributes, containers and objects in them: each value found has a path, such as
`blocks.3.f.cache` or `global COUNTER`. `look` takes a print of each, so that two looks tell what changed in between; a `Snapshot`
puts everything back. Parameters, buffers and torch generators of modules that the engine knows of are replayed and not looked at.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core.holdings import Holdings, globals_of, is_users
from retrograd.core.private import is_fake
from retrograd.core.replay import as_bytes
from retrograd.core.streams import local

MANY = 64  # a container with more in it holds data: its length tells enough
MOST = 20_000  # values looked at
LARGE = 1 << 24  # bytes of a tensor; of a larger one, some elements

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_MUTABLE = (dict, list, set, deque, bytearray)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CLOCKS = ("time", "datetime")
_ENTROPY = ("secrets", "uuid", "os")


class Seen(NamedTuple):
    """A value, and where it is: `place[key]`, a cell's content, a class's attribute; None where it cannot be put."""

    path: str
    place: Any
    key: Any
    value: Any


def visible(path: str, root: Any, replayed: Collection[int] = ()) -> Iterator[Seen]:
    """Everything that `root` can get at. `replayed`: modules whose parameters and buffers are others' business, by id."""
    queue, seen = deque([Seen(path, None, None, root)]), set()
    for _ in range(MOST):
        if not queue:
            return
        found = queue.popleft()
        yield found
        if not isinstance(found.value, (*_PLAIN, Tensor, torch.Generator)) and id(found.value) not in seen:
            seen.add(id(found.value))
            queue.extend(_inside(found.path, found.value, replayed))


def _inside(path: str, value: Any, replayed: Collection[int]) -> Iterator[Seen]:
    if isinstance(value, nn.Module):
        slots = [] if id(value) in replayed else [value._parameters, value._buffers]
        yield from (Seen(f"{path}.{key}", slot, key, inner) for slot in slots for key, inner in slot.items())
        yield from (Seen(_joined(path, key), None, None, child) for key, child in value._modules.items())
        if is_users(value):
            yield from _of_object(path, value, _OF_EVERY_MODULE)
    elif isinstance(value, types.FunctionType):
        if (value.__module__ or "").split(".")[0] not in ("torch", "retrograd"):
            yield from _of_function(path, value)
    elif isinstance(value, types.MethodType):
        yield from (Seen(path, None, None, inner) for inner in (value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        held = (*value.args, *value.keywords.values())
        yield from (Seen(f"{path}: bound argument {i}", None, None, inner) for i, inner in enumerate(held))
        yield Seen(path, None, None, value.func)
    elif isinstance(value, (dict, list, tuple, deque)):
        if len(value) <= MANY:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            place = None if isinstance(value, tuple) else value
            yield from (Seen(f"{path}[{key!r}]", place, key, inner) for key, inner in pairs)
    elif not isinstance(value, (type, types.ModuleType)) and is_someones(type(value)):
        yield from _of_object(path, value)


def _of_function(path: str, value: types.FunctionType) -> Iterator[Seen]:
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    yield from (Seen(f"{path}: default argument {i}", None, None, inner) for i, inner in enumerate(defaults))
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        if cell != types.CellType():
            yield Seen(f"{path}: variable {name}", cell, None, cell.cell_contents)
    for name in globals_of(value.__code__):
        if name in value.__globals__ and not isinstance(value.__globals__[name], types.ModuleType):
            yield Seen(f"global {name}", value.__globals__, name, value.__globals__[name])
    yield from (Seen(f"{path}.{key}", value.__dict__, key, inner) for key, inner in value.__dict__.items())


def _of_object(path: str, value: Any, without: Collection[str] = ()) -> Iterator[Seen]:
    """Attributes of an object and of its classes, and what its methods use."""
    held = getattr(value, "__dict__", {})
    yield from (Seen(_joined(path, key), held, key, inner) for key, inner in held.items() if key not in without)
    for cls in type(value).__mro__:
        if is_someones(cls):
            for key, inner in vars(cls).items():
                if isinstance(inner, types.FunctionType):
                    yield from _of_function(path, inner)
                elif not key.startswith("__") and not isinstance(inner, (type, property, staticmethod, classmethod)):
                    if key not in held and not hasattr(inner, "__get__"):
                        yield Seen(_joined(path, key), cls, key, inner)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def is_someones(cls: type) -> bool:
    """Whether a class is neither Python's own, nor torch's or NumPy's: those keep their state to themselves."""
    home = cls.__module__.split(".")[0]
    return (home not in sys.stdlib_module_names and home not in ("torch", "numpy", "retrograd", "builtins")) or home == "__main__"


# --- what changed


class Change(NamedTuple):
    """What became of a value between two looks."""

    path: str
    kind: str  # cache, counter, tensor, random, value
    text: str


def look(path: str, root: Any, replayed: Collection[int]) -> dict[str, Any]:
    """A print of everything that `root` can get at, by path."""
    return {seen.path: print_of(seen.value) for seen in visible(path, root, replayed)}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """What differs between two looks. Of a container whose length changed, not its elements too."""
    found: list[Change] = []
    for path, now in after.items():
        then = before.get(path, ("nothing",))
        if then != now and not any(path.startswith(f"{c.path}[") or path == c.path for c in found):
            found.append(_change(path, then, now))
    return found


def print_of(value: Any) -> Any:
    """Something small that differs if the value does. What is not known to hold state has none."""
    if isinstance(value, _PLAIN):
        return "plain", repr(value) if isinstance(value, (float, complex)) else value
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype), bits(value)
    if isinstance(value, (*_MUTABLE, tuple, frozenset)):
        return "container", type(value).__name__, len(value)
    if isinstance(value, random.Random):
        return "random", value.getstate()
    if _is_numpy(value, "Generator", "RandomState"):
        return "random", pickle.dumps(_numpy_state(value))
    if _is_numpy(value, "ndarray"):
        return "array", value.shape, value.tobytes() if value.nbytes <= LARGE else None
    if type(value).__module__ == "itertools":
        return "plain", repr(value)
    return ("object",)


def bits(tensor: Tensor) -> Any:
    """What tells a tensor from others of its shape and dtype."""
    if is_lazy(tensor) or is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    tensor = local(tensor.detach()).as_subclass(Tensor)
    if tensor.nbytes > LARGE:
        tensor = tensor.flatten()[:: tensor.nbytes // LARGE * 16]
    return hash(as_bytes(tensor.resolve_conj().resolve_neg().cpu().contiguous()))


def _change(path: str, then: Any, now: Any) -> Change:
    kind = now[0]
    if kind == "container":
        return Change(path, "cache", f"`{path}` has {now[2]} entries, and had {then[2] if then[0] == kind else 'none'} before")
    if kind == "tensor":
        if then[0] == "tensor" and then[1] != now[1]:
            return Change(path, "cache", f"`{path}` grew from {list(then[1])} to {list(now[1])}")
        return Change(path, "tensor", f"`{path}`, a tensor that is no registered buffer, was changed")
    if kind == "array":
        return Change(path, "tensor", f"`{path}`, an array, was changed")
    if kind == "random":
        return Change(path, "random", f"`{path}` drew random numbers")
    if kind == "plain":
        was = f"{then[1]!r:.40}" if then[0] == "plain" else "not there"
        number = isinstance(now[1], (int, str)) and not isinstance(now[1], bool)
        return Change(path, "counter" if number else "value", f"`{path}` is {now[1]!r:.40}, and was {was} before")
    return Change(path, "value", f"`{path}` was replaced")


def _is_numpy(value: Any, *names: str) -> bool:
    return type(value).__module__.split(".")[0] == "numpy" and type(value).__name__ in names


def _numpy_state(value: Any) -> Any:
    return value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()


def outside_sources(path: str, root: Any) -> list[str]:
    """Modules that its code uses and that give another answer each time: clocks, the system's random numbers."""
    found: dict[str, None] = {}
    for seen in visible(path, root):
        functions = [seen.value]
        if is_someones(type(seen.value)) or isinstance(seen.value, nn.Module):
            functions = [inner for cls in type(seen.value).__mro__ for inner in vars(cls).values()]
        for function in functions:
            if isinstance(function, types.FunctionType) and (function.__module__ or "").split(".")[0] != "torch":
                for name in globals_of(function.__code__):
                    value = function.__globals__.get(name)
                    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                    if home in (*_CLOCKS, *_ENTROPY) and not (home == "os" and "urandom" not in function.__code__.co_names):
                        found[name if home == name else f"{home}.{name}"] = None
    return list(found)


# --- putting it back


class Snapshot:
    """Everything that a network, and functions besides, can get at and change. `restore` puts it back, as often as asked.

    Tensors are put back in place and without a new version, so that graphs that others hold stay valid.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._undo: list[Callable[[], Any]] = [put for put, _ in global_generators()]
        known: set[int] = set()
        for path, root in roots:
            for seen in visible(path, root):
                if seen.place is not None:
                    self._undo.append(functools.partial(_put, seen.place, seen.key, seen.value))
                if id(seen.value) not in known:
                    known.add(id(seen.value))
                    self._remember(seen.value)

    def _remember(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            slots = [vars(value), *([] if isinstance(value, torch.jit.ScriptModule) else [value._parameters, value._buffers])]
            self._undo += [functools.partial(_refill, slot, slot.copy()) for slot in slots]
            # Those of torch's own modules are not walked.
            for tensor in (*value._parameters.values(), *value._buffers.values()):
                if tensor is not None:
                    self._remember_tensor(tensor)
        elif isinstance(value, Tensor):
            self._remember_tensor(value)
        elif isinstance(value, _MUTABLE):
            self._undo.append(functools.partial(_refill, value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif _is_numpy(value, "Generator"):
            self._undo.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif _is_numpy(value, "RandomState"):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif _is_numpy(value, "ndarray"):
            if value.flags.writeable:
                self._undo.append(functools.partial(value.__setitem__, ..., value.copy()))
        elif is_someones(type(value)) and hasattr(value, "__dict__"):
            self._undo.append(functools.partial(_refill, vars(value), vars(value).copy()))

    def _remember_tensor(self, tensor: Tensor) -> None:
        if is_fake(tensor) or is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
            return
        self._undo.append(functools.partial(_rewrite, tensor, tensor.detach().clone()))

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()


def _put(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, types.CellType):
        place.cell_contents = value
    elif isinstance(place, type):
        if vars(place).get(key) is not value:
            setattr(place, key, value)
    elif isinstance(place, dict) or key < len(place):
        place[key] = value


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        if list(container) != list(before) or any(container[key] is not value for key, value in before.items()):
            container.clear()
            container.update(before)
    elif isinstance(container, (list, bytearray)):
        container[:] = before
    else:
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


@torch.no_grad()
def _rewrite(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape or not torch.equal(tensor.detach(), before):
        tensor.data = tensor.data.resize_(before.shape) if tensor.shape != before.shape else tensor.data
        tensor.data.copy_(before)


def global_generators() -> Iterator[tuple[Callable[[], Any], tuple[str, Any]]]:
    """torch's on every device, Python's, NumPy's: how to put each back, its name and a print of its state."""
    state = torch.get_rng_state()
    yield functools.partial(torch.set_rng_state, state), ("torch, cpu", as_bytes(state))
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = torch.get_device_module(kind)
        for i in range(torch.accelerator.device_count()):
            state = module.get_rng_state(i)
            yield functools.partial(module.set_rng_state, state, i), (f"torch, {kind}:{i}", as_bytes(state))
    now = random.getstate()
    yield functools.partial(random.setstate, now), ("Python's random", now)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        legacy = numpy.get_state()
        yield functools.partial(numpy.set_state, legacy), ("NumPy's generator", pickle.dumps(legacy))


def random_states() -> dict[str, Any]:
    return dict(state for _, state in global_generators())


def replayed_by_the_engine(functions: Iterable[Any]) -> set[int]:
    """Modules whose parameters and buffers recompute sees as forward saw them, by id."""
    return set(map(id, itertools.chain.from_iterable(Holdings((fn,)).modules for fn in functions)))
