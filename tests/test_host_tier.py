"""What a plan keeps may wait in the memory of the host: the same gradients, fewer FLOPs, no waits.

On the test device, whose copies beside the work are late on purpose: a wait that is missing shows
in the values, and what is let go too early is counted. See `tests/device`.
"""

import contextlib
import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import retrograd as rg
from benchmarks.steps import FlopsOfAll
from retrograd.compiling.obstacles import _obstacle_of_settings
from retrograd.core import host_memory
from retrograd.planner import least_peak
from retrograd.profile import ASSUMED_BANDWIDTH
from tests import device, zoo
from tests.test_tight_budgets import NETWORKS, train

DEVICE = f"{device.NAME}:0"
HOST = rg.Choice(output=True, saved=True, host=True)


@pytest.fixture(scope="module", autouse=True)
def _device():
    device.load()


@pytest.fixture(autouse=True)
def _fast_copies(_device):
    """Copies that cost less than a recompute of the small functions here."""
    host_memory._bandwidths.clear()
    device.set_bandwidth(1e15)
    torch.manual_seed(0)
    with device.late_copies() as races:
        yield
        gc.collect()
    assert races == []


class Fixed:
    """A memory mode that makes the same choice for every update."""

    def __init__(self, choice, keep_from=None):
        self.choice = choice
        self.keep_from = keep_from

    def plan(self, call):
        count = len(call.targets) if self.keep_from is None else self.keep_from
        return rg.Plan(count, choices=dict.fromkeys(range(count), self.choice))


def mlp(width=16, dropout=0.0):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
        nn.Linear(4 * width, width),
    )  # fmt: skip


def deep(blocks=6, make=mlp, **options):
    options = {"drift": "ignore", **options}
    return rg.ReversibleSequence([(make(), make()) for _ in range(blocks)], **options).to(DEVICE)


def euler(layers=12, **options):
    return rg.Residual([mlp() for _ in range(layers)], drift="ignore", **options).to(DEVICE)


def data(rows=64, width=16):
    return torch.randn(rows, width, device=DEVICE)


def gradients(stack, x, memory):
    """Of a step in a memory mode whose plan is settled, and of the input."""
    stack.memory = memory
    x = x.detach().requires_grad_()
    for _ in range(3):
        torch.manual_seed(3)
        got = torch.autograd.grad(stack(x).square().mean(), [x, *stack.parameters()])
    return got


def host_of(stack):
    return stack._cache.host


@contextlib.contextmanager
def peak_bytes():
    """A list that has the peak of the device's allocator, afterwards."""
    found = []
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    yield found
    found.append(torch.accelerator.max_memory_allocated() - before)


def activations(stack, x):
    """The most that a step needs on the device, less the gradients of parameters."""
    for _ in range(2):
        stack.zero_grad()
        stack(x).square().mean().backward()
    stack.zero_grad()
    with peak_bytes() as peak:
        stack(x).square().mean().backward()
    return peak[0] - sum(p.grad.nbytes for p in stack.parameters())


def flops_of(stack, x):
    stack.zero_grad()
    with FlopsOfAll() as flops:
        stack(x).square().mean().backward()
    return flops.total


# --- the copies


