"""Written tensors: tensors outside of buffers that a function edits as it runs.

A running mean in a closure, a parameter without a gradient, an embedding that renormalises its
weight. Watching has seen them. They cannot be replaced by a copy, because nobody knows who refers
to them. So recompute writes the value that forward saw into the tensor itself, and writes the
present one back afterwards. What autograd saved of it meanwhile, and outputs that are views of it,
become copies.
"""

from __future__ import annotations

from torch import Tensor

from retrograd.core.guard import Guard, Undo
from retrograd.core.program import Application, Output
from retrograd.core.saved import SavedAgain
from retrograd.core.streams import State
from retrograd.core.structure import Structure
from retrograd.core.tensors import storage_of


class WrittenTensors(Guard):
    def __init__(self, structure: Structure) -> None:
        self.written = [function.usage.written for function in structure.functions]
        self.copies: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by update: tensor, value before

    def before_function(self, update: Application) -> None:
        tensors = self.written[update.index]
        if tensors:
            self.copies[update.index] = [(tensor, tensor.clone()) for tensor in tensors]

    def found_written(
        self,
        index: int,
        tensor: Tensor,
    ) -> None:
        """A function that runs is about to write this tensor, for the first time."""
        self.copies.setdefault(index, []).append((tensor, tensor.clone()))

    def before_backward(self) -> bool:
        return bool(self.copies)

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        for tensor, value in self.copies.get(index, ()):
            undo.add(tensor.data.copy_, tensor.clone())
            tensor.data.copy_(value)  # `data` counts no edit: for the user nothing has changed

    def after_recompute(
        self,
        index: int,
        saved: list[SavedAgain],
        output: Output | None,
        state: State,
    ) -> None:
        if index not in self.copies:
            return
        memory = {storage_of(tensor) for tensor, _ in self.copies[index]}
        for slot, (tensor, _) in enumerate(saved):
            if storage_of(tensor) in memory:
                copy = tensor.detach().clone()
                saved[slot] = (copy, copy._version)
        for leaf, outputs in enumerate(output or ()):
            if output is not None and any(storage_of(out) in memory for out in outputs):
                output[leaf] = tuple([out.clone() for out in outputs])
