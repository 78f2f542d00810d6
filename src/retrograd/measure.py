"""Counting bytes of live tensors, exactly, on any device.

A dispatch mode sees every tensor that an operation makes, and a weak reference to its storage tells when the memory goes. So
the count is of tensors, not of the process: repeatable to the byte, whatever the allocator does. Scratch memory inside a
kernel is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from retrograd.core.private import DispatchMode
from retrograd.core.streams import flatten


class LiveBytes(DispatchMode):
    """While active, counts bytes of tensors made inside: `now`, and `peak`, the most there ever were.

    Tensors that existed before, such as parameters, do not count. Gradients do: `peak - gradients` is what a user sees as
    activation memory.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(256)
        ...     y = x + 1
        ...     del x
        >>> live.now, live.peak
        (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # by the address of a storage, as long as it lives; 0 for one from before
        self._watches: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = None
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata in self._sizes:
                    continue
                if inputs is None:  # a view or an in-place result of a tensor from before
                    leaves = flatten((args, kwargs or {}))[0]
                    inputs = {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
                self._add(storage, 0 if storage._cdata in inputs else storage.nbytes())
        return result

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        self._sizes[key] = size
        self._watches[key] = weakref.ref(storage, lambda _: self._remove(key))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._watches[key]


def activation_bytes(step: Callable[[], Any], leaves: Iterable[Tensor]) -> int:
    """The most bytes of live tensors while `step()` runs a forward and a backward, less the gradients that it gives the `leaves`.

    Example:
        >>> net = torch.nn.Linear(4, 4)
        >>> activation_bytes(lambda: net(torch.ones(2, 4)).tanh().sum().backward(), net.parameters()) > 0
        True
    """
    leaves = list(leaves)
    for leaf in leaves:
        leaf.grad = None
    with LiveBytes() as live:
        step()
    return live.peak - sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
