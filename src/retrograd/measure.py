"""What a step takes: bytes, FLOPs, and how often each function runs.

    >>> pairs = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
    >>> stack = rg.ReversibleSequence(pairs)
    >>> measured = rg.measure.step(lambda: stack(torch.randn(2, 8)).sum().backward(), stack)
    >>> measured.evaluations["blocks.0.f"], measured.evaluations["blocks.3.g"]
    (2, 1)

A dispatch mode counts the bytes of every tensor that an operation makes, and a weak reference to
its storage tells when they are freed. So the count is of tensors, not of the process: it does not
depend on the allocator and is the same in every run. It does not include scratch memory inside
kernels; on an accelerator, `allocated` has what the allocator reports, if it reports anything.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.guard import Guard
from retrograd.core.observe import Observer
from retrograd.core.private import DispatchMode
from retrograd.core.program import Application, Program, Step
from retrograd.core.streams import tensors_in
from retrograd.core.tensors import storage_of
from retrograd.core.walk import is_recomputing
from retrograd.html_tables import html_table
from retrograd.sizes import human

__all__ = ["Flops", "LiveBytes", "Measurement", "activation_bytes", "step"]


def __dir__() -> list[str]:
    return __all__


class LiveBytes(DispatchMode):
    """While active, counts the bytes of all tensors made inside: `now` alive, and at most `peak`.

    Tensors that existed before, such as parameters, do not count. Gradients do: `peak` less the
    bytes of the gradients is the activation memory.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(256)
        ...     y = x + 1
        ...     del x
        >>> live.now, live.peak
        (1024, 2048)
    """

    supports_higher_order_operators = True  # torch.cond and others count as one operation

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.made = 0  # bytes so far, freed or not
        # By the address of a storage, as long as it lives. The size of one from before is 0.
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        new = {}
        for tensor in tensors_in(result):
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    new[storage._cdata] = storage
        if new:
            inputs = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
            for address, storage in new.items():
                # A view of a tensor from before, or one edited in place, takes no new memory.
                self._add(storage, 0 if address in inputs else storage.nbytes())
        return result

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        self._sizes[key] = size
        self._watches[key] = weakref.ref(storage, lambda _: self._remove(key))
        self.now += size
        self.made += size
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._watches[key]


def activation_bytes(step: Callable[[], Any], leaves: Iterable[Tensor]) -> int:
    """The peak of live bytes while `step()` runs a forward and a backward, less the gradients of
    the `leaves`.

    Example:
        >>> net = torch.nn.Linear(4, 4)
        >>> step = lambda: net(torch.ones(2, 4)).tanh().sum().backward()
        >>> activation_bytes(step, net.parameters()) > 0
        True
    """
    leaves = list(leaves)
    for leaf in leaves:
        leaf.grad = None
    with LiveBytes() as live:
        step()
    return live.peak - _gradient_bytes(leaves)


def _gradient_bytes(leaves: Iterable[Tensor]) -> int:
    return sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)


class Flops(DispatchMode):
    """While active, adds up the FLOPs of all operations by torch's own formulas: `total`.

    As `torch.utils.flop_counter.FlopCounterMode`, but without its hooks on modules, which some
    modules do not support.
    """

    supports_higher_order_operators = True
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.total += flops_of(func, args, kwargs, result) or 0
        return result


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """The FLOPs of an operation by torch's formula; None if it has none."""
    from torch.utils.flop_counter import flop_registry  # here, because importing it takes time

    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return None if formula is None else formula(*args, **kwargs, out_val=result)


@dataclass
class Measurement:
    """What `step` found. It prints as a table, and a notebook shows it as one.

    Attributes:
        activation_bytes: the most bytes alive at once, less the gradients of parameters.
        flops: of the step, by torch's own formulas.
        evaluations: how often each function ran, in forward and in recompute, by its name.
        kept: bytes that forward kept for each of them.
        allocated: as `activation_bytes`, but reported by the allocator; None on a CPU.
    """

    activation_bytes: int = 0
    flops: int = 0
    evaluations: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    allocated: int | None = None

    def __str__(self) -> str:
        rows = (f"  {where:<32} {runs:>4}   {size}" for where, runs, size in self._table())
        head = f"  {'function':<32} {'runs':>4}   kept by forward"
        return "\n".join([self._summary(), head, *rows])

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = ("function", "runs", "kept by forward")
        return f"<p>{self._summary()}</p>{html_table([head, *self._table()], has_head=True)}"

    def _summary(self) -> str:
        parts = [f"activations {human(self.activation_bytes)}", f"{self.flops / 1e9:.3g} GFLOPs"]
        if self.allocated is not None:
            parts.append(f"{human(self.allocated)} by the allocator")
        return ", ".join(parts)

    def _table(self) -> Iterator[tuple[str, str, str]]:
        """Neighbours with the same figures, together."""
        same = itertools.groupby(
            self.evaluations, key=lambda name: (self.evaluations[name], self.kept.get(name, 0))
        )
        for (runs, kept), names in same:
            first, *others = names
            where = f"{first} to {others[-1]}" if others else first
            yield where, str(runs), f"{human(kept)} each" if others else human(kept)


