"""The host tier: what a plan keeps may wait in the memory of the host, until backward needs it.

    forward     update i        a copy stream waits for the home stream, then copies to the host
                update i + 1    runs meanwhile; then the home stream waits for the copy, and the
                                memory on the device is let go
    backward    update i + 1    the copy stream waits for the home stream, then copies back
                update i        the home stream waits for that copy

The home stream is the one that the stack runs on. The host waits for nothing. A copy has the bits
of what was copied, so gradients do not change.

[Note: memory of two streams] The allocator gives memory that was let go to later work of the stream
that it was made on. Both copies use memory of the home stream on another one, so it is let go only
after the home stream has waited for the copy. With `record_stream` the allocator would see to
that, but at times that no plan can know. Buffers on the host are used by the copy stream only.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.guard import Guard, Undo
from retrograd.core.program import Application, Program, place
from retrograd.core.saved import Saved, save
from retrograd.core.streams import State
from retrograd.core.tensors import storage_of

MEASURED_BYTES = 16 * 2**20


class HostMemory:
    """Pinned buffers, at most `limit` bytes of them, which are used again from step to step."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.bytes = 0  # of all buffers
        self.used = 0  # of those that hold something
        self.free: dict[int, list[Tensor]] = {}  # the others, by size
        self.lock = threading.RLock()

    def __reduce__(self) -> Any:
        """A copy, or a pickle, has buffers of its own."""
        return HostMemory, (self.limit,)

    def has_room(self, size: int) -> bool:
        return self.limit is None or self.used + size <= self.limit

    def take(self, size: int) -> Tensor | None:
        """A buffer; None if there is no room for it."""
        with self.lock:
            if not self.has_room(size):
                return None
            found = self.free.get(size)
            buffer = found.pop() if found else self._new(size)
            self.used += size
            return buffer

    def _new(self, size: int) -> Tensor:
        if self.limit is not None and self.bytes + size > self.limit:
            self.trim()
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.bytes += size
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        with self.lock:
            self.used -= buffer.numel()
            self.free.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        """Free the buffers that hold nothing."""
        with self.lock:
            self.free.clear()
            self.bytes = self.used


class HostStorage:
    """A piece of a device's memory that waits on the host."""

    __slots__ = ("__weakref__", "buffer", "device", "home", "memory", "pending", "shared", "there")

    def __init__(self, memory: HostMemory, buffer: Tensor, tensor: Tensor) -> None:
        self.memory = memory
        self.buffer = buffer
        self.device = tensor.device
        self.home = torch.accelerator.current_stream(tensor.device)
        self.there: torch.UntypedStorage | None = tensor.untyped_storage()  # on the device
        self.shared: Callable[[], torch.UntypedStorage | None] = lambda: None
        self.pending: torch.Event | None = None  # of a copy that `there` takes part in
        self._copy(lambda there: buffer.copy_(there, non_blocking=True))

    def _copy(self, run: Callable[[Tensor], Any]) -> None:
        """Start a copy, given the memory on the device."""
        assert self.there is not None
        with _on_copy_stream(self.device, self.home) as stream, torch.no_grad():
            run(_tensor_of(self.there, self.device, torch.uint8, 0, (self.buffer.numel(),), (1,)))
            self.pending = stream.record_event()

    def _finish(self) -> None:
        """Let the home stream wait for the copy: [Note: memory of two streams]."""
        if self.pending is not None:
            self.home.wait_event(self.pending)
            self.pending = None

    def let_go(self) -> None:
        """Of the memory on the device."""
        self._finish()
        self.there = None

    def fetch(self) -> None:
        """Start to copy it back."""
        if self.there is None and self.shared() is None:
            size = self.buffer.numel()
            self.there = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            self._copy(lambda there: there.copy_(self.buffer, non_blocking=True))

    def get(self) -> torch.UntypedStorage:
        """The memory on the device. From now on whoever asked holds it."""
        self.fetch()
        there = self.shared() if self.there is None else self.there
        assert there is not None
        self._finish()
        self.there = None
        self.shared = weakref.ref(there)
        return there

    def __del__(self) -> None:
        self._finish()
        self.memory.give_back(self.buffer)


class HostTensor:
    """A tensor whose memory waits on the host."""

    __slots__ = ("dtype", "edited", "layout", "place", "source", "storage", "there")

    def __init__(self, storage: HostStorage, tensor: Tensor, program: Program, index: int) -> None:
        self.storage = storage
        self.place = (program, index)
        self.there = storage_of(tensor)
        self.dtype = tensor.dtype
        self.layout = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        self.source: tuple[Tensor, int] | None = (tensor.detach(), tensor._version)
        self.edited = False

    def let_go(self) -> None:
        """Of the tensor on the device. One that was edited before it was copied is lost."""
        if self.source is not None:
            tensor, version = self.source
            self.edited = tensor._version != version
            self.source = None

    def get(self) -> Tensor:
        self.let_go()
        if self.edited:
            raise errors.edited_output(place(*self.place), "a value that was copied to the host")
        return _tensor_of(self.storage.get(), self.storage.device, self.dtype, *self.layout)


