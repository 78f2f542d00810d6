"""Promise 14: backward runs each function once; an exception or Ctrl-C in the middle leaves
everything usable.
"""

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo


class Trace(nn.Linear):
    log: list = []
    fail = None

    def __init__(self, name):
        super().__init__(4, 4)
        self.name = name
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        Trace.log.append(self.name)
        y = self.drop(self.norm(super().forward(x).sin()))
        if rg.is_recomputing() and Trace.fail == self.name:
            raise Trace.error("in the middle")
        return y


@pytest.fixture
def stack():
    Trace.log, Trace.fail, Trace.error = [], None, ValueError
    return rg.ReversibleSequence([(Trace(f"f{i}"), Trace(f"g{i}")) for i in range(3)]).double()


@pytest.mark.parametrize(
    ("memory", "recomputed"),
    [
        (rg.Keep(), ""),
        (rg.Reverse(keep_last=False), "g2 f2 g1 f1 g0 f0"),
        (rg.Reverse(), "g1 f1 g0 f0"),
    ],
)
def test_the_order_of_recomputation(stack, memory, recomputed):
    stack.memory = memory
    stack(torch.randn(8, 4, dtype=torch.float64)).square().sum().backward()
    assert " ".join(Trace.log) == ("f0 g0 f1 g1 f2 g2 " + recomputed).strip()


def test_functions_that_backward_does_not_reach_are_not_run(stack):
    for block in stack.blocks[:2]:
        block.requires_grad_(False)
    stack.memory = rg.Reverse(keep_last=False)
    stack(torch.randn(8, 4, dtype=torch.float64)).sum().backward()
    assert " ".join(Trace.log) == "f0 g0 f1 g1 f2 g2 g2 f2"


def test_a_second_backward_walks_again(stack):
    stack.memory = rg.Reverse(keep_last=False)
    y = stack(torch.randn(8, 4, dtype=torch.float64)).square().sum()
    for _ in range(2):
        y.backward(retain_graph=True)
    assert " ".join(Trace.log) == "f0 g0 f1 g1 f2 g2" + " g2 f2 g1 f1 g0 f0" * 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["g1", "f0"])
@pytest.mark.parametrize("retain", [False, True])
def test_an_exception_in_the_middle_of_backward(stack, error, where, retain):
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = stack(x)
    buffers, state = [b.clone() for b in stack.buffers()], torch.get_rng_state()
    Trace.fail, Trace.error = where, error
    expected_error = rg.RecomputeError if error is ValueError else error
    with pytest.raises(expected_error, match="in the middle") as raised:
        zoo.loss(y).backward(retain_graph=retain)
    if error is ValueError:  # the user's own is the cause
        assert isinstance(raised.value.__cause__, ValueError)
        assert "update" in str(raised.value) and f"blocks.{where[1]}.{where[0]}" in str(
            raised.value
        )
    Trace.fail = None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(stack.buffers(), buffers))
    assert all(module.training for module in stack.modules())
    assert not rg.is_recomputing()
    assert torch.is_grad_enabled()
    torch.manual_seed(1)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    if retain:
        assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9
    torch.manual_seed(1)
    assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9


def test_flops_are_four_thirds_less_the_last_block():
    from torch.utils.flop_counter import FlopCounterMode

    for depth in (2, 4, 8, 16):
        make = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))  # noqa: E731
        stack = rg.ReversibleSequence([(make(), make()) for _ in range(depth)])
        x = torch.randn(8, 16, requires_grad=True)
        counts = []
        for mode in (rg.Keep(), rg.Reverse()):
            stack.memory = mode
            stack.zero_grad()
            with FlopCounterMode(display=False) as counter:
                stack(x).sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[1] / counts[0] == pytest.approx(4 / 3 - 1 / (3 * depth), abs=1e-12)


def test_a_thousand_blocks():
    """No recursion limit and no quadratic behaviour: bookkeeping is counted per update, and does
    not grow.
    """
    import gc

    def objects(depth):
        stack = rg.ReversibleSequence(
            [(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(depth)], drift="ignore"
        )
        x = torch.randn(1, 2, requires_grad=True)
        gc.collect()
        before = len(gc.get_objects())
        y = stack(x)
        gc.collect()
        count = len(gc.get_objects()) - before
        y.sum().backward()
        return count / (2 * depth)

    assert objects(64) == pytest.approx(objects(1024), rel=0.1)


def test_backward_from_another_thread(stack):
    import threading

    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    torch.manual_seed(1)
    y, got = stack(x), []
    thread = threading.Thread(target=lambda: got.extend(zoo.gradients(stack, y, x)))
    thread.start()
    thread.join()
    assert zoo.worst(got, expected) < 1e-9
