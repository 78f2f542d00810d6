"""Stricter than any user: warnings are errors (pyproject.toml), one thread, a fixed seed for every
test.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and do not run it: bfloat16 would end in "Illegal instruction".
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

import retrograd as rg
from tests import own_process

torch.set_num_threads(1)


# The files that take longest, first: two processes share the files, and shall end together.
SLOW = (
    "test_train.py",
    "test_compatibility.py",
    "test_fsdp.py",
    "test_budget.py",
    "test_device.py",
    "test_operations.py",
    "test_packaging.py",
    "test_examples.py",
    "test_compile.py",
    "test_exact.py",
    "test_check.py",
    "test_docs.py",
)


def pytest_configure(config):
    own_process.configure(config)


def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    from retrograd.measure import LiveBytes, activation_bytes

    doctest_namespace.update(
        torch=torch, rg=rg, LiveBytes=LiveBytes, activation_bytes=activation_bytes
    )
