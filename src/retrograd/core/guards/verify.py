"""Verify: in some calls, compare what a function does the second time with what it did the first.

Forward takes a fingerprint of every tensor that autograd saves, of what each function reads and of
what it returns. Recompute must arrive at the same. Whatever a function does differently shows here,
in the first backward, before anyone trains on it.

A fingerprint has 64 elements and the sums of 16 parts; of a small tensor, all elements. Elements
show random numbers that differ; sums show a difference in any place. An exact stack compares bits.

[Note: what rounding explains] In any other stack the rebuilt reads are a little off, and so is what
the function makes of them. Where the reads are what they were, nothing is explained. Elsewhere a
function may enlarge the error of its reads. And it may turn over a choice (a hash, the best expert,
a rounding): then a few elements are something else. That is a matter of `drift`, like the error of
the streams: the stack warns, raises or ignores it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf, isnan
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.guard import Guard
from retrograd.core.guards.drift import report
from retrograd.core.guards.watching import Watching
from retrograd.core.private import is_fake
from retrograd.core.program import Application, Output, Program, place
from retrograd.core.readback import Readback
from retrograd.core.saved import SavedAgain
from retrograd.core.streams import State
from retrograd.core.structure import Notices, Structure
from retrograd.core.tensors import describe, has_dense_strides, local, storage_bytes, storage_of

SMALL = 256  # elements; up to that all of them are compared
ELEMENTS = 64
PARTS = 16
AMPLIFICATION = 10_000.0  # how much a function may enlarge an error of what it reads
FLOOR = 1e-3  # what is smaller than that part of the largest value may be rounding
TOLERATED = 0.05  # the share of elements that rounding may turn over


class Fingerprint(NamedTuple):
    kind: str  # shape and dtype
    elements: list[float]
    is_whole: bool  # whole numbers: indices, masks
    sums: list[float] = []
    sizes: list[float] = []  # sums of absolute values
    largest: float = 0.0  # of the elements; of whole numbers, zero
    epsilon: float = 0.0  # of the dtype


class Seen(NamedTuple):
    """What forward saw of one update."""

    reads: list[Fingerprint | None]
    saved: list[Fingerprint | None]
    output: list[Fingerprint | None]


class Difference(NamedTuple):
    off: float = 0.0  # relative to the size of the tensor; of whole numbers, the share that differs
    is_rare: bool = True  # few elements are beyond the limit


class Verify(Guard):
    def __init__(
        self,
        program: Program,
        structure: Structure,
        watching: Watching,
        precision: Precision,
        notices: Notices,
        epsilon: float,
        readback: Readback,
    ) -> None:
        self.readback = readback
        self.watching = watching
        self.program = program
        self.structure = structure
        self.drift = precision.drift
        self.is_exact = precision.grid is not None
        self.notices = notices
        self.epsilon = epsilon  # of the narrowest dtype that functions compute in
        self.weights = structure.parameter_memory  # not compared: `versions.py` does
        self.seen: dict[int, Seen] = {}

    def after_update(self, update: Application) -> None:
        self.seen[update.index] = Seen(
            self._fingerprints(read_leaves(update.state, self.program, update.index)),
            self._fingerprints(update.saved, self.watching.unfilled.get(update.index, set())),
            self._fingerprints([out for outputs in update.output for out in outputs]),
        )

    def before_backward(self) -> bool:
        self.structure.has_inspected(self.seen)
        self.weights = self.structure.parameter_memory
        return True

    def after_recompute(
        self,
        index: int,
        saved: list[SavedAgain],
        output: Output | None,
        state: State,
    ) -> None:
        seen = self.seen.get(index)
        if seen is None:
            return
        largest = [found.largest for part in seen for found in part if found is not None]
        floor = FLOOR * max(largest, default=0.0)
        reads = self._fingerprints(read_leaves(state, self.program, index))
        apart = [difference(a, b, floor, 0.0).off for a, b in zip(seen.reads, reads)]
        drift = max(apart, default=0.0)
        tensors = [tensor for tensor, _ in saved]
        again = self._fingerprints(tensors)
        for slot, (before, after) in enumerate(zip(seen.saved, again)):
            what = f"tensor {slot} of those that autograd saves"
            self._judge(index, what, before, after, floor, drift)
        again = self._fingerprints([out for outs in output or () for out in outs])
        for before, after in zip(seen.output, again):
            self._judge(index, "the output", before, after, floor, drift)

    def _fingerprints(
        self,
        tensors: Sequence[Tensor],
        unfilled: Collection[int] = (),
    ) -> list[Fingerprint | None]:
        return [
            None
            if storage_of(tensor) in self.weights or storage_of(tensor) in unfilled
            else fingerprint(tensor, self.is_exact)
            for tensor in tensors
        ]

    def _judge(
        self,
        index: int,
        what: str,
        before: Fingerprint | None,
        after: Fingerprint | None,
        floor: float,
        drift: float,
    ) -> None:
        """See [Note: what rounding explains]."""
        limit = self._limit(before, drift)
        found = difference(before, after, floor, limit)
        if before is None or found.off <= limit:
            return
        self.readback.read()  # a value beyond the grid explains it better
        error = errors.not_repeated(place(self.program, index), what, before.kind, found.off, limit)
        if self.is_exact or drift == 0 or not found.is_rare:
            raise error
        report(error, self.drift, self.notices)

    def _limit(
        self,
        before: Fingerprint | None,
        drift: float,
    ) -> float:
        if self.is_exact or before is None:
            return 0.0
        if before.is_whole:
            return TOLERATED if drift else 0.0
        epsilon = max(self.epsilon, before.epsilon)
        return max(min(epsilon**0.5, 0.1), AMPLIFICATION * drift)


def read_leaves(
    state: State,
    program: Program,
    index: int,
) -> list[Tensor]:
    return [leaf for name in program[index].reads for leaf in state[name]]


def fingerprint(tensor: Tensor, bits: bool) -> Fingerprint | None:
    """None for a tensor whose values cannot be looked at."""
    if is_fake(tensor) or tensor.is_nested or tensor.is_meta:
        return None
    kind = describe(tensor)
    if tensor.layout != torch.strided:
        is_sparse = tensor.is_sparse or tensor.is_sparse_csr
        return Fingerprint(kind, [tensor._nnz()], True) if is_sparse else None
    tensor = local(tensor.detach())
    if not tensor.numel() or tensor.is_quantized or type(tensor) is not Tensor:
        return None
    if not storage_bytes(tensor):  # FSDP has freed the whole parameter again
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if bits and tensor.is_floating_point():
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    is_whole = not tensor.is_floating_point()
    if tensor.numel() <= SMALL:
        elements = tensor.reshape(-1).tolist()
        parts = []
    else:
        elements = elements_of(tensor).tolist()
        parts = in_parts(tensor)
    if is_whole:
        return Fingerprint(kind, elements, is_whole, whole_sums(parts))
    sums = [number for part in parts for number in part.sum(-1, dtype=torch.float64).tolist()]
    sizes = [number for part in parts for number in absolute_sums(part)]
    largest = max(map(_finite, elements))
    epsilon = torch.finfo(tensor.dtype).eps
    return Fingerprint(kind, elements, is_whole, sums, sizes, largest, epsilon)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements_of(tensor: Tensor) -> Tensor:
    """Up to 64 elements, the same ones whatever the strides are."""
    count = min(tensor.numel(), ELEMENTS)
    step = max(tensor.numel() // ELEMENTS, 1)
    if tensor.is_contiguous():
        return tensor.as_strided((count,), (step,))
    positions = torch.arange(count, device=tensor.device) * step
    return tensor[torch.unravel_index(positions, tensor.shape)]


def in_parts(tensor: Tensor) -> list[Tensor]:
    """The tensor as 16 rows and a rest. A copy only if its memory has gaps."""
    is_dense = tensor.is_contiguous() or has_dense_strides(tensor)
    flat = (tensor if is_dense else tensor.contiguous()).as_strided((tensor.numel(),), (1,))
    whole = flat.numel() // PARTS * PARTS
    parts = [flat[:whole].view(PARTS, -1), flat[None, whole:]]
    return [part for part in parts if part.numel()]


def whole_sums(parts: list[Tensor]) -> list[float]:
    return [number for part in parts for number in part.sum(-1, dtype=torch.int64).tolist()]


def absolute_sums(part: Tensor) -> list[float]:
    return torch.linalg.vector_norm(part, 1, dim=-1, dtype=torch.float64).tolist()


def difference(
    before: Fingerprint | None,
    after: Fingerprint | None,
    floor: float,
    limit: float,
) -> Difference:
    """How far two fingerprints are apart. A size is at least `floor`."""
    if before is None or after is None or before.kind != after.kind:
        return Difference()  # nothing to compare; other shapes are reported elsewhere
    if before == after:
        return Difference()  # nearly always
    if before.is_whole:
        return Difference(share_of_differences(before, after), is_rare=False)
    scale = max(before.largest, floor)
    off = [_relative(_apart(a, b), scale) for a, b in zip(before.elements, after.elements)]
    beyond = sum(number > limit for number in off)
    for a, b, size in zip(before.sums, after.sums, before.sizes):
        off.append(_relative(_apart(a, b), max(_finite(size), floor)))
    return Difference(max(off), beyond <= max(1, TOLERATED * len(before.elements)))


def share_of_differences(before: Fingerprint, after: Fingerprint) -> float:
    pairs = list(zip(before.elements, after.elements))
    share = sum(a != b for a, b in pairs) / len(pairs)
    if share == 0 and before.sums != after.sums:
        return 1 / (len(pairs) + 1)  # somewhere else: no more than that is known
    return share


def _apart(a: float, b: float) -> float:
    """The distance of two numbers; none between NaN and NaN, and between inf and inf."""
    if a == b or (isnan(a) and isnan(b)):
        return 0.0
    return abs(a - b)


def _finite(number: float) -> float:
    return abs(number) if abs(number) < inf else 0.0


def _relative(off: float, scale: float) -> float:
    if off == 0:
        return 0.0
    if isnan(off) or not scale:
        return inf
    return off / scale
