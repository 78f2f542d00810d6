"""Text as bytes: files that are memory-mapped, not loaded. A part of the text is held out.

The bytes of a step depend on the seed and the number of the step only. So a resumed run trains on
the same bytes, and so do two processes that share the batches of one.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import mmap
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from retrograd.files import open_regular

HELD_OUT = 16  # one file in 16 is held out; of a single file, its last sixteenth
MAPPED = 256  # files that are memory-mapped at a time
MIB = 2**20


class TextError(ValueError):
    """The data cannot be trained on."""


@dataclass(frozen=True)
class Piece:
    """The bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, count: int) -> Tensor:
        """Up to `count` bytes from position `start` of the piece on."""
        begin = self.start + start
        content = self._mapped()[begin : min(begin + count, self.stop)]
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def blocks(self) -> Iterator[bytes]:
        """All bytes, a MiB at a time. They are read, not mapped: so they take no memory."""
        left = len(self)
        with open_regular(self.path) as file:
            file.seek(self.start)
            while left:
                block = file.read(min(left, MIB))
                if not block:
                    raise TextError(f"{self.path} has become smaller while it was read.")
                left -= len(block)
                yield block

    def _mapped(self) -> mmap.mmap:
        try:
            if self.path.stat().st_size < self.stop:  # reading beyond the end kills the process
                raise TextError(
                    f"{self.path} has become smaller since training began. Put it back, and go on "
                    "with --resume."
                )
            return _mapped(self.path, self.stop)
        except (OSError, ValueError) as error:
            if isinstance(error, TextError):
                raise
            why = error.strerror if isinstance(error, OSError) else error
            raise TextError(
                f"{self.path} cannot be read any more ({why}). Put it back, and go on with "
                "--resume."
            ) from error


@functools.lru_cache(MAPPED)
def _mapped(path: Path, size: int) -> mmap.mmap:
    """A file in memory, read-only: so it may be larger than the memory."""
    with open_regular(path) as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


class Text:
    """Pieces of files, read as one text."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = [piece for piece in pieces if len(piece)]
        self.ends = list(itertools.accumulate(len(piece) for piece in self.pieces))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, count: int) -> Tensor:
        """`count` bytes from `start` on, as integers."""
        parts = []
        number = bisect.bisect_right(self.ends, start)  # the piece that has byte `start`
        while count:
            piece = self.pieces[number]
            end = self.ends[number]
            taken = min(count, end - start)
            parts.append(piece.read(start - (end - len(piece)), taken))
            start += taken
            count -= taken
            number += 1
        return torch.cat(parts).long()

    def batch(self, step: int, *, seed: int, count: int, context: int) -> Tensor:
        """The batch of a step: `count` random sequences of `context + 1` bytes."""
        generator = torch.Generator().manual_seed((seed << 32) + step)
        starts = torch.randint(len(self) - context, (count,), generator=generator).tolist()
        return torch.stack([self.read(start, context + 1) for start in starts])

    def windows(self, context: int, count: int) -> Iterator[Tensor]:
        """Up to `count` sequences that do not overlap, evenly spread over the text."""
        available = (len(self) - 1) // context
        count = min(count, available)
        for i in range(count):
            yield self.read(i * available // count * context, context + 1)


def read_text(source: Path | None, without: Sequence[Path] = ()) -> tuple[Text, Text]:
    """The text to train on and the text held out.

    Args:
        source: a file, or a folder whose files are all read; None: Python's standard library.
        without: folders that are left out. A run must not read what it writes.
    """
    excluded = [folder.absolute() for folder in without]
    found = [
        path
        for path in _files(source)
        if not any(folder in path.absolute().parents for folder in excluded)
    ]
    if not found:
        raise TextError(f"{source}: it has no text. Name a file with text, or a folder with files.")
    pieces = [Piece(path, 0, path.stat().st_size) for path in found]
    if len(pieces) == 1:
        return _split_file(pieces[0])
    return _split_files(pieces, source or _standard_library())


def fingerprint(*texts: Text) -> str:
    """A hash of all bytes of texts, and of where their pieces begin."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text.pieces)} pieces\n".encode())
        for piece in text.pieces:
            found.update(f"{len(piece)} bytes\n".encode())
            for block in piece.blocks():
                found.update(block)
    return found.hexdigest()


def _split_file(piece: Piece) -> tuple[Text, Text]:
    """The beginning of a file, and its last sixteenth."""
    cut = piece.stop - piece.stop // HELD_OUT
    return Text([Piece(piece.path, 0, cut)]), Text([Piece(piece.path, cut, piece.stop)])


def _split_files(pieces: Sequence[Piece], root: Path) -> tuple[Text, Text]:
    """All files but one in sixteen, and the others. The path of a file decides where it goes."""
    held_out = [piece for piece in pieces if _is_held_out(piece.path.relative_to(root))]
    if not held_out:
        held_out = [pieces[-1]]
    out = set(held_out)
    return Text([piece for piece in pieces if piece not in out]), Text(held_out)


def _is_held_out(path: Path) -> bool:
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    return int(digest, 16) % HELD_OUT == 0


def _files(source: Path | None) -> list[Path]:
    """The files of a source that are not empty, sorted."""
    if source is None:
        library = _standard_library()
        found = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    elif source.is_dir():
        found = [path for path in source.rglob("*") if path.is_file() and _visible(path, source)]
    elif source.exists():
        found = [source]
    else:
        raise TextError(f"{source}: there is no such file or folder.")
    return sorted(path for path in found if path.stat().st_size)


def _visible(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def bigram_bits(text: Text, held_out: Text, limit: int = 4 * MIB) -> float:
    """Bits per byte on the held-out text of a model that counts pairs of bytes: the baseline."""
    counts = torch.full((256, 256), 0.1)  # so that no pair has probability zero
    for start in range(0, min(len(text), limit) - 1, MIB):
        part = text.read(start, min(MIB, len(text) - start))
        pairs = part[:-1] * 256 + part[1:]
        counts += torch.bincount(pairs, minlength=256 * 256).view(256, 256)
    probabilities = counts / counts.sum(1, keepdim=True)
    part = held_out.read(0, min(len(held_out), limit))
    return float(-probabilities[part[:-1], part[1:]].log2().mean())
