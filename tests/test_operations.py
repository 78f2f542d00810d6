"""Every differentiable operation of torch inside an update, against plain autograd.

torch lists its operations in a registry of its own (`op_db`), with arguments to try each with. Here
each is the function of an update that backward rebuilds. Compared with the same equations in plain
torch: the output, first and second gradients, the random state, and what is left of the arguments.

`make test` takes three samples of each operation; with RETROGRAD_FUZZ set, all (ten minutes).
"""

import copy
import functools
import itertools
import os
import random
import sys
import types
import unittest
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import retrograd as rg
from tests import zoo

SAMPLES = None if os.environ.get("RETROGRAD_FUZZ") else 3  # of each operation; None: all
CHUNKS = 24
TOLERANCE = 1e-9
FEWEST = 500  # operations; torch 2.13 has more
WIDTH = 3  # of stream "a"

# Operations that cannot be compared, and why.
SKIPPED = {
    "as_strided.partial_views": "reads memory beside its input: it is no function of the input",
    "normal.number_mean": "its input is a number, not a tensor",
}
RANDOM = (
    "bernoulli",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.rrelu",
    "normal",
)


# --- the registry


@functools.cache
def operations():
    """The differentiable operations, by name. Importing them takes seconds."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The import would change settings of the whole process. It must not.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            patch.setattr(kind, "__call__", kind.__call__)
        patch.setitem(sys.modules, "hypothesis", None)
        # A package that torch's own tests derive from. Nothing here does.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal import common_methods_invocations as registry
    registry.wrapper_set_seed = unseeded
    return {name_of(op): op for op in registry.op_db if dtype_of(op) is not None}


def unseeded(op, *args, **kwargs):
    """In place of the registry's own, which seeds each random operation. Here they shall draw."""
    return op(*args, **kwargs)


def dtype_of(op):
    """The dtype to try an operation with; None if it has no gradients."""
    dtypes = op.supported_backward_dtypes("cpu") if op.supports_autograd else ()
    return next((dtype for dtype in (torch.float64, torch.complex128) if dtype in dtypes), None)


def seed(number):
    """As `torch.manual_seed`, which also writes a traceback for each absent accelerator."""
    torch.default_generator.manual_seed(number)


