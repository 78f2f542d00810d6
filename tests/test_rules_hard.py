"""Residual networks, scaled couplings and kept targets where they are easy to get wrong."""

import math

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd import measure
from tests import zoo


def layer(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class WithContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, context):
        return self.linear(x) + context


def both(net, run):
    """Gradients of `run(net)` as the network is, and in plain autograd."""
    found = []
    memory = net.memory
    for net.memory in (memory, rg.Keep()):
        for _ in range(2):  # a budget makes its plan in the first step
            net.zero_grad()
            run(net).backward()
        found.append([p.grad for p in net.parameters()])
    return found


# --- targets that are kept


@pytest.mark.parametrize("frozen", [1, 3])
@pytest.mark.parametrize("budget", ["45%", "58%", "70%", "84%"])
def test_a_budget_with_frozen_first_layers(frozen, budget):
    layers = [layer() for _ in range(8)]
    for one in layers[:frozen]:
        one.requires_grad_(False)
    x = torch.randn(64, 8)
    try:
        got, expected = both(
            rg.Residual(layers, memory=rg.Budget(budget)), lambda net: net(x).square().sum()
        )
    except rg.BudgetError:
        pytest.skip("too small for this network")
    assert zoo.worst(got, expected) < 1e-6


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Reverse(keep_last=False), rg.Anchor(2)])
def test_only_an_argument_of_a_frozen_layer_needs_a_gradient(memory):
    layers = [WithContext() for _ in range(4)]
    layers[0].requires_grad_(False)
    context = torch.randn(8, requires_grad=True)
    x = torch.randn(6, 8)
    net = rg.Residual(layers, memory=memory)
    grads = []
    for net.memory in (memory, rg.Keep()):
        loss = net(x, context=context).square().sum()
        grads.append(torch.autograd.grad(loss, [context, *layers[3].parameters()]))
    assert zoo.worst(*map(list, grads)) < 1e-6


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Reverse(keep_last=False), rg.Anchor(1)])
def test_the_loss_does_not_use_a_stream_that_is_kept(memory):
    f, g, h = layer(), layer(), layer()
    net = rg.Reversible(
        [
            rg.Update("a", lambda b, c: f(b + c), reads=("b", "c")),
            rg.Update("c", g, reads=("c",)),
            rg.Update("a", h, reads=("b",)),
        ],
        memory=memory,
    )
    x = {name: torch.randn(4, 8) for name in "abc"}
    parameters = [*f.parameters(), *h.parameters()]
    found = []
    for net.memory in (memory, rg.Keep()):
        loss = net(x)["a"].square().sum()
        found.append(torch.autograd.grad(loss, parameters))
    assert zoo.worst(*map(list, found)) < 1e-6


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Anchor(2)])
def test_a_layer_that_returns_a_detached_value(memory):
    layers = [layer() for _ in range(5)]
    detached = [*layers[:3], lambda x: layers[3](x).detach(), layers[4]]
    net = rg.Residual(detached, rule=rg.TwoStep([0, 0, 1, 0, 0], 1, 1), memory=memory)
    x = torch.randn(4, 8)
    parameters = [p for one in (*layers[:3], layers[4]) for p in one.parameters()]
    found = []
    for net.memory in (memory, rg.Keep()):
        found.append(torch.autograd.grad(net(x).square().sum(), parameters))
    assert zoo.worst(*map(list, found)) < 1e-6


def test_states_are_enough_for_backward():
    net = rg.Residual([layer() for _ in range(6)])
    x = torch.randn(3, 8, requires_grad=True)
    grads = []
    for net.memory in (rg.Reverse(), rg.Keep()):
        middle = net.states(x, after=(3,))[1][0]
        grads.append(torch.autograd.grad(middle.square().sum(), x)[0])
    assert zoo.worst(grads[:1], grads[1:]) < 1e-6
    sequence = rg.ReversibleSequence([(layer(), layer()) for _ in range(4)])
    middle = sequence.states(x, after=(1,))[1][0]
    torch.autograd.grad(middle.sum(), x)


