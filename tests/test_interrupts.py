"""Ctrl-C at any moment of a step leaves nothing behind: everything that was changed is put back.

A timer raises `KeyboardInterrupt` at random instructions, as Ctrl-C does. `make test` interrupts
100 times; with RETROGRAD_FUZZ set, as often as it says.
"""

import gc
import os
import random
import signal
import time

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core import tape
from retrograd.core.private import surrounding_hooks, vmap_level
from retrograd.core.walk import recomputing

INTERRUPTS = int(os.environ.get("RETROGRAD_FUZZ", "100"))


class Function(nn.Module):
    """Has all that is replayed: random numbers, statistics, a counter, a tensor of no module."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(8)
        self.mean = torch.zeros(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.norm(self.dropout(torch.tanh(self.linear(x))))


def stack_with(**options):
    return rg.ReversibleSequence([(Function(), Function()) for _ in range(4)], **options)


def state_of(stack):
    """Everything that a step must leave as it is, beside the values of buffers."""
    modules = list(stack.modules())
    return {
        "saved-tensor hooks": surrounding_hooks(),
        "is_recomputing": recomputing.depth,
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "module hooks": len(torch.nn.modules.module._global_forward_pre_hooks),
        "buffers": [id(buffer) for module in modules for buffer in module._buffers.values()],
        "training": [module.training for module in modules],
        "requires_grad": [parameter.requires_grad for parameter in stack.parameters()],
        "vmap": vmap_level(),
    }


def values_of(stack):
    """What backward must leave as it is, too."""
    means = {f"mean {i}": m.mean for i, m in enumerate(stack.modules()) if isinstance(m, Function)}
    values = {"random state": torch.get_rng_state(), **dict(stack.named_buffers()), **means}
    return {name: value.tolist() for name, value in values.items()}


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted(run, seconds):
    """Whether an interrupt after so many seconds came before `run` was over."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def seconds_of(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@pytest.fixture
def _no_gc_callbacks():
    """Hypothesis has one, and an interrupt inside of it is lost."""
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@pytest.mark.usefixtures("_no_gc_callbacks")
def test_nothing_is_left_behind():
    previous = signal.signal(signal.SIGALRM, interrupt)
    random_ = random.Random(0)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    settings = [
        {},
        {"memory": rg.Reverse(keep_last=False)},
        {"memory": rg.Anchor(every=1)},
        {"exact": True},
        {"memory": rg.Budget("80%")},
        {"verify": "always"},
    ]
    stacks = [stack_with(drift="ignore", **options) for options in settings]
    forward = backward = 0
    try:
        for stack in stacks:
            for _ in range(3):
                stack(x).sum().backward()
        seconds = {id(stack): seconds_of(lambda stack=stack: stack(x)) for stack in stacks}
        while forward + backward < INTERRUPTS:
            stack = random_.choice(stacks)
            before = state_of(stack)
            limit = 3 * seconds[id(stack)]
            if random_.random() < 0.5:
                forward += interrupted(lambda: stack(x), random_.uniform(1e-5, limit))  # noqa: B023
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled=random_.random() < 0.3):
                    loss = stack(x).float().sum()
                values = values_of(stack)
                backward += interrupted(loss.backward, random_.uniform(1e-5, limit))
                assert values_of(stack) == values
            assert state_of(stack) == before
            stack.zero_grad()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert forward > INTERRUPTS / 5
    assert backward > INTERRUPTS / 5


def test_an_interrupt_right_after_the_hooks_are_on(monkeypatch):
    def push(pack, unpack):
        real(pack, unpack)
        raise KeyboardInterrupt

    real = tape.push_hooks
    monkeypatch.setattr(tape, "push_hooks", push)
    with pytest.raises(KeyboardInterrupt):
        stack_with()(torch.randn(4, 8))
    assert surrounding_hooks() is None


def test_hooks_that_are_not_allowed():
    stack = stack_with()
    loss = stack(torch.randn(4, 8)).sum()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        with pytest.raises(RuntimeError, match="no hooks here"):
            stack(torch.randn(4, 8))
        with pytest.raises(RuntimeError, match="no hooks here"):
            loss.backward()
    assert surrounding_hooks() is None