CHOICES = {
    "saved": HOST,
    "output": rg.Choice(output=True, host=True),
    "streams": rg.Choice(streams=True, host=True),
    "streams and saved": rg.Choice(streams=True, saved=True, host=True),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("exact", [False, True])
def test_values_come_back_as_they_were(choice, exact):
    """Bit by bit: as if they had been kept on the device."""
    stack = deep(make=lambda: mlp(dropout=0.2), exact=exact)
    x = data()
    expected = gradients(stack, x, Fixed(CHOICES[choice]._replace(host=False)))
    got = gradients(stack, x, Fixed(CHOICES[choice]))
    assert host_of(stack).bytes > 0
    assert all(map(torch.equal, got, expected))
    plain = gradients(stack, x, rg.Keep())
    assert all(map(torch.equal, got, plain)) if exact else zoo.worst(got, plain) < 1e-4


@pytest.mark.parametrize("case", [case for case in zoo.REVERSED if case.value != "sparse"], ids=str)
def test_gradients_are_those_of_plain_autograd(case):
    with torch.device(DEVICE):
        stack, x = case.build(dropout=0.2)
    torch.manual_seed(1)
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    for choice in CHOICES.values():
        stack.memory = Fixed(choice)
        for _ in range(2):
            torch.manual_seed(1)
            got = zoo.gradients(stack, stack(x), x)
        assert zoo.worst(got, expected) < 1e-9


def test_targets_wait_on_the_host():
    """A residual network keeps the earlier value of each target."""
    net, x = euler(), data(1024)
    expected = gradients(net, x, rg.Keep())
    got = gradients(net, x, Fixed(rg.Choice(host=True)))
    assert host_of(net).bytes == 12 * x.nbytes
    assert zoo.worst(got, expected) < 1e-6
    net.memory = Fixed(rg.Choice(host=True))
    on_host = activations(net, x)
    net.memory = Fixed(rg.Choice())
    assert activations(net, x) >= on_host + 7 * x.nbytes


def test_memory_on_the_device_is_let_go_after_the_next_update():
    """And comes back one update ahead: two updates are on the device, never more."""
    x = data()
    peaks = []
    for blocks in (6, 24):
        stack = deep(blocks, memory=Fixed(HOST))
        peaks.append(activations(stack, x))
    assert abs(peaks[1] - peaks[0]) <= x.nbytes
    stack.memory = Fixed(HOST._replace(host=False))
    assert activations(stack, x) > 6 * peaks[1]


def test_copies_back_begin_one_update_ahead(monkeypatch):
    seen = []
    begin = host_memory.HostTier.before_recompute

    def look(tier, index, undo):
        was_begun = [storage.there is not None for storage in tier._alive(index)]
        begin(tier, index, undo)
        is_under_way = [storage.pending is not None for storage in tier._alive(index - 1)]
        seen.append((index, all(was_begun), all(is_under_way)))

    monkeypatch.setattr(host_memory.HostTier, "before_recompute", look)
    stack, x = deep(memory=Fixed(HOST)), data()
    stack(x).square().mean().backward()
    assert seen == [(11, False, True), *((index, True, True) for index in range(10, -1, -1))]


def test_the_host_does_not_wait():
    stack, x = deep(memory=Fixed(HOST)), data()
    for _ in range(3):
        device.reset_waits()
        with device.waiting() as names:
            stack(x).square().mean().backward()
        uploads = device.uploads()
    assert names == [] and uploads == 0


def test_buffers_are_used_again():
    stack, x = deep(memory=Fixed(HOST)), data()
    seen = []
    for _ in range(4):
        stack(x).square().mean().backward()
        memory = host_of(stack)
        assert memory.used == 0
        seen.append({buffer.data_ptr() for buffers in memory.free.values() for buffer in buffers})
    assert seen[0] == seen[-1] and len(seen[0]) >= 12


def test_what_is_measured_is_on_the_device():
    stack, x = deep(memory=Fixed(HOST)), data()
    stack(x).square().mean().backward()
    measured = rg.measure.step(lambda: stack(x).square().mean().backward(), stack)
    assert measured.activation_bytes == measured.allocated


def test_parameters_arguments_and_buffers_stay_on_the_device():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("table", torch.ones(4096))

        def forward(self, x, scale):
            return self.linear(x) * scale * self.table.view(-1, 1)[:1]

    stack = deep(make=Scaled, memory=Fixed(HOST))
    x = data()
    stack(x, scale=torch.full((64, 16), 0.5, device=DEVICE)).sum().backward()
    # What it reads, what the linear layer returns, the product, and the output of each.
    assert host_of(stack).bytes <= 12 * 5 * x.nbytes


def test_a_dropped_output_frees_everything_at_once():
    stack, x = deep(memory=Fixed(HOST)), data()
    stack(x).square().mean().backward()
    stack.zero_grad()
    before = torch.accelerator.memory_allocated()
    y = stack(x)
    assert host_of(stack).used > 0
    del y
    assert host_of(stack).used == 0
    assert torch.accelerator.memory_allocated() == before


def test_another_memory_mode_frees_the_buffers():
    stack, x = deep(memory=Fixed(HOST)), data()
    stack(x).square().mean().backward()
    memory = host_of(stack)
    stack.memory = rg.Reverse()
    assert host_of(stack) is None and memory.used == 0
    y = stack(x)
    stack.memory = Fixed(HOST)
    z = stack(x)
    (y + z).square().mean().backward()


# --- unusual backwards


def test_two_calls_before_a_backward():
    stack, x = deep(), data().requires_grad_()
    other = data().requires_grad_()

    def both():
        loss = stack(x).square().mean() + stack(other).sin().mean()
        return torch.autograd.grad(loss, [x, other, *stack.parameters()])

    stack.memory = rg.Keep()
    expected = both()
    stack.memory = Fixed(HOST)
    assert zoo.worst(both(), expected) < 1e-5
    assert host_of(stack).used == 0


def test_retained_graphs():
    stack, x = deep(memory=Fixed(HOST)), data().requires_grad_()
    y = stack(x)
    first, second, third = (
        torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in range(3)
    )
    assert zoo.worst([first], [second]) < 1e-5 and torch.equal(second, third)


@pytest.mark.parametrize("choice", CHOICES)
def test_double_backward(choice):
    stack, x = deep(2), data(4).double().requires_grad_()
    stack.double()
    results = []
    for stack.memory in (rg.Keep(), Fixed(CHOICES[choice])):
        (gradient,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), [x, *stack.parameters()]))
    assert zoo.worst(*results) < 1e-9


