"""Rows that fail in every way a library may: `test_compatibility.py` runs them to see that it is
noticed.
"""

import os
import signal
import time

import torch

from compatibility import networks
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


def places(scene):
    """Where the model and the data are."""
    model = networks.Model(scene.contestant)
    tensors = [*networks.batch(), networks.stack_input(), *model.parameters()]
    return {"devices": {tensor.device.type for tensor in tensors}}


_ROWS.add("lives on the test device", places, lambda scene: {"devices": {"rgdev"}})
_ROWS.add(
    "moves to the CPU",
    lambda scene: {"a": torch.ones(2)},
    lambda scene: {"a": torch.ones(2, device="rgdev")},
)
_ROWS.add("fails with retrograd only", lambda scene: scene.contestant, lambda scene: "plain")
ROWS = {row.key: row for row in _ROWS}
