"""Verify: in some calls, compare what a function does the second time with what it did the first.

Forward takes a fingerprint of every tensor that autograd saves, of what each function reads and of
what it returns. Recompute must arrive at the same. Whatever a function does differently shows here,
in the first backward, before anyone trains on it.

A fingerprint has up to 64 elements and the sums of up to 16 parts. Elements show random numbers
that differ; sums show a difference in any place. An exact stack compares every bit. In any other
stack, rounding explains some difference: the more, the further the rebuilt reads are off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf, isnan
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.guard import Guard
from retrograd.core.guards.watching import Watching
from retrograd.core.private import is_fake
from retrograd.core.program import Application, Output, Program, place
from retrograd.core.saved import Saved
from retrograd.core.streams import State
from retrograd.core.structure import Structure
from retrograd.core.tensors import describe, local, storage_of

ELEMENTS = 64
PARTS = 16
AMPLIFICATION = 1000.0  # how much a function may enlarge an error of what it reads
FLOOR = 1e-3  # what is smaller than that part of the largest value may be rounding
TOLERATED = 0.05  # the share of whole numbers (indices, masks) that rounding may turn over


class Fingerprint(NamedTuple):
    kind: str  # shape and dtype
    elements: list[float]
    sums: list[float]
    sizes: list[float]  # sums of absolute values; of whole numbers, empty


class Seen(NamedTuple):
    """What forward saw of one update."""

    reads: list[Fingerprint | None]
    saved: list[Fingerprint | None]
    output: list[Fingerprint | None]


class Verify(Guard):
    def __init__(
        self,
        program: Program,
        structure: Structure,
        watching: Watching,
        is_exact: bool,
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        self.watching = watching
        self.program = program
        self.structure = structure
        self.is_exact = is_exact
        floating = [dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point]
        self.epsilon = max([torch.finfo(dtype).eps for dtype in floating], default=0.0)
        self.seen: dict[int, Seen] = {}

    def after_update(self, update: Application) -> None:
        self.seen[update.index] = Seen(
            self._fingerprints(read_leaves(update.state, self.program, update.index)),
            self._fingerprints(update.saved, self.watching.unfilled.get(update.index, set())),
            self._fingerprints([out for outputs in update.output for out in outputs]),
        )

    def before_backward(self) -> bool:
        self.structure.is_verified = True
        return True

    def after_recompute(
        self, index: int, saved: list[Saved], output: Output | None, state: State
    ) -> None:
        seen = self.seen.get(index)
        if seen is None:
            return
        floor = FLOOR * max([_largest(print_) for part in seen for print_ in part], default=0.0)
        reads = self._fingerprints(read_leaves(state, self.program, index))
        drift = max(differences(seen.reads, reads, floor), default=0.0)
        again = self._fingerprints([tensor for tensor, _, _ in saved])
        for slot, off in enumerate(differences(seen.saved, again, floor)):
            what = f"tensor {slot} of those that autograd saves"
            self._judge(index, what, seen.saved[slot], off, drift)
        outputs = self._fingerprints([out for outs in output or () for out in outs])
        for before, off in zip(seen.output, differences(seen.output, outputs, floor)):
            self._judge(index, "the output", before, off, drift)

    def _fingerprints(
        self, tensors: Sequence[Tensor], unfilled: Collection[int] = ()
    ) -> list[Fingerprint | None]:
        left_out = self.structure.parameter_memory.union(unfilled)
        return [
            None if storage_of(tensor) in left_out else fingerprint(tensor, self.is_exact)
            for tensor in tensors
        ]

    def _judge(
        self, index: int, what: str, before: Fingerprint | None, off: float, drift: float
    ) -> None:
        if off == 0 or before is None:
            return
        limit = 0.0
        if not self.is_exact:
            limit = max(min(self.epsilon**0.5, 0.1), AMPLIFICATION * drift)
            if not before.sizes:
                limit = TOLERATED
        if not off <= limit:
            raise errors.not_repeated(place(self.program, index), what, before.kind, off, limit)


def read_leaves(state: State, program: Program, index: int) -> list[Tensor]:
    return [leaf for name in program[index].reads for leaf in state[name]]


def fingerprint(tensor: Tensor, bits: bool) -> Fingerprint | None:
    """None for a tensor whose values cannot be looked at."""
    if is_fake(tensor) or tensor.is_nested or tensor.is_meta:
        return None
    kind = describe(tensor)
    if tensor.layout != torch.strided:
        is_sparse = tensor.is_sparse or tensor.is_sparse_csr
        return Fingerprint(kind, [tensor._nnz()], [], []) if is_sparse else None
    tensor = local(tensor.detach())
    if not tensor.numel() or tensor.is_quantized or type(tensor) is not Tensor:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if bits and tensor.is_floating_point():
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    sizes: list[float] = []
    parts = in_parts(tensor)
    if tensor.is_floating_point():
        sizes = numbers(torch.linalg.vector_norm(parts, 1, dim=-1, dtype=torch.float64))
        sums = numbers(parts.sum(-1, dtype=torch.float64))
    else:
        sums = numbers(parts.sum(-1, dtype=torch.int64))
    return Fingerprint(kind, numbers(elements_of(tensor)), sums, sizes)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements_of(tensor: Tensor) -> Tensor:
    """Up to 64 elements, the same ones whatever the strides are."""
    count = min(tensor.numel(), ELEMENTS)
    step = max(tensor.numel() // ELEMENTS, 1)
    positions = torch.arange(count, device=tensor.device) * step
    return tensor[torch.unravel_index(positions, tensor.shape)] if tensor.ndim else tensor[None]


def in_parts(tensor: Tensor) -> Tensor:
    """The tensor as 16 rows, or as one. A copy only if its memory has gaps."""
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    if flat.numel() < PARTS:
        return flat[None]
    return flat[: flat.numel() // PARTS * PARTS].view(PARTS, -1)


def differences(
    before: Sequence[Fingerprint | None], after: Sequence[Fingerprint | None], floor: float
) -> list[float]:
    """How far each fingerprint is off; zero where there is nothing to compare."""
    pairs = zip(before, after)
    return [0.0 if a is None or b is None else difference(a, b, floor) for a, b in pairs]


def difference(before: Fingerprint, after: Fingerprint, floor: float) -> float:
    """How far two fingerprints are apart, relative to their size, which is at least `floor`; of
    whole numbers, the share of elements that differ.
    """
    if before.kind != after.kind:
        return 0.0  # other shapes are reported elsewhere
    if not before.sizes:
        return share_of_differences(before, after)
    scale = max(_largest(before), floor)
    elements = zip(before.elements, after.elements)
    off = [_relative(_apart(a, b), scale) for a, b in elements]
    for a, b, size in zip(before.sums, after.sums, before.sizes):
        off.append(_relative(_apart(a, b), max(_finite(size), floor)))
    return max(off)


def share_of_differences(before: Fingerprint, after: Fingerprint) -> float:
    pairs = list(zip(before.elements, after.elements))
    share = sum(a != b for a, b in pairs) / len(pairs)
    if share == 0 and before.sums != after.sums:
        return 1 / (len(pairs) + 1)  # somewhere else: no more than that is known
    return share


def _largest(found: Fingerprint | None) -> float:
    if found is None or not found.sizes:
        return 0.0
    return max(map(_finite, found.elements), default=0.0)


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


def numbers(tensor: Tensor) -> list[float]:
    return tensor.reshape(-1).tolist()
