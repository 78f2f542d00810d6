"""Every promise holds on a second device, and a training step waits for it as rarely as possible.

The device is that of `tests/device`: not a GPU, but with everything around the kernels that a GPU
has. These tests run in a process of their own (`own_process.py`), because a process has to load the
device before its first backward.
"""

import collections
import copy
import itertools
import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retrograd as rg
from retrograd.measure import LiveBytes
from tests import device, test_compat_parity, zoo

DEVICE = os.environ.get("RETROGRAD_DEVICE", device.NAME)  # benchmarks/gpu.py names another one
KIND = DEVICE.split(":")[0]
TENSORS = [case for case in zoo.REVERSED if case.value == "tensor"]
ADDITIVE = [case for case in zoo.REVERSED if case.coupling == "additive"]
CASE = zoo.Case("additive", "mean", "tensor", "reverse-all")


ITSELF = pytest.mark.skipif(KIND != device.NAME, reason="of the test device itself")


@pytest.fixture(scope="module", autouse=True)
def _device():
    if KIND == device.NAME:
        device.load()


def state(where=DEVICE):
    return torch.get_device_module(KIND).get_rng_state(where)


def of_two(*places):
    """Skip if there is only one device of this kind."""
    if f"{KIND}:1" in places and torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    return places


@pytest.fixture(autouse=True)
def _seeded(_device):
    torch.manual_seed(0)


def build(case, where=DEVICE, **options):
    """A case of the zoo, on the device."""
    with torch.device(where):
        return case.build(**options)


# --- the device itself


@ITSELF
def test_backward_runs_in_a_thread_of_each_device():
    threads = []
    for where in ("cpu", "rgdev:0", "rgdev:1"):
        x = torch.randn(3, device=where, requires_grad=True)
        y = x.sin()
        y.register_hook(lambda _: threads.append(threading.get_ident()))
        y.sum().backward()
        assert x.grad.device == torch.device(where)
    assert threads[0] == threading.get_ident()
    assert len(set(threads)) == 3


@ITSELF
def test_views_share_memory_and_versions():
    x = torch.zeros(4, 6, device=DEVICE)
    views = [x[1:3, ::2], x.t(), x.view(-1), x.unfold(0, 2, 2), x.diagonal(), *x.chunk(2)]
    for i, view in enumerate(views):
        view.add_(1)
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert x._version == view._version == i + 1
    assert x.sum().item() == 6 + 4 * 24 + 4
    out = torch.empty(0, device=DEVICE)
    assert torch.mm(x, x.t(), out=out) is out and out.shape == (4, 4)


@ITSELF
def test_devices_do_not_mix():
    a = torch.ones(2, 2, device=DEVICE)
    for b in (torch.ones(2, 2), torch.ones(2, 2, device="rgdev:1")):
        for operation in (torch.add, torch.mm):
            with pytest.raises(RuntimeError, match="on the same device"):
                operation(a, b)
    assert (a + torch.tensor(1.0)).sum().item() == 8  # numbers of the host do


def draws():
    ones = torch.ones(8, device=DEVICE)
    return [
        torch.rand(3, device=DEVICE),
        torch.randn(3, device=DEVICE),
        torch.randperm(5, device=DEVICE),
        torch.randint(9, (4,), device=DEVICE),
        F.dropout(ones),
        torch.native_dropout(ones, 0.5, True)[0],
        torch.bernoulli(ones / 2),
        torch.multinomial(ones, 3),
        torch.empty(3, device=DEVICE).exponential_(),
    ]


@ITSELF
def test_random_numbers_come_from_its_own_generators():
    cpu = torch.get_rng_state()
    before = torch.rgdev.get_rng_state()
    other = torch.rgdev.get_rng_state("rgdev:1")
    first = draws()
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.rgdev.get_rng_state("rgdev:1"), other)
    assert not torch.equal(torch.rgdev.get_rng_state(), before)
    second = draws()
    torch.rgdev.set_rng_state(before)
    third = draws()
    for a, b, c in zip(first, second, third):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)


