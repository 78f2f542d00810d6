"""Running forward without a trace: `stack.plan` measures a call and leaves everything as it was.

What functions change is not searched for, but seen (`core.watch`): each module, generator and
tensor is remembered just before a function first uses or writes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from retrograd.core.guard import Guard, Undo
from retrograd.core.guards.random_state import CPU, default_generator, generators_for
from retrograd.core.private import is_compiled, is_fake, set_version
from retrograd.core.program import Application
from retrograd.core.structure import registered_modules
from retrograd.core.watch import Known, Usage, Watch

CONTAINERS = (dict, list, set, deque)


class TakeBack(Guard):
    """Remembers what functions change. `run` takes it back."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.undo = Undo()
        self.usage = Usage()
        modules = registered_modules(tuple(functions))
        compiled = any(map(is_compiled, (*functions, *modules)))
        self.known = Known(set(map(id, modules)), set(), set(), set(), compiled)
        for module in modules:  # also those that are never called by themselves
            self.found_module(module)
        devices = {p.device for module in modules for p in module.parameters(recurse=False)}
        for generator in generators_for({CPU, *devices}, ()):
            self.undo.add(generator.set, generator.get())

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        return self.watched(run)

    def watched(self, run: Callable[[], Any]) -> Any:
        """What `run()` returns. What it changes is remembered."""
        return Watch(self.usage, self.known, (), self).run(run)

    def run(self) -> None:
        self.undo.run()

    # --- told by `Watch`

    def random_states(self) -> list[bytes]:
        return []

    def found_random_device(self, device: torch.device) -> None:
        generator = default_generator(device)
        if generator is not None:
            self.undo.add(generator.set, generator.get())

    def found_module(self, module: nn.Module) -> None:
        if isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin)):
            return  # these cannot be put back
        for parameter in module.parameters(recurse=False):
            self.undo.add(setattr, parameter, "grad", parameter.grad)
        for buffer in module.buffers(recurse=False):
            self.found_written(buffer.detach())
        for value in (vars(module), *vars(module).values()):
            if isinstance(value, CONTAINERS):
                self.undo.add(refill, value, value.copy())

    def found_generator(self, generator: torch.Generator) -> None:
        self.undo.add(generator.set_state, generator.get_state())

    def found_written(self, tensor: Tensor) -> None:
        if not is_fake(tensor) and not tensor.is_meta:
            self.undo.add(set_version, (tensor,), (tensor._version,))
            self.undo.add(tensor.data.copy_, tensor.clone())

    def found_written_buffer(self, memory: int) -> None:
        pass  # `found_module` has copied all buffers


def refill(container: Any, before: Any) -> None:
    """Give a container back what it held."""
    if isinstance(container, (dict, set)):
        container.clear()
        container.update(before)
    else:
        container.clear()
        container.extend(before)
