"""`Profile`: what one watched forward pass of a program needs, in bytes and in time.

A budget watches the first forward pass for each shape of input. For every update the profile
records:

- the operations that its function runs, each with its time and the bytes of its results,
- the bytes that autograd saves, and the most bytes that are alive in forward and in backward,
- the bytes of the parameter gradients that its backward creates.

`retrograd.planner` decides from these numbers what later passes keep.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from retrograd.backward_bytes import Arguments, peak_of_backward
from retrograd.backward_watch import MeasuredBackward
from retrograd.core import errors
from retrograd.core.guards.random_state import as_bytes
from retrograd.core.host_memory import bandwidth
from retrograd.core.memory import Plan
from retrograd.core.private import CPU_ATTENTION
from retrograd.core.tape import number_of_processes
from retrograd.core.tensors import (
    ShapeAndDtype,
    distinct_bytes,
    largest_shard,
    local,
    nbytes,
    storage_of,
)
from retrograd.measure import LiveBytes, flops_of
from retrograd.recent import Recent

PLANS = 8  # how many a profile remembers

# Before backward begins, there are the output of the stack and what a loss makes of it: in streams.
# A mean of squares has four tensors more.
LOSS = 5

ASSUMED_BANDWIDTH = 1e10  # bytes a second between device and host: PCIe 3 with 16 lanes


class Speed(NamedTuple):
    """What a device does in a second."""

    flops: float
    bytes: float


# Time is computed from FLOPs and bytes, not measured: every process of a group must make the same
# plan. The speeds are rough, because only their ratio matters.
SPEEDS = {"cpu": Speed(1e11, 3e10), "cuda": Speed(1e14, 1e12)}


# Operations without a formula for FLOPs that may be kept, too: they fill up what is left.
aten = torch.ops.aten
POINTWISE = {
    *(aten.gelu.default, aten.relu.default, aten.silu.default, aten.tanh.default),
    *(aten.sigmoid.default, aten.native_layer_norm.default, aten._softmax.default),
    *(aten.sin.default, aten.cos.default, aten.exp.default),
}


class Operation(NamedTuple):
    """One operation inside a function."""

    name: Any  # the torch operator
    number: int  # counts the calls of this operator in the function, from 0
    seconds: float
    bytes: int  # of its results; 0 if it allocated nothing (a view, an in-place operation)
    gradient_bytes: int  # of the gradients of its inputs and results; parameters excluded
    saves_before: int  # how many tensors autograd had saved when it began
    counted: bool  # may be kept: it has a FLOP formula, is not random, its results are not edited
    storages: frozenset[int] = frozenset()  # the memory of its results, while it is measured
    parameters: frozenset[int] = frozenset()  # that of the parameters it reads, likewise
    arguments: Arguments | None = None  # while it is measured
    is_saved: bool = False  # autograd saves all of its results anyway
    flops: int = 0


@dataclass
class UpdateProfile:
    """What the watched pass needed for one update."""

    operations: list[Operation] = field(default_factory=list)
    forward_bytes: int = 0  # the most alive at once while the function ran
    backward_bytes: int = 0  # the same for its backward: an estimate
    # The most in either, with the gradients of its parameters that exist by then, less all of them.
    # It is negative if these are larger than what the update needs.
    fresh_bytes: int = 0
    saved_bytes: int = 0  # saved by autograd; parameters excluded
    saved_streams: int = 0  # the part of that which is streams as the update reads them
    output_bytes: int = 0
    whole_bytes: int = 0  # of the saved tensors and the output together
    saved_by_fn: int = 0  # how many tensors autograd saved for the function
    coupling_saves: bool = False  # autograd saved tensors for the coupling, too
    pinned_bytes: int = 0  # of values that its function pins
    target_bytes: int | None = None  # of a target that has to be kept; None: it is rebuilt
    shapes: list[ShapeAndDtype] = field(default_factory=list)  # of all tensors that it saved
    gradients: dict[int, int] = field(default_factory=dict)  # bytes, by the parameter's id
    arguments: set[Any] = field(default_factory=set)  # signatures: see `profiling.LaterArguments`
    measured: MeasuredBackward | None = None  # None: backward was not measured, so far
    # No annotation: no fields of the dataclass. `Profile.use_host` sets them.
    bandwidth = 0.0  # to the host and back, bytes a second; 0: nothing may wait there
    seconds_beside = 0.0  # of the next update, beside which copies run

    @property
    def seconds(self) -> float:
        return sum(operation.seconds for operation in self.operations)

    def need(self, streams: int, fresh: bool, are_own_new: bool) -> int:
        """Bytes while backward is at the update if nothing is kept, less the gradients of its own
        parameters if these are `fresh`.
        """
        measured = self.measured
        if measured is None:
            return self._estimated_need(streams, fresh and are_own_new) + (
                0 if fresh else max(self.gradients.values(), default=0)
            )
        if fresh and are_own_new and measured.are_gradients_new:
            own = sum(self.gradients.values())
            return measured.alive + measured.peak_with_gradients - own
        return measured.alive + measured.peak

    def _estimated_need(self, streams: int, fresh: bool) -> int:
        most = self.fresh_bytes if fresh else max(self.forward_bytes, self.backward_bytes)
        # The streams and their gradients; and again, when new ones replace them.
        return 2 * streams + max(most, 2 * streams)

    def add_saved(
        self,
        saved: Sequence[Tensor],
        saved_by_fn: int,
        outputs: Sequence[Tensor],
        parameters: Sequence[Any],
        streams: Sequence[Tensor],
    ) -> None:
        """Add what is known when forward has finished the update."""
        # `Linear` saves a view of its weight: compare the memory, not the tensor.
        activations = _outside(saved, {storage_of(local(parameter)) for parameter in parameters})
        # The streams are alive in any case.
        own = _outside(activations, {storage_of(stream) for stream in streams})
        self.saved_by_fn = saved_by_fn
        self.coupling_saves = saved_by_fn < len(saved)
        self.saved_bytes = distinct_bytes(activations)
        self.saved_streams = self.saved_bytes - distinct_bytes(own)
        self.output_bytes = distinct_bytes(outputs)
        self.whole_bytes = distinct_bytes([*activations, *outputs])
        self.operations = list(map(_with_gradient_bytes, self.operations))
        self.gradients = {
            id(parameter): largest_shard(parameter)
            for parameter in parameters
            if parameter.requires_grad
        }
        alive = _alive_in_backward(self.operations, own, outputs)
        self.backward_bytes = max(alive)
        own_gradients = _gradients_in_backward(self.operations, parameters)
        most = max(map(sum, zip(alive, own_gradients)), default=0)
        most = max(most, self.forward_bytes + own_gradients[-1])
        self.fresh_bytes = most - sum(self.gradients.values())
        saved_storages = {storage_of(tensor) for tensor in own if tensor is not None}
        self.operations = [
            operation._replace(
                is_saved=operation.storages <= saved_storages,
                storages=frozenset(),
                parameters=frozenset(),
                arguments=None,
            )
            for operation in self.operations
        ]


def _with_gradient_bytes(operation: Operation) -> Operation:
    """The operation, with the bytes that its backward needs according to torch's own formula."""
    if operation.arguments is None:
        return operation
    results = operation.bytes
    measured = peak_of_backward(operation.name, operation.arguments) + results
    return operation._replace(gradient_bytes=max(operation.gradient_bytes, measured))


