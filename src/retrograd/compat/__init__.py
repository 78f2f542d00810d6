"""The five systems that retrograd grew out of, with their own names and behaviour, on one engine.

Each file has the public names of one package's reversible module. Replace `from
reformer_pytorch.reversible import ReversibleSequence` by `from retrograd.compat.reformer import
ReversibleSequence`; or keep the package and call `install("reformer_pytorch")`.
"""

from retrograd.compat import axial as axial
from retrograd.compat import nuwa as nuwa
from retrograd.compat import nuwa_video_audio as nuwa_video_audio
from retrograd.compat import reformer as reformer
from retrograd.compat import se3 as se3
from retrograd.compat.installing import Installed as Installed
from retrograd.compat.installing import install as install
from retrograd.compat.installing import uninstall as uninstall