@ITSELF
def test_generators_of_the_user():
    a, b = (torch.Generator(DEVICE).manual_seed(7) for _ in range(2))
    first = torch.rand(4, device=DEVICE, generator=a)
    assert torch.equal(first, torch.rand(4, device=DEVICE, generator=b))
    assert torch.equal(a.get_state(), b.get_state())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device=DEVICE, generator=torch.Generator())


@ITSELF
def test_autocast_casts_by_operation():
    linear = nn.Linear(4, 4, device=DEVICE)
    x = torch.randn(2, 4, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = linear(x)
        low = [y, x @ x.t(), F.scaled_dot_product_attention(x[None], x[None], x[None])]
        low.append(F.conv2d(x.view(1, 1, 2, 4), x.view(1, 1, 2, 4)))
        high = [F.softmax(y, -1), F.layer_norm(y, (4,)), F.mse_loss(y, y)]
        on_cpu = torch.ones(2, 2) @ torch.ones(2, 2)
    assert {t.dtype for t in low} == {torch.bfloat16}
    assert {t.dtype for t in [*high, on_cpu]} == {torch.float32}
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.float32


def recorded_event():
    return torch.accelerator.current_stream().record_event()


WAITS = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "bool": (lambda x: bool(x[0] > 0), "_local_scalar_dense"),
    "allclose": (lambda x: torch.allclose(x, x), "_local_scalar_dense"),
    "cpu": (lambda x: x.cpu(), "copy_"),
    "to": (lambda x: x.to("cpu", torch.float64), "copy_"),
    "tolist": (lambda x: x.tolist(), "copy_"),
    "equal": (lambda x: torch.equal(x, x + 1), "equal"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "index"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x: x.unique(), "_unique2"),
    "module": (lambda x: torch.rgdev.synchronize(), "synchronize"),
    "accelerator": (lambda x: torch.accelerator.synchronize(), "synchronize"),
    "stream": (lambda x: torch.accelerator.current_stream().synchronize(), "synchronize stream"),
    "event": (lambda x: recorded_event().synchronize(), "synchronize event"),
}
NO_WAITS = {
    "arithmetic": lambda x: (x.sin() @ x.view(4, 1)).add_(1),
    "reduction": lambda x: torch.stack([x, x]).amax(),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "indices": lambda x: x[torch.arange(2, device=DEVICE)],
    "pinned": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "other device": lambda x: x.to("rgdev:1"),
    "shapes": lambda x: torch.equal(x, x[:2]),
    "state": lambda x: torch.rgdev.set_rng_state(torch.rgdev.get_rng_state()),
}


@ITSELF
@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted(name):
    operation, expected = WAITS[name]
    x = torch.randn(4, device=DEVICE)
    device.reset_waits()
    with device.waiting() as names:
        operation(x)
    assert names == [expected]
    assert device.waits() == 1


@ITSELF
@pytest.mark.parametrize("name", NO_WAITS)
def test_other_operations_do_not_wait(name):
    x = torch.randn(4, device=DEVICE)
    device.reset_waits()
    NO_WAITS[name](x)
    assert device.waits() == 0


@ITSELF
def test_uploads_are_counted_by_themselves():
    device.reset_waits()
    torch.tensor([1.0, 2.0], device=DEVICE)
    torch.ones(3).to(DEVICE)
    torch.ones(3).to(DEVICE, non_blocking=True)
    torch.zeros(3, device=DEVICE).fill_(2.0)
    assert (device.uploads(), device.waits()) == (2, 0)


@ITSELF
def test_the_allocator_counts_bytes():
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, device=DEVICE)
    y = x * 2
    kept = y[:10]
    del x, y
    assert torch.accelerator.memory_allocated() - before == 4000
    assert torch.rgdev.memory_allocated("rgdev:1") == 0
    torch.accelerator.reset_peak_memory_stats()
    kept.new_empty(500)
    assert torch.accelerator.max_memory_allocated() - before == 6000
    assert torch.rgdev.max_memory_allocated() - before == 6000
    del kept
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == before


# --- promises


