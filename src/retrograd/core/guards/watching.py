"""Watching: in some calls, see what each function uses (`watch.py`), so that it is replayed.

What is seen for the first time is told to the guard that replays it, just before the function uses
it. Later calls know it from the start.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.guard import Guard
from retrograd.core.guards.buffers import Buffers
from retrograd.core.guards.modules import ModuleState
from retrograd.core.guards.random_state import RandomState
from retrograd.core.guards.versions import ParameterVersions
from retrograd.core.guards.written import WrittenTensors
from retrograd.core.private import PassiveMode, is_compiled, run_in_mode
from retrograd.core.program import Application
from retrograd.core.streams import State, flatten, tensors_in
from retrograd.core.structure import FunctionState, Structure
from retrograd.core.tensors import local, storage_bytes, storage_of
from retrograd.core.watch import Known, Usage, Watch


class Watching(Guard):
    def __init__(
        self,
        structure: Structure,
        modules: ModuleState,
        random_state: RandomState,
        buffers: Buffers,
        written: WrittenTensors,
        parameter_versions: ParameterVersions,
        is_verified: bool,
    ) -> None:
        self.structure = structure
        self.modules = modules
        self.random_state = random_state
        self.buffers = buffers
        self.written = written
        self.parameter_versions = parameter_versions
        self.is_verified = is_verified  # `Verify` says what is inspected
        self.index = 0  # of the update that is running
        self.where = ""
        self.usage = Usage()  # of its function
        self.unfilled: dict[int, set[int]] = {}  # by update, memory that is not filled
        self.is_over = False

    def call(
        self,
        update: Application,
        run: Callable[[], Any],
    ) -> Any:
        if self.is_over:  # this is the recompute
            return run_in_mode(PassiveMode(), run) if update.index in self.unfilled else run()
        self.index = update.index
        self.where = update.where
        function = self.structure.functions[update.index]
        usage = self.usage = function.usage
        for module in usage.modules[function.known_modules :]:
            # An earlier update with this function found it.
            self.buffers.found_module(module, usage.written_buffers)
        before = usage.size()
        weights = len(usage.weights)
        written = len(usage.written)
        attributes = attributes_of(function)
        watch = Watch(usage, known_to(function, update), update.saved, self)
        returned = watch.run(run)
        self.unfilled[update.index] = watch.unfilled
        usage.weights[weights:] = own_weights(function, usage.weights[weights:])
        self.parameter_versions.found_weights(update.index, new_weights(function))
        if len(usage.written) > written and not is_same(attributes, attributes_of(function)):
            # It writes something, and remembers that it did: that cannot be done a second time.
            update.is_repeatable = False
        if usage.draws:
            self.random_state.has_drawn = True
        if usage.size() != before:
            self.structure.is_outdated = True
        return returned

    def at_cut(self, state: State) -> None:
        self.is_over = True
        if not self.is_verified:
            self.structure.has_inspected(self.unfilled)

    # --- told by `Watch`

    def random_states(self) -> list[bytes]:
        return self.random_state.current()

    def found_random_device(self, device: torch.device) -> None:
        self.random_state.found_device(device, self.where)

    def found_module(self, module: nn.Module) -> None:
        self.modules.found_module(module)
        self.buffers.found_module(module, self.usage.written_buffers)

    def found_generator(self, generator: torch.Generator) -> None:
        self.random_state.found_generator(generator)

    def found_written(self, tensor: Tensor) -> None:
        self.written.found_written(self.index, tensor)

    def found_written_buffer(self, memory: int) -> None:
        self.usage.written_buffers.update(self.buffers.found_write(memory))


def attributes_of(function: FunctionState) -> list[Any]:
    """The values of all attributes of the user's own modules."""
    return [value for module in function.user_modules for value in vars(module).values()]


def is_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def new_weights(function: FunctionState) -> list[Tensor]:
    """Weights that the function was seen to use in this call for the first time."""
    usage = function.usage
    known = set(map(id, function.parameters))
    written = set(map(storage_of, usage.written))
    members = [p for module in usage.modules for p in module._parameters.values() if p is not None]
    return [
        weight
        for weight in (*members, *usage.weights)
        if id(weight) not in known and storage_of(local(weight)) not in written
    ]


def own_weights(function: FunctionState, weights: list[Tensor]) -> list[Tensor]:
    """Those that do not belong to a module after all: FSDP puts whole parameters into modules, and
    frees them.
    """
    modules = (*function.modules, *function.usage.modules)
    members = {id(p) for module in modules for p in module._parameters.values()}
    return [weight for weight in weights if id(weight) not in members and storage_bytes(weight) > 0]


def known_to(function: FunctionState, update: Application) -> Known:
    usage = function.usage
    arguments = tensors_in(update.arguments)
    reads = [leaf for read in update.reads for leaf in flatten(read)[0]]
    known = [*function.parameters, *usage.weights, *update.inputs, *reads, *arguments]
    return Known(
        modules=set(map(id, [*function.modules, *usage.modules])),
        tensors=set(map(id, known)),
        memory={storage_of(local(tensor)) for tensor in known},
        buffers={storage_of(buffer) for module in function.modules for buffer in _buffers(module)},
        is_compiled=any(map(is_compiled, [update.step.fn, *function.modules])),
    )


def _buffers(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]
