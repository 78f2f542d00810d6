"""Other threads: all threads of a process share the default generators.

If another thread draws while a function runs, the function gets other numbers than the state before
it promises. So when there are other threads, recompute must leave the generators as forward left
them, or untouched.
"""

from __future__ import annotations

import threading

from retrograd.core import errors
from retrograd.core.guard import Guard
from retrograd.core.guards.random_state import RandomState
from retrograd.core.program import Output, Program, place
from retrograd.core.saved import SavedAgain
from retrograd.core.streams import State


class OtherThreads(Guard):
    needs_output = True  # a function that is stopped early has not drawn all its numbers

    def __init__(
        self,
        program: Program,
        random_state: RandomState,
    ) -> None:
        self.program = program
        self.random_state = random_state

    def before_backward(self) -> bool:
        return self.random_state.has_drawn and threading.active_count() > 1

    def after_recompute(
        self,
        index: int,
        saved: list[SavedAgain],
        output: Output | None,
        state: State,
    ) -> None:
        before, after = self.random_state.states[index : index + 2]
        now = self.random_state.current()[: len(before)]
        if now not in (before, after[: len(before)]):
            raise errors.drawn_elsewhere(place(self.program, index), threading.active_count() - 1)
