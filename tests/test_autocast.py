"""Promise 6: f and g recompute under the autocast state of their forward, wherever backward() is
called.
"""

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo


@pytest.mark.parametrize(
    "case", [case for case in zoo.REVERSED if case.coupling == "additive"], ids=str
)
@pytest.mark.parametrize("backward_under_autocast", [False, True])
def test_backward_inside_or_outside_autocast(case, backward_under_autocast):
    stack, x = case.build(dropout=0.1, dtype=torch.float32)
    gradients = []
    for run in (stack, lambda x: zoo.plain_stack(stack, x)):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        assert all(leaf.dtype == torch.float32 for leaf in zoo.leaves(y))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_under_autocast):
            gradients.append(zoo.gradients(stack, y, x))
    # bfloat16 rounds to 3 digits; a function recomputed in float32 would be off by as much, one in
    # bfloat16 rarely is.
    assert zoo.worst(*gradients) < 2e-2


def test_recompute_sees_the_state_of_forward_whatever_it_was():
    """Also a region within f where autocast is off, and a backward under autocast of a forward that
    had none.
    """
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(
                (
                    rg.is_recomputing(),
                    torch.is_autocast_enabled("cpu"),
                    torch.get_autocast_dtype("cpu"),
                )
            )
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    stack = rg.ReversibleSequence(
        [(Spy(4, 4), Spy(4, 4)) for _ in range(2)], memory=rg.Reverse(keep_last=False)
    )
    x = torch.randn(2, 4)
    for forward, backward in (
        (torch.float16, None),
        (None, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ):
        seen.clear()
        with torch.autocast("cpu", dtype=forward, enabled=forward is not None):
            y = stack(x)
        with torch.autocast("cpu", dtype=backward, enabled=backward is not None):
            y.sum().backward()
        assert [recomputing for recomputing, *_ in seen] == [False] * 4 + [True] * 4
        assert {state[1] for state in seen} == {forward is not None}
        assert forward is None or {state[2] for state in seen} == {forward}
        assert not torch.is_autocast_enabled("cpu")


def test_bfloat16_parameters_leave_the_streams_wide():
    """A function may return a narrower dtype than its stream; the stream stays as it was."""

    class Narrow(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    stack = rg.ReversibleSequence([(Narrow(4, 4), Narrow(4, 4)) for _ in range(3)]).to(
        torch.bfloat16
    )
    x = torch.randn(2, 4, requires_grad=True)
    y = stack(x)
    assert y.dtype == torch.float32
    assert (
        zoo.worst(zoo.gradients(stack, y, x), zoo.gradients(stack, zoo.plain_stack(stack, x), x))
        < 2e-2
    )
