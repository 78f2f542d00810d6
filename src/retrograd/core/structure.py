"""The modules and parameters behind the functions of a program.

A program runs the same functions call after call. So a stack caches their structure, and a call
only checks that it is still current: validating the cache costs a third of rebuilding it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core import errors
from retrograd.core.holdings import Holdings, is_user_module
from retrograd.core.tensors import ShapeAndDtype

Functions = tuple[Any, ...]  # what one update calls: its function, and perhaps its coupling


class FunctionState:
    """The modules, parameters and generators that one function consists of."""

    first_module: int  # where its modules start among those of the whole structure
    first_parameter: int

    def __init__(
        self,
        number: int,
        functions: Functions,
    ) -> None:
        self.number = number  # among the distinct functions of the program
        self.holdings = Holdings(functions)
        self.modules = self.holdings.modules
        self.parameters: list[Tensor] = [
            parameter
            for module in self.modules
            if module._parameters
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        self.parameters += self.holdings.weights
        self.user_modules = [module for module in self.modules if is_user_module(module)]
        self.user_buffers = [module._buffers for module in self.user_modules]
        # Shapes of what autograd saved when the function last ran. One list serves every call.
        self.saved_shapes: list[ShapeAndDtype] = []
        self.members = [Members(module) for module in self.modules]


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

    def __init__(self, functions: Sequence[Functions]) -> None:
        self.key = functions
        self._ids = [*map(id, itertools.chain.from_iterable(functions))]
        self._lengths = [*map(len, functions)]
        by_id: dict[tuple[int, ...], FunctionState] = {}  # updates may share a function
        self.functions: list[FunctionState] = []  # of each update
        for parts in functions:
            ids = tuple(map(id, parts))
            if ids not in by_id:
                by_id[ids] = FunctionState(len(by_id), parts)
            self.functions.append(by_id[ids])
        self.distinct = list(by_id.values())
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        for function in self.distinct:
            function.first_module = len(self.modules)
            function.first_parameter = len(self.parameters)
            self.modules += function.modules
            self.parameters += function.parameters
        self.dtypes = {parameter.dtype for parameter in self.parameters}
        self.buffers = [module._buffers for module in self.modules]
        self.has_user_modules = any(function.user_modules for function in self.distinct)
        # The dicts of all members, and what they held, in flat lists: `is_current` runs every call.
        members = [members for function in self.distinct for members in function.members]
        self._slots = [slot for m in members for slot in (m.parameters, m.submodules)]
        self._sizes = [len(slot) for slot in self._slots]
        self._values = [value for slot in self._slots for value in slot.values()]

    def is_of(self, functions: Sequence[Functions]) -> bool:
        """Whether these are its functions: the same objects, not equal ones."""
        ids = [*map(id, itertools.chain.from_iterable(functions))]
        return ids == self._ids and [*map(len, functions)] == self._lengths

    def is_current(self) -> bool:
        """Whether all modules have the members that they had."""
        if list(map(len, self._slots)) != self._sizes:
            return False
        now = itertools.chain.from_iterable([slot.values() for slot in self._slots])
        if not all(map(operator.is_, now, self._values)):
            return False
        return all(function.holdings.is_current() for function in self.distinct)


class Notices:
    """What a stack has told its user already."""

    has_warned_of_drift = False


class StackCache:
    """What a stack remembers between calls. Copies and pickles of a stack start without it."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.program: Any = None  # the last one without keyword arguments
        self.program_key: Sequence[Any] = ()  # what that program was made of
        self.profiles: dict[Any, Any] = {}  # what calls of each shape need: see `profile`
        self.notices = Notices()
        self.trusts_casts = False  # hooks on its blocks cast streams and do nothing else

    def __reduce__(self) -> Any:
        return StackCache, ()

    def structure_of(self, functions: Sequence[Functions]) -> Structure:
        structure = self.structure
        if structure is None or not structure.is_of(functions) or not structure.is_current():
            structure = self.structure = Structure(functions)
        return structure
