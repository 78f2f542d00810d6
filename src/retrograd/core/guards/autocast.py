"""Autocast: functions run again in the autocast state of their forward."""

from __future__ import annotations

import torch

from retrograd.core.guard import Guard, Undo

AutocastState = tuple[torch.dtype, bool]  # the dtype, and whether casts of weights are cached


class Autocast(Guard):
    def __init__(self, devices: set[torch.device]) -> None:
        kinds = sorted({"cpu", *(device.type for device in devices)})
        self.kinds = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
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
        for kind, then, now in zip(self.kinds, self.states, self.current()):
            if then != now:
                dtype, cache = then or (None, None)
                context = torch.autocast(
                    kind, enabled=then is not None, dtype=dtype, cache_enabled=cache
                )
                context.__enter__()
                undo.add(context.__exit__, None, None, None)


def autocast_state(kind: str) -> AutocastState | None:
    if not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
