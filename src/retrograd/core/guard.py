"""Guards: what surrounds an update, in forward and when backward runs it again.

A guard protects one thing: the random state, the buffers, the versions of the inputs, the range of
the grid. It either replays that thing or raises if it is not what it has to be. Each guard is one
small file in `guards/`. Its methods are named by the moment they run:

    before_forward(state)        the streams are ready, no update has run
      before_function(update)    a function is about to run in forward
      call(update, run)          around every run of a function, in every pass
      after_update(update)       the function and its coupling have run in forward
    at_cut(state)                the last update that backward rebuilds has run
    after_forward(state)         the last update has run

    before_backward()            a walk back begins, or begins again: is this guard needed in it?
      before_recompute(index, undo)    update `index` is about to run again
      after_recompute(index, saved, output, state)    its function has run again
      after_undo(index, state)         the streams before update `index` are rebuilt

A guard belongs to one call of a stack. It must not refer to the graph, the tape or the walk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from retrograd.core.streams import State

if TYPE_CHECKING:
    from retrograd.core.program import Application, Output
    from retrograd.core.saved import SavedAgain

MOMENTS = (
    "before_forward",
    "before_function",
    "call",
    "after_update",
    "at_cut",
    "after_forward",
    "before_backward",
    "before_recompute",
    "after_recompute",
    "after_undo",
)


class Undo(list[tuple[Callable[..., Any], tuple[Any, ...]]]):
    """Actions that put things back. Register an action before the change that it takes back.

    [Note: interrupts] Ctrl-C raises `KeyboardInterrupt` wherever Python code runs: after a call
    into C, at the start of a Python function. So every change is made inside the `try` whose
    `finally` takes it back, and an action stays registered until it is done. If the interrupt comes
    in `run`, a second `run` does the rest: actions may run twice.
    """

    def add(
        self,
        action: Callable[..., Any],
        *args: Any,
    ) -> None:
        self.append((action, args))

    def run(self) -> None:
        """Run all actions, the last one first. An action that raises does not stop the others."""
        while self:
            action, args = self[-1]
            try:
                action(*args)
            except Exception:
                self.pop()
                self.run()
                raise
            self.pop()


class Guard:
    """The base class: every moment passes without effect. See the module for the moments."""

    rebuilt_only = True  # False: it also surrounds updates that are kept, and plain passes
    needs_output = False  # True: in a backward that it takes part in, functions run to their end

    def before_forward(self, state: State) -> None:
        """Look at the streams before the first update."""

    def before_function(self, update: Application) -> None:
        """Look at an update before its function runs in forward."""

    def call(
        self,
        update: Application,
        run: Callable[[], Any],
    ) -> Any:
        """Run a function by calling `run`, and return what it returns."""
        return run()

    def after_update(self, update: Application) -> None:
        """Look at an update after its function and its coupling ran in forward."""

    def at_cut(self, state: State) -> None:
        """Look at the streams from which backward starts to rebuild."""

    def after_forward(self, state: State) -> None:
        """Look at the streams after the last update."""

    def before_backward(self) -> bool:
        """A walk back begins. Returns whether `before_recompute` has anything to do in it."""
        return True

    def before_recompute(
        self,
        index: int,
        undo: Undo,
    ) -> None:
        """Put back what update `index` saw in forward, and register with `undo` how to end that."""

    def after_recompute(
        self,
        index: int,
        saved: list[SavedAgain],
        output: Output | None,
        state: State,
    ) -> None:
        """Look at what autograd saved and what the function returned when it ran again.

        What forward saw is still in place. `output` is None if the function was stopped early.
        """

    def after_undo(
        self,
        index: int,
        state: State,
    ) -> None:
        """Look at the rebuilt streams before update `index`."""


class Guards:
    """The guards of one call, by moment. Each list has the guards that do something then."""

    __slots__ = (*MOMENTS, "in_backward", "need_output")

    before_forward: list[Callable[[State], None]]
    before_function: list[Callable[[Application], None]]
    call: list[Callable[[Application, Callable[[], Any]], Any]]
    after_update: list[Callable[[Application], None]]
    at_cut: list[Callable[[State], None]]
    after_forward: list[Callable[[State], None]]
    before_backward: list[Callable[[], bool]]
    before_recompute: list[Callable[[int, Undo], None]]
    after_recompute: list[Callable[[int, list[SavedAgain], Output | None, State], None]]
    after_undo: list[Callable[[int, State], None]]

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        for moment in MOMENTS:
            setattr(self, moment, [])
        self.in_backward: list[Guard] = []
        self.need_output = False
        self.add(guards)

    def add(self, guards: Iterable[Guard]) -> None:
        """Use these guards, too, from now on."""
        for guard in guards:
            moments = _moments_of(type(guard))
            for moment in moments:
                getattr(self, moment).append(getattr(guard, moment))
            if not _IN_BACKWARD.isdisjoint(moments):
                self.in_backward.append(guard)

    def begin_backward(self) -> None:
        """A walk back begins: keep those guards for recompute that have something to do in it."""
        needed = [guard for guard in self.in_backward if guard.before_backward()]
        self.before_recompute = _methods(needed, "before_recompute")
        self.after_recompute = _methods(needed, "after_recompute")
        self.need_output = any(guard.needs_output for guard in needed)


_IN_BACKWARD = {"before_backward", "before_recompute", "after_recompute"}


def _methods(guards: list[Guard], moment: str) -> list[Any]:
    """What the guards do at a moment."""
    return [getattr(guard, moment) for guard in guards if moment in _moments_of(type(guard))]


@functools.cache
def _moments_of(kind: type[Guard]) -> tuple[str, ...]:
    """The moments at which guards of this class do something."""
    return tuple(name for name in MOMENTS if getattr(kind, name) is not getattr(Guard, name))


NO_GUARDS = Guards()