class HostTier(Guard):
    """What one call keeps on the host; and, as a guard, when it moves."""

    def __init__(self, memory: HostMemory, program: Program) -> None:
        self.memory = memory
        self.program = program
        self.storages: dict[int, list[weakref.ref[HostStorage]]] = {}  # by update
        self.leaving: dict[int, list[HostTensor]] = {}  # still on the device, too; by update

    # --- forward

    def saver(
        self, index: int, tensors: Iterable[Tensor], others: Collection[int]
    ) -> Callable[[Tensor], Saved] | None:
        """A function that saves tensors of an update. None if there is no room for these.

        Those with memory among `others`, which lives on in any case, stay on the device.
        """
        # What was saved before the function ran is there: `leaving` holds its memory.
        storages = {value.there: value.storage for value in self.leaving.get(index, ())}
        sizes = {storage_of(t): _size(t) for t in tensors if is_movable(t)}
        new = sizes.keys() - storages.keys() - set(others)
        if not self.memory.has_room(sum(map(sizes.__getitem__, new))):
            return None

        def save_one(tensor: Tensor) -> Saved:
            if not is_movable(tensor) or storage_of(tensor) in others:
                return save(tensor.detach())
            storage = storages.get(storage_of(tensor)) or self._leave(index, tensor)
            if storage is None:
                return save(tensor.detach())
            storages[storage_of(tensor)] = storage
            value = HostTensor(storage, tensor, self.program, index)
            self.leaving.setdefault(index, []).append(value)
            return Saved(value, tensor._version, HostTensor.get)

        return save_one

    def _leave(self, index: int, tensor: Tensor) -> HostStorage | None:
        """Start to copy the memory of a tensor to the host."""
        buffer = self.memory.take(_size(tensor))
        if buffer is None:
            return None
        storage = HostStorage(self.memory, buffer, tensor)
        self.storages.setdefault(index, []).append(weakref.ref(storage))
        return storage

    def after_update(self, update: Application) -> None:
        """What earlier updates kept has had the time of this one to get to the host."""
        self._let_go_before(update.index)

    def at_cut(self, state: State) -> None:
        self._let_go_before(len(self.program))

    def _let_go_before(self, index: int) -> None:
        """Of the device's memory of updates before this one."""
        for number in [number for number in self.leaving if number < index]:
            for value in self.leaving.pop(number):
                value.let_go()
                value.storage.let_go()

    # --- backward

    def before_recompute(self, index: int, undo: Undo) -> None:
        """Copy back what waits for this update, and for the one that comes next."""
        for number in (index, index - 1):
            for storage in self._alive(number):
                storage.fetch()

    def after_undo(self, index: int, state: State) -> None:
        """What nobody has asked for stays on the host."""
        for storage in self._alive(index):
            storage.let_go()

    def _alive(self, index: int) -> list[HostStorage]:
        found = [reference() for reference in self.storages.get(index, ())]
        return [storage for storage in found if storage is not None]


def is_movable(tensor: Tensor) -> bool:
    """Whether a tensor may wait on the host: an ordinary one, on a device that has streams."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and not tensor.is_cpu
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _size(tensor) > 0
    )


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tensor_of(
    storage: torch.UntypedStorage,
    device: torch.device,
    dtype: torch.dtype,
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage, offset, tuple(size), tuple(stride))  # type: ignore[call-overload]


# --- streams of devices

_copy_streams: dict[torch.device, torch.Stream] = {}
_bandwidths: dict[torch.device, float] = {}


@contextlib.contextmanager
def _on_copy_stream(device: torch.device, home: torch.Stream) -> Iterator[torch.Stream]:
    """Inside, a stream is current that copies only, and has waited for the home stream."""
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams[device] = torch.Stream(device)
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(device)
    stream.wait_stream(home)
    try:
        torch.accelerator.set_stream(stream)
        yield stream
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def bandwidth(device: torch.device) -> float:
    """Bytes a second from the device to the host or back, the slower of both. Measured once."""
    if device not in _bandwidths:
        there = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=device)
        here = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
        _seconds(device, here, there)  # the first copy takes longer
        seconds = max(_seconds(device, here, there), _seconds(device, there, here))
        _bandwidths[device] = MEASURED_BYTES / max(seconds, 1e-9)
    return _bandwidths[device]


def _seconds(device: torch.device, target: Tensor, source: Tensor) -> float:
    """How long a copy takes. The host waits for it."""
    stream = torch.accelerator.current_stream(device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record(stream)
    target.copy_(source, non_blocking=True)
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1000
