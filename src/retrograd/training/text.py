"""Text as bytes: files, memory-mapped, never loaded whole; a part of them held out.

Which bytes a step sees depends on the seed and the number of the step alone. So a run that is taken
up again goes on with the same ones, and so do two processes in place of one.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 16  # one file in so many; of a single file, the last part of so many
MAPPED = 256  # files at a time


class TextError(ValueError):
    """Data that nothing can be trained on."""


@dataclass(frozen=True)
class Piece:
    """Some of the bytes of a file."""

    path: Path
    start: int
    stop: int


class Text:
    """Pieces of files, as if they were one text."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = [piece for piece in pieces if piece.stop > piece.start]
        self.ends = list(itertools.accumulate(piece.stop - piece.start for piece in self.pieces))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def fingerprint(self) -> str:
        """Another one for another text: from the size of each piece, its beginning and its end."""
        found = hashlib.sha256()
        for piece in self.pieces:
            ends = (
                _bytes(piece, piece.start, 1024),
                _bytes(piece, max(piece.stop - 1024, piece.start), 1024),
            )
            found.update(repr((piece.stop - piece.start, *(end.tolist() for end in ends))).encode())
        return found.hexdigest()[:16]

    def read(self, start: int, count: int) -> Tensor:
        """`count` bytes from `start` on, as integers."""
        parts = []
        number = bisect.bisect_right(self.ends, start)
        while count:
            piece = self.pieces[number]
            offset = start - (self.ends[number] - (piece.stop - piece.start))  # in the piece
            taken = min(count, self.ends[number] - start)
            parts.append(_bytes(piece, piece.start + offset, taken))
            start, count, number = start + taken, count - taken, number + 1
        return torch.cat(parts).long()

    def batch(self, step: int, *, seed: int, count: int, context: int) -> Tensor:
        """`count` stretches of `context + 1` bytes, from anywhere: those of this step."""
        generator = torch.Generator().manual_seed((seed << 32) + step)
        starts = torch.randint(len(self) - context, (count,), generator=generator).tolist()
        return torch.stack([self.read(start, context + 1) for start in starts])

    def windows(self, context: int, count: int) -> Iterator[Tensor]:
        """Up to `count` stretches that do not overlap, evenly spread: the same ones every time."""
        whole = (len(self) - 1) // context
        for i in range(min(count, whole)):
            yield self.read(i * whole // min(count, whole) * context, context + 1)


def read_text(source: Path | None, without: Sequence[Path] = ()) -> tuple[Text, Text]:
    """What is trained on and what is held out, of a file or of all files in a folder; of Python's
    own library by default.

    Not what is in the folders of `without`: a run must not read what it writes.
    """
    apart = [folder.absolute() for folder in without]
    found = [
        path
        for path in _files(source)
        if not any(folder in path.absolute().parents for folder in apart)
    ]
    if not found:
        raise TextError(
            f"{source}: nothing in it. Name a file, or a folder with files, that has text in it."
        )
    pieces = [Piece(path, 0, path.stat().st_size) for path in found]
    if len(pieces) == 1:
        (only,) = pieces
        cut = only.stop - only.stop // HELD_OUT
        return Text([Piece(only.path, 0, cut)]), Text([Piece(only.path, cut, only.stop)])
    root = source or Path(sysconfig.get_paths()["stdlib"])
    chosen = [
        int(hashlib.sha256(str(p.path.relative_to(root)).encode()).hexdigest(), 16) % HELD_OUT == 0
        for p in pieces
    ]
    if not any(chosen):
        chosen[-1] = True
    return Text([p for p, out in zip(pieces, chosen) if not out]), Text(
        [p for p, out in zip(pieces, chosen) if out]
    )


def _files(source: Path | None) -> list[Path]:
    if source is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    elif source.is_dir():
        files = (path for path in source.rglob("*") if path.is_file())
        found = [
            path
            for path in files
            if not any(part[0] == "." for part in path.relative_to(source).parts)
        ]
    elif source.exists():
        found = [source]
    else:
        raise TextError(f"{source}: there is no such file or folder.")
    return sorted(path for path in found if path.stat().st_size)


def bigram_bits(text: Text, held_out: Text, most: int = 1 << 22) -> float:
    """Bits a byte that counting pairs of bytes gets on what is held out: what a model has
    to beat.
    """
    counts = torch.full((256, 256), 0.1)  # no pair is impossible
    for start in range(0, min(len(text), most) - 1, 1 << 20):
        piece = text.read(start, min(1 << 20, len(text) - start))
        counts += torch.bincount(piece[:-1] * 256 + piece[1:], minlength=1 << 16).view(256, 256)
    chances = counts / counts.sum(1, keepdim=True)
    piece = held_out.read(0, min(len(held_out), most))
    return float(-chances[piece[:-1], piece[1:]].log2().mean())


def _bytes(piece: Piece, start: int, count: int) -> Tensor:
    try:
        if (
            piece.path.stat().st_size < piece.stop
        ):  # what is mapped and not there would end the process
            raise TextError(
                f"{piece.path} has become smaller since training began. Put it back, and go on "
                "with --resume."
            )
        return _mapped(piece.path, piece.stop)[start : min(start + count, piece.stop)]
    except (OSError, RuntimeError) as error:
        raise TextError(
            f"{piece.path} cannot be read any more ({str(error).splitlines()[0]}). Put it back, "
            "and --resume."
        ) from error


@functools.lru_cache(MAPPED)
def _mapped(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
