"""Functions that few people write: scripts, odd layouts, batched gradients, odd outputs."""

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo

REBUILD = rg.Reverse(keep_last=False)


def same_as_plain(make, x, memory=REBUILD, steps=3, **kwargs):
    """Compare the gradients of some steps with those of plain autograd."""
    results = []
    for mode in (rg.Keep(), memory):
        torch.manual_seed(0)
        stack = rg.ReversibleSequence([(make(), make()) for _ in range(3)], memory=mode)
        inputs = [*stack.parameters(), *(v for v in kwargs.values() if v.requires_grad)]
        for _ in range(steps):
            grads = torch.autograd.grad(stack(x, **kwargs).sin().sum(), inputs, allow_unused=True)
        results.append([grad.to_dense() for grad in grads if grad is not None])
    assert zoo.worst(results[1], results[0]) < 1e-4


# --- scripts


def script():
    return torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))


class HasScript(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = script()

    def forward(self, x):
        return self.inner(x) * 0.5


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("make", [script, HasScript])
@pytest.mark.parametrize("memory", [rg.Reverse(), REBUILD, rg.Anchor(every=1)], ids=repr)
def test_scripts(make, memory):
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(make(), make()) for _ in range(4)], memory=memory)
    for _ in range(4):
        stack.zero_grad()
        x = torch.randn(6, 8)
        stack(x).sin().sum().backward()
        got = [parameter.grad for parameter in stack.parameters()]
        expected = zoo.plain_stack(stack, x).sin().sum()
        want = torch.autograd.grad(expected, list(stack.parameters()))
        assert zoo.worst(got, list(want)) < 1e-4


# --- layouts and dtypes


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


class Strided(Linear):
    def forward(self, x):
        return super().forward(torch.nested.as_nested_tensor(list(x))).to_padded_tensor(0.0)


OFFSETS = torch.tensor([0, 2, 7, 10, 20])


class Jagged(Linear):
    def forward(self, x):
        nested = torch.nested.nested_tensor_from_jagged(x.reshape(-1, 8), self.offsets())
        return super().forward(nested).sin().values().view_as(x)

    def offsets(self):
        return OFFSETS


class OwnOffsets(Jagged):
    def offsets(self):
        return OFFSETS.clone()


class Sparse(Linear):
    def forward(self, x, adjacency):
        return torch.stack([torch.sparse.mm(adjacency, super(Sparse, self).forward(t)) for t in x])


class Biased(Linear):
    def forward(self, x, bias):
        return super().forward(x) + bias


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Strided, Jagged])
def test_nested_tensors_inside(make):
    same_as_plain(make, torch.randn(4, 5, 8))


@pytest.mark.filterwarnings("ignore")
def test_jagged_tensors_with_offsets_made_inside_raise():
    """To torch, a ragged dimension is another one each time its offsets are made."""
    with pytest.raises(rg.RecomputeError, match=r"float32\[4, j\d+, 8\]"):
        same_as_plain(OwnOffsets, torch.randn(4, 5, 8))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_sparse_keyword_argument(layout, needs_grad):
    adjacency = torch.eye(5).to_sparse(layout=layout).requires_grad_(needs_grad)
    same_as_plain(Sparse, torch.randn(4, 5, 8), adjacency=adjacency)


def test_a_keyword_argument_made_in_inference_mode():
    with torch.inference_mode():
        bias = torch.randn(8)
    same_as_plain(Biased, torch.randn(4, 5, 8), bias=bias)


class Above(Linear):
    def forward(self, x):
        return super().forward(x) > 0


class AsBytes(Linear):
    def forward(self, x):
        return (super().forward(x) > 0).to(torch.uint8)


@pytest.mark.parametrize("make", [Above, AsBytes])
@pytest.mark.parametrize("coupling", [rg.Additive(), rg.Momentum(0.9)], ids=repr)
def test_outputs_of_whole_numbers(make, coupling):
    results = []
    for memory in (rg.Keep(), REBUILD):
        torch.manual_seed(0)
        pairs = [(make(), Linear()) for _ in range(3)]
        stack = rg.ReversibleSequence(pairs, memory=memory, coupling=coupling)
        x = torch.randn(4, 8, requires_grad=True)
        results.append(torch.autograd.grad(stack(x).sin().sum(), x))
    assert zoo.worst(list(results[1]), list(results[0])) < 1e-4


# --- batches of gradients


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Dropout(0.5))


class Drawing(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x) * torch.rand(4)


@pytest.mark.parametrize("make", [Dropping, Drawing])
@pytest.mark.parametrize("memory", [rg.Reverse(), REBUILD, rg.Anchor(every=1)], ids=repr)
def test_batched_gradients_of_random_functions(make, memory):
    results = []
    for mode in (rg.Keep(), memory):
        torch.manual_seed(0)
        stack = rg.ReversibleSequence([(make(), nn.Linear(4, 4)) for _ in range(3)], memory=mode)
        x = torch.randn(3, 4)
        for _ in range(2):
            jacobian = torch.autograd.functional.jacobian(stack, x, vectorize=True)
        results.append([jacobian, torch.get_rng_state()])
    torch.testing.assert_close(results[1], results[0])


# --- `plan` leaves everything as it was


class Traces(nn.Module):
    """Changes all that a function can change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(4, 4, max_norm=0.1)
        self.mean = torch.zeros(4)
        self.calls = 0
        self.seen = []
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("edited", torch.zeros(()))

    def forward(self, x):
        self.steps = self.steps + 1
        self.edited += 1
        self.calls += 1
        self.seen.append(len(x))
        self.mean.lerp_(x.detach().mean(0), 0.5)
        noise = torch.rand(4, generator=self.generator) + torch.rand(4)
        return self.linear(x) * noise + self.embedding(torch.arange(len(x))) + self.mean.clone()


def state_of(function):
    return {
        "steps": (id(function.steps), function.steps.item()),
        "edited": (id(function.edited), function.edited.item(), function.edited._version),
        "calls": function.calls,
        "seen": list(function.seen),
        "mean": function.mean.tolist(),
        "generator": function.generator.get_state().tolist(),
        "random state": torch.get_rng_state().tolist(),
        "embedding": function.embedding.weight.tolist(),
    }


NORM = nn.BatchNorm1d(4)


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Keep(), rg.Budget("150%")], ids=repr)
def test_plan_leaves_no_trace(memory):
    stack = rg.ReversibleSequence(
        [(Traces(), nn.Linear(4, 4)), (Traces(), Traces())], memory=memory
    )
    functions = [m for m in stack.modules() if isinstance(m, Traces)]
    x = torch.randn(2, 4)
    before = list(map(state_of, functions))
    stack.plan(x)
    assert list(map(state_of, functions)) == before


def test_plan_leaves_no_trace_in_modules_elsewhere():
    def normed(x):
        return NORM(x)

    x = torch.randn(2, 4)
    before = [NORM.running_mean.tolist(), torch.get_rng_state().tolist()]
    rg.ReversibleSequence([(normed, nn.Dropout(0.5))]).plan(x)
    assert [NORM.running_mean.tolist(), torch.get_rng_state().tolist()] == before
    assert not NORM.num_batches_tracked