@pytest.mark.parametrize(
    ("case", "dropout"),
    [*((case, 0.3) for case in zoo.CASES), *((case, 0.0) for case in ADDITIVE)],
    ids=str,
)
def test_gradients_and_generators_are_those_of_plain_autograd(case, dropout):
    stack, x = build(case, dropout=dropout)
    results = []
    for run in (stack, lambda x: zoo.plain_stack(stack, x)):
        torch.manual_seed(5)
        gradients = zoo.gradients(stack, run(x), x)
        results.append((gradients, state(), torch.get_rng_state()))
    (got, *states), (expected, *expected_states) = results
    assert zoo.worst(got, expected) < 1e-9
    assert all(map(torch.equal, states, expected_states))


def test_draws_between_forward_and_backward_do_not_disturb():
    stack, x = build(CASE, dropout=0.3)
    torch.manual_seed(5)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    torch.manual_seed(5)
    y = stack(x)
    torch.randn(3, device=DEVICE)
    torch.randn(3)
    before = state(), torch.get_rng_state()
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9
    assert all(map(torch.equal, before, (state(), torch.get_rng_state())))


@pytest.mark.parametrize("backward_under_autocast", [False, True])
@pytest.mark.parametrize("case", ADDITIVE, ids=str)
def test_autocast(case, backward_under_autocast):
    stack, x = build(case, dropout=0.1, dtype=torch.float32)
    gradients = []
    for run in (stack, lambda x: zoo.plain_stack(stack, x)):
        torch.manual_seed(0)
        with torch.autocast(KIND, dtype=torch.bfloat16):
            y = run(x)
        with torch.autocast(KIND, dtype=torch.bfloat16, enabled=backward_under_autocast):
            gradients.append(zoo.gradients(stack, y, x))
    assert zoo.worst(*gradients) < 2e-2


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_autocast_is_that_of_forward(memory):
    """In recompute, which runs in a thread of the device."""
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            state = torch.is_autocast_enabled(KIND), torch.get_autocast_dtype(KIND)
            seen.append((rg.is_recomputing(), *state, threading.get_ident()))
            return super().forward(x)

    blocks = [(Spy(4, 4, device=DEVICE), Spy(4, 4, device=DEVICE)) for _ in range(3)]
    stack = rg.ReversibleSequence(blocks, memory=zoo.MEMORY[memory])
    with torch.autocast(KIND, dtype=torch.bfloat16):
        y = stack(torch.randn(2, 4, device=DEVICE))
    y.sum().backward()
    assert {state[1:3] for state in seen} == {(True, torch.bfloat16)}
    threads = {is_again: {t for again, *_, t in seen if again == is_again} for is_again in (0, 1)}
    assert threads[0] == {threading.get_ident()}
    assert threading.get_ident() not in threads[1]
    assert len(threads[1]) == (memory != "keep")


