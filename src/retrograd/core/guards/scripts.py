"""Scripts: TorchScript rewrites a function after it has run once or twice.

The rewritten function saves other tensors, and no setting turns it back. So functions that are
scripts run as they are written, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd.core.guard import Guard
from retrograd.core.program import Application


class Scripts(Guard):
    rebuilt_only = False  # one run that is rewritten changes all later ones

    def call(
        self,
        update: Application,
        run: Callable[[], Any],
    ) -> Any:
        with torch.jit.optimized_execution(False):
            return run()
