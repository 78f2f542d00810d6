"""Reversible modules of other packages, with their own names and behaviour, on one engine.

`reformer`, `nuwa`, `axial`, `se3` and `nuwa_video_audio` are the five systems that retrograd grew
out of; `revtorch`, `revlib`, `memcnn` and `torch_geometric` have the classes of these libraries.
Replace `from reformer_pytorch.reversible import ReversibleSequence` by `from
retrograd.compat.reformer import ReversibleSequence`. Or keep the package and call
`install("reformer_pytorch")`: it puts the engine under any package of their family.
"""

import importlib
from types import ModuleType

from retrograd.compat import axial as axial
from retrograd.compat import nuwa as nuwa
from retrograd.compat import nuwa_video_audio as nuwa_video_audio
from retrograd.compat import reformer as reformer
from retrograd.compat import se3 as se3
from retrograd.compat.installing import Installed as Installed
from retrograd.compat.installing import install as install
from retrograd.compat.installing import uninstall as uninstall


def __getattr__(name: str) -> ModuleType:
    """The classes of other libraries are loaded when they are asked for."""
    if name in ("revtorch", "revlib", "memcnn", "torch_geometric"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
