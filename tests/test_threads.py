"""Several threads: gradients are right, or an error says that draws cannot be repeated."""

import sys
import threading

import pytest
import torch
from torch import nn

import retrograd as rg

REBUILD = rg.Reverse(keep_last=False)


@pytest.fixture
def busy():
    """Switch between threads often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


class Noted(nn.Module):
    """Notes the mask of its real forward, so that plain autograd can use the same."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.mask = None

    def forward(self, x):
        mask = (torch.rand(x.shape) > 0.5) * 2.0
        if not rg.is_recomputing():
            self.mask = mask
        return self.b(self.a(x) * mask) * 1e-3

    def again(self, x):
        return self.b(self.a(x) * self.mask) * 1e-3


def plain(stack, x):
    x1 = x2 = x
    for block in stack.blocks:
        x1 = x1 + block.f.again(x2)
        x2 = x2 + block.g.again(x1)
    return (x1 + x2) / 2


@pytest.mark.parametrize("memory", [REBUILD, rg.Anchor(every=1)], ids=repr)
def test_another_thread_that_draws(busy, memory):
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(Noted(), Noted()) for _ in range(8)], memory=memory)
    x = torch.randn(8, 16)
    stack(x).sum().backward()
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(16)

    thread = threading.Thread(target=draw)
    thread.start()
    raised = 0
    try:
        for _ in range(30):
            stack.zero_grad()
            try:
                stack(x).sin().sum().backward()
            except rg.RecomputeError as error:
                assert "drew other random numbers" in str(error)
                raised += 1
                continue
            got = [parameter.grad for parameter in stack.parameters()]
            want = torch.autograd.grad(plain(stack, x).sin().sum(), list(stack.parameters()))
            torch.testing.assert_close(got, list(want), rtol=1e-3, atol=1e-6)
    finally:
        stop.set()
        thread.join()
    assert raised


def test_another_thread_with_a_generator_of_its_own(busy):
    stack = rg.ReversibleSequence([(Noted(), Noted()) for _ in range(4)], memory=REBUILD)
    stop = threading.Event()
    own = torch.Generator()

    def draw():
        while not stop.is_set():
            torch.rand(16, generator=own)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(30):
            stack(torch.randn(8, 16)).sum().backward()
    finally:
        stop.set()
        thread.join()


def test_threads_that_share_a_stack(busy):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())  # noqa: E731
    stack = rg.ReversibleSequence([(make(), make()) for _ in range(4)]).double()
    parameters = list(stack.parameters())
    inputs = [torch.randn(8, 16, dtype=torch.float64) for _ in range(4)]

    def gradients(x):
        return torch.autograd.grad(stack(x).square().sum(), parameters)

    expected = [gradients(x) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(25):
            got = gradients(inputs[i])
            if not all(map(torch.allclose, got, expected[i])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
