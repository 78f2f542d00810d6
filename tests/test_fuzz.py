"""Random programs against plain autograd: 2 to 6 streams, nested values, shared functions, dropout,
frozen parameters, state in odd places.

`make fuzz` runs 20,000 of them; `make test` a few, always the same.
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import retrograd as rg
from tests import zoo

EXAMPLES = int(os.environ.get("RETROGRAD_FUZZ", "0"))


class Fold(nn.Module):
    """Any streams in, the structure of the target out."""

    def __init__(self, reads, target, dropout, outputs) -> None:
        super().__init__()
        self.ins = nn.ModuleList(nn.Linear(leaf.numel(), 3) for leaf in zoo.leaves(reads))
        self.drop = nn.Dropout(dropout)
        self.outs = nn.ModuleList(
            nn.Linear(3, leaf.numel()) for _ in range(outputs) for leaf in zoo.leaves(target)
        )
        self.bias = nn.Parameter(torch.zeros(3))
        leaves, self.spec = pytree.tree_flatten(target)
        self.shapes = [leaf.shape for leaf in leaves]
        self.outputs = outputs

    def forward(self, *reads, context=None):
        h = self.bias + sum(fn(leaf.flatten()) for fn, leaf in zip(self.ins, zoo.leaves(reads)))
        h = self.drop(torch.tanh(h if context is None else h * context["scale"][0]))
        flat = [fn(h).view(shape) for fn, shape in zip(self.outs, self.shapes * self.outputs)]
        n = len(self.shapes)
        values = [
            pytree.tree_unflatten(flat[i * n : (i + 1) * n], self.spec) for i in range(self.outputs)
        ]
        return values[0] if self.outputs == 1 else tuple(values)


SHAPES = [(2,), (1, 3), (2, 2), ()]
tensors = st.sampled_from(SHAPES).map(lambda shape: torch.empty(shape, dtype=torch.float64))
values = st.one_of(
    tensors,
    st.lists(tensors, min_size=1, max_size=2),
    st.fixed_dictionaries({"a": tensors, "b": st.tuples(tensors)}),
)
couplings = st.sampled_from(
    [*zoo.COUPLINGS.values(), zoo.COUPLINGS["additive"], zoo.COUPLINGS["additive"]]
)


@st.composite
def programs(draw, may_read_target=True):
    """Templates of the streams, and the updates as (target, reads, coupling, outputs, function
    number).
    """
    names = "abcdef"[: draw(st.integers(2, 6))]
    streams = {name: draw(values) for name in names}
    updates = []
    for number in range(draw(st.integers(1, 9))):
        target = draw(st.sampled_from(names))
        reads = tuple(
            draw(
                st.lists(
                    st.sampled_from([n for n in names if may_read_target or n != target]),
                    max_size=3,
                    unique=True,
                )
            )
        )
        coupling, outputs = draw(couplings)
        same = [u[-1] for u in updates if (u[0], u[1], u[3]) == (target, reads, outputs)]
        updates.append((target, reads, coupling, outputs, draw(st.sampled_from([number, *same]))))
    return streams, updates


def build(streams, updates, dropout, memory):
    functions = {}
    for target, reads, _, outputs, number in updates:
        if number not in functions:
            functions[number] = Fold(
                [streams[read] for read in reads], streams[target], dropout, outputs
            )
    program = [
        rg.Update(t, functions[number], reads, coupling=coupling)
        for t, reads, coupling, _, number in updates
    ]
    used = {name for target, reads, *_ in updates for name in (target, *reads)}
    return rg.Reversible(program, memory=memory).double(), {
        name: value for name, value in streams.items() if name in used
    }


@settings(
    max_examples=EXAMPLES or 150,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    programs(),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([rg.Reverse(), rg.Reverse(keep_last=False)]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_random_programs(program, dropout, memory, with_context, backwards, seed):
    torch.manual_seed(seed)
    net, templates = build(*program, dropout, memory)
    coin = torch.Generator().manual_seed(seed)

    def flip():
        return bool(torch.rand((), generator=coin) < 0.7)

    for parameter in net.parameters():
        parameter.requires_grad_(flip())
    streams = pytree.tree_map(lambda leaf: torch.randn_like(leaf).requires_grad_(flip()), templates)
    context = {"scale": [torch.randn((), dtype=torch.float64, requires_grad=flip())]}
    kwargs = {"context": context} if with_context else {}
    torch.manual_seed(seed)
    expected = zoo.plain_program(net, streams, **kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    output = net(streams, **kwargs)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b) for a, b in zip(zoo.leaves(output), zoo.leaves(expected)))
    assert [leaf.requires_grad for leaf in zoo.leaves(output)] == [
        leaf.requires_grad for leaf in zoo.leaves(expected)
    ]
    wanted = [
        t
        for t in [*zoo.leaves(streams), *zoo.leaves(context), *net.parameters()]
        if t.requires_grad
    ]
    for i in range(backwards):
        chosen = [
            j
            for j, leaf in enumerate(zoo.leaves(output))
            if leaf.requires_grad and (flip() or i == 0)
        ]
        if not chosen or not wanted:
            continue
        inputs = wanted if i == 0 else [t for t in wanted if flip()] or wanted
        got, reference = (
            torch.autograd.grad(
                zoo.loss([zoo.leaves(value)[j] for j in chosen]),
                inputs,
                retain_graph=i < backwards - 1,
                allow_unused=True,
            )
            for value in (output, expected)
        )
        assert zoo.worst(list(got), list(reference)) < 1e-9
    assert torch.equal(torch.get_rng_state(), after)


@settings(
    max_examples=EXAMPLES or 50,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs(may_read_target=False), st.integers(0, 2**16))
def test_random_programs_are_undone(program, seed):
    torch.manual_seed(seed)
    net, templates = build(*program, 0.0, rg.Reverse())
    streams = pytree.tree_map(torch.randn_like, templates)
    back = net.inverse(net(streams))
    assert zoo.worst(zoo.leaves(back), zoo.leaves(streams)) < 1e-9


# --- state in odd places


class Counter(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self):
        self.calls += 1
        return self.calls.mul(0.1).cos()


def count_in_place(tensor):
    with torch.no_grad():
        tensor += 1
    return tensor.mul(0.1).cos()


def zeros():
    return torch.zeros((), dtype=torch.float64)


# How to make the state, what a function makes of it, and how to look at it.
STATES = {
    "generator": (
        lambda: torch.Generator().manual_seed(7),
        lambda state: torch.rand((), generator=state, dtype=torch.float64) + 0.5,
        lambda state: state.get_state(),
    ),
    "module": (Counter, lambda state: state(), lambda state: state.calls),
    "tensor": (zeros, count_in_place, lambda state: state),
    "parameter": (
        lambda: nn.Parameter(zeros(), requires_grad=False),
        count_in_place,
        lambda state: state.detach(),
    ),
}


class Slots:
    __slots__ = ("state",)


GLOBAL = {}


def store(home, state, module):
    """Put the state somewhere; returns how a function gets at it."""
    if home == "slots":
        module.holder = Slots()
        module.holder.state = state
        return lambda: module.holder.state
    if home == "list":
        module._hidden = [[state]]
        return lambda: module._hidden[0][0]
    if home == "global":
        key = len(GLOBAL)
        GLOBAL[key] = state
        return lambda: GLOBAL[key]
    return lambda: state  # in a closure


class Odd(nn.Module):
    """A function that multiplies what it returns by something that its state says."""

    def __init__(self, inner, kind, home, in_hook):
        super().__init__()
        self.inner = inner
        make, self.use, self.look = STATES[kind]
        self.state = store(home, make(), self)
        self.in_hook = in_hook
        if in_hook:
            inner.register_forward_hook(lambda module, args, output: self.times_state(output))

    def times_state(self, output):
        factor = self.use(self.state())
        return pytree.tree_map(lambda leaf: leaf * factor, output)

    def forward(self, *reads):
        output = self.inner(*reads)
        return output if self.in_hook else self.times_state(output)


MEMORY = [rg.Reverse(), rg.Reverse(keep_last=False), rg.Anchor(every=1), rg.Budget("1 GiB")]


@settings(
    max_examples=2 * EXAMPLES or 60,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    programs(),
    st.lists(
        st.tuples(
            st.sampled_from(list(STATES)),
            st.sampled_from(["slots", "list", "global", "closure"]),
            st.booleans(),
        ),
        min_size=9,
        max_size=9,
    ),
    st.sampled_from(MEMORY),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_random_programs_with_state_in_odd_places(program, odd, memory, steps, seed):
    results = []
    for is_plain in (True, False):
        GLOBAL.clear()
        torch.manual_seed(seed)
        net, templates = build(*program, 0.3, memory)
        functions = {id(update.fn): update.fn for update in net.updates}
        wrapped = {key: Odd(fn, *choice) for (key, fn), choice in zip(functions.items(), odd)}
        for update in net.updates:
            update.fn = wrapped[id(update.fn)]
        parameters = [p for p in net.parameters() if p.requires_grad]
        found = []
        for step in range(steps):
            torch.manual_seed(seed + step)
            streams = pytree.tree_map(torch.randn_like, templates)
            output = zoo.plain_program(net, streams) if is_plain else net(streams)
            leaves = [leaf for leaf in zoo.leaves(output) if leaf.requires_grad]
            grads = torch.autograd.grad(zoo.loss(leaves), parameters, allow_unused=True)
            found += [*zoo.leaves(output), *grads, torch.get_rng_state()]
            found += [function.look(function.state()).clone() for function in wrapped.values()]
        results.append(found)
    assert zoo.worst(*map(as_numbers, results)) < 1e-9


def as_numbers(tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]
