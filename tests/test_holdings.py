"""What a function holds is replayed or checked wherever it keeps it: closures, partials, lists,
objects, globals.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import retrograd as rg
from retrograd.checking.holdings import Holdings
from tests import zoo

REVERSED = {name: memory for name, memory in zoo.MEMORY.items() if name != "keep"}
every_memory = pytest.mark.parametrize("memory", REVERSED)


def noisy(before, after, generator, x):
    """Draws from a generator of its own. With `after` at zero, another draw leaves the streams
    alone: only gradients tell.
    """
    return after(before(x) * torch.rand(4, generator=generator, dtype=x.dtype))


@dataclasses.dataclass
class Settings:
    generator: torch.Generator


class Callable_:
    def __init__(self, *held):
        self.held = list(held)

    def __call__(self, x):
        return noisy(*self.held, x)


class Attribute(nn.Module):
    def __init__(self, before, after, generator):
        super().__init__()
        self.before, self.after, self.generators = before, after, {"own": generator}

    def forward(self, x):
        return noisy(self.before, self.after, self.generators["own"], x)


def in_a_closure(before, after, generator):
    return lambda x: noisy(before, after, generator, x)


def in_an_object(before, after, generator):
    settings = Settings(generator)
    return lambda x: noisy(before, after, settings.generator, x)


def in_a_default(before, after, generator):
    def function(x, held=(before, after), *, generator=generator):
        return noisy(*held, generator, x)

    return function


def in_a_method(before, after, generator):
    class Owner:
        def __init__(self):
            self.generator = generator

        def run(self, x):
            return noisy(before, after, self.generator, x)

    return Owner().run


PLACES = {
    "partial": lambda *held: functools.partial(noisy, *held),
    "callable object": Callable_,
    "attribute of a module": Attribute,
    **{
        function.__name__: function
        for function in (in_a_closure, in_an_object, in_a_default, in_a_method)
    },
}


@every_memory
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_generators_replay_and_end_where_plain_leaves_them(place, exact, memory):
    def gradients(memory):
        torch.manual_seed(0)
        functions, weights, generators = [], [], []
        for i in range(6):
            before, after = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.zeros_(after.weight)
            generators.append(torch.Generator().manual_seed(i))
            functions.append(PLACES[place](before, after, generators[-1]))
            weights += [*before.parameters(), *after.parameters()]
        stack = rg.ReversibleSequence(
            zip(functions[::2], functions[1::2]), memory=memory, exact=exact
        )
        loss = stack(torch.randn(2, 4)).sin().sum()
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return list(found), [generator.get_state() for generator in generators]

    got, states = gradients(REVERSED[memory])
    expected, plain_states = gradients(rg.Keep())
    assert zoo.worst(got, expected) < (1e-12 if exact else 1e-4)
    assert all(map(torch.equal, states, plain_states))


def test_a_generator_in_an_argument_that_is_no_pytree():
    class Draws(nn.Linear):
        def forward(self, x, settings):
            return super().forward(x) * torch.rand(4, generator=settings.generator, dtype=x.dtype)

    stack = rg.ReversibleSequence([(Draws(4, 4), Draws(4, 4)) for _ in range(4)]).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    found = []
    for memory in (rg.Keep(), rg.Reverse(keep_last=False)):
        stack.memory = memory
        found.append(
            zoo.gradients(stack, stack(x, settings=Settings(torch.Generator().manual_seed(1))))
        )
    assert zoo.worst(*found) < 1e-9


def test_a_generator_among_many_arguments():
    class Draws(nn.Linear):
        def forward(self, x, settings):
            return super().forward(x) * torch.rand(4, generator=settings[-1], dtype=x.dtype)

    stack = rg.ReversibleSequence([(Draws(4, 4), Draws(4, 4)) for _ in range(4)]).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    found = []
    for memory in (rg.Keep(), rg.Reverse(keep_last=False)):
        stack.memory = memory
        found.append(
            zoo.gradients(stack, stack(x, settings=[*range(100), torch.Generator().manual_seed(1)]))
        )
    assert zoo.worst(*found) < 1e-9


@every_memory
def test_a_function_that_seeds_leaves_the_generator_as_plain_does(memory):
    """Every function starts with the same seed, so that the state before it is the state
    after it.
    """

    class Seeded(zoo.Mix):
        def forward(self, x):
            torch.manual_seed(0)
            return super().forward(x) * torch.rand(4, dtype=x.dtype)

    def next_draw(memory):
        torch.manual_seed(5)
        stack = rg.ReversibleSequence(
            [(Seeded(4), Seeded(4)) for _ in range(3)], memory=memory
        ).double()
        y = stack(torch.randn(2, 4, dtype=torch.float64))
        torch.rand(3)
        y.sum().backward()
        return torch.rand(1).item()

    assert next_draw(REVERSED[memory]) == next_draw(rg.Keep())


# --- modules

statistics = nn.BatchNorm1d(4)


def uses_a_global(x):
    return statistics(x)


def calls_a_function_that_uses_a_global(x):
    return uses_a_global(x).sin()


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = [nn.BatchNorm1d(4)]

    def forward(self, x):
        return self.shared[0](x)


@every_memory
@pytest.mark.parametrize("function", [uses_a_global, calls_a_function_that_uses_a_global])
def test_statistics_of_a_global_module_are_updated_once(function, memory):
    statistics.reset_running_stats()
    rg.ReversibleSequence([(function, function)] * 3, memory=REVERSED[memory])(
        torch.randn(8, 4, requires_grad=True)
    ).sum().backward()
    assert statistics.num_batches_tracked == 6


@every_memory
def test_statistics_of_a_module_in_a_list_are_updated_once(memory):
    functions = [InAList() for _ in range(6)]
    stack = rg.ReversibleSequence(zip(functions[::2], functions[1::2]), memory=REVERSED[memory])
    for step in range(1, 3):
        stack(torch.randn(8, 4, requires_grad=True)).sum().backward()
        assert [function.shared[0].num_batches_tracked.item() for function in functions] == [
            step
        ] * 6
        for function in functions:  # another one in its place, which the stack must find
            function.shared[0] = function.shared[0].__class__(4).requires_grad_(False)
            function.shared[0].num_batches_tracked.add_(step)


def test_a_parent_is_not_part_of_a_function():
    """Modules refer to their parents through lists; a function does not consist of the
    whole model.
    """

    class Child(nn.Linear):
        def __init__(self, parent):
            super().__init__(4, 4)
            self.parent = [parent]

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = rg.ReversibleSequence([(Child(self), Child(self)) for _ in range(2)])
            self.other = nn.BatchNorm1d(4)

    parent = Parent()
    child = parent.stack.blocks[0].f
    assert Holdings([child]).modules == [child]
    function = lambda x: parent.other(x)  # noqa: E731
    assert Holdings([function]).modules[0] is parent
    parent.stack = rg.ReversibleSequence([(Child(parent), function)])
    assert Holdings([function]).modules == []


def test_large_containers_are_data():
    layers = [nn.Linear(1, 1) for _ in range(65)]
    assert not Holdings([lambda x: layers[0](x)]).modules
    assert len(Holdings([functools.partial(lambda held, x: held[0](x), layers[:64])]).modules) == 64


def test_what_refers_to_itself_is_searched_once():
    first, second = InAList(), InAList()
    first.shared.append(second)
    second.shared.append(first)
    held = {}
    held["self"] = held
    function = functools.partial(lambda held, x: x, held)
    assert Holdings([first, function]).modules.count(second) == 1


# --- weights


@every_memory
@pytest.mark.parametrize("exact", [False, True])
def test_a_weight_of_no_module_edited_before_backward_raises(exact, memory):
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    functions = [functools.partial(lambda w, x: (x @ w).tanh(), w) for w in weights]
    stack = rg.ReversibleSequence(
        zip(functions[::2], functions[1::2]), memory=REVERSED[memory], exact=exact
    )
    y = stack(torch.randn(2, 4, dtype=torch.float64))
    with torch.no_grad():
        weights[0].add_(1)
    with pytest.raises(rg.InPlaceError, match=r"needs parameter .* as forward saw it"):
        y.sum().backward()


# --- modules that change between forward and backward


@every_memory
@pytest.mark.parametrize("exact", [False, True])
def test_parameters_registered_in_another_order(exact, memory):
    """What follows is at zero, so that only gradients would tell if weight and bias were taken for
    each other.
    """

    def function():
        last = nn.Linear(4, 4)
        nn.init.zeros_(last.weight)
        return nn.Sequential(nn.LayerNorm(4), last)

    def gradients(memory, reorder):
        torch.manual_seed(0)
        functions = [function() for _ in range(6)]
        for f in functions:
            nn.init.normal_(f[0].weight)
        stack = rg.ReversibleSequence(
            zip(functions[::2], functions[1::2]), memory=memory, exact=exact
        ).double()
        y = stack(torch.randn(2, 4, dtype=torch.float64))
        for f in functions if reorder else ():
            weight = f[0].weight
            del f[0].weight
            f[0].weight = weight
        y.sin().sum().backward()
        return [p.grad for f in functions for _, p in sorted(f.named_parameters())]

    assert zoo.worst(gradients(REVERSED[memory], True), gradients(rg.Keep(), False)) < 1e-9


@every_memory
def test_a_module_that_was_pruned_before_backward_raises(memory):
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    stack.memory = REVERSED[memory]
    y = stack(x)
    prune.l1_unstructured(stack.blocks[0].f.up, "weight", amount=0.5)
    with pytest.raises(
        rg.RecomputeError, match=r"(?s)needs parameter 'weight'.*pruned.*call backward\(\) first"
    ):
        y.sum().backward()
