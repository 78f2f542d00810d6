"""The packages that the five systems come from, imported for tests: quietly, and with a stand-in
for torchvision.

nuwa_pytorch imports torchvision when it is loaded, for training loops and image files that nothing
here uses.
"""

import importlib
import sys
import warnings
from types import ModuleType


class _StandIn(ModuleType):
    """A module of which every attribute is one, too. Calling it gives itself."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return self


def load(name):
    """The package or module of this name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
            for part in ("", ".datasets", ".models", ".transforms", ".utils"):
                sys.modules[f"torchvision{part}"] = _StandIn(f"torchvision{part}")
        return importlib.import_module(name)
