"""The modules and parameters behind the functions of a program.

A program runs the same functions call after call. So a stack caches their structure, and a call
only checks that it is still current: validating the cache costs a third of rebuilding it.

The structure has what the functions have registered, and what they were seen to use (`watch.py`).
[Note: which calls are inspected] A call is watched and verified if it is the first one of its
structure, of a training mode or of a shape, dtype or device (up to eight of these), if an attribute
of a module has another value than before, and every 1,024th time. Updates that are kept cannot be
verified: if a later call rebuilds them, it is inspected from there on.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core import errors
from retrograd.core.host_memory import HostMemory
from retrograd.core.private import FSDP_FORGETS_CASTS, fsdp_policy, identity_of_generator
from retrograd.core.streams import State
from retrograd.core.tensors import ShapeAndDtype, local, storage_of
from retrograd.core.watch import Usage

log = logging.getLogger("retrograd")
VerifyCalls = Literal["first", "always", "never"]
EVERY = 1024  # calls: how often a stack is inspected again
MAX_KINDS = 8  # how many shapes, dtypes and devices are inspected

_training = operator.attrgetter("training")
_values = operator.methodcaller("values")

Functions = tuple[Any, ...]  # what one update calls: its function, and perhaps its coupling


class FunctionState:
    """The modules, parameters and generators that one function consists of."""

    first_module: int  # where its modules start among those of the whole structure
    first_parameter: int

    def __init__(
        self,
        number: int,
        functions: Functions,
        usage: Usage,
    ) -> None:
        self.number = number  # among the distinct functions of the program
        self.usage = usage
        self.known_modules = len(usage.modules)
        self.modules = [*registered_modules(functions), *usage.modules]
        parameters = [p for module in self.modules for p in module._parameters.values()]
        self.parameters: list[Tensor] = [p for p in parameters if p is not None] + usage.weights
        written = set(map(storage_of, usage.written))
        # Those that must not change between forward and backward.
        self.constant_parameters = [
            p for p in self.parameters if storage_of(local(p)) not in written
        ]
        self.user_modules = [module for module in self.modules if is_user_module(module)]
        self.user_buffers = [module._buffers for module in self.user_modules]
        self.is_script = any(map(is_script, (*functions, *self.modules)))
        # Whether recompute may end as soon as autograd has saved the last tensor. Scripts turn the
        # exception that ends them into one of their own.
        self.may_stop_early = usage.may_stop_early and not self.is_script
        # Shapes of what autograd saved when the function last ran. One list serves every call.
        self.saved_shapes: list[ShapeAndDtype] = []
        self.members = [Members(module) for module in self.modules]

    def replayed(self) -> set[int]:
        """What it runs again with: modules (ids), tensors (memory) and generators (identities)."""
        usage = self.usage
        generators = map(identity_of_generator, usage.generators)
        return {
            *map(id, (*self.modules, *usage.modules)),
            *map(storage_of, usage.written),
            *generators,
        }


def registered_modules(functions: Functions) -> list[nn.Module]:
    """The modules among these functions, and their children, each as often as it is registered."""
    found = [function for function in functions if isinstance(function, nn.Module)]
    seen = set(map(id, found))
    for module in found:  # grows while it is searched
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def is_user_module(module: nn.Module) -> bool:
    """Whether the class of a module is not one of torch's, which hold no hidden state."""
    return module.__class__.__module__[:8] != "torch.nn"


def is_script(function: Any) -> bool:
    return isinstance(function, (torch.jit.ScriptModule, torch.jit.ScriptFunction))


class Members:
    """The dicts of parameters and submodules of one module, and what they held."""

    __slots__ = ("parameters", "submodules", "values")

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            # The members of a script cannot be replaced, so there is nothing to put back.
            for name, _ in module._buffers.items():
                raise errors.scripted(name)
            self.parameters: dict[str, Any] = dict(module._parameters.items())
            self.submodules: dict[str, Any] = {}
        else:
            self.parameters = module._parameters
            self.submodules = module._modules
        self.values = {**self.parameters, **self.submodules}


