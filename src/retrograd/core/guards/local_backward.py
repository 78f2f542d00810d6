"""Local backward: a function may call `backward()` on a loss of its own, once.

Local learning does that. Autograd then asks the hooks for tensors while the function still runs. If
it runs again, gradients that it accumulates are dropped: forward has accumulated them.
"""

from __future__ import annotations

from retrograd.core.guard import Guard, Undo
from retrograd.core.structure import Structure


class LocalBackward(Guard):
    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.updates: set[int] = set()  # those whose functions ran backward: told by the tape

    def before_backward(self) -> bool:
        return bool(self.updates)

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        if index not in self.updates:
            return
        for parameter in self.structure.functions[index].parameters:
            if parameter.is_leaf and parameter.requires_grad:
                undo.add(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None
