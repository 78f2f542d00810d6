"""Running a function twice the same way.

Between forward and backward the world moves on: generators advance, autocast ends, modules switch
between train and eval, buffers are updated, parameters are swapped. A `Scene` remembers what a call
saw; `Replay` puts that back while a function runs again, and then puts the present back, so that a
step leaves behind exactly what one forward leaves.

Replayed, and only where they differ:

1. random state, of the CPU, of every device that holds a stream, and of generators in modules and
  keyword arguments;
2. autocast, for the device types of the streams and the CPU;
3. each module's `training` flag, and which parameters and submodules it has (`functional_call` and
  adapters change them);
4. each parameter's `requires_grad`;
5. each buffer that the function changed.

Not replayed but checked: parameters and constant buffers edited in place since forward. They make
the recompute wrong, so they raise.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core import errors
from retrograd.core.holdings import Holdings, is_users
from retrograd.core.private import NormWithStatistics, has_step_hooks, is_fake
from retrograd.core.streams import nbytes


class _Recomputing(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # recomputes under way in this thread, one inside the other


recomputing = _Recomputing()


def is_recomputing() -> bool:
    """True inside a function of a stack while it runs a second time, during backward.

    Example:
        >>> class Counted(torch.nn.Linear):
        ...     calls = 0
        ...     def forward(self, x):
        ...         if not rg.is_recomputing():
        ...             self.calls += 1
        ...         return super().forward(x)
    """
    return recomputing.depth > 0


# [Note: constant buffers] To replay a buffer, its value before the function ran is needed, but
# whether the function changes it shows only afterwards. So every buffer is copied and compared; by
# value, because BatchNorm changes its statistics without moving their version counters. But a large
# one that was seen unchanged is not copied again: masks and rotary tables cost one copy in the life
# of a module, not one for each call. Should its version show that it changed after all,
# `Scene.changes` says that the value is lost, and the tape keeps that one update. Remembered per
# module, name and training flag.
LARGE = 1 << 16  # bytes; beyond any channel statistics, below any table that hurts
_constant: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = weakref.WeakKeyDictionary()

# Getters, because `map` with one runs in C: these loops run for every call, over everything a
# network holds.
version_of = operator.attrgetter("_version")
_training = operator.attrgetter("training")
_requires_grad = operator.attrgetter("requires_grad")
MISSING: Any = object()  # in place of a buffer that was not registered

# Whose, under which name, the value that the function saw, and its version; None marks a copy of
# our own.
Buffers = list[tuple[nn.Module, str, Any, "int | None"]]


class Cast:
    """What one function consists of: its modules and parameters, and where these stand among all of
    its program's.
    """

    first_module: int
    first_parameter: int
    first_held: int

    def __init__(self, number: int, functions: tuple[Any, ...]) -> None:
        self.number = number
        self.saved: list[Any] = []  # what autograd saved when it last ran: see `walk.Record.saved`
        self.holdings = Holdings(functions)
        self.modules = modules = self.holdings.modules
        self.parameters = [
            p for m in modules if m._parameters for p in m._parameters.values() if p is not None
        ]
        self.parameters += self.holdings.weights
        self.users = [m for m in modules if is_users(m)]
        self.users_buffers = [m._buffers for m in self.users]


class Structure:
    """The modules behind a program, and all that they hold. A stack remembers it: to check it takes
    a third of making it anew.
    """

    def __init__(self, functions: list[tuple[Any, ...]]) -> None:
        self.functions = functions
        casts: dict[tuple[int, ...], Cast] = {}  # a function may be used by several updates
        self.casts = []
        for fns in functions:
            key = tuple(map(id, fns))
            if key not in casts:
                casts[key] = Cast(len(casts), fns)
            self.casts.append(casts[key])
        self.distinct = list(casts.values())
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        self.slots: list[dict[str, Any]] = []  # of each module: its parameters, its submodules
        self.held: list[Any] = []
        self.names: list[str] = []  # theirs
        for cast in self.distinct:
            cast.first_module, cast.first_parameter, cast.first_held = (
                len(self.modules),
                len(self.parameters),
                len(self.held),
            )
            self.modules += cast.modules
            self.parameters += cast.parameters
            slots = [slot for m in cast.modules for slot in slots_of(m)]
            self.slots += slots
            self.held += [value for slot in slots for value in slot.values()]
            self.names += [name for slot in slots for name in slot]
        self.dtypes = {parameter.dtype for parameter in self.parameters}
        self.sizes = [len(slot) for slot in self.slots]
        self.buffers = [m._buffers for m in self.modules]

    def is_current(self) -> bool:
        if list(map(len, self.slots)) != self.sizes:
            return False
        now = itertools.chain.from_iterable([slot.values() for slot in self.slots])
        return all(map(operator.is_, now, self.held)) and all(
            cast.holdings.is_current() for cast in self.distinct
        )


class Backstage:
    """What a stack remembers between calls. Not part of its copies and pickles."""

    structure: Structure | None = None
    program: Any = None  # the last one without keyword arguments
    warned = False  # of drift; once is enough
    trusts_casts = False  # whether hooks that cast a block's streams were seen to do nothing else
    profiles: dict[Any, Any]  # what calls of each shape need: see `budget`
    program_of: Any = ()  # what it was made of

    def __init__(self) -> None:
        self.profiles = {}

    def __reduce__(self) -> Any:
        return Backstage, ()

    def get(self, functions: list[tuple[Any, ...]]) -> Structure:
        structure = self.structure
        if structure is None or structure.functions != functions or not structure.is_current():
            structure = self.structure = Structure(functions)
        return structure


Seen = list[tuple[nn.Module, str, "Tensor | None", int, "Tensor | None"]]


class Scene:
    """What one forward call sees: the structure, all modules' states, the generators in play, and
    autocast.

    Taken in a few tight loops over everything: the same work done between the updates would cost
    several times as much.
    """

    def __init__(
        self, structure: Structure, tensors: Iterable[Tensor], arguments: list[Any]
    ) -> None:
        self.structure = structure
        self.casts = structure.casts
        parameters = structure.parameters
        self.training = list(map(_training, structure.modules))
        self.flags = list(map(_requires_grad, parameters))
        self.versions = [list(map(version_of, cast.parameters)) for cast in structure.distinct]
        # Whether parameters may be stepped as soon as their gradients are there: [Note: an
        # optimizer inside backward].
        self.steps_in_backward = any(map(has_step_hooks, parameters))
        self.has_buffers = any(structure.buffers)
        devices = {tensor.device for tensor in tensors}
        default = torch.default_generator
        self.generators: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = [
            (default.get_state, default.set_state)
        ]
        for device in devices:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                put = functools.partial(module.set_rng_state, device=device)
                self.generators.append((functools.partial(module.get_rng_state, device), put))
        own = [generator for cast in structure.distinct for generator in cast.holdings.generators]
        own += Holdings(
            [(value,) for value in arguments if not isinstance(value, Tensor)]
        ).generators
        self.generators += [(g.get_state, g.set_state) for g in {id(g): g for g in own}.values()]
        kinds = sorted({"cpu", *(device.type for device in devices)})
        self.kinds = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
        self.autocast = self.autocast_now()

    def is_present(self) -> bool:
        """Whether nothing but random states and buffers has to be put back. Asked once a walk."""
        structure = self.structure
        if (
            self.autocast_now() != self.autocast
            or list(map(_training, structure.modules)) != self.training
        ):
            return False
        return (
            list(map(_requires_grad, structure.parameters)) == self.flags and structure.is_current()
        )

    def buffers(self, cast: Cast) -> Seen:
        """The buffers that a function is about to see: whose, name, object, version, and a copy
        unless it is constant.
        """
        seen: Seen = []
        copies: dict[int, Tensor] = {}  # a buffer may be registered in several modules
        for module in cast.modules:
            if not module._buffers:
                continue
            known = _constant.get(module, ())
            for name, buffer in module._buffers.items():
                if buffer is None or is_lazy(buffer) or buffer.is_inference():
                    seen.append((module, name, None, 0, None))
                    continue
                if (name, module.training) not in known and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                seen.append((module, name, buffer, buffer._version, copies.get(id(buffer))))
        return seen

    def changes(self, cast: Cast, seen: Seen) -> tuple[Buffers, bool]:
        """What to put back of the buffers; and whether the function can be run again: whether all
        it changed is known.
        """
        versions = list(map(version_of, cast.parameters))
        complete = versions == self.versions[cast.number]
        if (
            not complete
        ):  # it edited its own parameters; updates before keep the old list, and will raise
            self.versions[cast.number] = versions
        buffers: Buffers = []
        for module, name, buffer, version, copy in seen:
            now = module._buffers.get(name, MISSING)
            if buffer is None:
                if now is not None and now is not MISSING and not now.is_inference():
                    buffers.append((module, name, None, None))
                continue
            edited = buffer._version != version or (copy is not None and not is_equal(copy, buffer))
            complete = complete and not (edited and copy is None)
            # Statistics of normalisation are copied even if unchanged: another forward may change
            # them before backward.
            if copy is not None and (
                edited or now is not buffer or isinstance(module, NormWithStatistics)
            ):
                buffers.append((module, name, copy, None))
            else:
                buffers.append((module, name, buffer, version))
            if edited or now is not buffer:
                _constant.get(module, set()).discard((name, module.training))
            elif copy is not None and nbytes(copy) > LARGE:
                _constant.setdefault(module, set()).add((name, module.training))
        if any(cast.users_buffers):  # a function of the user's own may have registered some
            known = {(module, name) for module, name, *_ in seen}
            buffers += [
                (m, name, MISSING, None)
                for m in cast.users
                for name in m._buffers
                if (m, name) not in known
            ]
            self.has_buffers = True
        return buffers, complete

    def autocast_now(self) -> list[tuple[torch.dtype, bool] | None]:
        """For each kind of device: None, or the dtype and whether casts of weights are cached."""
        return [
            (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            if torch.is_autocast_enabled(kind)
            else None
            for kind in self.kinds
        ]

    def random_states(self) -> list[bytes]:
        """The state of each generator, which is on the CPU, whatever device the generator
        is for.
        """
        return [as_bytes(get()) for get, _ in self.generators]

    def set_random_states(self, states: list[bytes]) -> None:
        for (_, put), state in zip(self.generators, states):
            put(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def put_back(self, cast: Cast, random: list[bytes] | None, buffers: Buffers) -> ExitStack:
        """Put back what an update saw, where it differs. Closing what is returned brings the
        present back.
        """
        with ExitStack() as undo:
            for kind, then, now in zip(self.kinds, self.autocast, self.autocast_now()):
                if then != now:
                    dtype, cache = then or (None, None)
                    undo.enter_context(
                        torch.autocast(
                            kind, enabled=then is not None, dtype=dtype, cache_enabled=cache
                        )
                    )
            structure, at = self.structure, cast.first_held
            start, end = cast.first_module, cast.first_module + len(cast.modules)
            for module, flag in zip(cast.modules, self.training[start:end]):
                if module.training != flag:
                    undo.callback(setattr, module, "training", module.training)
                    module.training = flag
            for slot, size in zip(
                structure.slots[2 * start : 2 * end], structure.sizes[2 * start : 2 * end]
            ):
                for name, value in zip(
                    structure.names[at : at + size], structure.held[at : at + size]
                ):
                    now = slot.get(name, MISSING)
                    # FSDP swaps sharded and unsharded parameters, and has the right ones in place:
                    # put back plain tensors only.
                    plain = {type(value), type(now)} <= {Tensor, nn.Parameter}
                    if now is MISSING and isinstance(value, Tensor):
                        raise errors.lost_parameter(name)
                    if now is not value and (isinstance(value, nn.Module) or plain):
                        undo.callback(_put, slot, name, now)
                        slot[name] = value
                at += size
            start, end = cast.first_parameter, cast.first_parameter + len(cast.parameters)
            for parameter, flag in zip(cast.parameters, self.flags[start:end]):
                if parameter.requires_grad != flag and parameter.is_leaf:
                    undo.callback(parameter.requires_grad_, not flag)
                    parameter.requires_grad_(flag)
            # Buffers are swapped, not overwritten: the present object is never touched, so no
            # version counter moves.
            copies: dict[int, Tensor] = {}
            for module, name, value, version in buffers:
                now = module._buffers.get(name, MISSING)
                if version is None and isinstance(value, Tensor):
                    value = copies.setdefault(id(value), value.clone())
                if now is not value:
                    undo.callback(_put, module._buffers, name, now)
                    _put(module._buffers, name, value)
            if random is not None:
                undo.callback(self.set_random_states, self.random_states())
                self.set_random_states(random)
            return undo.pop_all()


def as_bytes(state: Tensor) -> bytes:
    """A generator's state. To compare bytes takes a tenth of comparing tensors, and
    `FakeTensorMode` allows it.
    """
    return string_at(state.data_ptr(), state.nbytes)


def slots_of(module: nn.Module) -> tuple[Any, Any]:
    """Where a module has its parameters and its submodules. A script's cannot be swapped, and need
    not: they are copies.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        return module._parameters, module._modules
    for name, _ in module._buffers.items():
        raise errors.scripted(name)
    return dict(module._parameters.items()), {}


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether values are the same, as far as there are any and they can be compared."""
    if a.is_meta or is_fake(a) or a.layout != torch.strided:
        return True
    return torch.equal(a, b)


def _put(slot: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        slot.pop(name, None)
    else:
        slot[name] = value


def check_unedited(cast: Cast, versions: list[int], buffers: Buffers, where: str) -> None:
    """Raise if a parameter or a constant buffer that the function still uses was edited since
    forward, naming it.
    """
    if list(map(version_of, cast.parameters)) != versions:
        names = {
            id(p): name
            for module in reversed(cast.modules)
            for name, p in module.named_parameters()
        }
        names |= {id(p): "(a tensor of no module)" for p in cast.holdings.weights}
        for parameter, version in zip(cast.parameters, versions):
            if parameter._version != version and id(parameter) in names:
                raise errors.edited_parameter(
                    where, names[id(parameter)], (version, parameter._version)
                )
    for _, name, value, version in buffers:
        if version is not None and value._version != version:
            raise errors.edited_buffer(where, name, (version, value._version))