def batch_norm():
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_buffers(memory, shared):
    one = batch_norm()
    blocks = [(one, one) if shared else (batch_norm(), batch_norm()) for _ in range(3)]
    stack = rg.ReversibleSequence(blocks, memory=zoo.MEMORY[memory]).double().to(DEVICE)
    plain = copy.deepcopy(stack)
    for _ in range(3):
        x = torch.randn(8, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
        expected = zoo.gradients(plain, zoo.plain_stack(plain, x), x)
        assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9
        assert zoo.worst([*stack.buffers()], [*plain.buffers()]) < 1e-12


class Moving(nn.Module):
    """A function on a device of its own."""

    def __init__(self, where, dropout=0.0):
        super().__init__()
        self.inner = zoo.Mix(4, dropout).double().to(where)
        self.where = where

    def forward(self, *values):
        return self.inner(sum(value.to(self.where) for value in values))


# Torch 2.10 to 2.12 warn of it in plain autograd, once in a process.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("memory", zoo.MEMORY)
@pytest.mark.parametrize("places", [("cpu", f"{KIND}:0"), (f"{KIND}:0", f"{KIND}:1")], ids="-".join)
def test_streams_on_two_devices(places, memory, dropout):
    """Four streams, two on each device, that read each other. Autograd uses a thread for each."""
    of_two(*places)
    updates = []
    for _ in range(3):
        for i, where in enumerate(places):
            reads = (f"{i}b", f"{1 - i}b")
            updates.append(rg.Update(f"{i}a", Moving(where, dropout), reads=reads))
        for i, where in enumerate(places):
            updates.append(rg.Update(f"{i}b", Moving(where, dropout), reads=(f"{i}a",)))
    net = rg.Reversible(updates, memory=zoo.MEMORY[memory])
    streams = {
        f"{i}{letter}": torch.randn(2, 4, dtype=torch.float64, device=where, requires_grad=True)
        for i, where in enumerate(places)
        for letter in "ab"
    }
    results = []
    for run in (net, lambda streams: zoo.plain_program(net, streams)):
        torch.manual_seed(3)
        output = run(streams)
        wanted = [*streams.values(), *net.parameters()]
        total = sum(zoo.loss(stream).cpu() for stream in output.values())
        results.append(torch.autograd.grad(total, wanted))
    assert zoo.worst(*map(list, results)) < 1e-9


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("case", ADDITIVE, ids=str)
def test_exact_is_keep_to_the_bit(case, dtype):
    stack, x = build(case, depth=6, dropout=0.2, dtype=torch.float32)
    results = []
    for memory in (zoo.MEMORY[case.memory], rg.Keep()):
        pairs = [(block.f, block.g) for block in stack.blocks]
        exact = rg.ReversibleSequence(pairs, streams=stack.streams, memory=memory, exact=True)
        torch.manual_seed(1)
        with torch.autocast(KIND, dtype=dtype, enabled=dtype is not None):
            y = exact(x)
        results.append([*zoo.leaves(y), *zoo.gradients(exact, y, x)])
    assert all(map(torch.equal, *results))


def mlp(width=16, dropout=0.0):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
        nn.Linear(4 * width, width),
    )  # fmt: skip


def deep(blocks=8, make=mlp, **options):
    return rg.ReversibleSequence([(make(), make()) for _ in range(blocks)], **options).to(DEVICE)


def activations(stack, x):
    """The peak of a step as the allocator has it, less the gradients."""
    stack.zero_grad()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    stack(x).sum().backward()
    gradients = sum(parameter.grad.nbytes for parameter in stack.parameters())
    return torch.accelerator.max_memory_allocated() - before - gradients


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_budget(share):
    x = torch.randn(64, 16, device=DEVICE)
    stack = deep(memory=rg.Keep())
    plain = activations(stack, x)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x))
    stack.memory = rg.Reverse()
    least = activations(stack, x)
    stack.memory = rg.Budget(int(share * plain))
    for _ in range(3):
        got = zoo.gradients(stack, stack(x))
    assert zoo.worst(got, expected) < 1e-4
    assert least < activations(stack, x) <= share * plain


def test_plan():
    stack = deep(make=lambda: mlp(dropout=0.1), memory=rg.Budget("50%"))
    x = torch.randn(64, 16, device=DEVICE)
    states = state(), torch.get_rng_state()
    plan = stack.plan(x)
    assert 0 < plan.peak <= plan.plain / 2
    assert all(map(torch.equal, states, (state(), torch.get_rng_state())))


def test_peak_memory_does_not_grow_with_depth():
    x = torch.randn(64, 16, device=DEVICE)
    peaks = []
    for blocks in (4, 32):
        stack = deep(blocks)
        activations(stack, x)
        peaks.append(activations(stack, x))
    assert peaks[1] - peaks[0] < x.nbytes


@pytest.mark.parametrize("case", [CASE, zoo.Case("affine", "split", "tree", "reverse")], ids=str)
def test_check(case):
    stack, x = build(case, dropout=0.1)
    report = rg.check(stack, x)
    assert report.ok, str(report)
    assert max(report.gradients.values()) < 1e-9


def test_measure_has_what_the_allocator_says():
    stack = deep()
    x = torch.randn(64, 16, device=DEVICE)
    stack(x).sum().backward()
    measured = rg.measure.step(lambda: stack(x).sum().backward(), stack)
    assert measured.evaluations["blocks.0.f"] == 2
    assert measured.allocated == activations(stack, x)
    assert measured.activation_bytes <= measured.allocated < 1.2 * measured.activation_bytes


