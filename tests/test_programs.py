"""Programs beyond pairs: updates that read their target, transforms, couplings of any shape,
several streams, stacks as lists.
"""

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd import measure
from tests import zoo

ALL = rg.Reverse(keep_last=False)
MEMORY = {"keep": rg.Keep(), "reverse": rg.Reverse(), "reverse-all": ALL, "anchor": rg.Anchor(1)}


def mlp(width=4, out=None):
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, out or width)
    ).double()


class Mixed(nn.Module):
    """Reads several streams."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, *streams):
        return self.inner(sum(stream.sin() for stream in streams))


def plain(net, streams):
    """A program in plain autograd, and what its transforms return besides."""
    streams = dict(streams)
    aux = []
    for update in net.updates:
        out = update.fn(*[streams[name] for name in update.reads])
        if isinstance(out, rg.WithAux):
            aux.append(out.aux)
            out = out.output
        if isinstance(update, rg.Transform):
            streams[update.target] = out
        elif isinstance(update.coupling, rg.Scaled):
            streams[update.target] = update.coupling.a * streams[update.target] + out
        else:
            streams[update.target] = streams[update.target] + out
    return (streams, aux) if aux else streams


def inputs(*names, width=4, rows=4):
    torch.manual_seed(1)
    shape = (rows, width)
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name in names}


def agree(net, streams, limit=1e-9):
    got = zoo.gradients(net, net(streams), streams)
    assert zoo.worst(got, zoo.gradients(net, plain(net, streams), streams)) < limit


# --- updates that read their target


@pytest.mark.parametrize("memory", MEMORY)
def test_updates_that_read_their_target(memory):
    updates = []
    for _ in range(3):
        updates += [
            rg.Update("a", Mixed(), ("a", "b")),
            rg.Update("b", Mixed(), ("a",)),
            rg.Update("b", Mixed(), ("b",), coupling=rg.Scaled(0.5)),
            rg.Update("c", torch.sin, ("c",)),
        ]
    net = rg.Reversible(updates, memory=MEMORY[memory])
    agree(net, inputs("a", "b", "c"))


def test_a_function_that_saves_nothing_keeps_its_target():
    """Backward never asks for it, and yet has to pass it."""
    net = rg.Reversible(
        [
            rg.Update("a", Mixed(), ("b",)),
            rg.Update("a", lambda a: a.flip(-1), ("a",)),
            rg.Update("b", Mixed(), ("a",)),
        ],
        memory=ALL,
    )
    agree(net, inputs("a", "b"))


def test_two_streams_that_no_gradient_needs():
    net = rg.Reversible(
        [rg.Update("a", torch.sin, ("a",)), rg.Update("b", Mixed(), ("a",))] * 3, memory=ALL
    )
    streams = inputs("a", "b")
    streams["a"] = streams["a"].detach()
    wanted = [streams["b"], *net.parameters()]
    got = torch.autograd.grad(zoo.loss(net(streams)), wanted)
    expected = torch.autograd.grad(zoo.loss(plain(net, streams)), wanted)
    assert zoo.worst(list(got), list(expected)) < 1e-9


def test_exact_programs_may_read_their_target():
    updates = [
        *(rg.Update("a", Mixed(), ("a", "b")), rg.Update("b", Mixed(), ("a",))),
        *(rg.Update("b", Mixed(), ("b",)), rg.Update("a", Mixed(), ("b",))),
    ] * 3
    streams = inputs("a", "b")
    results = []
    for memory in (rg.Keep(), ALL):
        net = rg.Reversible(updates, exact=True, memory=memory)
        y = net(streams)
        results.append([*y.values(), *zoo.gradients(net, y, streams)])
    assert all(map(torch.equal, *results))


def test_it_has_no_inverse():
    net = rg.Reversible([rg.Update("a", Mixed(), ("a", "b"))])
    with pytest.raises(ValueError, match=r"inverse: updates.0 reads or overwrites its own target"):
        net.inverse(inputs("a", "b"))


# --- transforms


class Mixing(nn.Module):
    """An invertible 1x1 convolution, with its log-determinant."""

    def __init__(self, width=4):
        super().__init__()
        orthogonal = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
        self.weight = nn.Parameter(orthogonal + 0.1)

    def forward(self, x):
        return rg.WithAux(x @ self.weight, torch.linalg.slogdet(self.weight)[1])

    def inverse(self, y):
        return torch.linalg.solve(self.weight, y, left=False)


def squeeze(x):
    return x.reshape(len(x) // 2, -1)


def unsqueeze(x):
    return x.reshape(2 * len(x), -1)


def stages():
    """Two stages of a flow: couplings, a mixing of channels, and a squeeze between the stages."""
    updates = []
    for width in (4, 8):
        for _ in range(2):
            mixing = Mixing(width)
            updates += [
                rg.Update("a", mlp(width), ("b",)),
                rg.Update("b", mlp(width), ("a",)),
                rg.Transform("a", mixing, inverse=mixing.inverse),
            ]
        if width == 4:
            updates += [rg.Transform(name, squeeze, inverse=unsqueeze) for name in "ab"]
    return updates


@pytest.mark.parametrize("memory", MEMORY)
def test_transforms(memory):
    net = rg.Reversible(stages(), memory=MEMORY[memory])
    streams = inputs("a", "b")
    agree(net, streams)
    with torch.no_grad():
        output, aux = net(streams)
    assert len(aux) == 4
    back = net.inverse(output)
    assert all(torch.allclose(back[name], streams[name], atol=1e-9) for name in "ab")


def test_a_flow_takes_constant_memory():
    torch.manual_seed(0)
    x = {name: torch.randn(256, 4, dtype=torch.float64, requires_grad=True) for name in "ab"}

    def peak(times):
        updates = []
        for _ in range(times):
            mixing = Mixing()
            updates += [
                rg.Update("a", mlp(), ("b",)),
                rg.Update("b", mlp(), ("a",)),
                rg.Transform("b", mixing, inverse=mixing.inverse),
            ]
        net = rg.Reversible(updates)

        def step():
            output, aux = net(x)
            (zoo.loss(output) + sum(aux)).backward()

        step()
        return measure.activation_bytes(step, [*net.parameters(), *x.values()])

    assert peak(16) - peak(4) < x["a"].nbytes


class OfAll(nn.Module):
    """A function of the sum of all that it reads."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *reads):
        return self.fn(sum(reads))


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_as_in_group_add_rev(groups):
    """PyG: the first group gets f of the sum of the others, each other one f of the one before."""
    names = [f"x{i}" for i in range(groups)]
    functions = nn.ModuleList(mlp() for _ in range(3 * groups)).double()
    updates = []
    for i, fn in enumerate(functions):
        number = i % groups
        reads = names[1:] if number == 0 else [names[number - 1]]
        updates.append(rg.Update(names[number], OfAll(fn), reads))
    net = rg.Reversible(updates, memory=ALL)
    x = torch.randn(5, 4 * groups, dtype=torch.float64, requires_grad=True)
    outputs = []
    parts = rg.Split(parts=groups).split(x)
    outputs.append(torch.cat(list(net(dict(zip(names, parts))).values()), -1))
    parts = list(x.chunk(groups, -1))
    for i, fn in enumerate(functions):
        number = i % groups
        read = sum(parts[1:]) if number == 0 else parts[number - 1]
        parts[number] = parts[number] + fn(read)
    outputs.append(torch.cat(parts, -1))
    grads = [torch.autograd.grad(y.square().sum(), [x, *functions.parameters()]) for y in outputs]
    assert zoo.worst(*map(list, grads)) < 1e-9


