"""Python state: what functions can get at besides their arguments, and nobody replays.

Attributes, globals, closures, class attributes, hooks, containers and objects in them: each value
found has a path, such as `blocks.3.f.cache` or `global model.COUNTER`. `look` takes a print of
each, so that two looks tell what changed in between; a `Snapshot` puts everything back. Parameters,
buffers and generators that the engine replays are not looked at.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
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

from retrograd.core.holdings import Holdings, globals_of
from retrograd.core.private import is_fake
from retrograd.core.replay import as_bytes
from retrograd.core.streams import local, storage_of

MANY = 1000  # a container with more in it holds data: its length tells enough
MOST = 50_000  # values looked at
LARGE = 1 << 24  # bytes of a tensor; of a larger one, some elements

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_MUTABLE = (dict, list, set, deque, bytearray)
_HELD = (
    *_PLAIN,
    Tensor,
    torch.Generator,
    type,
    types.ModuleType,
    random.SystemRandom,
)  # nothing of ours is inside
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
_CLOCKS = ("time", "datetime")
_ENTROPY = ("secrets", "uuid", "os")


class Seen(NamedTuple):
    """A value, and where it is: `place[key]`, a cell's content, an attribute; None where it cannot
    be put.
    """

    path: str
    place: Any
    key: Any
    value: Any


def visible(path: str, root: Any, replayed: Collection[int] = ()) -> Iterator[Seen]:
    """Everything that `root` can get at. `replayed`: what is the engine's business, modules and
    generators, by id.
    """
    queue, seen = deque([Seen(path, None, None, root)]), set()
    for _ in range(MOST):
        if not queue:
            return
        found = queue.popleft()
        yield found
        if not isinstance(found.value, _HELD) and id(found.value) not in seen:
            seen.add(id(found.value))
            queue.extend(_inside(found.path, found.value, replayed))
        elif (
            isinstance(found.value, type)
            and is_ones_own(found.value)
            and id(found.value) not in seen
        ):
            seen.add(id(found.value))
            queue.extend(_of_class(found.path, found.value))


def _inside(path: str, value: Any, replayed: Collection[int]) -> Iterator[Seen]:
    if isinstance(value, nn.Module):
        yield from _of_module(path, value, replayed)
    elif isinstance(value, types.FunctionType):
        if is_ones_own(value):
            yield from _of_function(path, value)
    elif isinstance(value, types.MethodType):
        yield from (Seen(path, None, None, inner) for inner in (value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        held = (*value.args, *value.keywords.values())
        yield from (
            Seen(f"{path}: bound argument {i}", None, None, inner) for i, inner in enumerate(held)
        )
        yield Seen(path, None, None, value.func)
    elif isinstance(value, (dict, list, tuple, deque)):
        if len(value) <= MANY:
            pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            place = None if isinstance(value, tuple) else value
            # Plain values are in the print of their container.
            yield from (
                Seen(f"{path}[{_key(key)}]", place, key, v)
                for key, v in pairs
                if not isinstance(v, _PLAIN)
            )
    elif is_someones(type(value)):
        yield from _of_object(path, value)


def _of_module(path: str, value: nn.Module, replayed: Collection[int]) -> Iterator[Seen]:
    if id(value) not in replayed and not isinstance(value, torch.jit.ScriptModule):
        for slot in (value._parameters, value._buffers):
            yield from (Seen(_joined(path, key), slot, key, inner) for key, inner in slot.items())
    yield from (
        Seen(_joined(path, key), None, None, child) for key, child in value._modules.items()
    )
    for name in _HOOKS:
        yield from (
            Seen(f"{path}: hook", None, None, hook) for hook in getattr(value, name, {}).values()
        )
    yield from _of_object(path, value, _OF_EVERY_MODULE)


def _of_function(path: str, value: types.FunctionType) -> Iterator[Seen]:
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    yield from (
        Seen(f"{path}: default argument {i}", None, None, inner) for i, inner in enumerate(defaults)
    )
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        if cell != types.CellType():
            yield Seen(f"{path}: variable {name}", cell, None, cell.cell_contents)
    for name in globals_of(value.__code__):
        inner = value.__globals__.get(name)
        if isinstance(inner, types.ModuleType):
            if is_ones_own(inner):  # the names in it that the code mentions
                for used in set(value.__code__.co_names) & vars(inner).keys():
                    yield Seen(
                        f"global {inner.__name__}.{used}", vars(inner), used, vars(inner)[used]
                    )
        elif name in value.__globals__:
            yield Seen(f"global {value.__module__}.{name}", value.__globals__, name, inner)
    yield from (
        Seen(f"{path}.{key}", value.__dict__, key, inner) for key, inner in value.__dict__.items()
    )


def _of_object(path: str, value: Any, without: Collection[str] = ()) -> Iterator[Seen]:
    """Attributes of an object and of its classes, and what its methods use."""
    held = getattr(value, "__dict__", {})
    yield from (
        Seen(_joined(path, key), held, key, inner)
        for key, inner in list(held.items())
        if key not in without
    )
    for cls in type(value).__mro__:
        for key in slots_of(cls) if is_someones(cls) else ():
            with contextlib.suppress(AttributeError):
                yield Seen(_joined(path, key), value, key, getattr(value, key))
        if is_ones_own(cls):
            yield from (seen for seen in _of_class(path, cls) if seen.key not in held)


def _of_class(path: str, cls: type) -> Iterator[Seen]:
    for key, inner in list(vars(cls).items()):
        if isinstance(inner, types.FunctionType):
            yield from _of_function(path, inner)
        elif isinstance(inner, (staticmethod, classmethod)) and isinstance(
            inner.__func__, types.FunctionType
        ):
            yield from _of_function(path, inner.__func__)
        elif not key.startswith("__") and not hasattr(inner, "__get__"):
            yield Seen(_joined(path, key), cls, key, inner)


def slots_of(cls: type) -> list[str]:
    """The names in its `__slots__` that hold values."""
    slots = vars(cls).get("__slots__", ())
    return [
        key
        for key in ((slots,) if isinstance(slots, str) else slots)
        if key not in ("__dict__", "__weakref__")
    ]


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _key(key: Any) -> str:
    try:
        return f"{key!r:.60}"
    except Exception:  # of someone else's
        return type(key).__name__


def is_someones(cls: type) -> bool:
    """Whether objects of a class are looked into: not those of torch and NumPy, and few of Python's
    own.
    """
    home = cls.__module__.split(".")[0]
    if home in ("types", "collections"):
        return cls.__name__ in ("SimpleNamespace", "UserDict", "UserList", "UserString")
    return home == "__main__" or (
        home not in sys.stdlib_module_names
        and home not in ("torch", "numpy", "retrograd", "builtins")
    )


def is_ones_own(value: Any) -> bool:
    """Whether a function, class or module is the user's own: not Python's, not torch's, not of a
    package that is installed.
    """
    name = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(value, "__module__", None) or ""
    )
    home = name.split(".")[0]
    if home in sys.stdlib_module_names or home in ("torch", "numpy", "retrograd", "builtins"):
        return home == "__main__"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


# --- what changed


class Change(NamedTuple):
    """What became of a value between two looks."""

    path: str
    kind: str  # cache, counter, tensor, random, value
    text: str


def look(path: str, root: Any, replayed: Collection[int]) -> dict[str, Any]:
    """A print of everything that `root` can get at, by path."""
    return {seen.path: print_of(seen.value, replayed) for seen in visible(path, root, replayed)}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """What differs between two looks. Of a container whose length changed, not its elements too."""
    found: list[Change] = []
    for path, now in after.items():
        then = before.get(path, ("nothing",))
        if then[:4] != now[:4] and not any(
            path.startswith(f"{c.path}[") or path == c.path for c in found
        ):
            found.append(_change(path, then, now))
    return found


def print_of(value: Any, replayed: Collection[int] = ()) -> tuple[Any, ...]:
    """Something small that differs if the value does. What is not known to hold state has none."""
    if isinstance(value, _PLAIN):
        return "plain", _plain(value)
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype), bits(value), id(value)
    if isinstance(value, (*_MUTABLE, tuple, frozenset)):
        inside = value.values() if isinstance(value, dict) else value
        plain = (
            tuple(map(_plain, inside))
            if len(value) <= MANY and all(isinstance(v, _PLAIN) for v in inside)
            else None
        )
        return (
            "container",
            type(value).__name__,
            len(value),
            plain if not isinstance(value, (set, frozenset)) else None,
        )
    if isinstance(value, torch.Generator):
        return ("object",) if id(value) in replayed else ("random", as_bytes(value.get_state()))
    if isinstance(value, random.Random):
        return (
            ("object",) if isinstance(value, random.SystemRandom) else ("random", value.getstate())
        )
    if _is_numpy(value, "Generator", "RandomState"):
        return "random", pickle.dumps(_numpy_state(value))
    if _is_numpy(value, "ndarray"):
        return "array", value.shape, value.tobytes() if value.nbytes <= LARGE else None
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return "plain", _plain(value.item())
    if type(value).__module__ == "itertools":
        return "plain", repr(value)
    return ("object",)


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, (float, complex)) else value  # NaN is not NaN


def bits(tensor: Tensor) -> Any:
    """What tells a tensor from others of its shape and dtype."""
    if has_no_values(tensor):
        return None
    tensor = local(tensor.detach()).as_subclass(Tensor)
    if tensor.nbytes > LARGE:
        tensor = tensor.flatten()[:: tensor.nbytes // LARGE * 16]
    return hash(as_bytes(tensor.resolve_conj().resolve_neg().cpu().contiguous()))


def has_no_values(tensor: Tensor) -> bool:
    return is_lazy(tensor) or is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided


def _change(path: str, then: Any, now: Any) -> Change:
    kind = now[0]
    if kind == "container":
        if then[0] == kind and then[2] == now[2]:
            return Change(path, "value", f"`{path}` holds other values")
        return Change(
            path,
            "cache",
            f"`{path}` has {now[2]} entries, and had {then[2] if then[0] == kind else 'none'} "
            "before",
        )
    if kind == "tensor":
        if then[0] == "tensor" and then[1] != now[1]:
            return Change(path, "cache", f"`{path}` grew from {list(then[1])} to {list(now[1])}")
        if then[0] == "tensor" and then[4] == now[4]:
            return Change(
                path, "tensor", f"`{path}`, a tensor that is no registered buffer, was changed"
            )
        return Change(path, "tensor", f"`{path}` is another tensor than before, with other values")
    if kind == "array":
        return Change(path, "tensor", f"`{path}`, an array, was changed")
    if kind == "random":
        return Change(path, "random", f"`{path}` drew random numbers")
    if kind == "plain":
        was = f"{then[1]!r:.40}" if then[0] == "plain" else "not there"
        number = isinstance(now[1], (int, str)) and not isinstance(now[1], bool)
        return Change(
            path,
            "counter" if number else "value",
            f"`{path}` is {now[1]!r:.40}, and was {was} before",
        )
    return Change(path, "value", f"`{path}` was replaced")


def _is_numpy(value: Any, *names: str) -> bool:
    return type(value).__module__.split(".")[0] == "numpy" and type(value).__name__ in names


def _numpy_state(value: Any) -> Any:
    return value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()


def outside_sources(path: str, root: Any) -> list[str]:
    """What its code uses and that gives another answer each time: clocks, the system's random
    numbers.
    """
    found: dict[str, None] = {}
    for seen in visible(path, root):
        if isinstance(seen.value, random.SystemRandom):
            found["random.SystemRandom"] = None
        functions = [seen.value]
        if is_someones(type(seen.value)) or isinstance(seen.value, nn.Module):
            functions = [inner for cls in type(seen.value).__mro__ for inner in vars(cls).values()]
        for function in functions:
            if isinstance(function, types.FunctionType) and is_ones_own(function):
                for name in globals_of(function.__code__):
                    value = function.__globals__.get(name)
                    home = (
                        value.__name__
                        if isinstance(value, types.ModuleType)
                        else getattr(value, "__module__", None)
                    )
                    if home in (*_CLOCKS, *_ENTROPY) and not (
                        home == "os" and "urandom" not in function.__code__.co_names
                    ):
                        found[name if home == name else f"{home}.{name}"] = None
    return list(found)


# --- putting it back


class Snapshot:
    """Everything that a network, and whatever else is given, can get at and change. `restore` puts
    it back, as often as asked.

    While it is in use, networks run on copies of their buffers, so those of the caller are never
    written to: a graph that the caller holds stays good. `release` puts the buffers themselves
    back. Other tensors are put back in place, without a new version.
    """

    def __init__(self, module: nn.Module, others: Iterable[Any]) -> None:
        self._undo: list[Callable[[], Any]] = [put for put, _ in global_generators()]
        self._known: set[int] = set()
        self._buffers: list[
            tuple[dict[str, Any], str, Tensor]
        ] = []  # those that are swapped: whose, name, the buffer itself
        modules = list(module.modules())
        for part in modules:  # without a limit, and before anything else
            self._remember(part)
        found = [list(visible("", root)) for root in (module, *others)]
        self.is_complete = all(len(each) < MOST for each in found)
        seen = [one for each in found for one in each]
        slots = {
            id(part._buffers): part._buffers
            for part in modules
            if not isinstance(part, torch.jit.ScriptModule)
        }
        # A buffer that something else shares its memory with has to be written to: a copy would
        # part them.
        users: dict[Any, set[Any]] = {}
        for one in seen:
            if isinstance(one.value, Tensor) and not has_no_values(one.value):
                users.setdefault(storage_of(one.value), set()).add(
                    id(one.value) if id(one.place) in slots else one.path
                )
        for slot in slots.values():
            for name, buffer in slot.items():
                if (
                    buffer is not None
                    and not has_no_values(buffer)
                    and len(users.get(storage_of(buffer), {0})) == 1
                ):
                    self._buffers.append((slot, name, buffer))
        self._known |= {id(buffer) for *_, buffer in self._buffers}
        for one in seen:
            self._remember_place(one)
            self._remember(one.value)
        for part in modules:
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    self._remember(tensor)

    def restore(self) -> None:
        """As it was, on new copies of the buffers."""
        self.release()
        copies = {id(buffer): copy_of(buffer) for *_, buffer in self._buffers}
        for slot, name, buffer in self._buffers:
            slot[name] = copies[id(buffer)]

    def release(self) -> None:
        """As it was, for good."""
        failed = None
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # and go on with the rest
                failed = failed or error
        if failed is not None:
            raise failed

    def _remember(self, value: Any) -> None:
        if id(value) in self._known or isinstance(value, (*_PLAIN, type, types.ModuleType)):
            return
        self._known.add(id(value))
        undo = self._undo.append
        if isinstance(value, nn.Module):
            inner = [
                slot for slot in vars(value).values() if isinstance(slot, dict)
            ]  # parameters, modules, hooks
            for slot in (vars(value), *inner):
                undo(functools.partial(_refill, slot, slot.copy()))
        elif isinstance(value, Tensor):
            if not has_no_values(value):
                undo(functools.partial(_rewrite, value, value.detach().clone()))
            if value.is_leaf:
                undo(functools.partial(_require, value, value.requires_grad))
        elif isinstance(value, _MUTABLE):
            undo(functools.partial(_refill, value, value.copy()))
        elif isinstance(value, torch.Generator):
            undo(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            if not isinstance(value, random.SystemRandom):
                undo(functools.partial(value.setstate, value.getstate()))
        elif _is_numpy(value, "Generator"):
            undo(
                functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            )
        elif _is_numpy(value, "RandomState"):
            undo(functools.partial(value.set_state, value.get_state()))
        elif _is_numpy(value, "ndarray"):
            if value.flags.writeable:
                undo(functools.partial(value.__setitem__, ..., value.copy()))
        elif isinstance(value, types.FunctionType):
            if is_ones_own(value):
                undo(functools.partial(_refill, value.__dict__, value.__dict__.copy()))
                missing = [
                    n
                    for n in globals_of(value.__code__)
                    if n not in value.__globals__ and not hasattr(builtins, n)
                ]
                undo(functools.partial(_forget, value.__globals__, missing))
        elif is_someones(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
            undo(functools.partial(_refill, vars(value), vars(value).copy()))
        for cls in type(value).__mro__ if not isinstance(value, types.FunctionType) else ():
            self._remember_class(cls)

    def _remember_class(self, cls: type) -> None:
        """Attributes that a class gets meanwhile are taken away again."""
        if id(cls) not in self._known and is_ones_own(cls):
            self._known.add(id(cls))
            self._undo.append(functools.partial(_keep_only, cls, frozenset(vars(cls))))

    def _remember_place(self, seen: Seen) -> None:
        if isinstance(seen.value, type):
            self._remember_class(seen.value)
        if seen.place is not None:
            # A counter of itertools cannot be set back: another one takes its place.
            again = (
                (lambda v: copy.copy(v))
                if type(seen.value).__module__ == "itertools"
                else (lambda v: v)
            )
            value = again(seen.value)
            self._undo.append(lambda: _put(seen.place, seen.key, again(value)))


def copy_of(tensor: Tensor) -> Tensor:
    """A leaf of its own that wants gradients if this one does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _put(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, types.CellType):
        place.cell_contents = value
    elif isinstance(place, dict):
        place[key] = value
    elif isinstance(place, (list, deque)):
        if key < len(place):
            place[key] = value
    elif (
        vars(place).get(key) is not value
        if isinstance(place, type)
        else getattr(place, key, None) is not value
    ):
        setattr(place, key, value)