def test_a_backward_that_begins_in_the_middle():
    """Of `inputs` only: the walk stops, and a later backward goes on."""
    stack, x = deep(memory=Fixed(HOST)), data().requires_grad_()
    parameters = list(stack.blocks[3].parameters())
    y = stack(x).square().sum()
    first = torch.autograd.grad(y, parameters, retain_graph=True)
    whole = torch.autograd.grad(y, [x, *parameters])
    stack.memory = rg.Keep()
    expected = torch.autograd.grad(stack(x).square().sum(), [x, *parameters])
    assert zoo.worst(first, expected[1:]) < 1e-4
    assert zoo.worst(whole, expected) < 1e-4


class Fails(nn.Linear):
    when = None  # "forward" or "backward"

    def forward(self, x):
        if self.when == "forward":
            raise RuntimeError("no")
        y = super().forward(x)
        if self.when == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient):
        raise RuntimeError("no")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_in_the_middle(when):
    stack, x = deep(4, memory=Fixed(HOST)), data()
    stack.blocks[2].f = Fails(16, 16).to(DEVICE)
    stack(x).sum().backward()
    stack.blocks[2].f.when = when
    with pytest.raises(RuntimeError, match="no"):
        stack(x).sum().backward()
    stack.blocks[2].f.when = None
    gc.collect()
    assert host_of(stack).used == 0
    expected = gradients(stack, x, rg.Keep())
    assert zoo.worst(gradients(stack, x, Fixed(HOST)), expected) < 1e-4


class EditsLater(nn.Module):
    """Edits in place what the function before saved: while it is copied, or long after."""

    edit = False

    def __init__(self, seen):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen = seen

    def forward(self, x):
        if self.edit and not rg.is_recomputing():
            with torch.no_grad():
                self.seen[0].add_(1)
        return self.linear(x)


class Shows(nn.Linear):
    def __init__(self, seen):
        super().__init__(16, 16)
        self.seen = seen

    def forward(self, x):
        hidden = super().forward(x)
        if not rg.is_recomputing():
            self.seen[:] = [hidden]
        return hidden.tanh() * hidden


