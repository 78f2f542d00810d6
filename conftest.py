"""Stricter than any user: warnings are errors (pyproject.toml), one thread, a fixed seed for every
test.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import retrograd as rg

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    from retrograd.measure import LiveBytes, activation_bytes

    doctest_namespace.update(
        torch=torch, rg=rg, LiveBytes=LiveBytes, activation_bytes=activation_bytes
    )
