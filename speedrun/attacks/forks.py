"""Commands in processes that are forked from this one.

This process must not have run a backward pass: PyTorch's autograd does not survive a fork.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

TIMEOUT = 300  # seconds; a trial that takes longer hangs
HUNG = "it hangs"


class Ended(NamedTuple):
    """How a process ended: its exit code (minus the signal that killed it) and what it printed."""

    code: int
    out: str
    err: str

    def fault(self, *codes: int) -> str | None:
        """What is wrong with it, unless it ended with one of these exit codes and no traceback."""
        if "Traceback" in self.err or self.code not in codes:
            lines = self.err.strip().splitlines() or ["nothing"]
            return f"exit code {self.code}, stderr: {lines[-1]:.200}"
        return None


class Process:
    """A function that runs in a process of its own; what it returns is the exit code."""

    def __init__(
        self,
        function: Callable[[], int],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.out = tempfile.TemporaryFile()  # noqa: SIM115
        self.err = tempfile.TemporaryFile()  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, environment or {}, folder)

    def _run(
        self, function: Callable[[], int], environment: Mapping[str, str], folder: Path | None
    ) -> None:
        """The whole life of the new process."""
        code = 1
        try:
            os.dup2(self.out.fileno(), 1)
            os.dup2(self.err.fileno(), 2)
            os.environ.update(environment)
            if folder is not None:
                os.chdir(folder)
            torch.set_num_threads(1)
            code = function()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def is_running(self) -> bool:
        """Whether it has not ended. It stays to be waited for."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is None

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        deadline = time.monotonic() + timeout
        hangs = False
        while self.is_running():
            if not hangs and time.monotonic() > deadline:
                hangs = True
                self.kill()
            time.sleep(0.005)
        _, status = os.waitpid(self.pid, 0)
        printed = []
        for file in (self.out, self.err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
            file.close()
        return Ended(os.waitstatus_to_exitcode(status), printed[0], HUNG if hangs else printed[1])