def _outside(tensors: Iterable[Tensor | None], storages: set[int]) -> list[Tensor | None]:
    """The tensors, with None in place of each that lives in one of these storages."""
    return [
        None if tensor is None or storage_of(tensor) in storages else tensor for tensor in tensors
    ]


def _alive_in_backward(
    operations: Sequence[Operation], saved: Sequence[Tensor | None], outputs: Sequence[Tensor]
) -> list[int]:
    """The bytes that are alive in the backward of an update, at each operation and before the last.

    Backward goes through the operations from the last to the first. At each of them, the tensors
    that autograd saved up to there are still alive, and the gradients of what it read and returned
    exist. The gradient of the function's output does not count: it is the gradient of a stream.
    """
    output_bytes = {storage_of(tensor): tensor.nbytes for tensor in outputs}
    saves_after = [*(operation.saves_before for operation in operations[1:]), len(saved)]
    alive = []
    for operation, count in zip(operations, saves_after):
        stream_gradients = sum(output_bytes.get(storage, 0) for storage in operation.storages)
        alive.append(distinct_bytes(saved[:count]) + operation.gradient_bytes - stream_gradients)
    return [*alive, distinct_bytes(saved)]


def _gradients_in_backward(operations: Sequence[Operation], parameters: Sequence[Any]) -> list[int]:
    """The bytes of the gradients of parameters, at the moments of `_alive_in_backward`.

    A gradient exists as soon as backward has reached the last operation that reads its parameter.
    If no operation is seen to do so, it may exist at any time.
    """
    new = [0] * len(operations)
    unknown = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        memory = storage_of(local(parameter))
        readers = [i for i, operation in enumerate(operations) if memory in operation.parameters]
        if readers:
            new[readers[-1]] += largest_shard(parameter)
        else:
            unknown += largest_shard(parameter)
    existing = itertools.accumulate(reversed([*new, unknown]))
    return list(existing)[::-1]


