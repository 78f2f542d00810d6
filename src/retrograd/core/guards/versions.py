"""Versions: tensors that backward depends on must not be edited in place.

These are the inputs of a function, its parameters, and the streams that a stack hands out. An edit
would make the recompute wrong. `Tensor._version` counts edits in place, so they raise.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.program import (
    Application,
    Program,
    edited_input,
    place,
)
from retrograd.core.streams import State
from retrograd.core.structure import FunctionState, Structure
from retrograd.core.tensors import describe, storage_of, version_of


class InputVersions(Guard):
    """A function must leave its target and its reads as they are."""

    rebuilt_only = False

    def __init__(self) -> None:
        self.versions: list[int] = []  # of the inputs of the update that is running

    def before_function(self, update: Application) -> None:
        try:
            self.versions = list(map(version_of, update.inputs))
        except RuntimeError:
            self.versions = versions_of(update.inputs)

    def after_update(self, update: Application) -> None:
        try:
            now = list(map(version_of, update.inputs))
        except RuntimeError:
            now = versions_of(update.inputs)
        if now == self.versions:
            return
        pairs = zip(now, self.versions)
        edited = next(i for i, (after, before) in enumerate(pairs) if after != before)
        raise edited_input(update, update.inputs[edited])


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Tensors of inference mode count no versions, and nothing is rebuilt from them."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class ParameterVersions(Guard):
    """The parameters of a function must be in recompute what they were in forward."""

    def __init__(
        self,
        structure: Structure,
        program: Program,
    ) -> None:
        self.structure = structure
        self.program = program
        self.latest = [list(map(version_of, f.constant_parameters)) for f in structure.distinct]
        self.versions: list[list[int]] = []  # after each update
        self.discovered: dict[int, list[tuple[Tensor, int]]] = {}  # by update

    def found_weights(
        self,
        index: int,
        weights: list[Tensor],
    ) -> None:
        """An update was seen to use these, for the first time."""
        self.discovered[index] = [(weight, weight._version) for weight in weights]

    def after_update(self, update: Application) -> None:
        function = self.structure.functions[update.index]
        now = list(map(version_of, function.constant_parameters))
        before = self.latest[function.number]
        if now != before:
            # It edited its own parameters. Earlier updates keep the old versions and will raise,
            # unless the edit is replayed: see `written.py`.
            self.latest[function.number] = now
            if not _are_replayed(function, before, now):
                update.is_repeatable = False
        self.versions.append(self.latest[function.number])

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        for weight, version in self.discovered.get(index, ()):
            if weight._version != version:
                versions = (version, weight._version)
                raise errors.edited_parameter(
                    place(self.program, index), describe(weight), versions
                )
        function = self.structure.functions[index]
        versions = self.versions[index]
        if list(map(version_of, function.constant_parameters)) != versions:
            raise_if_edited(function, versions, place(self.program, index))


def _are_replayed(
    function: FunctionState,
    before: list[int],
    now: list[int],
) -> bool:
    """Whether all parameters that were edited have just been seen to be written."""
    written = set(map(storage_of, function.usage.written))
    versions = zip(function.constant_parameters, before, now)
    edited = [storage_of(parameter) for parameter, a, b in versions if a != b]
    return written.issuperset(edited)


class OutputVersions(Guard):
    """The streams that a stack hands out must not be edited before backward.

    A hook on their nodes looks, first thing in backward.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def after_forward(self, state: State) -> None:
        last = {step.target: index for index, step in enumerate(self.program)}
        outputs = [
            (name, weakref.ref(leaf), leaf._version, place(self.program, index))
            for name, index in last.items()
            for leaf in state[name]
        ]

        def check(_: object) -> None:
            for name, reference, version, where in outputs:
                leaf = reference()
                if leaf is not None and leaf._version != version:
                    what = f"stream {name!r} as it was returned"
                    raise errors.edited_output(f"backward through {where}", what)

        for name in last:
            for leaf in state[name]:
                if leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(check)


def raise_if_edited(
    function: FunctionState,
    versions: list[int],
    where: str,
) -> None:
    """Raise for an edited parameter that the function still uses, naming it."""
    names = {id(parameter): "(a tensor of no module)" for parameter in function.usage.weights}
    for module in function.modules:
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), name)
    written = set(map(storage_of, function.usage.written))
    for parameter, version in zip(function.constant_parameters, versions):
        is_edited = parameter._version != version and storage_of(parameter) not in written
        if is_edited and id(parameter) in names:
            raise errors.edited_parameter(
                where, names[id(parameter)], (version, parameter._version)
            )