@pytest.mark.parametrize("memory", MEMORY)
def test_a_flow_with_affine_couplings_permutations_and_log_determinants(memory):
    """As in Glow: the log-determinant of an affine coupling is the sum of its log-scales."""
    order = torch.tensor([2, 0, 3, 1])
    back = torch.argsort(order)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).double()

        def forward(self, x):
            log_scale, shift = self.mlp(x).chunk(2, -1)
            return rg.WithAux((log_scale, shift), torch.tanh(log_scale).sum(-1))

    updates = []
    for _ in range(4):
        updates += [
            rg.Update("a", Net(), ("b",), coupling=rg.Affine(limit=1.0)),
            rg.Transform("a", lambda x: x[:, order], inverse=lambda y: y[:, back]),
            rg.Update("b", Net(), ("a",), coupling=rg.Affine(limit=1.0)),
        ]
    net = rg.Reversible(updates, memory=MEMORY[memory])
    x = {name: torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for name in "ab"}
    grads = []
    for net.memory in (MEMORY[memory], rg.Keep()):
        output, log_determinants = net(x)
        loss = sum(v.square().sum() for v in output.values()) / 2 - sum(log_determinants).sum()
        grads.append(torch.autograd.grad(loss, [*x.values(), *net.parameters()]))
    assert len(log_determinants) == 8
    assert zoo.worst(*map(list, grads)) < 1e-9
    with torch.no_grad():
        z = torch.randn(8).double()
        volume = torch.func.jacrev(lambda z: flat_flow(net, z))(z)
        _, log_determinants = net({"a": z[None, :4], "b": z[None, 4:]})
    assert torch.allclose(torch.linalg.slogdet(volume)[1], sum(log_determinants)[0])


