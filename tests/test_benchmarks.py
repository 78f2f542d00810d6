"""Benchmarks: what they replace and call is there. (Their figures are not tested: they are
measurements.)
"""

import importlib
from pathlib import Path

import pytest

from benchmarks import overhead

NAMES = sorted(path.stem for path in Path(overhead.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_they_import(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


def test_what_is_left_out_for_a_promise_is_there():
    patches = [patch for patches in overhead.PROMISES.values() for patch in patches]
    assert patches
    assert all(hasattr(owner, name) for owner, name, _ in patches)
