"""Files that are there as a whole or not at all, and files that are only read if they are files.

`write_whole` writes a temporary file in the same folder, waits until it is on the disk, and renames
it. Symlinks are followed first, so the link stays. A device, a pipe or an open file of a process
(/dev/stdout) cannot be replaced: it is written to.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

PART = ".retrograd-*.part"  # temporary files; one is left behind if the process is killed
OPEN_FILES = ("/proc", "/dev/fd")  # where links stand for open files
MOST_LINKS = 40  # as Linux allows


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file. An interrupted write leaves the old file as it was, and nothing beside it.

    Folders on the way are made. The permissions of an old file are kept.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    final = Path(path)
    try:
        final = _without_links(final)
        if _is_replaceable(final):
            _replace(final, data)
        else:
            final.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush_to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk: then it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a file to read it. Raises `OSError` for a pipe or a device, which might never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def save_figure(figure: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """What matplotlib's `figure.savefig(path, **options)` does, by `write_whole`."""
    final = Path(path)
    kind = final.suffix.removeprefix(".")
    if not kind:
        kind = figure.canvas.get_default_filetype()
        final = final.with_name(f"{final.name}.{kind}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind.lower(), **options)
    write_whole(final, buffer.getvalue())


def _without_links(path: Path) -> Path:
    """The file that a path leads to. Links that stand for open files are not followed."""
    for _ in range(MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)
        if not path.is_symlink() or _stands_for_open_file(path):
            return path
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _stands_for_open_file(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in OPEN_FILES)


def _is_replaceable(path: Path) -> bool:
    """Whether a path is that of a regular file, or free."""
    if _stands_for_open_file(path):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / PART.replace("*", os.urandom(8).hex())
    try:
        with open(part, "xb") as file:  # "x": neither an old file nor a link is ever opened
            file.write(data)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                os.chmod(part, stat.S_IMODE(path.stat().st_mode))
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        flush_to_disk(path.parent)
