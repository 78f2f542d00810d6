"""Promise 4: every random draw replays, without flags, and the generators end up where plain
autograd leaves them.
"""

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core import walk
from retrograd.core.guard import Undo
from retrograd.core.guards.autocast import Autocast
from retrograd.core.guards.random_state import RandomState
from tests import zoo


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_dropout_replays_and_the_generator_is_left_where_plain_leaves_it(case):
    stack, x = case.build(dropout=0.3)
    torch.manual_seed(5)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    got = zoo.gradients(stack, stack(x), x)
    assert zoo.worst(got, expected) < 1e-9
    assert torch.equal(torch.get_rng_state(), after)


def test_draws_between_forward_and_backward_do_not_disturb():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build(dropout=0.3)
    torch.manual_seed(5)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    torch.manual_seed(5)
    y = stack(x)
    torch.randn(100)
    before = torch.get_rng_state()
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(nn.Module):
    """Draws in its own way, from the default generator or from one that it is given."""

    def forward(self, x, generator=None):
        return x * torch.rand(x.shape, dtype=x.dtype, generator=generator)


@pytest.mark.parametrize("own", [False, True])
def test_any_draw_replays_also_from_a_generator_in_a_keyword_argument(own):
    stack = rg.ReversibleSequence([(Noisy(), Noisy()) for _ in range(4)])
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def generator():
        torch.manual_seed(3)
        return torch.Generator().manual_seed(4) if own else None

    expected = zoo.gradients(stack, zoo.plain_stack(stack, x, generator=generator()), x)
    mine = generator()
    y = stack(x, generator=mine)
    states = torch.get_rng_state(), mine and mine.get_state()
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9
    assert torch.equal(torch.get_rng_state(), states[0])
    assert mine is None or torch.equal(mine.get_state(), states[1])


def test_states_are_kept_only_once_for_updates_that_do_not_draw(monkeypatch):
    """5 KiB each: a network without dropout must not pay for them."""
    for dropout, kept in ((0.0, 1), (0.3, 6)):
        stack, x = zoo.Case("additive", "mean", "tensor", "reverse-all").build(dropout=dropout)
        walks = []
        original = walk.Walk.begin_at

        def begin_at(self, state, walks=walks, original=original):
            original(self, state)
            walks.append(self)

        monkeypatch.setattr(walk.Walk, "begin_at", begin_at)
        stack(x)
        monkeypatch.undo()
        (note,) = [
            before.__self__
            for before in walks[0].guards.before_recompute
            if isinstance(before.__self__, RandomState)
        ]
        assert len({id(states) for states in note.states[:-1]}) == kept  # and after the last one


def test_every_device_that_holds_a_stream_is_replayed(monkeypatch):
    """No accelerator here: a stand-in for its module shows which calls it would get, and with which
    device.
    """
    device, calls, states = torch.device("cuda", 1), [], [torch.arange(16, dtype=torch.uint8)]

    class Module:
        @staticmethod
        def get_rng_state(device):
            calls.append(("get", device))
            return states[-1].clone()

        @staticmethod
        def set_rng_state(state, device):
            calls.append(("set", device))
            states.append(state.clone())

    monkeypatch.setattr(torch, "cuda", Module)
    guard, undo = RandomState({device}), Undo()
    guard.before_function(None)
    states.append(states[0] + 1)  # the function draws
    guard.at_cut({})
    assert guard.before_backward()
    guard.before_recompute(0, undo)
    assert torch.equal(states[-1], torch.arange(16, dtype=torch.uint8))
    undo.run()
    assert torch.equal(states[-1], states[0] + 1)
    assert {where for _, where in calls} == {device}
    assert "cuda" in Autocast({device}).kinds
