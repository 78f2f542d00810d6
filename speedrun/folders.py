"""The folder of a run: which one it is, that one run at a time writes to it, and what is left.

A lock (`.lock`) is held while a run writes. The system releases it when the process ends, however
it ends. A new run that ends before its first step leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from retrograd.cli.mistakes import Mistake
from retrograd.cli.terminal import tell
from retrograd.files import PART

RUNS = Path("runs")
LOCK = ".lock"
OF_A_RUN = ("configuration.json", "metrics.jsonl", "checkpoints")  # a folder with one has a run
MADE_BEFORE_A_STEP = (*OF_A_RUN, "tensorboard")
BUSY = (errno.EWOULDBLOCK, errno.EACCES)


def numbered() -> list[Path]:
    """The folders runs/001, runs/002 and so on, in order."""
    if not RUNS.is_dir():
        return []
    found = [path for path in RUNS.iterdir() if _is_number(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def _is_number(name: str) -> bool:
    """Whether a name is one that `_next_numbered` gives: 001 to 999, 1000, and so on."""
    return re.fullmatch("[0-9]{3}|[1-9][0-9]{3,8}", name) is not None


@contextlib.contextmanager
def begun(out: Path | None) -> Iterator[Path]:
    """A folder for a new run, locked. If the run ends before its first step, nothing is left."""
    folder, made = _next_numbered() if out is None else _named(out)
    before: list[str] | None = None
    try:
        with locked(folder):
            _check_is_free(folder)
            before = os.listdir(folder)
            yield folder
    except BaseException:
        if before is not None and not _has_steps(folder):
            _remove(folder, [name for name in MADE_BEFORE_A_STEP if name not in before])
        for path in made:
            with contextlib.suppress(OSError):  # not empty: somebody else's
                path.rmdir()
        raise


@contextlib.contextmanager
def resumed(out: Path | None) -> Iterator[Path]:
    """The folder of an existing run, or of the newest one, locked."""
    runs = numbered()
    folder = out or (runs[-1] if runs else RUNS)
    if not (folder / "configuration.json").exists():
        raise Mistake(f"--resume: there is no run in {folder}. Leave it out to begin one.")
    with locked(folder):
        _remove_parts(folder)
        yield folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises `Mistake` if another process holds it."""
    path = folder / LOCK
    handle = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path) -> int:
    """The open file of a lock that this process holds."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in BUSY:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                os.close(handle)
                raise _in_use(path.parent, holder or "another process") from None
            tell(
                f"speedrun train: {path.parent} cannot be locked ({error.strerror}). See to it "
                "that no other process trains in it."
            )
        if _is_file_of(handle, path):
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} of {socket.gethostname()}\n".encode())
            return handle
        os.close(handle)  # another process has removed it since it was opened


def _is_file_of(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _in_use(folder: Path, holder: str) -> Mistake:
    return Mistake(
        f"{folder}: {holder} is training in it. Wait until it is done, or name another folder with "
        "--out."
    )


def _next_numbered() -> tuple[Path, list[Path]]:
    """A new folder with the next number, and the folders that were made for it."""
    made = _with_parents(RUNS)
    runs = numbered()
    number = int(runs[-1].name) + 1 if runs else 1
    while True:
        folder = RUNS / f"{number:03d}"
        try:
            folder.mkdir()
            return folder, [folder, *made]
        except FileExistsError:  # another run has taken it in between
            number += 1


def _named(folder: Path) -> tuple[Path, list[Path]]:
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"--out {folder} is a file; name a folder.")
    return folder, _with_parents(folder)


def _with_parents(folder: Path) -> list[Path]:
    """Make a folder and those above it. Returns the ones that were missing, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _check_is_free(folder: Path) -> None:
    for name in OF_A_RUN:
        if (folder / name).exists():
            raise Mistake(
                f"--out {folder}: there is a run in it. Add --resume to go on with it, or name "
                "another folder."
            )


def _has_steps(folder: Path) -> bool:
    """Whether a run has taken a step."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove_parts(folder: Path) -> None:
    """Remove what a killed run has left half-written."""
    for path in (*folder.glob(PART), *folder.glob("checkpoints/*.part")):
        _remove(path.parent, [path.name])


def quoted(folder: Path) -> str:
    """A folder as an argument to type into a shell."""
    text = str(folder)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
