"""What functions use is seen, wherever it is stored, and replayed from the first call on."""

import collections
import os
import sys
import types

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo

WIDTH = 4
MEMORY = [rg.Reverse(keep_last=False), rg.Reverse(), rg.Anchor(every=1), rg.Budget("150%")]
every_memory = pytest.mark.parametrize("memory", MEMORY, ids=repr)

GENERATOR = torch.Generator()
NORM = nn.BatchNorm1d(WIDTH, dtype=torch.float64)


class Slots:
    __slots__ = ("generator",)

    def __init__(self):
        self.generator = torch.Generator()


class Noise(nn.Module):
    """Multiplies by random numbers of a generator; the output does not show which."""

    of_the_class = torch.Generator()

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.last.weight)
        self._private = torch.Generator()
        self.config = types.SimpleNamespace(generator=torch.Generator())
        self.slots = Slots()
        self.many = [torch.Generator() for _ in range(70)]
        self.late = None
        hidden = torch.Generator()
        self.closure = lambda: hidden

    def generator(self):
        return {
            "private": self._private,
            "global": GENERATOR,
            "class": self.of_the_class,
            "namespace": self.config.generator,
            "slots": self.slots.generator,
            "one of many": self.many[3],
            "late": self.late,
            "closure": self.closure(),
            "default": torch.default_generator,
        }[self.place]

    def forward(self, x):
        noise = torch.rand(WIDTH, generator=self.generator(), dtype=x.dtype)
        return self.last(self.first(x) * noise)


def generators_of(stack):
    functions = [fn for block in stack.blocks for fn in (block.f, block.g)]
    return [fn.generator() for fn in functions if fn.generator() is not None]


@every_memory
@pytest.mark.parametrize(
    "place",
    [
        *("private", "global", "class", "namespace", "slots", "one of many", "late"),
        *("closure", "default"),
    ],
)
def test_generators_anywhere(place, memory):
    pairs = [(Noise(place), Noise(place)) for _ in range(3)]
    stack = rg.ReversibleSequence(pairs, memory=memory).double()
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    for step in range(3):
        if step == 1:
            for block in stack.blocks:
                block.f.late = torch.Generator()
                block.g.late = torch.Generator()
        results = []
        for forward in (lambda: zoo.plain_stack(stack, x), lambda: stack(x)):
            torch.manual_seed(1)
            for generator in generators_of(stack):
                generator.manual_seed(7)
            gradients = zoo.gradients(stack, forward(), x)
            states = [generator.get_state() for generator in generators_of(stack)]
            results.append((gradients, states))
        assert zoo.worst(results[1][0], results[0][0]) < 1e-9
        assert all(map(torch.equal, results[1][1], results[0][1]))


class UsesGlobal(nn.Module):
    def forward(self, x):
        return NORM(x)


class UsesList(nn.Module):
    def __init__(self):
        super().__init__()
        self._norms = [nn.BatchNorm1d(WIDTH, dtype=torch.float64)]

    def forward(self, x):
        return self._norms[0](x)


class Model(nn.Module):
    """Functions are methods of the model that holds the stack."""

    def __init__(self, memory):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stack = rg.ReversibleSequence([(self.f, self.g)] * 2, memory=memory)

    def f(self, x):
        return self.linear(self.norm(x)).tanh()

    def g(self, x):
        return self.linear(x).tanh()


def batches(norm):
    return int(norm.num_batches_tracked)


