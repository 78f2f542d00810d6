"""A graph that no backward walks is freed when it is dropped, whoever holds an activation."""

import gc
import weakref

import pytest
import torch
from torch import nn

import retrograd as rg

MEMORY = [rg.Keep(), rg.Reverse(keep_last=False), rg.Reverse(), rg.Anchor(every=1)]
every_memory = pytest.mark.parametrize("memory", MEMORY, ids=repr)


class Batch:
    """An argument that is no tensor."""


class Reads(nn.Linear):
    def forward(self, x, batch):
        return super().forward(x)


class Stores(nn.Linear):
    """Keeps its last activation in an attribute."""

    def forward(self, x):
        self.last = super().forward(x).tanh()
        return self.last


class Returns(nn.Linear):
    """An adapter that is switched off: returns what it read."""

    def forward(self, x):
        return x


def stack_of(kind, memory):
    return rg.ReversibleSequence([(kind(8, 8), kind(8, 8)) for _ in range(3)], memory=memory)


def alive(name):
    gc.collect()
    return sum(type(value).__name__ == name for value in gc.get_objects())


@every_memory
def test_an_argument_may_hold_the_output(memory):
    stack = stack_of(Reads, memory)
    batch = Batch()
    batch.y = stack(torch.randn(4, 8), batch=batch)
    reference = weakref.ref(batch)
    del batch
    gc.collect()
    assert reference() is None


@every_memory
def test_a_closure_in_an_argument_may_hold_the_output(memory):
    stack = stack_of(Reads, memory)

    def call():
        kept = []
        kept.append(stack(torch.randn(4, 8), batch=lambda: kept))
        return weakref.ref(kept[0])

    reference = call()
    gc.collect()
    assert reference() is None


@every_memory
def test_a_module_may_hold_an_activation(memory):
    stack = stack_of(Stores, memory)
    stack(torch.randn(4, 8))
    reference = weakref.ref(stack.blocks[0].f)
    del stack
    gc.collect()
    assert reference() is None


@every_memory
def test_the_output_outlives_its_stack(memory):
    """Nobody holds the modules and the arguments but the graph of the loss."""
    stack = stack_of(Reads, memory)
    weight = stack.blocks[0].f.weight
    loss = stack(torch.randn(4, 8), batch=Batch()).sum()
    del stack
    gc.collect()
    loss.backward()
    assert weight.grad is not None


def test_a_stored_activation_needs_the_output():
    """The loss uses only what a function stored: backward says that the output is gone."""
    stack = stack_of(Stores, rg.Reverse(keep_last=False))
    y = stack(torch.randn(4, 8))
    loss = stack.blocks[1].f.last.sum()
    with_output = torch.autograd.grad(loss, stack.blocks[0].f.weight, retain_graph=True)
    assert with_output[0].isfinite().all()
    y = stack(torch.randn(4, 8))
    loss = stack.blocks[1].f.last.sum()
    del y
    with pytest.raises(rg.RecomputeError, match="a stack whose output is gone"):
        loss.backward()


def test_second_gradients_outlive_the_output():
    stack = stack_of(nn.Linear, rg.Reverse(keep_last=False)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    weight = stack.blocks[0].f.weight
    (first,) = torch.autograd.grad(stack(x).tanh().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    stack.memory = rg.Keep()
    (expected,) = torch.autograd.grad(stack(x).tanh().sum(), weight, create_graph=True)
    (expected,) = torch.autograd.grad(expected.square().sum(), weight)
    assert (second - expected).abs().max() < 1e-9


@every_memory
def test_a_function_may_return_what_it_read(memory):
    """Its output is a node of the caller's. A pass that is dropped leaves nothing there."""
    encoder = nn.Linear(8, 8)
    pairs = [(Returns(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(3)]
    stack = rg.ReversibleSequence(pairs, memory=memory)
    h = encoder(torch.randn(4, 8))
    before = alive("Walk")
    for _ in range(3):
        stack(h)
    assert alive("Walk") == before
    with torch.no_grad():
        stack.blocks[0].g[0].weight.mul_(1.1)
    stack(h).sum().backward()
    assert encoder.weight.grad is not None


def test_the_output_may_be_edited_where_an_argument_is_an_object():
    stack = stack_of(Reads, rg.Reverse(keep_last=False))
    y = stack(torch.randn(4, 8), batch=Batch())
    y += 1
    y.square().sum().backward()
    assert all(parameter.grad is not None for parameter in stack.parameters())