def larger(update: UpdateProfile, other: UpdateProfile) -> UpdateProfile:
    """The one of two profiles of an update that needs more."""
    found = max(update, other, key=lambda one: (one.saved_bytes, one.forward_bytes))
    found.arguments = update.arguments | other.arguments
    return found


class GradientsToCome(NamedTuple):
    """Gradients of parameters that do not exist yet when backward has passed an update."""

    bytes: int
    are_own_new: bool  # none of the update's own existed before: it shares no parameter


class PlanMaker(Protocol):
    """A memory mode that plans from a profile: `Budget`."""

    def plans_for(self, profile: Profile, fresh: bool) -> list[Plan]: ...


class Place(NamedTuple):
    """Which streams are alive while backward is at an update."""

    streams: int  # bytes of those of its own call
    others: int  # of those that earlier calls hold: 0 if the profile is of a single call
    is_last: bool  # of its call


class Profile:
    """What one forward pass of a program needs; remembers the plans that were made from it.

    `profiling.Profiling` fills it during that pass. `least` is one that is outdated: updates that
    need less than they did then count as they did then.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = list(targets)  # the stream that each update changes
        self.devices: list[torch.device] = []  # of the streams
        self.updates = [UpdateProfile() for _ in self.targets]
        self.state_bytes = 0  # of all streams
        self.is_complete = False
        self.is_outdated = False  # a later call had other arguments
        self.least: Profile | None = None
        self.is_measured = False  # the backward, too
        self._plans: Recent[tuple[PlanMaker, bool, int], list[Plan]] = Recent(PLANS)

    def complete(self, state_bytes: int) -> None:
        """The pass is over. Layers that do the same share one list of operations."""
        self.state_bytes = state_bytes
        if self.least is not None and self.least.is_complete:
            self.updates = list(map(larger, self.updates, self.least.updates))
        self.least = None
        distinct: list[list[Operation]] = []
        for update in self.updates:
            same = next((found for found in distinct if found == update.operations), None)
            if same is None:
                distinct.append(update.operations)
            else:
                update.operations = same
        self.is_complete = True

    def add_backward(self, found: Mapping[int, MeasuredBackward]) -> None:
        """Add what the backward of each update needed."""
        kept = itertools.accumulate(
            (update.target_bytes or 0 for update in self.updates), initial=0
        )
        for index, (update, waiting) in enumerate(zip(self.updates, kept)):
            if index in found:
                # Targets that earlier updates keep: `planner.base_needs` adds them, where they are.
                alive = max(found[index].alive - waiting, self.state_bytes)
                update.measured = found[index]._replace(alive=alive)
        self.is_measured = True

    @property
    def lengths(self) -> list[int]:
        """How many updates each call has: of a single call, here."""
        return [len(self.updates)]

    def places(self) -> list[Place]:
        """Where each update is."""
        last = len(self.updates) - 1
        return [Place(self.state_bytes, 0, index == last) for index in range(last + 1)]

    def use_host(self, budget: Any) -> None:
        """Measure what copies to the host take. Raises if there is nowhere to copy to."""
        accelerator = torch.accelerator.current_accelerator()
        found = [d for d in self.devices if accelerator is not None and d.type == accelerator.type]
        if not found:
            raise errors.no_host_tier(repr(budget), sorted({d.type for d in self.devices}))
        # Every process must come to the same plan.
        speed = ASSUMED_BANDWIDTH if number_of_processes() > 1 else bandwidth(found[0])
        following = [*(update.seconds for update in self.updates[1:]), 0.0]
        for update, seconds in zip(self.updates, following):
            update.bandwidth = speed
            update.seconds_beside = seconds

    # --- what a step needs

    def gradients(self) -> dict[int, int]:
        """The bytes of each parameter's gradient. Several updates may use the same parameter."""
        merged: dict[int, int] = {}
        for update in self.updates:
            merged.update(update.gradients)
        return merged

    def needs(self, fresh: bool) -> list[int]:
        """Bytes at each update of the backward pass, and then before it begins, if nothing is kept;
        less all parameter gradients.

        If `fresh`, the gradients that later updates of the walk create do not exist yet. If not,
        gradients are accumulated: all exist already, and a new one is alive beside the old one that
        it is added to.
        """
        needs = []
        pinned = 0
        to_comes = self._gradients_to_come()
        places = self.places()
        for update, place, to_come in zip(self.updates, places, to_comes):
            need = place.others + update.need(place.streams, fresh, to_come.are_own_new)
            if place.is_last and (update.measured is None or len(self.lengths) > 1):
                need += place.streams  # the output of the stack, which later layers may save
            pinned += update.pinned_bytes
            needs.append(need + pinned - to_come.bytes if fresh else need + pinned)
        end = pinned
        end += places[-1].others + (1 + LOSS) * places[-1].streams if places else 0
        end += 64  # numbers that a loss makes
        return [*needs, end - sum(self.gradients().values()) if fresh else end]

    def loss_bytes(self) -> int:
        """The room that `needs` leaves for what a loss makes of the output of the stack."""
        places = self.places()
        return (LOSS - 1) * places[-1].streams if places else 0

    def _gradients_to_come(self) -> list[GradientsToCome]:
        """What backward has yet to create when it has passed each update."""
        missing = self.gradients()
        to_come = []
        for update in reversed(self.updates):
            are_own_new = missing.keys() >= update.gradients.keys()
            for parameter in update.gradients:
                missing.pop(parameter, 0)
            to_come.append(GradientsToCome(sum(missing.values()), are_own_new))
        return to_come[::-1]

    def plain(self, fresh: bool) -> int:
        """The peak of plain autograd: everything is kept."""
        saved_before = itertools.accumulate(
            (update.saved_bytes for update in self.updates), initial=0
        )
        needs = self.needs(fresh)
        if self.updates:
            needs[-1] -= self.places()[-1].others + self.places()[-1].streams  # no walk begins
        return max(map(operator.add, needs, saved_before))

    # --- plans

    def plans(self, budget: PlanMaker, fresh: bool) -> list[Plan]:
        """The plan of each call under a budget: made once, then remembered."""
        key = (budget, fresh, self.measurements)
        return self._plans.find(key) or self._plans.add(key, self._made(budget, fresh))

    @property
    def measurements(self) -> int:
        """How many calls have their backward measured. Then plans are made anew."""
        return int(self.is_measured)

    def _made(self, budget: PlanMaker, fresh: bool) -> list[Plan]:
        if not any(update.saved_by_fn for update in self.updates):  # nothing is ever rebuilt
            return [Plan(keep_from=length) for length in self.lengths]
        return budget.plans_for(self, fresh)


