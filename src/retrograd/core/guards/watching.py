"""Watching: in some calls, see what each function uses (`watch.py`), so that it is replayed.

What is seen for the first time is told to the guard that replays it, just before the function uses
it. Later calls know it from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.guard import Guard
from retrograd.core.guards.buffers import Buffers
from retrograd.core.guards.random_state import RandomState
from retrograd.core.guards.versions import ParameterVersions
from retrograd.core.guards.written import WrittenTensors
from retrograd.core.private import PassiveMode, is_compiled
from retrograd.core.program import Application
from retrograd.core.streams import State, flatten
from retrograd.core.structure import FunctionState, Structure
from retrograd.core.tensors import local, storage_of
from retrograd.core.watch import Known, Usage, Watch


class Watching(Guard):
    def __init__(
        self,
        structure: Structure,
        random_state: RandomState,
        buffers: Buffers,
        written: WrittenTensors,
        parameter_versions: ParameterVersions,
    ) -> None:
        self.structure = structure
        self.random_state = random_state
        self.buffers = buffers
        self.written = written
        self.parameter_versions = parameter_versions
        self.index = 0
        self.unfilled: dict[int, set[int]] = {}  # by update, memory that is not filled
        self.is_over = False

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        if self.is_over:  # this is the recompute
            with PassiveMode():
                return run()
        self.index = update.index
        function = self.structure.functions[update.index]
        usage = function.usage
        before = usage.size()
        known = len(usage.modules), len(usage.weights)
        with Watch(usage, known_to(function, update), update.saved, self) as watch:
            returned = run()
        self.unfilled[update.index] = watch.unfilled
        self._tell_weights(update.index, usage, *known)
        if usage.draws:
            self.random_state.has_drawn = True
        if usage.size() != before:
            self.structure.is_outdated = True
        return returned

    def _tell_weights(self, index: int, usage: Usage, modules: int, weights: int) -> None:
        written = set(map(storage_of, usage.written))
        found = [p for module in usage.modules[modules:] for p in module._parameters.values()]
        found = [weight for weight in (*found, *usage.weights[weights:]) if weight is not None]
        found = [weight for weight in found if storage_of(local(weight)) not in written]
        if found:
            self.parameter_versions.found_weights(index, found)

    def after_forward(self, state: State) -> None:
        self.is_over = True

    # --- told by `Watch`

    def found_module(self, module: nn.Module) -> None:
        self.buffers.found_module(module)

    def found_generator(self, generator: torch.Generator) -> None:
        self.random_state.found_generator(generator)

    def found_written(self, tensor: Tensor) -> None:
        self.written.found_written(self.index, tensor)


def known_to(function: FunctionState, update: Application) -> Known:
    usage = function.usage
    arguments = [leaf for leaf in flatten(update.arguments)[0] if isinstance(leaf, Tensor)]
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