class Structure:
    """The functions of a program, and all modules and parameters behind them."""

    def __init__(
        self,
        functions: Sequence[Functions],
        usages: dict[tuple[int, ...], Usage] | None = None,
    ) -> None:
        self.key = functions
        self.usages = {} if usages is None else usages  # by the ids of the functions of an update
        self.is_outdated = False  # more was seen of what the functions use
        self.inspected_until = 0  # updates before this one were inspected
        self._ids = [*map(id, itertools.chain.from_iterable(functions))]
        self._lengths = [*map(len, functions)]
        by_id: dict[tuple[int, ...], FunctionState] = {}  # updates may share a function
        self.functions: list[FunctionState] = []  # of each update
        for parts in functions:
            ids = tuple(map(id, parts))
            if ids not in by_id:
                usage = self.usages.setdefault(ids, Usage())
                by_id[ids] = FunctionState(len(by_id), parts, usage)
            self.functions.append(by_id[ids])
        self.distinct = list(by_id.values())
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        for function in self.distinct:
            function.first_module = len(self.modules)
            function.first_parameter = len(self.parameters)
            self.modules += function.modules
            self.parameters += function.parameters
        self.lazy = list(filter(is_lazy, self.parameters))  # those that had no shape
        self.dtypes = {parameter.dtype for parameter in self.parameters}
        self.buffers = [module._buffers for module in self.modules]
        self.has_user_modules = any(function.user_modules for function in self.distinct)
        # The dicts of all members, and what they held, in flat lists: `is_current` runs every call.
        members = [members for function in self.distinct for members in function.members]
        self._slots = [slot for m in members for slot in (m.parameters, m.submodules)]
        self._sizes = [len(slot) for slot in self._slots]
        self._filled = [slot for slot in self._slots if slot]
        self._values = [value for slot in self._filled for value in slot.values()]
        self._sum_up_usage()
        self.has_scripts = any(function.is_script for function in self.distinct)
        self.attributes = Attributes(self.modules)

    def _sum_up_usage(self) -> None:
        usages = [function.usage for function in self.distinct]
        self.generators = [generator for usage in usages for generator in usage.generators]
        self.random_devices = {device for usage in usages for device in usage.random_devices}
        self.draws = any(usage.draws for usage in usages)
        self.has_written = any(usage.written for usage in usages)

    @functools.cached_property
    def forgets_casts(self) -> bool:
        """Whether FSDP casts inputs or outputs of its modules, and would not in recompute."""
        return FSDP_FORGETS_CASTS and any(map(fsdp_policy, self.modules))

    def has_inspected(self, updates: Iterable[int]) -> None:
        """These updates were watched, and verified if they are to be."""
        self.inspected_until = max([self.inspected_until, *(index + 1 for index in updates)])

    @property
    def parameter_memory(self) -> set[int]:
        return {storage_of(local(parameter)) for parameter in self.parameters}

    def is_of(self, functions: Sequence[Functions]) -> bool:
        """Whether these are its functions: the same objects, not equal ones."""
        ids = [*map(id, itertools.chain.from_iterable(functions))]
        return ids == self._ids and [*map(len, functions)] == self._lengths

    def is_current(self) -> bool:
        """Whether all modules have the members that they had."""
        if list(map(len, self._slots)) != self._sizes:
            return False
        now = itertools.chain.from_iterable(map(_values, self._filled))
        return all(map(operator.is_, now, self._values))


class Attributes:
    """The attributes of the user's own modules: has any become something else?"""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.dicts = [vars(module) for module in modules if is_user_module(module)]
        self.values = self._current()
        self.reported: set[tuple[int, str]] = set()  # each attribute counts once
        self.is_dirty = False  # a change that was not told yet

    def will_be_inspected(self) -> bool:
        """Ask before the call whether `have_changed` will be true in it."""
        self.is_dirty = self.have_changed()
        return self.is_dirty

    def _current(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self.dicts)))

    def have_changed(self) -> bool:
        """Whether an attribute has changed that had not changed before. Asked in every call."""
        now = self._current()
        before = self.values
        if self.is_dirty:
            self.is_dirty = False
            self.values = now
            return True
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return False  # nearly always
        self.values = now
        if len(now) != len(before):
            return True
        names = [(id(owner), name) for owner in self.dicts for name in owner]
        changed = {
            name for name, a, b in zip(names, before, now) if a is not b and _matters(name[1], b)
        }
        is_new = not changed <= self.reported
        self.reported |= changed
        return is_new


def _matters(name: str, value: Any) -> bool:
    """Activations that a module stores do not; `training` is looked at by itself."""
    return name != "training" and not isinstance(value, Tensor)


class Notices:
    """What a stack has told its user already."""

    has_warned_of_drift = False


class StackCache:
    """What a stack remembers between calls. Copies and pickles of a stack start without it."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.program: Any = None  # the last one without keyword arguments
        self.program_key: Sequence[Any] = ()  # what that program was made of
        self.layers: Any = {}  # what a `Residual` calls, by function
        self.profiles: Any = {}  # what calls of each shape need: see `profiling`
        self.profiled: Any = None  # the usages of the structure that they belong to
        self.integers: set[Any] = set()  # values of integers in keyword arguments
        self.numbers_matter = False  # numbers in keyword arguments change what a call needs
        self.notices = Notices()
        self.trusts_casts = False  # hooks on its blocks cast streams and do nothing else
        self.calls = 0
        self.inspected: set[Any] = set()  # shapes, dtypes, devices and training modes
        self.host: HostMemory | None = None  # what its plans keep there

    def host_memory(self, limit: int | None) -> HostMemory:
        """The buffers on the host, at most so many bytes."""
        if self.host is None or self.host.limit != limit:
            self.host = HostMemory(limit)
        return self.host

    def __reduce__(self) -> Any:
        return StackCache, ()

    def structure_of(self, functions: Sequence[Functions]) -> Structure:
        structure = self.structure
        if structure is None or not structure.is_of(functions) or not structure.is_current():
            self.inspected = set()
            structure = self.structure = Structure(functions)
        elif structure.is_outdated:
            outdated = structure
            structure = self.structure = Structure(functions, outdated.usages)
            structure.inspected_until = outdated.inspected_until
            structure.attributes.is_dirty = outdated.attributes.have_changed()
        return structure

    def inspect_from(
        self,
        structure: Structure,
        state: State,
        verify: VerifyCalls,
        is_capturing: bool = False,
    ) -> int:
        """From which update on a call is inspected. See [Note: which calls are inspected]."""
        self.calls += 1
        if verify == "always":
            return 0
        have_changed = structure.attributes.have_changed()
        leaves = [leaf for leaves in state.values() for leaf in leaves]
        kinds = tuple([(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves])
        key = (kinds, bytes(map(_training, structure.modules)))
        is_new = key not in self.inspected and len(self.inspected) < MAX_KINDS
        if is_new:
            self.inspected.add(key)
        is_due = self.calls % EVERY == 0 and not is_capturing
        if is_new or have_changed or is_due:
            why = "new shapes" if is_new else "a changed attribute" if have_changed else "its turn"
            log.debug("call %d of a stack is inspected: %s", self.calls, why)
            return 0
        return structure.inspected_until