def flat_flow(net, z):
    output, _ = net({"a": z[None, :4], "b": z[None, 4:]})
    return torch.cat([output["a"][0], output["b"][0]])


def test_permutations_are_exact():
    order = torch.randperm(4)
    back = torch.argsort(order)
    updates = []
    for _ in range(4):
        updates += [rg.Update("a", Mixed(), ("b",)), rg.Update("b", Mixed(), ("a",))]
        updates.append(
            rg.Transform("a", lambda x: x[:, order], inverse=lambda y: y[:, back]),
        )
    streams = inputs("a", "b")
    results = []
    for memory in (rg.Keep(), ALL):
        net = rg.Reversible(updates, exact=True, memory=memory)
        results.append(zoo.gradients(net, net(streams), streams))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("inverse", "says"),
    [
        (lambda y: y.flip(-1) * 1.001, "misses the target by 1.0e-03 of its size"),
        (lambda y: y[:2], r"returns float64\[2, 4\], and fn was given float64\[4, 4\]"),
        (lambda y: (y, y), "stream 'a' has another structure"),
        (lambda y: y.mul_(2), "inverse"),
    ],
)
def test_a_wrong_inverse_is_noticed(inverse, says):
    net = rg.Reversible(
        [
            rg.Update("a", Mixed(), ("b",)),
            rg.Transform("a", lambda x: x.flip(-1), inverse=inverse),
            rg.Update("b", Mixed(), ("a",)),
        ],
        memory=ALL,
    )
    with pytest.raises(rg.RetrogradError, match=f"updates.1.*{says}"):
        net(inputs("a", "b"))


def test_an_inverse_that_rounds_is_not_exact():
    net = rg.Reversible(
        [
            rg.Update("a", Mixed(), ("b",)),
            rg.Transform("a", lambda x: x * 0.3, inverse=lambda y: y / 0.3),
            rg.Update("b", Mixed(), ("a",)),
        ],
        memory=ALL,
        exact=True,
    )
    with pytest.raises(rg.CouplingError, match="with exact=True the inverse must be exact"):
        net(inputs("a", "b"))


# --- couplings whose functions return other shapes


class ActNorm(rg.Coupling):
    """The function returns a scale and a shift for each channel."""

    returns = ("log_scale", "shift")

    def forward(self, x, log_scale, shift):
        return x * log_scale.exp() + shift

    def inverse(self, y, log_scale, shift):
        return (y - shift) * (-log_scale).exp()


class Turned(rg.Coupling):
    """The function returns a matrix."""

    def forward(self, x, out):
        return x @ torch.linalg.matrix_exp(out - out.mT)

    def inverse(self, y, out):
        return y @ torch.linalg.matrix_exp(out.mT - out)


class Channels(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.linear = nn.Linear(4, 4 * outputs).double()
        self.outputs = outputs

    def forward(self, x):
        y = self.linear(x.mean(0))
        return y.chunk(2) if self.outputs == 2 else y.view(4, 4)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("coupling", "outputs"), [(ActNorm(), 2), (Turned(), 4)])