def test_live_bytes_are_the_allocator_s():
    x = torch.randn(64, 16, device=DEVICE)
    before = torch.accelerator.memory_allocated()
    with LiveBytes() as live:
        kept = [x.sin(), x[:2], x.view(-1)]
        assert live.now == torch.accelerator.memory_allocated() - before == x.nbytes
        del kept
    assert live.now == 0


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("case", ADDITIVE, ids=str)
def test_save_on_cpu(case, pin_memory):
    stack, x = build(case)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        y = stack(x)
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_a_model_that_moves_between_steps(memory):
    stack, x = zoo.Case("additive", "mean", "tensor", memory).build(dropout=0.2)
    last = torch.accelerator.device_count() - 1
    for where in ("cpu", f"{KIND}:0", f"{KIND}:{last}", "cpu", f"{KIND}:0"):
        stack.to(where)
        there = x.detach().to(where).requires_grad_()
        gradients = []
        for run in (stack, lambda x: zoo.plain_stack(stack, x)):
            torch.manual_seed(4)
            gradients.append(zoo.gradients(stack, run(there), there))
        assert zoo.worst(*gradients) < 1e-9


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_torch_func(memory):
    stack, x = build(zoo.Case("additive", "mean", "tensor", memory))
    parameters = dict(stack.named_parameters())
    x = x.detach()

    def loss(parameters, x):
        return zoo.loss(torch.func.functional_call(stack, parameters, (x,)))

    got = torch.func.grad(loss)(parameters, x)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x))
    assert zoo.worst(list(got.values()), expected) < 1e-9
    rows = torch.func.vmap(stack)(x)
    assert zoo.worst([rows], [zoo.plain_stack(stack, x)]) < 1e-9


@pytest.mark.parametrize("system", test_compat_parity.CASES, ids=lambda system: system.__name__)
def test_the_five_systems(system):
    case = system()
    with torch.device(DEVICE):
        net, (args, kwargs) = case.build(case.ours, 0.2).double(), case.inputs()
        results = []
        for memory in (rg.Reverse(), rg.Keep()):
            net.engine.memory = memory
            torch.manual_seed(1)
            found = test_compat_parity.step(net, args, kwargs)
            results.append([tensor for tensors in found.values() for tensor in tensors])
    assert zoo.worst(*results) < 1e-9


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("memory", ["reverse", "reverse-all"])
def test_backwards_in_any_order(memory, order):
    stack, x = build(zoo.Case("additive", "split", "tensor", memory), depth=2, dropout=0.3)
    inputs = [(x.detach() + i).requires_grad_() for i in range(3)]
    results = []
    for run in (stack, lambda x: zoo.plain_stack(stack, x)):
        torch.manual_seed(2)
        outputs = [run(x) for x in inputs]
        results.append([zoo.gradients(stack, outputs[i], inputs[i]) for i in order])
    for got, expected in zip(*results):
        assert zoo.worst(got, expected) < 1e-9


@pytest.mark.parametrize("case", TENSORS, ids=str)
def test_double_backward(case):
    stack, x = build(case, depth=2)
    results = []
    for run in (stack, lambda x: zoo.plain_stack(stack, x)):
        (gradient,) = torch.autograd.grad(zoo.loss(run(x)), x, create_graph=True)
        results.append(zoo.gradients(stack, gradient, x))
    assert zoo.worst(*results) < 1e-8


