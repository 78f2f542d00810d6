"""A second device without a GPU: `rgdev`, with the indices 0 and 1.

`device.cpp` says what it is. A test uses it like this:

    from tests import device

    device.load()                       # builds it the first time; skips if there is no compiler
    x = torch.randn(3, device="rgdev")
    with device.waiting() as names:     # what made the host wait for the device
        x.sum().item()
    assert names == ["_local_scalar_dense"]

With `device.without(device.GENERATORS)` it is a device that lacks something.

The autograd engine starts its threads, one for each device, in the first backward of a process. So
a process has to load the device before that.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import rgdev

NAME = "rgdev"
LIBRARY = "retrograd_test_device"
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ["-O1", "-g0"]

# What devices may lack, as names in their module.
GENERATORS = ("get_rng_state", "set_rng_state")
AUTOCAST = ("get_amp_supported_dtype",)
MEMORY = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "memory_stats")


def load() -> None:
    """Build the device, the first time, and register it with torch as `torch.rgdev`."""
    if rgdev.native is not None:
        return
    rgdev.native = _import(library())
    generators = map(rgdev.native.default_generator, range(rgdev.device_count()))
    rgdev.default_generators = tuple(generators)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, rgdev)
    torch.utils.generate_methods_for_privateuse1_backend()
    try:
        torch.ones((), device=NAME, requires_grad=True).backward()
    except RuntimeError as error:
        raise RuntimeError("load the test device before the first backward") from error


def native() -> Any:
    """Its library. Skips a test that runs on another device, which counts nothing."""
    if rgdev.native is None:
        pytest.skip("only the test device counts waits, or can lack something")
    return rgdev.native


def waits() -> int:
    """How often the host has waited for the device, since `reset_waits`."""
    return len(native().waits())


def uploads() -> int:
    """Copies from the host to the device that were not asked to be asynchronous.

    On CUDA they wait for the device, too. They are counted by themselves.
    """
    return native().uploads()


def reset_waits() -> None:
    native().reset_waits()


@contextlib.contextmanager
def waiting() -> Iterator[list[str]]:
    """Yields a list that has, afterwards, the operations that waited for the device inside."""
    names: list[str] = []
    before = waits()
    yield names
    names += rgdev.native.waits()[before:]


@contextlib.contextmanager
def without(names: tuple[str, ...]) -> Iterator[None]:
    """Make the device one that lacks these functions in its module."""
    native().set_statistics(names != MEMORY)
    removed = {name: vars(rgdev).pop(name) for name in names}
    try:
        yield
    finally:
        vars(rgdev).update(removed)
        rgdev.native.set_statistics(True)


@contextlib.contextmanager
def late_copies() -> Iterator[list[str]]:
    """Copies on a stream of their own run when someone waits for them, and not before.

    Yields a list that has, afterwards, what was wrong with their order.
    """
    names: list[str] = []
    native().set_late(True)
    try:
        yield names
        torch.accelerator.synchronize()
        names += rgdev.native.races()
    finally:
        rgdev.native.set_late(False)


def set_bandwidth(bytes_a_second: float) -> None:
    """Of copies between pinned memory and the device, as events measure it."""
    native().set_bandwidth(bytes_a_second)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """What the capture of a CUDA graph forbids raises: waits, and reading states of generators.

    Unlike there, the work is done at once.
    """
    native()
    rgdev.is_capturing = True
    try:
        with waiting() as names:
            yield
    finally:
        rgdev.is_capturing = False
    if names:
        raise RuntimeError(f"the host waited for the device inside a capture: {names}")


# --- building


def library() -> Path:
    """The compiled library: for this source, this torch and this Python, built once."""
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(f"{torch.__version__} {sys.implementation.cache_tag} {FLAGS}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = cache / "retrograd-tests" / key.hexdigest()[:16] / f"{LIBRARY}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _build(library)
    return library


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. The lock of a process that dies is free again."""
    fcntl = pytest.importorskip("fcntl", reason="the test device is built on POSIX systems only")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    # The ninja of this environment, whether it is activated or not.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which(cpp_extension.get_cxx_compiler()) is None or shutil.which("ninja") is None:
        pytest.skip("the test device needs a C++ compiler and ninja", allow_module_level=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpp_extension.load(
            LIBRARY, [str(SOURCE)], FLAGS, build_directory=folder, is_python_module=False
        )
        os.replace(Path(folder) / library.name, library)


def _import(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(LIBRARY, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