def test_outputs_of_another_shape(coupling, outputs, memory):
    torch.manual_seed(0)
    pairs = [(Channels(outputs), Channels(outputs)) for _ in range(3)]
    stack = rg.ReversibleSequence(pairs, coupling=coupling, memory=MEMORY[memory])
    x = inputs("x")["x"]

    def formula(x):
        x1 = x2 = x
        for f, g in pairs:
            out = f(x2)
            x1 = coupling.forward(x1, *(out if outputs == 2 else [out]))
            out = g(x1)
            x2 = coupling.forward(x2, *(out if outputs == 2 else [out]))
        return (x1 + x2) / 2

    got = zoo.gradients(stack, stack(x), x)
    assert zoo.worst(got, zoo.gradients(stack, formula(x), x)) < 1e-9


def test_an_addend_may_be_broadcast():
    stack = rg.ReversibleSequence([(nn.Linear(4, 1).double(),) * 2] * 3)
    x = inputs("x")["x"]
    got = zoo.gradients(stack, stack(x), x)
    assert zoo.worst(got, zoo.gradients(stack, zoo.plain_stack(stack, x), x)) < 1e-9


def test_a_coupling_that_changes_the_shape_is_refused():
    class Wider(rg.Coupling):
        def forward(self, x, out):
            return torch.cat((x, out), -1)

        def inverse(self, y, out):
            return y[:, :4]

    stack = rg.ReversibleSequence([(mlp(), mlp())], coupling=Wider())
    with pytest.raises(rg.OutputError, match=r"blocks.0.f\) returned float64\[4, 8\]"):
        stack(inputs("x")["x"])


# --- streams


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_uneven_halves(memory):
    torch.manual_seed(0)
    pairs = [(mlp(6, 2), mlp(2, 6)) for _ in range(3)]
    stack = rg.ReversibleSequence(pairs, streams=rg.Split(parts=(2, 6)), memory=zoo.MEMORY[memory])
    x = inputs("x", width=8)["x"]

    def formula(x):
        x1, x2 = x[:, :2], x[:, 2:]
        for f, g in pairs:
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        return torch.cat((x1, x2), -1)

    got = zoo.gradients(stack, stack(x), x)
    assert zoo.worst(got, zoo.gradients(stack, formula(x), x)) < 1e-9
    assert torch.allclose(stack.inverse(stack(x)), x)


def test_groups():
    """The shape of grouped reversible networks: each part adds a function of the one before it."""
    torch.manual_seed(0)
    split = rg.Split(parts=4)
    functions = nn.ModuleList(Mixed() for _ in range(4))
    names = "abcd"
    updates = [
        rg.Update(name, fn, tuple(names[1:]) if i == 0 else (names[i - 1],))
        for i, (name, fn) in enumerate(zip(names, functions))
    ]
    net = rg.Reversible(updates * 3)
    x = inputs("x", width=16)["x"]
    y = split.join(*net(dict(zip(names, split.split(x)))).values())

    def formula(x):
        parts = list(x.chunk(4, -1))
        for _ in range(3):
            for i, fn in enumerate(functions):
                parts[i] = parts[i] + fn(*(parts[1:] if i == 0 else [parts[i - 1]]))
        return torch.cat(parts, -1)

    got = zoo.gradients(functions, y, x)
    assert zoo.worst(got, zoo.gradients(functions, formula(x), x)) < 1e-9