def test_retained_graphs():
    stack, x = build(CASE, dropout=0.3)
    y = stack(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


# --- waits


class Scaled(nn.Module):
    """A function with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, scale, mask=None):
        return (self.linear(x).tanh() * scale).masked_fill(mask, 0.0)


def normed():
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())


STACKS = {
    "mlp": mlp,
    "dropout": lambda: mlp(dropout=0.2),
    "batch-norm": normed,
    "arguments": Scaled,
}


def waits_of_a_step(make, steps=3, **options):
    """What waits in forward and in backward, after the steps that are inspected."""
    stack = deep(10, STACKS[make], **options)
    x = torch.randn(32, 16, device=DEVICE, requires_grad=True)
    kwargs = {}
    if make == "arguments":
        scale = torch.full((), 0.5, device=DEVICE, requires_grad=True)
        kwargs = {"scale": scale, "mask": torch.zeros(32, 16, dtype=torch.bool, device=DEVICE)}
    for _ in range(steps):
        device.reset_waits()
        with device.waiting() as forward:
            loss = stack(x, **kwargs).square().mean()
        with device.waiting() as backward:
            loss.backward()
    assert device.uploads() == 0
    return collections.Counter(forward), collections.Counter(backward)


@pytest.mark.parametrize("make", STACKS)
def test_plain_autograd_waits_for_nothing(make):
    assert waits_of_a_step(make, memory=rg.Keep()) == ({}, {})


@pytest.mark.parametrize("make", STACKS)
def test_a_step_waits_once_to_compare_the_streams(make):
    forward, backward = waits_of_a_step(make)
    assert forward == {}
    assert backward.total() == 1


@pytest.mark.parametrize("make", STACKS)
def test_a_step_that_compares_nothing_does_not_wait(make):
    assert waits_of_a_step(make, drift="ignore") == ({}, {})


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("make", STACKS)
def test_an_exact_step_waits_once(make, verify):
    forward, backward = waits_of_a_step(make, exact=True, verify=verify)
    assert (forward + backward).total() == 1


@pytest.mark.parametrize("memory", [rg.Budget("60%"), rg.Anchor(4), rg.Reverse(False)], ids=str)
@pytest.mark.parametrize("make", STACKS)
def test_other_memory_modes_wait_as_rarely(make, memory):
    forward, backward = waits_of_a_step(make, memory=memory)
    assert forward == {}
    assert backward.total() == 1


@pytest.mark.parametrize("make", ["mlp", "dropout", "arguments"])
def test_budgets_that_compare_nothing_do_not_wait(make):
    assert waits_of_a_step(make, memory=rg.Budget("60%"), drift="ignore") == ({}, {})


@pytest.mark.parametrize("make", STACKS)
def test_a_step_that_is_never_verified_waits_as_rarely_from_the_start(make):
    forward, backward = waits_of_a_step(make, steps=1, verify="never")
    assert forward == {}
    assert backward.total() == 1


# --- residual networks

RULES = {
    "euler": (rg.Euler(), False),
    "euler-exact": (rg.Euler(), True),
    "midpoint": (rg.Midpoint(0.5), False),
    "midpoint-exact": (rg.Midpoint(0.5), True),
    "leapfrog-exact": (rg.Leapfrog(0.5), True),
    "blend-exact": (rg.Blend(1 / 4), True),
    "bdia-exact": (rg.Bdia(0.5), True),
    "mixed-exact": (rg.TwoStep([0, 0.5, 0, 1, 0.9, -0.5, 0, 0.25], 1, 0.5), True),
}


def residual(name, memory=rg.Reverse(keep_last=False), **options):
    rule, exact = RULES[name]
    with torch.device(DEVICE):
        layers = [mlp(dropout=0.2) for _ in range(8)]
    return rg.Residual(layers, rule=rule, exact=exact, memory=memory, **options)


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Anchor(2), rg.Budget("70%")], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_residual_networks(name, memory):
    net = residual(name)
    x = torch.randn(256, 16, device=DEVICE, requires_grad=True)
    found = []
    for net.memory in (memory, rg.Keep()):
        for _ in range(2):  # a budget makes its plan in the first step
            torch.manual_seed(1)
            y = net(x)
            grads = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
        found.append([y.detach(), *grads, state()])
    if RULES[name][1]:
        assert all(map(torch.equal, *found))
    else:
        *tensors, states = zip(*found)
        assert torch.equal(*states)
        assert zoo.worst(*map(list, zip(*tensors))) < 1e-4


@pytest.mark.parametrize("memory", [rg.Reverse(keep_last=False), rg.Budget("70%")], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_residual_networks_wait_as_rarely(name, memory):
    net = residual(name, memory)
    x = torch.randn(256, 16, device=DEVICE, requires_grad=True)
    for _ in range(3):
        with device.waiting() as forward:
            loss = net(x).square().mean()
        with device.waiting() as backward:
            loss.backward()
    assert collections.Counter(forward) == {}
    assert collections.Counter(backward).total() == 1


@pytest.mark.parametrize("value", zoo.VALUES)
def test_streams_of_several_tensors_and_of_other_strides(value):
    stack, x = build(zoo.Case("additive", "split", value, "reverse"))
    x = zoo.pytree.tree_map(lambda leaf: leaf.detach().mT.contiguous().mT, x)
    for _ in range(3):
        with device.waiting() as forward:
            loss = zoo.loss(stack(x))
        with device.waiting() as backward:
            loss.backward()
    assert (len(forward), len(backward)) == (0, 1)


def test_a_coupling_of_the_user_s_does_not_wait():
    assert waits_of_a_step("mlp", coupling=zoo.Scaled(), drift="ignore") == ({}, {})


@pytest.mark.parametrize("exact", [False, True])
def test_without_gradients_and_inverse(exact):
    """Only `inverse` looks at the range of the grid. Nothing is rebuilt from the other pass."""
    stack = deep(make=lambda: mlp(8), streams=rg.Split(), exact=exact)
    x = torch.randn(4, 16, device=DEVICE)
    device.reset_waits()
    with torch.no_grad():
        y = stack(x)
    assert device.waits() == 0
    stack.inverse(y)
    assert device.waits() == exact


def test_hooks_on_blocks_are_trusted_after_the_first_call():
    stack = deep(drift="ignore").bfloat16()

    def cast(block, args):
        state, *others = args
        state = {name: tuple(map(torch.Tensor.bfloat16, leaves)) for name, leaves in state.items()}
        return state, *others

    for block in stack.blocks:
        block.register_forward_pre_hook(cast)
    x = torch.randn(4, 16, device=DEVICE)
    for _ in range(3):
        device.reset_waits()
        stack(x).sum().backward()
    assert device.waits() == 0


# --- guards look later on a device, but they look


class Inconstant(nn.Module):
    """Does something else in recompute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x) * (1.01 if rg.is_recomputing() else 1.0)


