"""`torch.rgdev`: what a device has in Python, as `torch.cuda` has it. `load` sets `native`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

native: Any = None
default_generators: tuple[torch.Generator, ...] = ()


def _index(device: Any = None) -> int:
    """The index of a device, given as PyTorch's functions take it."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# --- devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return native.device_count()


def current_device() -> int:
    return native.current_device()


def set_device(device: Any) -> None:
    native.set_device(_index(device))


class device:
    """A context with another current device."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def synchronize(device: Any = None) -> None:
    native.synchronize()


# --- graphs: see `tests.device.capture`

is_capturing = False


def is_current_stream_capturing() -> bool:
    return is_capturing


def _not_while_capturing() -> None:
    if is_capturing:
        raise RuntimeError("the state of a generator cannot be read while a graph is captured")


# --- generators


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = None) -> Tensor:
    _not_while_capturing()
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    _not_while_capturing()
    default_generators[_index(device)].set_state(new_state)


# --- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# --- memory


def memory_allocated(device: Any = None) -> int:
    return native.usage(_index(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    return native.usage(_index(device))[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    native.reset_peak(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = native.usage(_index(device))
    return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}


def empty_cache() -> None:
    pass
