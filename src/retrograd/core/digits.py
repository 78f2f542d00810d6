"""Digits: multiply whole numbers by a ratio, and lose nothing.

`x * n / d` is rarely a whole number. With `x = k * d + r`, the multiplication keeps `k` and stores
the digit `r` in an integer beside each element. If n is larger than 1, it also takes a digit `e`
below n out of the store, so that the store grows by `log2(d / n)` bits only:

    r = x mod d,   k = (x - r) / d          push r:   s = s * d + r
    y = k * n + e                           pop  e:   e = s mod n,   s = (s - e) / n

Every line can be undone (Maclaurin, Duvenaud and Adams, 2015, call it reversible multiplication).
So y is off from `x * n / d` by less than n: the smaller n, the better.

A store is a list of words, each a tensor of integers of the shape of the stream. How full a word is
at each update depends on the ratios only, so it is known before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 4096  # of n and d

Words = tuple[Tensor, ...]  # the last one is the one in use


class Ratio(NamedTuple):
    """A number, as a sign and a ratio of whole numbers."""

    n: int
    d: int
    sign: int

    @property
    def capacity(self) -> int:
        """How many values a word can have. These digits fill a byte to the last bit."""
        return 2**8 if self.n == 1 and self.d in (2, 4, 16) else 2**31


def ratio_of(a: float) -> Ratio | None:
    """`a` as a ratio; None if it is not one of small whole numbers."""
    from fractions import Fraction  # and decimal with it: a tenth of what importing retrograd takes

    fraction = Fraction(abs(a)).limit_denominator(LARGEST)
    if float(fraction) != abs(a) or not 0 < fraction.numerator <= LARGEST:
        return None
    return Ratio(fraction.numerator, fraction.denominator, 1 if a > 0 else -1)


class Position(NamedTuple):
    """The store before one multiplication."""

    ratio: Ratio
    bound: int  # values of the word in use are below this
    is_new: bool  # the multiplication starts a new word

    @property
    def bound_after(self) -> int:
        return -(-self.bound * self.ratio.d // self.ratio.n)

    def dtype(self, x: Tensor) -> torch.dtype:
        """In which words are computed: bytes if they fit, for the sake of memory."""
        n, d, _ = self.ratio
        is_byte = n == 1 and d < 2**8 and self.bound * d <= 2**8
        return torch.uint8 if is_byte else x.dtype


def positions(ratios: Iterable[Ratio | None]) -> list[Position]:
    """The positions of all multiplications of a stream, in order. None: a new word follows."""
    found: list[Position] = []
    bound: int | None = None
    for ratio in ratios:
        if ratio is None:
            bound = None
            continue
        is_new = bound is None or bound * ratio.d > ratio.capacity
        position = Position(ratio, 1 if bound is None or is_new else bound, is_new)
        found.append(position)
        bound = position.bound_after
    return found


def multiply(
    x: Tensor,
    words: Words,
    at: Position,
) -> tuple[Tensor, Words]:
    """`x` times the ratio, and the words with one more digit. Overwrites `x`."""
    n, d, sign = at.ratio
    dtype = at.dtype(x)
    r = x.remainder(d).to(dtype)
    y = x.sub_(r).div_(d, rounding_mode="floor")
    if not at.is_new:
        r = words[-1].to(dtype).mul(d) + r  # not in place: under vmap, the word may have no batch
        words = words[:-1]
    if n > 1:
        e = r.remainder(n)
        r = r.sub_(e).div_(n, rounding_mode="floor")
        y = y.mul_(n).add_(e)
    return y.mul_(sign), (*words, r.to(narrowest(at.bound_after)))


def divide(
    y: Tensor,
    words: Words,
    at: Position,
) -> tuple[Tensor, Words]:
    """What `multiply` made `y` of, and the words that it was given. Overwrites `y`."""
    n, d, sign = at.ratio
    y = y.mul_(sign)
    s = words[-1].to(at.dtype(y))
    if n > 1:
        e = y.remainder(n)
        y = y.sub_(e).div_(n, rounding_mode="floor")
        s = s.mul(n).add_(e)
    r = s.remainder(d)
    x = y.mul_(d).add_(r)
    if at.is_new:
        return x, words[:-1]
    s = s.sub(r).div_(d, rounding_mode="floor")
    return x, (*words[:-1], s.to(narrowest(at.bound)))


def narrowest(bound: int) -> torch.dtype:
    """The narrowest dtype for numbers from zero to below `bound`."""
    if bound <= 2**8:
        return torch.uint8
    return torch.int16 if bound <= 2**15 else torch.int32