@every_memory
def test_modules_anywhere_update_their_statistics_once(memory):
    hooked = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    of_hook = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    hooked.register_forward_hook(lambda module, args, out: of_hook(out))
    in_list = UsesList()
    cases = [(UsesGlobal(), NORM), (in_list, in_list._norms[0]), (hooked, of_hook)]
    x = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    for function, norm in cases:
        pairs = [(function, nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        stack = rg.ReversibleSequence(pairs, memory=memory).double()
        for _ in range(3):
            before = batches(norm)
            stack(x).sum().backward()
            assert batches(norm) == before + 2


@every_memory
def test_methods_of_the_model_that_holds_the_stack(memory):
    model = Model(memory).double()
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    for step in range(3):
        mean = model.norm.running_mean.clone()
        expected = zoo.gradients(model, zoo.plain_stack(model.stack, x), x)
        after = model.norm.running_mean.clone()
        model.norm.running_mean.copy_(mean)
        assert zoo.worst(zoo.gradients(model, model.stack(x), x), expected) < 1e-9
        assert torch.equal(model.norm.running_mean, after)
        assert batches(model.norm) == 4 * (step + 1)


def test_a_weight_of_the_model_edited_before_backward_raises():
    model = Model(rg.Reverse(keep_last=False))
    for _ in range(2):
        y = model.stack(torch.randn(8, WIDTH))
        with torch.no_grad():
            model.linear.weight.mul_(1.1)
        with pytest.raises(rg.InPlaceError, match="needs parameter"):
            y.sum().backward()


class ForksState(nn.Module):
    """Leaves the random state as it was."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            return self.last(nn.functional.dropout(self.first(x), 0.5))


@every_memory
def test_draws_inside_fork_rng(memory):
    stack = rg.ReversibleSequence([(ForksState(), ForksState()) for _ in range(3)], memory=memory)
    stack = stack.double()
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    for _ in range(2):
        results = []
        for forward in (lambda: zoo.plain_stack(stack, x), lambda: stack(x)):
            torch.manual_seed(1)
            y = nn.functional.dropout(forward(), 0.1)
            results.append(zoo.gradients(stack, y, x))
        assert zoo.worst(results[1], results[0]) < 1e-9


class RunningMean(nn.Module):
    """Its running mean is a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(32), requires_grad=False)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.net(x - self.mean)


def test_a_function_that_edits_its_own_parameter_keeps_nothing():
    peaks = []
    x = torch.randn(256, 32)
    for depth in (4, 16):
        pairs = [(RunningMean(), nn.Linear(32, 32)) for _ in range(depth)]
        stack = rg.ReversibleSequence(pairs, memory=rg.Reverse(keep_last=False))
        step = rg.measure.step(lambda stack=stack: stack(x).square().mean().backward(), stack)
        peaks.append(step.activation_bytes)
    assert peaks[1] - peaks[0] < x.nbytes


@every_memory
def test_two_forwards_of_a_function_that_edits_its_own_parameter(memory):
    x = torch.randn(8, 32, dtype=torch.float64)
    results = []
    for mode in (rg.Keep(), memory):
        torch.manual_seed(0)
        pairs = [(RunningMean(), nn.Linear(32, 32)) for _ in range(3)]
        stack = rg.ReversibleSequence(pairs, memory=mode).double()
        for _ in range(2):
            gradients = zoo.gradients(stack, stack(x) + stack(2 * x), x)
        results.append((gradients, [f.f.mean.clone() for f in stack.blocks]))
    assert zoo.worst(results[1][0], results[0][0]) < 1e-9
    assert all(map(torch.equal, results[1][1], results[0][1]))


@every_memory
def test_noise_that_a_kernel_writes_after_autograd_saved_it(memory):
    """RReLU. A recompute that stops early must not stop before that."""
    pairs = [(nn.Sequential(nn.Linear(8, 8), nn.RReLU()), nn.Linear(8, 8)) for _ in range(4)]
    stack = rg.ReversibleSequence(pairs, memory=memory).double()
    x = torch.randn(16, 8, dtype=torch.float64)
    for _ in range(2):
        results = []
        for forward in (lambda: zoo.plain_stack(stack, x), lambda: stack(x)):
            torch.manual_seed(1)
            results.append(zoo.gradients(stack, forward(), x))
        assert zoo.worst(results[1], results[0]) < 1e-9


class Local(nn.Module):
    """Trains a side loss on the way."""

    def __init__(self):
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.side(x.detach()).square().mean().backward()
        return self.main(x).tanh()


@every_memory
def test_a_function_may_call_backward(memory):
    gradients = []
    for mode in (rg.Keep(), memory):
        torch.manual_seed(0)
        pairs = [(Local(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        stack = rg.ReversibleSequence(pairs, memory=mode)
        for _ in range(2):
            stack(torch.randn(8, WIDTH)).sum().backward()
        gradients.append([block.f.side.weight.grad for block in stack.blocks])
    assert all(torch.allclose(a, b) for a, b in zip(*gradients))


def test_a_step_that_is_not_inspected_runs_no_operation_more():
    """Counted: the operations of a step with and without verification."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for verify in ("first", "never", "always"):
        pairs = [(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)]
        stack = rg.ReversibleSequence(pairs, verify=verify)
        x = torch.randn(4, 8)
        for _ in range(2):
            stack(x).sum().backward()
        with Count() as count:
            stack(x).sum().backward()
        counts.append(count.operations)
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize("verify", ["first", "never"])
def test_functions_that_are_rebuilt_only_later(verify):
    """While gradients are fresh, the last block is kept. Then it is rebuilt, and must be known."""
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(Mean(), Mean()) for _ in range(4)], verify=verify).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    for _ in range(4):
        loss = stack(x).sum()
        means = [function.mean.clone() for function in functions_of(stack)]
        loss.backward()  # gradients accumulate
        assert all(map(torch.equal, means, [f.mean for f in functions_of(stack)]))


class Mean(nn.Module):
    """A running mean that is no buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean = torch.zeros(8, dtype=torch.float64)

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x) - self.mean.clone()


def functions_of(stack):
    return [function for block in stack.blocks for function in (block.f, block.g)]


def test_functions_that_are_rebuilt_only_later_are_verified():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    pairs = [(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]
    stack = rg.ReversibleSequence([*pairs, (Counts(8, 8), nn.Linear(8, 8))])
    stack(torch.randn(4, 8)).sum().backward()
    with pytest.raises(rg.RecomputeError, match=r"blocks.3.f\) did something else"):
        stack(torch.randn(4, 8)).sum().backward()


INSPECTION = ("watch.py", "watching.py", "verify.py", "written.py", "arguments.py", "scripts.py")


def test_a_step_that_is_not_inspected_enters_nothing_of_it():
    """Counted: the functions that a step enters, by file."""
    pairs = [(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), nn.Linear(8, 8)) for _ in range(4)]
    stack = rg.ReversibleSequence(pairs, memory=rg.Reverse(keep_last=False))
    x = torch.randn(4, 8)
    entered = []
    for _ in range(4):
        files = collections.Counter()

        def count(frame, event, argument, files=files):
            if event == "call":
                files[os.path.basename(frame.f_code.co_filename)] += 1

        sys.setprofile(count)
        stack(x).sum().backward()
        sys.setprofile(None)
        entered.append(files)
    first, _, third, fourth = entered
    assert all(first[file] for file in INSPECTION[:3])
    assert not any(third[file] for file in INSPECTION)
    assert third == fourth