@pytest.mark.parametrize(("where", "raises"), [(0, True), (2, False)])
def test_an_edit_in_place(where, raises):
    """One before the copy is done is an error, as it is on the device. Later the host has a copy,
    so the gradients are those of the values that forward had.
    """
    seen = []
    stack = deep(4, make=lambda: nn.Linear(16, 16))
    stack.blocks[0].f = Shows(seen).to(DEVICE)
    (stack.blocks[where].g if where == 0 else stack.blocks[where].f).to(DEVICE)
    edits = EditsLater(seen).to(DEVICE)
    if where == 0:
        stack.blocks[where].g = edits
    else:
        stack.blocks[where].f = edits
    x = data()
    expected = gradients(stack, x, rg.Keep())
    got = gradients(stack, x, Fixed(HOST))
    assert zoo.worst(got, expected) < 1e-4
    edits.edit = True
    y = stack(x)
    del seen[:]
    if raises:
        with pytest.raises(rg.RetrogradError, match="edited in place"):
            y.square().mean().backward()
    else:
        got = torch.autograd.grad(y.square().mean(), list(stack.parameters()))
        assert zoo.worst(got, expected[1:]) < 1e-4


def test_saved_tensor_hooks_around_the_stack_come_first():
    stack, x = deep(memory=Fixed(rg.Choice(host=True))), data()
    expected = gradients(stack, x, rg.Keep())
    stack.memory = Fixed(HOST)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = stack(x).square().mean()
    got = torch.autograd.grad(loss, list(stack.parameters()))
    assert zoo.worst(got, expected[1:]) < 1e-4


# --- the limit


def test_without_room_on_the_host_a_function_runs_again():
    """A second call before the backward of the first: neither limit is exceeded."""
    stack, x = deep(), data()
    expected = gradients(stack, x, rg.Keep())
    stack.memory = Fixed(HOST)
    stack(x).sum().backward()
    host_of(stack).limit = limit = host_of(stack).bytes // 2
    host_of(stack).trim()
    stack._host_memory = lambda memory: host_of(stack)
    losses = [stack(x).square().mean() for _ in range(2)]
    assert 0 < host_of(stack).bytes <= limit
    for loss in losses:
        got = torch.autograd.grad(loss, list(stack.parameters()))
        assert zoo.worst(got, expected[1:]) < 1e-4
        assert host_of(stack).bytes <= limit


def test_buffers_of_other_sizes_make_room():
    memory = host_memory.HostMemory(limit=100)
    first = memory.take(60)
    assert memory.take(60) is None
    memory.give_back(first)
    second = memory.take(80)
    assert second.numel() == 80 and memory.bytes == 80
    memory.give_back(second)
    assert memory.take(80) is second


def test_copies_and_pickles_have_buffers_of_their_own():
    memory = host_memory.HostMemory(limit=100)
    memory.take(60)
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert (other.limit, other.bytes) == (100, 0)


# --- budgets


def budget_points(stack, x, limit, hosts):
    """Bytes on the device, FLOPs and bytes on the host of steps with more and more host memory."""
    points = []
    for host in hosts:
        stack.memory = rg.Budget(limit) if host is None else rg.Budget(limit, host=host)
        bytes_ = activations(stack, x)
        points.append((bytes_, flops_of(stack, x), host_of(stack).bytes))
    return points