def test_a_doubled_input_that_is_concatenated():
    stack = rg.ReversibleSequence([(mlp(), mlp()) for _ in range(3)], streams=rg.Duplicate("cat"))
    x = inputs("x")["x"]
    y = stack(x)
    assert y.shape == (4, 8)
    assert torch.allclose(stack.inverse(y), x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rg.Split(parts=0), "pass a number of equal parts"),
        (lambda: rg.Split(parts=(2, -1)), "or a tuple with the size of each"),
        (lambda: rg.Split(parts=(2, 3)).split(torch.ones(2, 4)), "has 4 along dim -1"),
        (lambda: rg.Split(parts=3).split(torch.ones(2, 4)), "has no 3 equal parts. Pad it to 6"),
        (lambda: rg.Duplicate("max"), 'merge must be "mean", "sum" or "cat"'),
    ],
)
def test_streams_that_make_no_sense(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# --- stacks are lists


def test_a_stack_of_pairs_is_a_list():
    pairs = [(mlp(), mlp()) for _ in range(5)]
    stack = rg.ReversibleSequence(
        pairs, streams=rg.Split(), memory=rg.Anchor(2), route=[{"mask": "f"}] * 5
    ).eval()
    assert len(stack) == 5 and len(list(stack)) == 5
    f, g = stack[1]
    assert f is pairs[1][0] and g is pairs[1][1]
    part = stack[1:3]
    assert isinstance(part, rg.ReversibleSequence) and len(part) == 2 and part[0].f is f
    assert (part.memory, part.streams, part.training) == (rg.Anchor(2), rg.Split(), False)
    assert len(part.route.rows) == 2
    stack = rg.ReversibleSequence(pairs, streams=rg.Split()).append((mlp(), mlp()))
    x = inputs("x", width=8)["x"]
    assert len(stack) == 6 and torch.equal(stack[3:](stack[:3](x)), stack(x))
    with pytest.raises(TypeError, match=r"blocks\[6\] is Sequential, not a pair"):
        stack.append(mlp())


def test_a_program_is_a_list():
    net = rg.Reversible([rg.Update("a", Mixed(), ("b",)), rg.Update("b", Mixed(), ("a",))] * 2)
    streams = inputs("a", "b")
    assert len(net) == 4 and net[-1].target == "b" and len(list(net)) == 4
    halves = net[2:](net[:2](streams))
    assert all(torch.equal(halves[name], net(streams)[name]) for name in "ab")
    net.append(rg.Update("a", torch.sin, ("b",)))
    assert len(net) == 5
    with pytest.raises(TypeError, match=r"updates\[5\] is"):
        net.append(torch.sin)


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_states_on_the_way(memory):
    stack = rg.ReversibleSequence([(mlp(), mlp()) for _ in range(5)], memory=zoo.MEMORY[memory])
    x = inputs("x")["x"]
    y, states = stack.states(x, after=(1, -2))
    expected = [zoo.plain_stack(stack[:count], x) for count in (2, 4, 5)]
    got = zoo.gradients(stack, [*states, y], x)
    assert zoo.worst(got, zoo.gradients(stack, expected, x)) < 1e-9
    assert not stack._lookers


def test_each_state_costs_its_own_memory():
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(mlp(), mlp()) for _ in range(12)], memory=ALL)
    stack.requires_grad_(False)
    x = torch.randn(256, 4, dtype=torch.float64, requires_grad=True)

    def peak(after):
        def step():
            y, states = stack.states(x, after=after)
            (zoo.loss(y) + sum(map(zoo.loss, states))).backward()

        step()
        return measure.activation_bytes(step, [x])

    stream = x.nbytes
    # Each has a loss with a few tensors of its own here.
    assert peak((2, 5, 8)) - peak((2,)) < 2 * 6 * stream


class Initialised(nn.Module):
    """Sets a tensor of its own in its first call, and remembers that it did."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4, dtype=torch.float64)
        self.is_done = False

    def forward(self, x):
        if not self.is_done:
            self.scale.copy_(x.detach().mean(0).cos())
            self.is_done = True
        return (x * self.scale).sin() if not rg.is_recomputing() else x * float("nan")


def test_a_segment_with_a_function_that_cannot_run_again():
    """What it returned is kept, and used when the updates between two kept states run once more."""

    class EveryThird:
        def plan(self, call):
            count = len(call.targets)
            return rg.Plan(count, {i: rg.Choice(rerun=True) for i in range(count) if i % 3})

    functions = [mlp(), Initialised(), mlp(), mlp(), mlp()]
    net = rg.Residual(functions, memory=EveryThird(), verify="never")
    x = inputs("x")["x"]
    got = zoo.gradients(net, net(x), x)
    functions[1].is_done = False
    y = x
    for fn in functions:
        y = y + fn(y)
    assert zoo.worst(got, zoo.gradients(net, y, x)) < 1e-9
