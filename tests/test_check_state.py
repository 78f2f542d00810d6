"""`rg.check` and Python state: changes in recompute are named, wherever they are, and put back."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import sys
import threading
import types

import numpy
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.checking.fingerprints import fingerprints
from retrograd.checking.restore import Snapshot
from retrograd.core.observe import observers
from tests.test_check import WIDTH, example, kinds, mlp, stack_of, text_of


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- places of state: each function counts its calls in one, and uses the count


class Registry:
    count = 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


elsewhere = types.ModuleType("elsewhere")
elsewhere.COUNT = 0
COUNT = 0
LIST = [0]


def in_a_global():
    global COUNT
    COUNT += 1
    return COUNT


def in_a_list():
    LIST[0] += 1
    return LIST[0]


def in_a_class():
    Registry.count += 1
    return Registry.count


def in_another_module():
    elsewhere.COUNT += 1
    return elsewhere.COUNT


def of_a_function():
    of_a_function.count = getattr(of_a_function, "count", 0) + 1
    return of_a_function.count


def in_a_global_that_is_new():
    globals()  # the global is found by its name, not through this call
    global FRESH
    try:
        FRESH += 1
    except NameError:
        FRESH = 1
    return FRESH


def in_an_attribute(holder, get, put):
    def count():
        put(holder, get(holder) + 1)
        return get(holder)

    return count


def of(holder):
    return in_an_attribute(holder, lambda h: h.count, lambda h, n: setattr(h, "count", n))


def closure():
    count = 0

    def counted():
        nonlocal count
        count += 1
        return count

    return counted


def iterator():
    numbers = itertools.count(1)
    return lambda: next(numbers)


PLACES = {
    "a global": lambda: in_a_global,
    "a list": lambda: in_a_list,
    "a class": lambda: in_a_class,
    "another module": lambda: in_another_module,
    "a function": lambda: of_a_function,
    "a new global": lambda: in_a_global_that_is_new,
    "a closure": closure,
    "an iterator": iterator,
    "a namespace": lambda: of(types.SimpleNamespace(count=0)),
    "slots": lambda: of(Slotted()),
    "a UserDict": lambda: in_an_attribute(
        collections.UserDict(count=0), lambda h: h["count"], lambda h, n: h.__setitem__("count", n)
    ),
    "a NumPy number": lambda: of(types.SimpleNamespace(count=numpy.int64(0))),
}


class Counts(nn.Linear):
    def __init__(self, count):
        super().__init__(WIDTH, WIDTH)
        self.count_calls = count

    def forward(self, x):
        return super().forward(x) / (1 + self.count_calls())


@pytest.fixture
def other_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)


@pytest.mark.filterwarnings("ignore::retrograd.DriftWarning")
@pytest.mark.parametrize("place", PLACES)
def test_a_counter_is_found_and_put_back(place, other_module):
    count = PLACES[place]()
    stack = stack_of(lambda: Counts(count))
    before = fingerprints("", stack)
    report = rg.check(stack, example())
    assert "determinism" in kinds(report), str(report)
    assert "not found" not in text_of(report, "determinism"), str(report)
    assert fingerprints("", stack) == before
    assert count() == 1 or place in (
        "a global",
        "a list",
        "a class",
        "another module",
        "a function",
        "a new global",
    )


def test_new_globals_attributes_and_submodules_are_removed():
    class Lazy(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.late = nn.Linear(WIDTH, WIDTH)
                type(self).made = True
                self.register_forward_hook(lambda *_: None)
            return super().forward(x) + self.late(x)

    stack = stack_of(lambda: Lazy(WIDTH, WIDTH))
    rg.check(stack, example())
    assert not hasattr(stack.blocks[0].f, "late") and not hasattr(Lazy, "made")
    assert not stack.blocks[0].f._forward_hooks
    assert "FRESH" not in globals() or FRESH == 1


def test_hooks_are_searched():
    seen = []
    stack = stack_of(mlp)
    stack.blocks[0].f.register_forward_hook(lambda module, args, output: seen.append(output))
    report = rg.check(stack, example())
    assert "seen` has" in text_of(report, "state")
    assert seen == []


def test_requires_grad_is_put_back():
    class Freezes(nn.Linear):
        def forward(self, x):
            self.bias.requires_grad_(False)
            return super().forward(x)

    network = nn.Sequential(stack_of(mlp), Freezes(WIDTH, WIDTH))
    assert rg.check(network, example()).ok
    assert network[1].bias.requires_grad


def test_buffers_are_never_written_to():
    """A graph of plain autograd that saved one stays valid."""

    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)
            self.register_buffer("m", torch.ones(WIDTH))

        def forward(self, x):
            self.m.mul_(0.9)
            return self.stack(x) * self.m

    network = Decays()
    loss = network(example()).sum()
    buffer = network.m
    version = buffer._version
    value = buffer.clone()
    assert rg.check(network, example()).ok
    assert network.m is buffer and buffer._version == version and torch.equal(buffer, value)
    loss.backward()


def test_buffers_that_share_memory_stay_so():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)
            self.register_buffer("m", torch.ones(WIDTH))
            self.alias = self.m
            self.register_buffer("part", self.m[:2])

        def forward(self, x):
            self.alias.mul_(0.5)
            assert torch.equal(self.alias, self.m) and torch.equal(self.part, self.m[:2])
            return self.stack(x) * self.m

    network = Shares()
    assert rg.check(network, example()).ok
    assert network.alias is network.m and network.m.tolist() == [1.0] * WIDTH


def test_a_value_that_cannot_be_put_back_does_not_stop_the_rest():
    class Stubborn(dict):
        def clear(self):
            raise OSError("no")

    class Changes(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.first = 0
            self.stubborn = Stubborn()
            self.last = 0

        def forward(self, x):
            self.first += 1
            self.last += 1
            self.stubborn[self.first] = 1
            return super().forward(x)

    module = Changes()
    snapshot = Snapshot(module, [])
    module(example())
    with pytest.raises(OSError, match="no"):
        snapshot.release()
    assert (module.first, module.last) == (0, 0)


@pytest.mark.filterwarnings("ignore::retrograd.DriftWarning")
def test_values_that_cannot_be_searched_are_skipped():
    class Meta(type):
        pass

    class Odd(metaclass=Meta):
        pass

    class Key:
        def __repr__(self):
            raise ValueError

    class Holds(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.kind = Odd
            self.random = random.SystemRandom()
            self.table = {Key(): [1]}
            self.register_buffer("expanded", torch.full((1,), float("nan")).expand(3))

    assert rg.check(stack_of(Holds), example()).ok


def test_much_state_does_not_crowd_out_modules():
    network = nn.Sequential(
        stack_of(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
    )
    network.grid = [[[object()] * 30 for _ in range(30)] for _ in range(90)]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert rg.check(network, example(8, WIDTH)).ok
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


# --- stacks outside the module tree, and stacks of other threads


class InAList(nn.Module):
    """Stacks that are not in the module tree."""

    def __init__(self, *stacks):
        super().__init__()
        self.stacks = list(stacks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for stack in self.stacks:
            x = stack(x)
        return self.head(x)


class Off(rg.Coupling):
    def forward(self, x, out):
        return x + out

    def inverse(self, y, out):
        return y - 1.0001 * out


def test_stacks_in_a_list_are_all_checked():
    report = rg.check(InAList(stack_of(mlp), stack_of(mlp)), example())
    assert report.ok, str(report)
    assert [stack.name for stack in report.stacks] == [
        "ReversibleSequence 1",
        "ReversibleSequence 2",
    ]
    assert len(report.gradients) == 2 * 4 * 2 * 4 + 2 and len(report.evaluations) == 16
    for stacks in (
        (stack_of(mlp, coupling=Off()), stack_of(mlp)),
        (stack_of(mlp), stack_of(mlp, coupling=Off())),
    ):
        assert "coupling" in kinds(rg.check(InAList(*stacks), example()))


def test_an_argument_with_the_name_of_a_parameter():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, scale):
            return self.stack(x) * self.scale * scale

    report = rg.check(Scaled(), example(), scale=torch.ones(WIDTH, requires_grad=True))
    assert report.ok and {"scale", "scale (2)"} <= report.gradients.keys()


def test_a_network_that_inverts():
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = rg.ReversibleSequence(
                [(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)], streams=rg.Split()
            )

        def forward(self, x):
            return self.stack(self.stack.inverse(x))

    assert rg.check(Flow(), example()).ok
    stack = Flow().stack
    measured = rg.measure.step(lambda: stack.inverse(example()), stack)
    assert measured.evaluations["blocks.0.f"] == 1


def test_stacks_of_other_threads_are_left_alone():
    theirs = stack_of(mlp)
    stop = threading.Event()
    errors = []
    runs = []
    cache = theirs._cache

    def train():
        while not stop.is_set():
            try:
                theirs(example()).sum().backward()
                runs.append(theirs._cache is cache)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        report = rg.check(stack_of(mlp), example())
    finally:
        stop.set()
        thread.join()
    assert report.ok
    assert len(report.stacks) == 1
    assert not errors
    assert runs and all(runs)
    assert observers == []


def test_interrupts_leave_everything_as_it_was():
    class Interrupts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if next(remaining, None) is None:
                raise KeyboardInterrupt
            return super().forward(x)

    for after in range(0, 60, 3):
        stack = stack_of(lambda: Interrupts(WIDTH, WIDTH))
        remaining = iter(range(after))  # an iterator is not put back
        with pytest.raises(KeyboardInterrupt):
            rg.check(stack, example())
        assert observers == []
        assert stack.blocks[0].f.calls == 0
        assert torch.is_grad_enabled()
    remaining = iter(range(100))
    stack(example()).sum().backward()


# --- gradients that are hard to compare


class Root(nn.Module):
    """One element of its gradient is infinite."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack
        self.w = nn.Parameter(torch.tensor([0.0, 1.0, 1.0, 1.0]))

    def forward(self, x):
        return self.stack(x), self.w.sqrt().sum()


