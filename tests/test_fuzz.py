"""Random programs against plain autograd: 2 to 6 streams, nested values, shared functions, dropout,
frozen parameters.

`make fuzz` runs 10,000 of them; `make test` a few, always the same.
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
def programs(draw):
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
                    st.sampled_from([n for n in names if n != target]), max_size=3, unique=True
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
@given(programs(), st.integers(0, 2**16))
def test_random_programs_are_undone(program, seed):
    torch.manual_seed(seed)
    net, templates = build(*program, 0.0, rg.Reverse())
    streams = pytree.tree_map(torch.randn_like, templates)
    back = net.inverse(net(streams))
    assert zoo.worst(zoo.leaves(back), zoo.leaves(streams)) < 1e-9