class OperationRecorder(LiveBytes):
    """While active, lists the operations that run, and counts live bytes."""

    def __init__(self, saved: Sized, parameters: Iterable[Any]) -> None:
        super().__init__()
        self.saved = saved  # the tensors that autograd has saved of the function so far
        self.parameter_storages = frozenset(storage_of(local(p)) for p in parameters)
        self.operations: list[Operation] = []
        self.calls: dict[Any, int] = {}
        self.edited: set[int] = set()  # storages that an in-place operation wrote to
        # The memory of a freed tensor may be used again, at the same address. Plans must not depend
        # on that: a negative number for each storage that is made.
        self.numbers: dict[int, int] = {}  # by address, the newest there
        self.count = itertools.count(-1, -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        saves_before = len(self.saved)
        bytes_before = self.made
        random_before = as_bytes(torch.get_rng_state())
        result = super().__torch_dispatch__(func, types, args, kwargs)
        drew = as_bytes(torch.get_rng_state()) != random_before
        if _is_mutable(func):
            written = _tensors((*args[:1], *kwargs.values()))
            self.edited.update(map(self._identity, written))
        flops = flops_of_operation(func, args, kwargs, result)
        inputs = list(_tensors(args))
        outputs = list(_tensors(result))
        speed = _speed(inputs)
        allocated = distinct_bytes(outputs) if self.made != bytes_before else 0
        if not allocated:  # no memory is moved, and gradients need no memory of their own
            inputs = []
            outputs = []
        moved = sum(map(nbytes, inputs + outputs))
        self.operations.append(
            Operation(
                name=func,
                number=self._call_number(func),
                seconds=(flops or 0) / speed.flops + moved / speed.bytes,
                bytes=allocated,
                gradient_bytes=self._gradient_bytes(inputs, outputs),
                saves_before=saves_before,
                # A random operation must run again, or all later ones would draw other numbers.
                counted=(flops is not None or func in POINTWISE)
                and not drew
                and not _is_random(func, args, kwargs),
                storages=frozenset(map(self._identity, outputs)),
                parameters=self.parameter_storages.intersection(map(storage_of, inputs)),
                arguments=self._arguments(func, args, kwargs) if allocated else None,
                flops=flops or 0,
            )
        )
        return result

    def _add(self, storage: Any, size: int) -> None:
        super()._add(storage, size)
        self.numbers[storage._cdata] = next(self.count)

    def _identity(self, tensor: Tensor) -> int:
        address = storage_of(tensor)
        return self.numbers.get(address, address)

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> Arguments | None:
        tensors = [*_tensors(args), *_tensors(list(kwargs.values()))]
        is_usual = all(type(tensor) in (Tensor, Parameter) for tensor in tensors)
        is_strided = all(tensor.layout == torch.strided for tensor in tensors)
        if not is_usual or not is_strided or not hasattr(func, "_schema"):
            return None
        return Arguments(args, kwargs, lambda tensor: storage_of(tensor) in self.parameter_storages)

    def _call_number(self, func: Any) -> int:
        number = self.calls.get(func, 0)
        self.calls[func] = number + 1
        return number

    def _gradient_bytes(self, inputs: list[Tensor], outputs: list[Tensor]) -> int:
        """Of the gradients of an operation. `UpdateProfile.gradients` has those of parameters."""
        differentiable = [
            tensor
            for tensor in inputs
            if tensor.is_floating_point() and storage_of(tensor) not in self.parameter_storages
        ]
        return sum(map(nbytes, differentiable + outputs))

    def finish(self) -> list[Operation]:
        """All operations. A result that was edited in place later cannot be kept.

        Lets go of what autograd saved: the recorder is part of a reference cycle.
        """
        self.saved = ()
        alive = {self.numbers[address]: address for address in self._sizes}
        return [
            operation._replace(
                counted=operation.counted and not operation.storages & self.edited,
                storages=frozenset(alive.get(number, number) for number in operation.storages),
            )
            for operation in self.operations
        ]


def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation may draw random numbers. Attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return given != 0


def _is_mutable(func: Any) -> bool:
    return hasattr(func, "_schema") and func._schema.is_mutable


def _speed(inputs: Sequence[Tensor]) -> Speed:
    device = inputs[0].device.type if inputs else "cpu"
    return SPEEDS.get(device, SPEEDS["cuda"])


def flops_of_operation(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """FLOPs by torch's formulas; for attention on a CPU, which torch does not count, by our own."""
    if getattr(func, "_overloadpacket", None) is CPU_ATTENTION:
        query = args[0]
        key = args[1]
        *batch, queries, channels = query.shape
        return 4 * math.prod(batch) * queries * key.shape[-2] * channels
    return flops_of(func, args, kwargs, result)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, and in tuples and lists of values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