@pytest.mark.parametrize("frozen", [0, 2])
def test_drift_is_noticed(frozen):
    """Also where backward ends before the first update, because nothing there needs a gradient."""
    makes = [mlp] * 4 + [Inconstant] * 4
    stack = rg.ReversibleSequence(
        [(make(), mlp()) for make in makes], verify="never", drift="raise"
    ).to(DEVICE)
    for block in stack.blocks[:frozen]:
        block.requires_grad_(False)
    x = torch.randn(8, 16, device=DEVICE)
    with pytest.raises(rg.RetrogradError, match="off by"):
        stack(x).sum().backward()


def test_values_beyond_the_grid_are_noticed_in_backward():
    stack = deep(4, exact=rg.Grid(bits=16), memory=rg.Reverse(keep_last=False))
    y = stack(torch.full((4, 16), 300.0, device=DEVICE))
    with pytest.raises(rg.GridError, match="the input: stream 'x1' holds 300"):
        y.sum().backward()


def test_verification_names_the_update():
    stack = rg.ReversibleSequence([(Inconstant(), mlp()) for _ in range(4)]).to(DEVICE)
    with pytest.raises(rg.RecomputeError, match=r"blocks.2.f"):
        stack(torch.randn(8, 16, device=DEVICE)).sum().backward()


def test_edits_in_place_are_noticed():
    stack = deep(memory=rg.Reverse(keep_last=False))
    x = torch.randn(8, 16, device=DEVICE)
    y = stack(x)
    with torch.no_grad():
        next(stack.parameters()).add_(1)
    with pytest.raises(rg.InPlaceError):
        y.sum().backward()


# --- devices that lack something


def test_without_a_generator_functions_that_do_not_draw():
    stack, x = build(CASE)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    with device.without(device.GENERATORS):
        assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9


@pytest.mark.parametrize("verify", ["first", "never"])
def test_without_a_generator_functions_that_draw_raise(verify):
    """Their numbers cannot be replayed. The error names the update and the device."""
    stack, x = build(CASE, dropout=0.3)
    stack.verify = verify
    with (
        device.without(device.GENERATORS),
        pytest.raises(rg.RetrogradError, match=r"update \d of 6 [\s\S]*rgdev"),
    ):
        zoo.gradients(stack, stack(x), x)


