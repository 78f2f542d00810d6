"""What a step really takes: bytes, FLOPs, and how often each function runs. For users who want to
verify.

    >>> pairs = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
    >>> stack = rg.ReversibleSequence(pairs)
    >>> measured = rg.measure.step(lambda: stack(torch.randn(2, 8)).sum().backward(), stack)
    >>> measured.evaluations["blocks.0.f"], measured.evaluations["blocks.3.g"]
    (2, 1)

Bytes are counted by a dispatch mode that sees every tensor that an operation makes, and a weak
reference to its storage tells when the memory goes. So the count is of tensors, not of the process:
repeatable to the byte, whatever the allocator does. Scratch memory inside a kernel is not seen; on
an accelerator, `allocated` has what its allocator says.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from retrograd.core.private import DispatchMode
from retrograd.core.program import Program, Step, observers
from retrograd.core.replay import is_recomputing
from retrograd.core.streams import flatten, storage_of


class LiveBytes(DispatchMode):
    """While active, counts bytes of tensors made inside: `now`, and `peak`, the most there ever
    were.

    Tensors that existed before, such as parameters, do not count. Gradients do: `peak - gradients`
    is what a user sees as activation memory.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(256)
        ...     y = x + 1
        ...     del x
        >>> live.now, live.peak
        (1024, 2048)
    """

    supports_higher_order_operators = True  # such as torch.cond: as one operation

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[
            int, int
        ] = {}  # by the address of a storage, as long as it lives; 0 for one from before
        self._watches: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = None
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata in self._sizes:
                    continue
                if inputs is None:  # a view or an in-place result of a tensor from before
                    leaves = flatten((args, kwargs or {}))[0]
                    inputs = {storage_of(t) for t in leaves if isinstance(t, Tensor)}
                self._add(storage, 0 if storage._cdata in inputs else storage.nbytes())
        return result

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        self._sizes[key] = size
        self._watches[key] = weakref.ref(storage, lambda _: self._remove(key))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._watches[key]


def activation_bytes(step: Callable[[], Any], leaves: Iterable[Tensor]) -> int:
    """The most bytes of live tensors while `step()` runs a forward and a backward, less the
    gradients that it gives the `leaves`.

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
    return live.peak - sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)


class Flops(DispatchMode):
    """While active, adds up the FLOPs of what runs inside, by torch's own formulas: `total`.

    As `torch.utils.flop_counter.FlopCounterMode`, without its hooks on modules, which not every
    module can stand.
    """

    supports_higher_order_operators = True
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, result) or 0
        return result


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """The FLOPs of an operation by torch's formula; None if it has none."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return None if formula is None else formula(*args, **kwargs, out_val=result)


@dataclass
class Measurement:
    """What `step` found."""

    activation_bytes: int = (
        0  # the most alive at once, less the gradients of the module's parameters
    )
    flops: int = 0
    evaluations: dict[str, int] = field(
        default_factory=dict
    )  # how often each function of a stack ran, forward and recompute
    kept: dict[str, int] = field(
        default_factory=dict
    )  # bytes that forward left behind for each of them
    allocated: int | None = None  # the same as activation_bytes, by the accelerator's allocator


def step(run: Callable[[], Any], module: nn.Module) -> Measurement:
    """Measure `run()`, a forward and a backward of `module`: bytes and FLOPs, calls of the
    functions in its stacks.

    Runs it twice: once for bytes and calls, once for FLOPs, each time with gradients that were set
    to None before. Random states and buffers go on as in two steps.
    """
    measured = Measurement()
    gradients = lambda: sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)  # noqa: E731
    module.zero_grad(set_to_none=True)
    device = next(
        (p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")), None
    )
    before = 0
    if device is not None:
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
    entered: list[tuple[str, int]] = []
    with (
        LiveBytes() as live,
        Counting(module, lambda name: entered.append((name, live.now))) as counting,
    ):
        run()
    measured.evaluations = counting.evaluations
    measured.activation_bytes = live.peak - gradients()
    if device is not None:
        measured.allocated = torch.accelerator.max_memory_allocated(device) - before - gradients()
    for (name, now), (_, later) in itertools.pairwise(entered):
        measured.kept[name] = measured.kept.get(name, 0) + later - now
    module.zero_grad(set_to_none=True)
    with Flops() as flops:
        run()
    measured.flops = flops.total
    return measured


class Counting:
    """An observer (see `core.program.observers`) that counts the calls of the functions of each
    stack, by name.
    """

    def __init__(
        self, module: nn.Module, entered: Callable[[str], None] = lambda name: None
    ) -> None:
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.stacks: dict[int, tuple[str, Any]] = {}  # that ran: name and stack
        self.names: dict[int, str] = {}  # of steps
        self.steps: list[Step] = []  # kept alive, so that no other gets the number of one
        self.evaluations: dict[str, int] = {}
        self.entered = entered
        self.thread = threading.get_ident()

    def __enter__(self) -> Counting:
        observers.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        observers.remove(self)

    def memory(self, stack: Any) -> Any:
        return stack.memory

    def begin(self, stack: Any, program: Program) -> None:
        """A pass of a stack begins."""
        if not self.is_mine(stack):
            return
        if id(stack) not in self.stacks:
            self.stacks[id(stack)] = self.stack_name(stack), stack
        for step in program:
            self.steps.append(step)
            self.names[id(step)] = self.name(stack, step)

    def is_mine(self, stack: Any) -> bool:
        """Other threads may run stacks of their own. Backward may run ours in threads of
        its own.
        """
        return threading.get_ident() == self.thread or id(stack) in self.stacks

    def stack_name(self, stack: Any) -> str:
        """Its path, or its kind and number if it is no part of the network (those of `compat`,
        those in a list).
        """
        if id(stack) in self.paths:
            return self.paths[id(stack)]
        count = sum(name.split(" ")[0] == type(stack).__name__ for name, _ in self.stacks.values())
        return f"{type(stack).__name__} {count + 1}"

    def name(self, stack: Any, step: Step) -> str:
        """Of a step in the whole network: by its stack, or by its function if only that is part of
        it.
        """
        inner = step.fn
        while id(stack) not in self.paths and hasattr(inner, "fn"):
            inner = inner.fn  # type: ignore[union-attr]
            if id(inner) in self.paths:
                return self.paths[id(inner)]
        path = self.stacks[id(stack)][0]
        return f"{path}.{step.name}" if path else step.name

    def call(self, step: Step, reads: list[Any], arguments: dict[str, Any]) -> Any:
        if id(step) not in self.names and threading.get_ident() != self.thread:
            return step.fn(*reads, **arguments)
        if not isinstance(step.fn, nn.Identity):
            name = self.names.get(id(step), step.name)  # `inverse` is not announced
            self.evaluations[name] = self.evaluations.get(name, 0) + 1
            if not is_recomputing():
                self.entered(name)
        return step.fn(*reads, **arguments)
