"""One training step of a network, again and again, from the same state.

`Network.step` restores everything (parameters, buffers, generators, Python state), runs forward and
backward, and returns the gradients and the state that the step left behind. How the stacks run
meanwhile is up to the observer around it (`observers.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.checking.compare import copy_of
from retrograd.checking.crawl import crawl, slots_of
from retrograd.checking.generators import global_states, state_of
from retrograd.checking.progress import Progress
from retrograd.checking.restore import Snapshot
from retrograd.converting.run import without_cache
from retrograd.core.private import pytree
from retrograd.core.streams import flatten, unflatten
from retrograd.stack import Stack


@dataclass
class StepResult:
    """What one step computed and left behind."""

    seconds: float = 0.0
    output_type: str = ""
    outputs: list[torch.Size] = field(default_factory=list)  # the shapes of those with gradients
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    random: dict[str, object] = field(default_factory=dict)  # the state of each generator


class Network:
    """A module and its arguments, ready to run the same step any number of times.

    `release` puts everything back for good.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        progress: Progress | None = None,
    ) -> None:
        self.module = module
        self.progress = progress or Progress(0, enabled=False)
        leaves, self._spec = flatten((args, kwargs))
        self._leaves = _copies(leaves)
        self._names: set[str] = set()  # of all gradients that are compared
        self._compared: dict[int, tuple[str, Tensor]] = {}  # parameters, by id: name and tensor
        for name, parameter in module.named_parameters():
            self.compare_gradient(name, parameter)
        self._inputs = self._inputs_with_gradients(args, kwargs)
        self._output_weights: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.snapshot = Snapshot(module, others)
        self._gradients_before = [(p, p.grad) for p in module.parameters()]
        self._on_release: list[Callable[[], None]] = []

    def compare_gradient(self, name: str, tensor: Tensor) -> None:
        """Compare the gradient of this tensor too, if it requires one."""
        if tensor.requires_grad and id(tensor) not in self._compared:
            self._compared[id(tensor)] = self._unique(name), tensor

    def step(
        self,
        watcher: AbstractContextManager[object] | None = None,
        after_forward: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Forward and backward from the initial state, inside `watcher`."""
        self.progress.advance()
        self.snapshot.restore()
        for parameter, _ in self._gradients_before:
            parameter.grad = None
        result = StepResult()
        leaves = _copies(self._leaves)  # new ones, because a network may write to its input
        with contextlib.nullcontext() if watcher is None else watcher:
            begun = time.perf_counter()
            losses = self._forward(leaves, result)
            inputs = self._wanted(leaves)
            del leaves
            after_forward()
            if losses and inputs:
                result.gradients = self._backward(losses, inputs)
            result.seconds = time.perf_counter() - begun
        buffers = self.module.named_buffers()
        result.buffers = {name: b.detach().clone() for name, b in buffers if not b.is_meta}
        result.random = global_states() | _own_generators(self.module)
        return result

    def on_release(self, action: Callable[[], None]) -> None:
        """Call `action` when everything is put back."""
        self._on_release.append(action)

    def release(self) -> None:
        """Put everything back as it was in the beginning."""
        try:
            self.snapshot.release()
        finally:
            for parameter, gradient in self._gradients_before:
                parameter.grad = gradient
            for action in self._on_release:
                action()

    def _unique(self, name: str) -> str:
        """The name, with a number if it is taken."""
        numbered = (f"{name} ({i})" for i in itertools.count(2))
        names = itertools.chain([name], numbered)
        free = next(candidate for candidate in names if candidate not in self._names)
        self._names.add(free)
        return free

    def _inputs_with_gradients(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> dict[int, str]:
        """The arguments that require gradients: number of the leaf and name."""
        inputs: dict[int, str] = {}
        for i, (path, leaf) in enumerate(pytree.tree_flatten_with_path((args, kwargs))[0]):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                inputs[i] = self._unique(_input_name(path))
        return inputs

    def _forward(self, leaves: list[Any], result: StepResult) -> list[Tensor]:
        """Run the module. Returns the outputs that backward can start from."""
        args, kwargs = unflatten(leaves, self._spec)
        output = self.module(*args, **kwargs)
        result.output_type = type(output).__name__
        losses = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        result.outputs = [tensor.shape for tensor in losses]
        return losses

    def _wanted(self, leaves: list[Any]) -> dict[str, Tensor]:
        """The tensors whose gradients are compared. Forward may have frozen some parameters."""
        wanted = {name: t for name, t in self._compared.values() if t.requires_grad}
        return wanted | {name: leaves[i] for i, name in self._inputs.items()}

    def _backward(self, losses: list[Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = [self._weight(i, loss) for i, loss in enumerate(losses)]
        with _no_autocast():
            found = torch.autograd.grad(losses, list(inputs.values()), weights, allow_unused=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        gradients = zip(inputs, found)
        return {name: _dense(gradient) for name, gradient in gradients if gradient is not None}

    def _weight(self, number: int, output: Tensor) -> Tensor:
        """The gradient of an output. Made once, so that its bytes do not count in later steps."""
        key = number, output.shape, output.dtype
        if key not in self._output_weights:
            self._output_weights[key] = _output_weight(output, number)
        return self._output_weights[key]


@contextlib.contextmanager
def run_eagerly(module: nn.Module) -> Iterator[None]:
    """With gradients enabled, and with stacks outside of any compiled module. Functions inside a
    stack stay compiled.
    """
    compiled = [
        (part, part._compiled_call_impl)  # set by `module.compile()`
        for part in module.modules()
        if part._compiled_call_impl is not None and _contains_stack(part)
    ]
    for part, _ in compiled:
        part._compiled_call_impl = None
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for part, implementation in compiled:
            part._compiled_call_impl = implementation


def _contains_stack(module: nn.Module) -> bool:
    return any(isinstance(part, Stack) for part in module.modules())


# --- arguments, outputs and gradients


def _copies(leaves: list[Any]) -> list[Any]:
    """The leaves with each tensor copied. A tensor that occurs twice is copied once."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    copies = {key: copy_of(leaf) for key, leaf in tensors.items()}
    return [copies.get(id(leaf), leaf) for leaf in leaves]


def _input_name(path: Any) -> str:
    """`args[0]`, or `mask` for a keyword argument."""
    first, *rest = path
    if first.idx == 0:
        return f"args{pytree.keystr(tuple(rest))}"
    return f"{rest[0].key}{pytree.keystr(tuple(rest[1:]))}"


_WITHOUT_OUTPUTS = (nn.Module, type, str, types.FunctionType)


def _tensors(value: object, depth: int = 4) -> list[Tensor]:
    """The tensors of a pytree, and those in attributes of objects in it.

    Not those of a cache of keys and values: a converted model makes none while it is trained.
    """
    found: list[Tensor] = []
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and not isinstance(leaf, _WITHOUT_OUTPUTS) and without_cache(leaf) is not None:
            attributes = _attributes(leaf)
            if attributes:
                found += _tensors(attributes, depth - 1)
    return found


def _attributes(value: object) -> dict[str, object]:
    slots = [name for cls in type(value).__mro__ for name in slots_of(cls)]
    in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def _output_weight(output: Tensor, seed: int) -> Tensor:
    """The gradient that backward starts from: 1 for a loss, else random values, so that no symmetry
    hides an error. The same in every step.
    """
    if not output.ndim:
        return torch.ones_like(output)
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(output.device, output.dtype) / max(output.numel(), 1) ** 0.5


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Backward runs outside of autocast, as PyTorch recommends."""
    kinds = {"cpu"}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        kinds.add(accelerator.type)
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _own_generators(module: nn.Module) -> dict[str, object]:
    """The states of the torch generators in the network, by path."""
    return {
        reference.path: state_of(reference.value)
        for reference in crawl("", module)
        if isinstance(reference.value, torch.Generator)
    }


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient
