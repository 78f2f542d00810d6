"""A line on stderr that says what the check is doing. It is rewritten in place, and cleared at the
end.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import Any


class Progress:
    """`retrograd check: step 3 of 18, reversed`.

    Args:
        total: how many steps there are.
        enabled: whether to write. None: if stderr is a terminal.
    """

    def __init__(self, total: int, enabled: bool | None = None) -> None:
        self.total = total
        self.step = 0
        self.phase = ""
        self._stream: Any = sys.stderr
        self._width = 0  # of the line that is there
        if enabled is None:
            enabled = _is_terminal(self._stream)
        self._is_on = enabled and self._stream is not None

    def enter(self, phase: str) -> None:
        """The next steps do this."""
        self.phase = phase

    def advance(self) -> None:
        """A step begins."""
        self.step += 1
        count = f"{min(self.step, self.total)} of {self.total}"
        self._write(f"retrograd check: step {count}, {self.phase}")

    def close(self) -> None:
        """Clear the line."""
        if self._width:
            self._write("")

    def _write(self, text: str) -> None:
        """Replace the line. A stream that cannot be written to is not tried again."""
        if not self._is_on:
            return
        try:
            columns = shutil.get_terminal_size().columns
            line = text[: max(columns - 1, 1)]
            end = "" if line else "\r"
            self._stream.write(f"\r{line:<{self._width}}{end}")
            self._stream.flush()
            self._width = len(line)
        except Exception:  # closed, full, of another encoding
            self._is_on = False


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(stream.isatty())
    return False
