"""Batched gradients: functions run again outside of `is_grads_batched`.

A batch of gradients goes through one backward (`torch.autograd.functional.jacobian(vectorize=True)`
does that), and torch refuses to draw random numbers in it. What forward ran on has no batch.
"""

from __future__ import annotations

from retrograd.core.guard import Guard, Undo
from retrograd.core.private import set_vmap_level, vmap_level


class BatchedGradients(Guard):
    def before_backward(self) -> bool:
        return vmap_level() > 0

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        undo.add(set_vmap_level, vmap_level())
        set_vmap_level(0)
