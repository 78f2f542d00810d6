"""Observing stacks: all active observers see what happens, whatever the nesting."""

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.guard import MOMENTS, Guard, Undo
from retrograd.core.observe import Observer, observers
from retrograd.measure import Counting


def stack_of(blocks=3, **options):
    torch.manual_seed(0)
    pairs = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(blocks)]
    return rg.ReversibleSequence(pairs, **options)


class Recorder(Observer):
    """Notes every moment of every pass."""

    def __init__(self, kept=False):
        self.moments = []
        self.kept = kept

    def guards(self, stack, program, guards):
        return [*guards, Notes(self.moments, self.kept)]


class Notes(Guard):
    def __init__(self, moments, kept):
        self.moments = moments
        self.rebuilt_only = not kept

    def before_forward(self, state):
        self.moments.append("before_forward")

    def before_function(self, update):
        self.moments.append(f"before_function {update.index}")

    def call(self, update, run):
        again = "again" if rg.is_recomputing() else "first"
        self.moments.append(f"call {update.index} {again}")
        return run()

    def after_update(self, update):
        self.moments.append(f"after_update {update.index}")

    def at_cut(self, state):
        self.moments.append("at_cut")

    def after_forward(self, state):
        self.moments.append("after_forward")

    def before_backward(self):
        self.moments.append("before_backward")
        return True

    def before_recompute(self, index, undo):
        self.moments.append(f"before_recompute {index}")
        undo.add(self.moments.append, f"undone {index}")

    def after_recompute(self, index, saved, output, state):
        self.moments.append(f"after_recompute {index}")

    def after_undo(self, index, state):
        self.moments.append(f"after_undo {index}")


def test_the_order_of_moments():
    """As data: two updates, the second kept."""
    stack = stack_of(1)
    with Recorder() as recorder:
        stack(torch.randn(2, 4)).sum().backward()
    assert recorder.moments == [
        "before_forward",
        "before_function 0",
        "call 0 first",
        "after_update 0",
        "at_cut",
        "after_forward",
        "before_backward",
        "before_recompute 0",
        "call 0 again",
        "after_recompute 0",
        "undone 0",
        "after_undo 0",
    ]
    assert {moment.split()[0] for moment in recorder.moments} - {"undone"} == set(MOMENTS)


def test_guards_of_kept_updates_see_plain_passes_and_the_inverse():
    stack = stack_of(1, memory=rg.Keep(), streams=rg.Split())
    with Recorder(kept=True) as recorder:
        y = stack(torch.randn(2, 8))
        stack.inverse(y)
    calls = [moment for moment in recorder.moments if moment.startswith("call")]
    assert calls == ["call 0 first", "call 1 first", "call 1 first", "call 0 first"]


def test_nested_observers_all_see_everything():
    stack = stack_of()
    x = torch.randn(2, 4)
    with Counting(stack) as outer, Recorder() as middle, Counting(stack) as inner:
        stack(x).sum().backward()
    assert outer.evaluations == inner.evaluations
    assert outer.evaluations["blocks.0.f"] == 2
    assert middle.moments.count("call 0 again") == 1
    assert observers == []


def test_measuring_inside_a_check_and_around_one():
    stack = stack_of()
    with Counting(stack) as outer:
        report = rg.check(stack, torch.randn(2, 4))
    assert report.ok
    assert outer.evaluations["blocks.0.f"] > 10


def test_each_observer_may_replace_the_memory_mode_of_those_around_it():
    seen = []

    class Replaces(Observer):
        def __init__(self, mode):
            self.mode = mode

        def memory(self, stack, memory):
            seen.append(memory)
            return self.mode

    stack = stack_of(memory=rg.Anchor(1))
    with Replaces(rg.Reverse(keep_last=False)), Replaces(rg.Keep()), Counting(stack) as counting:
        stack(torch.randn(2, 4)).sum().backward()
    assert seen == [rg.Anchor(1), rg.Reverse(keep_last=False)]
    assert set(counting.evaluations.values()) == {1}  # the innermost one decides
    assert stack.memory == rg.Anchor(1)


def test_an_exception_ends_an_observation():
    with pytest.raises(KeyError), Counting(stack_of()):
        raise KeyError("mine")
    assert observers == []


def test_undo_runs_all_actions_last_first_even_if_one_raises():
    done = []
    undo = Undo()
    undo.add(done.append, 1)
    undo.add(int, "not a number")
    undo.add(done.append, 2)
    with pytest.raises(ValueError, match="not a number"):
        undo.run()
    assert done == [2, 1]
    undo.run()
    assert done == [2, 1]