class Aux(nn.Linear):
    """Its aux differs in recompute; its output does not."""

    def forward(self, x):
        y = super().forward(x)
        return rg.WithAux(y, (y * torch.full((WIDTH,), 2.0 if rg.is_recomputing() else 1.0)).mean())


def test_infinite_gradients_hide_nothing():
    report = rg.check(Root(stack_of(mlp)), example())
    assert report.ok, str(report)
    assert "not all finite" in str(report)
    assert not rg.check(Root(stack_of(lambda: Aux(WIDTH, WIDTH))), example()).ok


def test_nan_in_both_is_no_difference():
    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)
            self.w = nn.Parameter(torch.tensor([0.0, 1.0, 1.0, 1.0]))

        def forward(self, x):
            return self.stack(x * torch.where(self.w > 0, self.w.sqrt(), 0.0))

    assert rg.check(Where(), example()).ok
    x = example()
    x[0] = float("nan")
    x[1] = float("inf")
    report = rg.check(stack_of(mlp), x)
    assert report.ok, str(report)


def test_an_aux_that_differs_is_found():
    report = rg.check(stack_of(lambda: Aux(WIDTH, WIDTH)), example())
    assert "determinism" in kinds(report), str(report)


def test_plain_autograd_that_does_not_agree_with_itself():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)
            self.generator = random.SystemRandom()

        def forward(self, x):
            return self.stack(x + self.generator.random() * torch.arange(WIDTH))

    report = rg.check(Noisy(), example())
    assert kinds(report) == {"noise"}, str(report)
    assert "something outside of the stacks" in str(report)


def test_outputs_in_objects():
    class Inner:
        __slots__ = ("logits",)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)

        def forward(self, x):
            inner = Inner()
            inner.logits = self.stack(x)
            return types.SimpleNamespace(inner=inner, name="x")

    assert rg.check(Model(), example()).ok


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripts_and_odd_devices():
    script = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    assert rg.check(stack_of(lambda: script), example()).ok
    stack, x = stack_of(mlp), example()
    with torch.device("meta"):
        assert rg.check(stack, x).ok
    with pytest.raises(ValueError, match="has no values"):
        rg.check(stack_of(mlp).to("meta"), x.to("meta"))
    with pytest.raises(ValueError, match="is an iterator"):
        rg.check(stack, iter([x]))


@pytest.mark.filterwarnings("ignore")  # raised by objects that the garbage collector visits
def test_a_check_leaks_no_tensors():
    stack = stack_of(mlp)
    x = example()
    counts = []
    for _ in range(6):
        rg.check(stack, x)
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert counts[2] == counts[-1]
