"""Rows that fail in every way a library may: `test_compatibility.py` runs them to see that it is
noticed.
"""

import os
import signal
import time

from compatibility.verdict import Rows

_ROWS = Rows("planted")
_ROWS.add(
    "dies",
    lambda scene: scene.rank == 1 and os.kill(os.getpid(), signal.SIGSEGV),
    lambda scene: None,
    processes=2,
)
_ROWS.add("hangs", lambda scene: time.sleep(600), lambda scene: None)
_ROWS.add("raises", lambda scene: 1 // 0, lambda scene: None)
_ROWS.add("gives something else", lambda scene: {"a": 1}, lambda scene: {"a": 2})
_ROWS.add(
    "fails before its last stage",
    lambda scene: None,
    lambda scene: None,
    before=((2, lambda scene: [][scene.rank]),),
)
ROWS = {row.key: row for row in _ROWS}
