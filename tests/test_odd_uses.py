"""Legitimate uses that once gave errors or wrong gradients, each against plain autograd."""

import dataclasses

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.sequence import Block
from tests import zoo

REBUILD = rg.Reverse(keep_last=False)


def mlp(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


# --- couplings


class Damped(rg.Additive):
    """Overrides `forward` and `inverse`, and inherits `inverse_`."""

    def forward(self, x, out):
        return x + 0.999 * out

    def inverse(self, y, out):
        return y - 0.999 * out


class DampedInPlace(Damped):
    def inverse_(self, y, out):
        return y.sub_(0.999 * out)


class WrongInPlace(rg.Momentum):
    """Its inverse does not belong to its forward."""

    def forward(self, x, out):
        return x + out


@pytest.mark.parametrize("coupling", [Damped(), DampedInPlace()], ids=repr)
def test_a_subclass_is_undone_by_its_own_inverse(coupling):
    gradients = []
    x = torch.randn(4, 8, dtype=torch.float64)
    for memory in (rg.Keep(), REBUILD):
        torch.manual_seed(0)
        pairs = [(mlp(), mlp()) for _ in range(4)]
        stack = rg.ReversibleSequence(pairs, coupling=coupling, memory=memory).double()
        gradients.append(zoo.gradients(stack, stack(x), x))
    assert zoo.worst(gradients[1], gradients[0]) < 1e-9


def test_a_subclass_is_tried_on_live_data():
    stack = rg.ReversibleSequence([(mlp(), mlp())] * 2, coupling=WrongInPlace(0.5), memory=REBUILD)
    with pytest.raises(rg.CouplingError, match="WrongInPlace"):
        stack(torch.randn(4, 8))


# --- reads


class Attention(nn.Module):
    """`nn.MultiheadAttention` asks whether query, key and value are one tensor."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, q, k, v):
        assert k is v
        return self.attention(q, k, v, need_weights=False)[0]


@pytest.mark.parametrize("reads", [("b", "b", "b"), ("c", "b", "b")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_stream_that_is_read_twice_stays_one_tensor(reads, dtype):
    updates = []
    for _ in range(3):
        updates.append(rg.Update("a", Attention(), reads=reads))
        updates.append(rg.Update("b", nn.Linear(8, 8), reads=("a",)))
    net = rg.Reversible(updates, memory=REBUILD).to(dtype)
    x = torch.randn(2, 5, 8, dtype=dtype)
    streams = dict.fromkeys({"a", *reads}, x)  # they start as one tensor
    net(streams)["b"].sum().backward()


# --- routes


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


def test_a_block_may_be_appended_to_a_stack_with_a_route():
    pairs = [(Masked(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    stack = rg.ReversibleSequence(pairs, route={"mask": "f"})
    stack.blocks.append(Block(Masked(4, 4), nn.Linear(4, 4)))
    stack(torch.randn(2, 4), mask=torch.ones(4)).sum().backward()


def test_a_route_with_an_entry_for_each_block_says_that_one_is_missing():
    pairs = [(Masked(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    stack = rg.ReversibleSequence(pairs, route={"mask": ["f", "f"]})
    stack.blocks.append(Block(Masked(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"route\['mask'\] has 2 entries for 3 blocks"):
        stack(torch.randn(2, 4), mask=torch.ones(4))


# --- backward in parts


class WithLoss(nn.Module):
    """The output does not depend on what the loss depends on."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        h = self.a(x).tanh()
        return rg.WithAux(self.b(h), h.square().mean())


def test_weights_assigned_between_two_backwards():
    gradients = []
    for memory in (rg.Keep(), REBUILD):
        torch.manual_seed(0)
        pairs = [(WithLoss(), WithLoss()) for _ in range(4)]
        stack = rg.ReversibleSequence(pairs, memory=memory).double()
        parameters = list(stack.parameters())
        _, aux = stack(torch.randn(4, 8, dtype=torch.float64))
        last = list(stack.blocks[-1].parameters())
        torch.autograd.grad(aux[-1], last, retain_graph=True, allow_unused=True)
        tripled = {name: 3 * value for name, value in stack.state_dict().items()}
        stack.load_state_dict(tripled, assign=True)
        found = torch.autograd.grad(aux[2] + aux[3], parameters, allow_unused=True)
        gradients.append([gradient for gradient in found if gradient is not None])
    assert zoo.worst(gradients[1], gradients[0]) < 1e-9


# --- functions that compare equal


@dataclasses.dataclass
class Scaled:
    scale: float
    linear: nn.Module = dataclasses.field(compare=False)

    def __call__(self, x):
        return self.linear(x) * self.scale


def test_a_function_that_is_replaced_by_an_equal_one():
    def norm():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))

    pairs = [(Scaled(1.0, norm()), nn.Linear(4, 4)) for _ in range(2)]
    stack = rg.ReversibleSequence(pairs, memory=REBUILD)
    stack(torch.randn(6, 4)).sum().backward()
    second = norm()
    stack.blocks[0].f = Scaled(1.0, second)
    stack(torch.randn(6, 4)).sum().backward()
    assert int(second[1].num_batches_tracked) == 1
    assert second[0].weight.grad is not None


# --- drift


class Large(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.scale = scale

    def forward(self, x):
        return self.scale * self.net(x)


@pytest.mark.parametrize("scale", [1e3, 1e4, 1e5])
def test_drift_is_relative_to_the_streams_that_are_rebuilt(scale):
    """One block in the middle is large. What comes before it is small and is rebuilt badly."""
    scales = [1.0] * 5 + [scale] + [1.0] * 6
    pairs = [(Large(s), Large(s)) for s in scales]
    stack = rg.ReversibleSequence(pairs, memory=REBUILD, drift="raise")
    with pytest.raises(rg.RecomputeError, match="off by"):
        nn.functional.layer_norm(stack(torch.randn(64, 32)), (32,)).sin().sum().backward()


def test_a_mask_of_minus_infinity_raises():
    class Mask(nn.Linear):
        def forward(self, x):
            closed = torch.arange(8) > 5
            return super().forward(x.softmax(-1)).masked_fill(closed, float("-inf"))

    class Soft(nn.Linear):
        def forward(self, x):
            return super().forward(x.softmax(-1))

    pairs = [(Soft(8, 8), Soft(8, 8)), (Mask(8, 8), Soft(8, 8)), (Soft(8, 8), Soft(8, 8))]
    stack = rg.ReversibleSequence(pairs, memory=REBUILD)
    with pytest.raises(rg.RecomputeError, match="was finite in forward and is not"):
        stack(torch.randn(16, 8)).softmax(-1)[:, 0].sum().backward()


def test_an_overflow_gives_what_plain_autograd_gives():
    """A loss scaler looks for infinite gradients and skips the step."""
    stack = rg.ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    x = torch.randn(4, 8)
    x[0, 0] = float("inf")
    stack(x).sum().backward()
    assert not stack.blocks[0].f.weight.grad.isfinite().all()