def _forget(slot: dict[str, Any], names: list[str]) -> None:
    for name in names:
        slot.pop(name, None)


def _keep_only(cls: type, names: frozenset[str]) -> None:
    for name in [name for name in vars(cls) if name not in names and not name.startswith("__")]:
        delattr(cls, name)


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        if list(container) != list(before) or any(
            container[key] is not value for key, value in before.items()
        ):
            container.clear()
            container.update(before)
    elif isinstance(container, (list, bytearray)):
        container[:] = before
    else:
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


@torch.no_grad()
def _rewrite(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape:
        tensor.data = before.clone()
    elif not is_same(tensor.detach(), before):
        tensor.data.copy_(before)


def _require(tensor: Tensor, flag: bool) -> None:
    if tensor.requires_grad != flag and tensor.is_leaf:
        tensor.requires_grad_(flag)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same to the bit (NaN is NaN), as far as there is anything
    to see.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or a.device != b.device:
        return False
    if has_no_values(a) or has_no_values(b):
        return True
    return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


# --- global generators


def global_generators() -> Iterator[tuple[Callable[[], Any], tuple[str, Any]]]:
    """torch's on every device, Python's, NumPy's: how to put each back, its name and a print of its
    state.
    """
    state = torch.get_rng_state()
    yield functools.partial(torch.set_rng_state, state), ("torch, cpu", as_bytes(state))
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = torch.get_device_module(kind)
        for i in range(torch.accelerator.device_count()):
            state = module.get_rng_state(i)
            yield (
                functools.partial(module.set_rng_state, state, i),
                (f"torch, {kind}:{i}", as_bytes(state)),
            )
    now = random.getstate()
    yield functools.partial(random.setstate, now), ("Python's random", now)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        legacy = numpy.get_state()
        yield (
            functools.partial(numpy.set_state, legacy),
            ("NumPy's generator", pickle.dumps(legacy)),
        )


def random_states() -> dict[str, Any]:
    return dict(state for _, state in global_generators())


def replayed_by_the_engine(function: Any) -> set[int]:
    """Modules and generators that recompute sees as forward saw them, by id."""
    holdings = Holdings((function,))
    return {id(value) for value in (*holdings.modules, *holdings.generators)}