@pytest.mark.parametrize("make", [deep, euler])
def test_more_bytes_on_the_host_are_fewer_flops(make):
    """At the same limit on the device, which holds. So does the limit on the host."""
    stack, x = make(), data(1024)
    stack.memory = rg.Budget("100%")
    activations(stack, x)
    (profile,) = stack._cache.profiles.values()
    limit = int(0.45 * profile.plain(True))
    whole = sum(update.whole_bytes for update in profile.updates)
    hosts = [None, *(int(share * whole) for share in (0.05, 0.2, 0.4, 0.7, 1.2))]
    points = budget_points(stack, x, limit, hosts)
    flops = [flops for _, flops, _ in points]
    assert flops == sorted(flops, reverse=True) and len(set(flops)) >= 4
    stack.memory = rg.Keep()
    assert flops[-1] == flops_of(stack, x)
    for host, (bytes_, _, on_host) in zip(hosts, points):
        assert bytes_ <= limit
        assert on_host <= (host or 0)
    assert points[0][2] == 0 and points[2][2] > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_the_limits_are_never_exceeded(name):
    make, shape = NETWORKS[name]
    stack = rg.ReversibleSequence([make() for _ in range(6)], streams=rg.Split(), drift="ignore")
    stack.to(DEVICE)
    x = torch.randn(shape, device=DEVICE)
    stack.memory = rg.Budget("100%")
    bytes_of_step(stack, x)
    (profile,) = stack._cache.profiles.values()
    least, most = least_peak(profile, profile.needs(True)), profile.plain(True)
    whole = sum(update.whole_bytes for update in profile.updates)
    for way in (0.2, 0.5, 0.8):
        limit = int(least * (most / least) ** way)
        flops = []
        for share in (0.1, 0.5, 1.0):
            stack.memory = rg.Budget(limit, host=int(share * whole))
            assert bytes_of_step(stack, x) <= limit
            assert host_of(stack).bytes <= share * whole
            with FlopsOfAll() as counted:
                train(stack, x)
            flops.append(counted.total)
        assert flops == sorted(flops, reverse=True)


def bytes_of_step(stack, x):
    """The peak of the device's allocator in a step, less the gradients of parameters."""
    for _ in range(2):
        stack.zero_grad()
        train(stack, x)
    stack.zero_grad()
    with peak_bytes() as peak:
        train(stack, x)
    return peak[0] - sum(p.grad.nbytes for p in stack.parameters())


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_gradients_under_a_budget(share):
    stack, x = deep(make=lambda: mlp(dropout=0.2)), data(512)
    expected = gradients(stack, x, rg.Keep())
    stack.memory = rg.Budget("100%")
    activations(stack, x)
    (profile,) = stack._cache.profiles.values()
    budget = rg.Budget(int(share * profile.plain(True)), host="1 GiB")
    assert zoo.worst(gradients(stack, x, budget), expected) < 1e-4
    assert host_of(stack).bytes > 0


def test_a_budget_does_not_let_the_host_wait():
    stack, x = deep(memory=rg.Budget("40%", host="1 GiB")), data(512)
    for _ in range(4):
        with device.waiting() as names:
            stack(x).square().mean().backward()
    assert names == [] and host_of(stack).bytes > 0


def test_copies_that_are_slow_are_not_worth_it():
    """The plan weighs the time of a copy, as it was measured, against that of a recompute."""
    stack, x = deep(), data(512)
    found = []
    for speed in (1e15, 1e6):
        host_memory._bandwidths.clear()
        device.set_bandwidth(speed)
        stack.memory = rg.Budget("40%", host="1 GiB")
        stack._cache.profiles.clear()
        activations(stack, x)
        found.append(host_of(stack).bytes)
        assert host_memory.bandwidth(torch.device(DEVICE)) == pytest.approx(speed, rel=0.01)
    assert found[0] > 0 and found[1] == 0


def test_several_processes_assume_a_speed(monkeypatch):
    """Each would measure another one, and all must come to the same plan."""
    monkeypatch.setattr("retrograd.profile.number_of_processes", lambda: 2)
    stack, x = deep(memory=rg.Budget("40%", host="1 GiB")), data(512)
    stack.plan(x)
    assert host_memory._bandwidths == {}
    stack(x)
    (profile,) = stack._cache.profiles.values()
    assert {update.bandwidth for update in profile.updates} == {ASSUMED_BANDWIDTH}