def step(run: Callable[[], Any], module: nn.Module) -> Measurement:
    """Measure `run()`, a forward and a backward of `module`: bytes, FLOPs, and calls of the
    functions in its stacks.

    Runs it twice: once for bytes and calls, once for FLOPs, each time with gradients set to None
    before. Random states and buffers change as in two steps.
    """
    measured = Measurement()
    allocator = Allocator.of(module)
    entered: list[tuple[str, int]] = []  # functions as forward calls them, and the bytes alive then
    module.zero_grad(set_to_none=True)
    if allocator is not None:
        allocator.reset()
    with (
        LiveBytes() as live,
        Counting(module, lambda name: entered.append((name, live.now))) as counting,
    ):
        run()
    gradients = _gradient_bytes(module.parameters())
    measured.evaluations = counting.evaluations
    measured.activation_bytes = live.peak - gradients
    if allocator is not None:
        measured.allocated = allocator.peak() - gradients
    for (name, before), (_, after) in itertools.pairwise(entered):
        measured.kept[name] = measured.kept.get(name, 0) + after - before
    module.zero_grad(set_to_none=True)
    with Flops() as flops:
        run()
    measured.flops = flops.total
    return measured


class Allocator:
    """The peak of bytes that the allocator of an accelerator reports."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0
        self.reset()

    @classmethod
    def of(cls, module: nn.Module) -> Allocator | None:
        """That of the device of the module's parameters.

        None if it is the CPU, or a device that reports nothing.
        """
        devices = (parameter.device for parameter in module.parameters())
        device = next((d for d in devices if d.type not in ("cpu", "meta")), None)
        if device is None:
            return None
        try:
            return cls(device)
        except (AttributeError, NotImplementedError, RuntimeError):
            return None

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)
        self.before = torch.accelerator.memory_allocated(self.device)

    def peak(self) -> int:
        """Since the last reset, beyond what was allocated then."""
        return torch.accelerator.max_memory_allocated(self.device) - self.before


class Counting(Observer):
    """Counts the calls of the functions of each stack, by name."""

    def __init__(
        self, module: nn.Module, entered: Callable[[str], None] = lambda name: None
    ) -> None:
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.stacks: dict[int, tuple[str, nn.Module]] = {}  # that ran: name and stack
        self.evaluations: dict[str, int] = {}
        self.entered = entered
        self.thread = threading.get_ident()

    def guards(self, stack: nn.Module, program: Program, guards: list[Guard]) -> list[Guard]:
        if not self.is_mine(stack):
            return guards
        return [*guards, _CountCalls(self, self.names(stack, program))]

    def is_mine(self, stack: nn.Module) -> bool:
        """Other threads may run stacks of their own. Backward may use other threads for ours."""
        return threading.get_ident() == self.thread or id(stack) in self.stacks

    def names(self, stack: nn.Module, program: Program) -> list[str]:
        """The names of all updates in the whole network."""
        if id(stack) not in self.stacks:
            self.stacks[id(stack)] = self._stack_name(stack), stack
        return [self._name(stack, step) for step in program]

    def _stack_name(self, stack: nn.Module) -> str:
        """The path of a stack; its class and a number if it is not a submodule of the network."""
        if id(stack) in self.paths:
            return self.paths[id(stack)]
        path = self._path_of_list(stack)
        if path is not None:
            return path
        kind = type(stack).__name__
        count = sum(name.split(" ")[0] == kind for name, _ in self.stacks.values())
        return f"{kind} {count + 1}"

    def _path_of_list(self, stack: Any) -> str | None:
        """The path of the list of layers that `rg.convert` made a stack of. None: another stack."""
        layers = [body.layer for body in getattr(stack, "bodies", ())]
        if not layers or id(layers[0]) not in self.paths:
            return None
        first = self.paths[id(layers[0])]
        path = first.rpartition(".")[0]
        is_taken = any(name == path for name, _ in self.stacks.values())
        return f"{path} from {first}" if is_taken else path

    def _name(self, stack: nn.Module, step: Step) -> str:
        """The name of an update: by its stack, or by its function if only that has a path."""
        inner: Any = step.fn
        while id(stack) not in self.paths and (hasattr(inner, "fn") or hasattr(inner, "layer")):
            inner = inner.fn if hasattr(inner, "fn") else inner.layer
            if id(inner) in self.paths:
                return self.paths[id(inner)]
        path = self.stacks[id(stack)][0]
        return f"{path}.{step.name}" if path else step.name


class _CountCalls(Guard):
    rebuilt_only = False

    def __init__(self, counting: Counting, names: list[str]) -> None:
        self.counting = counting
        self.names = names

    def call(self, update: Application, run: Callable[[], Any]) -> Any:
        if not isinstance(update.step.fn, nn.Identity):
            name = self.names[update.index]
            counts = self.counting.evaluations
            counts[name] = counts.get(name, 0) + 1
            if not is_recomputing():
                self.counting.entered(name)
        return run()
