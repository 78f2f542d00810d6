"""Autocast: functions run again in the autocast state of their forward."""

from __future__ import annotations

import torch

from retrograd.core.guard import Guard, Undo

AutocastState = tuple[torch.dtype, bool]  # the dtype, and whether casts of weights are cached


class Autocast(Guard):
    def __init__(self, devices: set[torch.device]) -> None:
        self.kinds = sorted({"cpu", *(device.type for device in devices)})
        self.states = self.current()

    def current(self) -> list[AutocastState | None]:
        """The state for each kind of device; None where autocast is off."""
        return [autocast_state(kind) for kind in self.kinds]

    def before_backward(self) -> bool:
        return self.current() != self.states

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        cache = torch.is_autocast_cache_enabled()
        for kind, then, now in zip(self.kinds, self.states, self.current()):
            if then != now:
                undo.add(torch.set_autocast_cache_enabled, cache)
                undo.add(torch.clear_autocast_cache)  # the casts belong to the graph of recompute
                undo.add(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
                undo.add(torch.set_autocast_enabled, kind, now is not None)
                torch.set_autocast_enabled(kind, then is not None)
                if then is not None:
                    dtype, keeps_casts = then
                    torch.set_autocast_dtype(kind, dtype)
                    torch.set_autocast_cache_enabled(keeps_casts)


def autocast_state(kind: str) -> AutocastState | None:
    """The state of autocast for a kind of device; None where it is off, or does not exist."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