def test_a_compiled_graph_refuses_it():
    stack = deep(memory=rg.Budget("40%", host="1 GiB"))
    assert "keeps values on the host" in _obstacle_of_settings(stack)
    stack.memory = "40%"
    assert _obstacle_of_settings(stack) is None


def test_a_plan_shows_what_is_on_the_host():
    stack, x = deep(), data(512)
    stack.memory = rg.Budget("40%")
    without = stack.plan(x)
    stack.memory = rg.Budget("40%", host="1 GiB")
    plan = stack.plan(x)
    assert plan.host == sum(row.host for row in plan.rows) > without.host == 0
    assert plan.time < without.time and plan.peak <= 0.4 * plan.plain
    assert "everything, on the host" in str(plan)
    assert f"{plan.host / 2**20:.2f} MiB on the host" in str(plan)
    for _ in range(3):
        stack(x).square().mean().backward()
    assert host_of(stack).bytes <= plan.host


def test_a_network_that_only_fits_with_a_host():
    """Where targets have to be kept, the least that a step needs is less."""
    net, x = euler(24), data(1024)
    net.memory = rg.Budget(1, host="1 GiB")
    with pytest.raises(rg.BudgetError, match="are less than the") as error:
        net(x)
    limit = rg.Budget(str(error.value).split('rg.Budget("')[1].split('"')[0]).limit
    net.memory = rg.Budget(limit, host="1 GiB")
    expected = gradients(net, x, rg.Keep())
    assert zoo.worst(gradients(net, x, rg.Budget(limit, host="1 GiB")), expected) < 1e-4
    assert activations(net, x) <= rg.Budget(limit).bytes_of(0)


def test_several_stacks_share_one_limit_on_the_host():
    model = nn.Sequential(deep(4), nn.Linear(16, 16, device=DEVICE), deep(4))
    x = data(512)
    for stack in rg.stacks_of(model).values():
        stack.memory = rg.Keep()
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    found = []
    for host in (2**17, 2**30):
        rg.set_memory(model, rg.Budget("40%", host=host))
        for _ in range(3):
            got = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        memory = model[0].memory.host_memory
        assert memory is model[2].memory.host_memory and memory.used == 0
        assert zoo.worst(got, expected) < 1e-4
        found.append(memory.bytes)
        plan = rg.plan(model, x)
        assert max(memory.bytes, plan.host) <= host
    assert 0 < found[0] <= 2**17 < found[1]


def test_what_it_takes():
    budget = rg.Budget("25%", host="2 MiB")
    assert repr(budget) == "Budget(limit='25%', host='2 MiB')"
    assert repr(rg.Budget("25%")) == "Budget(limit='25%')"
    assert (budget.bytes_of(100), budget.host_bytes, rg.Budget(1).host_bytes) == (25, 2**21, 0)
    assert rg.Budget("1 GiB", host=5).host_bytes == 5
    for wrong in ("25%", "much", 0, -1, 1.5, True, ""):
        with pytest.raises(ValueError, match="host is a number of bytes or a size"):
            rg.Budget("1 GiB", host=wrong)


def test_on_a_cpu_it_is_refused():
    budget = rg.Budget("1 MiB", host="1 GiB")
    stack = deep(memory=budget).cpu()
    for run in (stack, stack.plan, lambda x: rg.plan(stack, x)):
        with pytest.raises(ValueError, match="the memory of a CPU is that of the host") as error:
            run(torch.randn(8, 16))
    assert "leave out host=" in str(error.value) and repr(budget) in str(error.value)
    model = rg.set_memory(nn.Sequential(stack), budget)
    with pytest.raises(ValueError, match="the memory of a CPU is that of the host"):
        model(torch.randn(8, 16))


def test_a_graph_that_is_captured_refuses_it():
    stack, x = deep(memory=rg.Budget("40%", host="1 GiB"), verify="never"), data(512)
    for _ in range(3):
        stack(x).square().mean().backward()
    with (
        pytest.raises(rg.RetrogradError, match="would keep values on the host"),
        device.capture(),
    ):
        stack(x)