@pytest.mark.parametrize("after", [(7,), (-8,), 3])
def test_states_that_do_not_exist(after):
    with pytest.raises((IndexError, TypeError), match="after"):
        rg.Residual([layer() for _ in range(6)]).states(torch.ones(2, 8), after=after)


# --- exact


@pytest.mark.parametrize("a", [1 / 256, -1 / 256, 1 / 255, 1 / 128, 3 / 256])
def test_ratios_that_fill_a_byte(a):
    net = rg.Residual([layer() for _ in range(6)], rule=rg.TwoStep(a, 1 - a, 1), exact=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    found = []
    for net.memory in (rg.Reverse(), rg.Keep()):
        found.append(zoo.gradients(net, net(x), x))
    assert all(map(torch.equal, *found))


def test_a_scaled_update_that_reads_its_target():
    f = layer()
    scaled = rg.Scaled(0.75)
    net = rg.Reversible(
        [
            rg.Update("a", f, reads=("b",), coupling=scaled),
            rg.Update("b", f, reads=("a",)),
            rg.Update("a", lambda a, b: f(a + b), reads=("a", "b"), coupling=scaled),
            rg.Update("b", f, reads=("a",)),
            rg.Update("a", f, reads=("b",), coupling=scaled),
        ],
        exact=True,
    )
    x = {name: torch.randn(5, 8, requires_grad=True) for name in "ab"}
    found = []
    for net.memory in (rg.Reverse(keep_last=False), rg.Keep()):
        y = net(x)
        found.append(torch.autograd.grad(y["a"].sum() + y["b"].sum(), [*x.values()]))
    assert all(map(torch.equal, *found))


def test_digits_and_a_map_that_changes_the_shape():
    net = rg.Reversible(
        [
            rg.Update("a", torch.tanh, reads=("b",), coupling=rg.Scaled(0.5)),
            rg.Transform("a", lambda x: x.reshape(4, 4), inverse=lambda y: y.reshape(2, 8)),
            rg.Transform("b", lambda x: x.reshape(4, 4), inverse=lambda y: y.reshape(2, 8)),
            rg.Update("a", torch.sin, reads=("b",), coupling=rg.Scaled(0.5)),
            rg.Update("b", torch.tanh, reads=("a",)),
        ],
        exact=True,
    )
    x = {name: torch.randn(2, 8, requires_grad=True) for name in "ab"}
    found = []
    for net.memory in (rg.Reverse(keep_last=False), rg.Keep()):
        y = net(x)
        found.append(torch.autograd.grad(y["a"].sum() + y["b"].sum(), [*x.values()]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("previous", [(0, 0, 0, 0, 1), (0, 0, 0.5, 1, 0), (0, 0.5, 0, 1, 0.9)])
def test_zeros_have_no_sign(previous):
    """A rebuilt zero is 0.0. Where forward saw -0.0, its bits would differ."""

    def small():
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    rule = rg.TwoStep(previous, 1, 0.5)
    net = rg.Residual([small() for _ in previous], rule=rule, exact=True)
    x = torch.randn(256, 16, requires_grad=True)
    found = []
    for net.memory in (rg.Reverse(keep_last=False), rg.Keep()):
        found.append(zoo.gradients(net, net(x), x))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("a", [0.937, 0.99, 4095 / 4096])
def test_ratios_too_coarse_for_the_grid(a):
    """A product is off by as many steps of the grid as its numerator says."""
    net = rg.Residual([layer() for _ in range(4)], rule=rg.TwoStep(a, 1 - a, 1), exact=True)
    with pytest.raises(rg.GridError, match=r"float64"):
        net(torch.randn(3, 8))
    net.exact = rg.Grid(dtype=torch.float64)
    x = torch.randn(3, 8)
    previous, state = x.double(), x.double()
    for k, one in enumerate(net):
        a_k, b_k = (a, 1 - a) if k else (0.0, 1.0)
        previous, state = state, a_k * previous + b_k * state + one(state.float()).double()
    assert (net(x) - state).abs().max() < 1e-4


@pytest.mark.parametrize("a", [1 / 4, 1 / 2, 9 / 10, 15 / 16])
def test_how_far_off_a_product_is(a):
    net = rg.Reversible(
        [rg.Update("a", torch.zeros_like, reads=("b",), coupling=rg.Scaled(a))], exact=True
    )
    x = {name: torch.randn(1000) for name in "ab"}
    assert (net(x)["a"] - a * x["a"]).abs().max() <= 2**-8


def test_a_product_leaves_the_grid_and_the_result_does_not():
    net = rg.Reversible(
        [
            rg.Update("b", torch.sin, reads=("a",)),
            rg.Update("a", lambda b, shift: b * 0 + shift, reads=("b",), coupling=rg.Scaled(1.5)),
        ],
        exact=True,
    )
    x = {"a": torch.full((64,), 3500.0), "b": torch.zeros(64)}
    for memory in (rg.Reverse(keep_last=False), rg.Keep()):
        net.memory = memory
        with pytest.raises(rg.GridError):
            net(x, shift=torch.tensor(-3500.0))


def test_a_product_beyond_64_bits():
    net = rg.Reversible(
        [rg.Update("a", torch.zeros_like, reads=("b",), coupling=rg.Scaled(4096.0))], exact=True
    )
    x = {"a": torch.full((4,), 2.0**20, dtype=torch.float64), "b": torch.zeros(4).double()}
    with pytest.raises(rg.GridError):
        net(x)


def test_an_output_that_is_larger_than_its_stream():
    net = rg.Reversible(
        [rg.Update("a", lambda b: b, reads=("b",), coupling=rg.Scaled(0.5))], exact=True
    )
    with pytest.raises(rg.OutputError, match="update 0"):
        net({"a": torch.ones(1, 8), "b": torch.ones(5, 8)})


def test_whole_numbers_are_not_multiplied():
    net = rg.Residual([lambda x: x] * 3, rule=rg.Blend(1 / 4), exact=True)
    with pytest.raises(rg.RetrogradError, match="int64"):
        net({"a": torch.ones(3, dtype=torch.int64)})


def test_a_transform_off_the_grid():
    net = rg.Reversible(
        [
            rg.Transform("a", lambda x: x * 2**-14, inverse=lambda y: y * 2**14),
            rg.Update("a", torch.sin, reads=("b",)),
        ],
        exact=True,
    )
    x = {name: torch.randn(8, requires_grad=True) for name in "ab"}
    with pytest.raises(rg.RetrogradError, match="grid"):
        net(x)["a"].sum().backward()


def test_an_ensemble_under_vmap():
    net = rg.Residual([nn.Linear(5, 5) for _ in range(4)], rule=rg.Blend(1 / 4), exact=True)
    stacked = {name: torch.stack([p, p]).detach() for name, p in net.named_parameters()}
    x = torch.randn(3, 5)
    both = torch.func.vmap(lambda p: torch.func.functional_call(net, p, (x,)))(stacked)
    assert torch.allclose(both[0], net(x), atol=1e-3)


# --- rules


def test_signs_that_were_drawn_cannot_be_undone():
    net = rg.Residual([layer() for _ in range(4)], rule=rg.Bdia(1.0))
    x = torch.randn(4, 8)
    last, (previous,) = net.states(x, after=[-2])
    with pytest.raises(ValueError, match="draws"):
        net.inverse(previous, last)


def test_one_stream_is_rebuilt_and_one_is_not():
    layers = [layer().bfloat16() for _ in range(4)]
    rule = rg.TwoStep([0, 0, 0.5, 0], 1, 1)
    net = rg.Residual(layers, rule=rule, memory=rg.Anchor(1))
    assert net(torch.randn(4, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_numbers_that_change_are_checked():
    rule = rg.TwoStep(0.5, 0.5, 1)
    net = rg.Residual([layer() for _ in range(12)], rule=rule, exact=True)
    net(torch.randn(3, 8))
    for wrong in (0.123456789, math.nan):
        rule.previous = wrong
        with pytest.raises(ValueError, match=r"previous|ratio"):
            net(torch.randn(3, 8))
    rule.previous = 0.01
    net = rg.Residual([layer() for _ in range(12)], rule=rg.TwoStep(1, 0, 1))
    net.rule.previous = 0.01
    with pytest.raises(ValueError, match="exact=True"):
        net(torch.randn(3, 8))


class Rule:
    def __init__(self, steps):
        self._steps = steps

    def steps(self, layers, training):
        return self._steps


ONE = rg.Euler().steps(1, True)[0]


@pytest.mark.parametrize(
    "steps", [[ONE] * 3, [ONE] * 5, [(0, 1, 1)] * 4, [ONE._replace(previous=0.5)] * 4]
)
def test_rules_of_the_user_are_checked(steps):
    with pytest.raises((ValueError, TypeError), match="steps"):
        rg.Residual([layer() for _ in range(4)], rule=Rule(steps), exact=True)


def test_a_budget_follows_numbers_that_change():
    rule = rg.TwoStep(1, 0, 1)
    net = rg.Residual([layer() for _ in range(24)], rule=rule, memory=rg.Budget(150_000))
    x = torch.randn(64, 8)
    for previous in (1, [0.0] * 23 + [1.0]):
        rule.previous = previous
        for _ in range(3):
            net.zero_grad()
            taken = measure.activation_bytes(
                lambda: net(x).square().sum().backward(), net.parameters()
            )
        assert taken <= 150_000


def test_parts_of_networks_with_a_number_for_each_layer():
    net = rg.Residual([layer() for _ in range(6)], rule=rg.TwoStep([1.0] * 6, [0.0] * 6, 1))
    part = net[:3]
    x = torch.randn(2, 8)
    assert len(part) == 3
    assert torch.equal(part(x), net.states(x, after=(2,))[1][0])
    with pytest.raises(ValueError, match="7 layers"):
        net.append(layer())
    assert len(net) == 6
    net(x)


def test_what_cannot_be_added_is_not():
    net = rg.Reversible([rg.Update("a", torch.tanh, reads=("b",))], exact=True)
    with pytest.raises(ValueError, match="exact"):
        net.append(rg.Update("b", torch.tanh, reads=("a",), coupling=rg.Affine()))
    assert len(net) == 1
    net({"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize("parts", [1, 3, (2, 3, 3)])
def test_a_sequence_has_two_streams(parts):
    with pytest.raises(ValueError, match="two"):
        rg.ReversibleSequence([(layer(), layer())], streams=rg.Split(parts=parts))


def test_a_coupling_without_an_inverse():
    class Replace(rg.Coupling):
        is_lossy = True

        def forward(self, x, out):
            return out

    f = layer()
    net = rg.Reversible([rg.Update("a", f, reads=("b",), coupling=Replace())])
    x = {name: torch.randn(2, 8, requires_grad=True) for name in "ab"}
    grad = torch.autograd.grad(net(x)["a"].sum(), x["b"])[0]
    assert torch.equal(grad, torch.autograd.grad(f(x["b"]).sum(), x["b"])[0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: rg.Midpoint(None),
        lambda: rg.Blend(None),
        lambda: rg.Bdia(None),
        lambda: rg.TwoStep(None, 1, 1),
        lambda: rg.Scaled("a"),
        lambda: rg.Scaled(True),
        lambda: rg.Momentum("a"),
        lambda: rg.Split(parts=2.0),
        lambda: rg.Split(dim="a"),
        lambda: rg.Residual(nn.Linear(8, 8)),
        lambda: rg.Residual([layer()], skip="x"),
        lambda: rg.Transform(5, torch.neg, inverse=torch.neg),
    ],
)
def test_arguments_are_checked(build):
    with pytest.raises((ValueError, TypeError)) as caught:
        build()
    assert "(" in str(caught.value) or "=" in str(caught.value)  # it names the argument