def test_without_a_generator_check():
    stack, x = build(CASE)
    with device.without(device.GENERATORS):
        assert rg.check(stack, x).ok


def test_without_a_generator_plan():
    stack = deep(memory=rg.Budget("50%"))
    with device.without(device.GENERATORS):
        assert stack.plan(torch.randn(64, 16, device=DEVICE)).peak > 0


def test_without_autocast():
    stack, x = build(CASE, dropout=0.3)
    torch.manual_seed(1)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    torch.manual_seed(1)
    with device.without(device.AUTOCAST):
        got = zoo.gradients(stack, stack(x), x)
        assert rg.check(stack, x).ok
    assert zoo.worst(got, expected) < 1e-9


def test_without_autocast_under_that_of_the_cpu():
    stack, x = build(CASE, dtype=torch.float32)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    with device.without(device.AUTOCAST), torch.autocast("cpu", dtype=torch.bfloat16):
        y = stack(x)
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-5


def test_without_memory_statistics_measure():
    stack = deep()
    x = torch.randn(64, 16, device=DEVICE)
    with device.without(device.MEMORY):
        measured = rg.measure.step(lambda: stack(x).sum().backward(), stack)
    assert measured.allocated is None
    assert measured.activation_bytes > 0


def test_without_memory_statistics_budget_and_check():
    stack = deep(memory=rg.Budget("1 MiB"))
    x = torch.randn(64, 16, device=DEVICE)
    with device.without(device.MEMORY):
        for _ in range(2):
            stack(x).sum().backward()
        assert rg.check(stack, x).ok


# --- graph capture


def captured_step(make="mlp", warm_up=2, **options):
    stack = deep(6, STACKS[make], **options).double()
    x = torch.randn(8, 16, device=DEVICE, dtype=torch.float64)
    for _ in range(warm_up):
        stack(x).sum().backward()
    stack.zero_grad()
    with device.capture():
        stack(x).sum().backward()
    return [parameter.grad for parameter in stack.parameters()]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make", ["mlp", "batch-norm"])
def test_a_step_can_be_captured(make, exact):
    """Nothing is waited for, and no generator is read."""
    options = {"drift": "ignore", "verify": "never", "exact": exact}
    got = captured_step(make, **options)
    torch.manual_seed(0)
    assert zoo.worst(got, captured_step(make, memory=rg.Keep(), **options)) < 1e-9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, 'would look at values on the device: drift=.*set stack.drift = "ignore"'),
        ({"drift": "ignore", "warm_up": 0}, "have not been seen yet.*run two steps"),
        ({"drift": "ignore", "make": "dropout"}, "draw random numbers.*capture without dropout"),
    ],
)
def test_what_cannot_be_captured_raises(options, says):
    with pytest.raises(rg.RetrogradError, match=f"(?s){says}"):
        captured_step(**options)


# --- streams of the device


class Aside(nn.Module):
    """Computes on a stream of its own, as functions that overlap communication do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen = []  # whether it ran again, and on which stream it was called

    def forward(self, x):
        home = torch.accelerator.current_stream()
        self.seen.append((rg.is_recomputing(), home.stream_id))
        side = torch.Stream(x.device)
        side.wait_stream(home)
        torch.accelerator.set_stream(side)
        try:
            y = self.linear(x).tanh()
        finally:
            torch.accelerator.set_stream(home)
        home.wait_stream(side)
        return y


def test_functions_run_again_on_the_stream_of_forward():
    """Autograd runs their backward on the other one, and asks from there."""
    stack = deep(4, Aside, memory=rg.Reverse(keep_last=False))
    x = torch.randn(8, 16, device=DEVICE)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x))
    for block in stack.blocks:
        block.f.seen.clear()
    home = torch.accelerator.current_stream()
    assert zoo.worst(zoo.gradients(stack, stack(x)), expected) < 1e-4
    assert stack.blocks[1].f.seen == [(False, home.stream_id), (True, home.stream_id)]
    assert torch.accelerator.current_stream() == home