def name_of(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples_of(op, number):
    """Samples with a differentiable input: the first `number` of moderate size, or all."""
    seed(0)
    random.seed(0)
    # Not `op.sample_inputs`: that looks through the stack of calls, for half of the time.
    samples = op.sample_inputs_func(op, "cpu", dtype_of(op), True)
    samples = filter(is_differentiable, samples)
    if number is None:
        return list(samples)
    return list(itertools.islice(filter(is_moderate, samples), number))


def is_differentiable(sample):
    """Whether the input consists of tensors, and something in the sample requires grad."""
    leaves = zoo.leaves(sample.input)
    if not leaves or not all(isinstance(leaf, Tensor) and is_inexact(leaf) for leaf in leaves):
        return False
    return any(tensor.requires_grad for tensor in tensors_of(sample))


def is_moderate(sample):
    return all(0 < tensor.numel() <= 2**16 for tensor in tensors_of(sample))


def tensors_of(sample):
    leaves = zoo.leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def is_inexact(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


# --- an operation as the function of an update


def own(value):
    """A copy with leaves of its own, in the strides of the original."""
    copies = {}

    def copied(tensor):
        if id(tensor) not in copies:
            new = tensor.detach()
            new = copy.deepcopy(new) if new.layout == torch.strided else new.clone()
            copies[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return pytree.tree_map_only(Tensor, copied, value)


def stream_of(tensor):
    """A strided leaf of multiples of 2**-40: adding one and taking it away again is exact."""
    with torch.no_grad():
        stream = as_strided(tensor)
        parts = as_real(stream)
        small = parts.abs() < 2**12
        parts.copy_(torch.where(small, (parts * 2**40).round() / 2**40 + 0.0, parts))
    return stream.requires_grad_(tensor.requires_grad)


def as_strided(tensor):
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def as_real(tensor):
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def with_layout_of(sample, tensor):
    return tensor if sample.layout == torch.strided else tensor.to_sparse(layout=sample.layout)


def reduced(value):
    """A scalar of moderate size that depends on every inexact number in `value`."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in zoo.leaves(value):
        if isinstance(leaf, Tensor) and is_inexact(leaf):
            leaf = as_real(as_strided(leaf))
            leaf = torch.where(leaf.isfinite(), leaf, 0.0)
            total = total + weighted(leaf / (1 + largest(leaf)))
    return total


def weighted(tensor):
    """A sum in which every element counts differently."""
    return (tensor * torch.arange(tensor.numel()).double().view(tensor.shape).cos()).sum()


def largest(tensor):
    """The largest finite absolute value; 0 if there is none."""
    tensor = tensor.detach()[tensor.isfinite()].abs()
    return tensor.max().item() if tensor.numel() else 0.0


class Case:
    """One sample of an operation: the streams, the updates, and the tensors to differentiate by.

    "b" is what the operation reads. It is moved by exactly one afterwards, so backward rebuilds it.
    """

    def __init__(self, op, sample):
        value, self.arguments = own((sample.input, (sample.args, sample.kwargs)))
        value = pytree.tree_map(stream_of, value)
        start = torch.linspace(-0.5, 0.5, WIDTH, dtype=torch.float64).requires_grad_()
        self.streams = {"a": start, "b": value}
        self.recomputes = 0
        self.updates = self.updates_with(op, sample)
        leaves = [*zoo.leaves(self.streams), *self.tensors()]
        self.wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def updates_with(self, op, sample):
        args, kwargs = self.arguments
        value = self.streams["b"]
        spread = torch.linspace(1.0, 2.0, WIDTH, dtype=torch.float64)

        def apply(b):
            self.recomputes += rg.is_recomputing()
            b = pytree.tree_map(with_layout_of, sample.input, b)
            return spread * reduced(sample.output_process_fn_grad(op(b, *args, **kwargs)))

        def move(a):
            """Exactly one, with a gradient."""
            turn = a.sin().sum()
            one = 1 + (turn - turn.detach())
            return pytree.tree_map(lambda leaf: one.expand(leaf.shape).to(leaf.dtype), value)

        def look(b):
            return spread * reduced(pytree.tree_map(torch.tanh, b))

        return [("a", apply, "b"), ("b", move, "a"), ("a", look, "b")]

    def tensors(self):
        """The tensors among the arguments of the operation."""
        return [leaf for leaf in zoo.leaves(self.arguments) if isinstance(leaf, Tensor)]

    def plain(self):
        streams = dict(self.streams)
        for target, fn, read in self.updates:
            streams[target] = pytree.tree_map(torch.add, streams[target], fn(streams[read]))
        return streams

    def rebuilt(self):
        updates = [rg.Update(target, fn, reads=(read,)) for target, fn, read in self.updates]
        net = rg.Reversible(updates, memory=rg.Reverse(keep_last=False), drift="raise")
        return net(self.streams)


# --- what a run gives


def first_run(case, forward):
    """The output, its gradients and what is left behind, by name."""
    seed(1)
    output = forward()
    forward_state = torch.get_rng_state()
    gradients = torch.autograd.grad(loss(output), case.wanted, allow_unused=True)
    return {
        "output": zoo.leaves(output),
        "gradients": gradients,
        "random state": [forward_state, torch.get_rng_state()],
        "arguments": case.tensors(),
    }


def second_run(case, forward):
    """Second gradients, of another call; or the error where torch has none.

    The registry promises some that torch does not have (`ctc_loss`).
    """
    seed(2)
    try:
        first = torch.autograd.grad(
            loss(forward()), case.wanted, create_graph=True, allow_unused=True
        )
        gradients = [as_real(as_strided(gradient)) for gradient in first if gradient is not None]
        total = sum(map(weighted, gradients))
        second = torch.autograd.grad(total, case.wanted, allow_unused=True)
    except rg.RetrogradError:
        raise
    except RuntimeError as error:
        return {"error": str(error)}
    return {"second gradients": second, "random state": [torch.get_rng_state()]}


def loss(streams):
    return sum(weighted(as_real(leaf).sin()) for leaf in zoo.leaves(streams))


# --- the comparison


def compare(op, sample):
    """What differs between a stack and plain autograd, in words; empty if nothing does."""
    found = []
    for run in (first_run, second_run) if op.supports_gradgrad else (first_run,):
        plain = Case(op, sample)
        expected = run(plain, plain.plain)
        case = Case(op, sample)
        got = run(case, case.rebuilt)
        if not case.recomputes:
            found.append("the operation did not run again")
        found += differences(got, expected)
    return found


def differences(got, expected):
    if got.get("error") != expected.get("error"):
        return [f"raised {got.get('error')!r}, and plain autograd {expected.get('error')!r}"]
    names = [name for name in expected if name != "error"]
    off = {name: difference(got[name], expected[name]) for name in names}
    return [f"{name} off by {value:.1e}" for name, value in off.items() if not value < TOLERANCE]


def difference(got, expected):
    """The largest difference, relative to the largest value of its tensor.

    Infinite where one has a value and one has not; NaN and infinities must be in the same places.
    """
    assert len(got) == len(expected)
    pairs = [(comparable(a), comparable(b)) for a, b in zip(got, expected)]
    floor = 1e-6 * max((largest(b) for _, b in pairs if b is not None), default=0.0) + 1e-30
    return max((distance(a, b, floor) for a, b in pairs), default=0.0)


def comparable(tensor):
    if tensor is None:
        return None
    tensor = as_strided(tensor.detach())
    return tensor if tensor.is_complex() else tensor.double()


def distance(a, b, floor):
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite):
        return float("inf")
    if not torch.equal(a[~finite].nan_to_num(0.5), b[~finite].nan_to_num(0.5)):
        return float("inf")
    return largest(a[finite] - b[finite]) / max(largest(b), floor)


def faults(name, number):
    """How many samples of an operation were compared, and what was found."""
    op = operations()[name]
    samples = samples_of(op, number)
    found = []
    for i, sample in enumerate(samples):
        try:
            differing = compare(op, sample)
        except Exception as error:
            differing = [f"{type(error).__name__}: {error}"]
        found += [f"{name}, sample {i}: {what}" for what in differing]
    return len(samples), found


# --- tests


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operations_inside_updates(chunk):
    names = [name for name in operations() if name not in SKIPPED][chunk::CHUNKS]
    compared, found = 0, []
    for name in names:
        number, differing = faults(name, SAMPLES)
        compared += number
        found += differing if number else [f"{name}: nothing was compared"]
    assert not found, "\n".join(found)
    assert compared >= 2 * len(names)


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations_draw(name):
    op = operations()[name]
    cases = [Case(op, sample) for sample in samples_of(op, 3)]
    before = torch.get_rng_state()
    for case in cases:
        case.plain()
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_registry():
    """It is as large as it should be, and importing it changed nothing for other tests."""
    assert len(operations()) >= FEWEST
    assert SKIPPED.keys() <= operations().keys()
    assert not torch.backends.flags_frozen()
    assert sys.modules.get("hypothesis", True)


class Planted:
    """An operation that may be another one when it runs again."""

    supports_gradgrad = True

    def __init__(self, change):
        self.change = change

    def __call__(self, x):
        return self.change(x, 1e-6 * rg.is_recomputing())


PLANTED = {
    "nothing": lambda x, off: x.sin(),
    "value": lambda x, off: x.sin() * (1 + off),
    "gradient": lambda x, off: x.sin() + (x - x.detach()) * torch.tensor(off),
    "second gradient": lambda x, off: x.sin() + (x - x.detach()) ** 2 * torch.tensor(off),
    "random numbers": lambda x, off: x.sin() * (1 + off * torch.rand(())),
    "number of operations": lambda x, off: x.sin().sin() if off else x.sin(),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_comparison_can_fail(name):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sample = types.SimpleNamespace(
        input=x, args=(), kwargs={}, output_process_fn_grad=lambda out: out
    )
    try:
        found = compare(Planted(PLANTED[name]), sample)
    except rg.RecomputeError as error:
        found = [error]
    assert bool(found) == (name != "nothing"), found


def test_a_lost_edit_is_seen():
    """Arguments, random states and missing gradients are compared, too."""
    one = torch.ones(2)
    assert differences({"arguments": [one]}, {"arguments": [one + 1e-6]})
    assert differences({"random state": [one]}, {"random state": [2 * one]})
    assert differences({"gradients": [None]}, {"gradients": [one]})
    assert differences({"gradients": [one]}, {"gradients": [one * torch.nan]})
    assert not differences({"gradients": [one * torch.nan]}, {"gradients": [one * torch.nan]})
