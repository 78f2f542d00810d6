"""What is written for people to see: without control characters, and never a reason to stop."""

from __future__ import annotations

import os
import sys

# A terminal obeys these: C0, DEL and C1 control characters.
_CONTROLS = (*range(0x20), 0x7F, *range(0x80, 0xA0))
# These reorder or break lines. The last are bytes of file names that are not UTF-8.
_INVISIBLE = (
    0x061C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPED = {code: repr(chr(code))[1:-1] for code in (*_CONTROLS, *_INVISIBLE)}
_ESCAPED_IN_TEXT = {code: text for code, text in _ESCAPED.items() if code not in (9, 10)}


def printable(text: str) -> str:
    """`text` with control characters written out, such as \\x1b; tabs and ends of lines stay."""
    return text.translate(_ESCAPED_IN_TEXT)


def one_printable_line(text: str) -> str:
    """As `printable`, with tabs and ends of lines written out, too."""
    return text.translate(_ESCAPED)


def tell(line: str) -> None:
    """Print a line on stderr. If nobody can read it (a closed terminal, a full disk), drop it."""
    try:
        print(one_printable_line(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(2)


def discard(number: int) -> None:
    """Send stdout (1) or stderr (2) nowhere from now on, so that flushing it cannot fail."""
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, number)
    if handle != number:
        os.close(handle)


def open_standard_streams() -> None:
    """Open the streams that were closed when the program began (`>&-`) on nothing.

    Python has None in their place. And the next file that is opened would get the number of stdout:
    what C code prints would be written into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                discard(number)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
