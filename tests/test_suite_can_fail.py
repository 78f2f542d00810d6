"""The suite itself: planted faults must be caught, or a green run means nothing."""

import pytest
import torch

import retrograd as rg
from retrograd.core import tape, updates, walk
from retrograd.core.guards.buffers import Buffers
from retrograd.core.guards.modules import ModuleState
from retrograd.core.guards.random_state import RandomState
from tests import (
    test_buffers,
    test_gradients,
    test_independent_calls,
    test_memory,
    test_random,
    zoo,
)

CAUGHT = (
    AssertionError,
    rg.RecomputeError,
    rg.DriftWarning,
)  # by a comparison, or by retrograd itself
CASE = zoo.Case("additive", "mean", "tensor", "reverse-all")


def test_an_inverse_off_by_a_thousandth(monkeypatch):
    monkeypatch.setattr(updates.Additive, "inverse", lambda self, y, out: y - out * 1.001)
    monkeypatch.setattr(updates.Additive, "inverse_", lambda self, y, out: y - out * 1.001)
    with pytest.raises(CAUGHT):
        test_gradients.test_outputs_and_gradients_are_those_of_plain_autograd(CASE)


def test_an_inverse_off_by_a_billionth(monkeypatch):
    """Near the tolerance of 1e-9: it is tight enough to see this at depth 3."""
    monkeypatch.setattr(updates.Additive, "inverse", lambda self, y, out: y - out * (1 + 1e-7))
    monkeypatch.setattr(updates.Additive, "inverse_", lambda self, y, out: y - out * (1 + 1e-7))
    with pytest.raises(CAUGHT):
        test_gradients.test_outputs_and_gradients_are_those_of_plain_autograd(CASE)


def test_randomness_that_is_not_replayed(monkeypatch):
    monkeypatch.setattr(RandomState, "restore", lambda self, states: None)
    with pytest.raises(CAUGHT):
        test_random.test_dropout_replays_and_the_generator_is_left_where_plain_leaves_it(CASE)


def test_training_flags_that_are_not_replayed(monkeypatch):
    original = ModuleState.__init__

    def forgetful(self, *args):
        original(self, *args)
        self.training = [False] * len(self.training)

    monkeypatch.setattr(ModuleState, "__init__", forgetful)
    with pytest.raises(CAUGHT):
        test_independent_calls.test_backwards_in_any_order(CASE, (0, 1, 2))


def test_buffers_that_are_not_replayed(monkeypatch):
    monkeypatch.setattr(Buffers, "before_recompute", lambda self, index, undo: None)
    with pytest.raises(CAUGHT):
        test_buffers.test_buffers_are_updated_once_and_replayed("counter", "reverse-all", False)


def test_activations_that_are_not_dropped(monkeypatch):
    leak = []
    original = tape.ForwardHooks.pack

    def pack(self, tensor):
        leak.append(tensor.detach())
        return original(self, tensor)

    monkeypatch.setattr(tape.ForwardHooks, "pack", pack)
    with pytest.raises(AssertionError):
        test_memory.test_flat_in_depth({})


def test_streams_that_are_overwritten(monkeypatch):
    monkeypatch.setattr(walk, "is_unshared", lambda tensor: True)
    with pytest.raises((AssertionError, rg.InPlaceError, RuntimeError)):
        test_memory.test_streams_that_the_caller_holds_are_not_overwritten()
        test_gradients.test_outputs_and_gradients_are_those_of_plain_autograd(CASE)


def test_a_gradient_that_is_missing():
    assert zoo.worst([None, torch.ones(1)], [torch.ones(1), torch.ones(1)]) == float("inf")
    assert zoo.worst([torch.ones(1)], [torch.full((1,), 1.001)]) > 1e-4
