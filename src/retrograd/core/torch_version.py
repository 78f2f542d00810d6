"""Which torch: a clear line at import if it is too old, too new, or lacks something.

`make test-torch` runs the tests on one version; docs/limits.md has a table of what was run.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch

OLDEST = (2, 9)
NEWEST = (2, 15)  # that all tests were run on
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} or newer"
TESTED = f"torch up to {NEWEST[0]}.{NEWEST[1]}"

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

if VERSION < OLDEST:
    raise ImportError(
        f"retrograd needs {SUPPORTED}, and this is torch {torch.__version__}: "
        f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
    )

if VERSION > NEWEST:
    warnings.warn(
        f"retrograd was tested on {TESTED}, and this is torch {torch.__version__}: check your "
        "network with rg.check",
        stacklevel=4,
    )


def needed(path: str) -> Any:
    """What torch has under this name, which it does not document."""
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError:
        raise ImportError(
            f"retrograd cannot use torch {torch.__version__}, which has no torch.{path}: "
            f"install torch {NEWEST[0]}.{NEWEST[1]}"
        ) from None
