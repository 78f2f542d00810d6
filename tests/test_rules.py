"""Residual networks under rules: each against its formula, written as a plain loop."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd import measure
from tests import zoo

HALF = rg.TwoStep(previous=0.5, current=0.5, scale=1)


def mlp(width=8, dropout=0.0):
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(2 * width, width),
    )


def layers(count, width=8, dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.ModuleList(mlp(width, dropout) for _ in range(count)).to(dtype)


# --- the formulas


def euler(functions, x):
    for f in functions:
        x = x + f(x)
    return x


def two_step(previous, current, scale, first=1.0):
    def run(functions, x):
        before, now = x, x + first * functions[0](x)
        for f in functions[1:]:
            before, now = now, previous * before + current * now + scale * f(now)
        return now

    return run


def bdia(functions, x):
    before, now = x, x + functions[0](x)
    for f in functions[1:]:
        sign = torch.randint(2, (len(x), *[1] * (x.ndim - 1))) * 2 - 1
        gamma = sign.to(x.dtype) / 2
        before, now = now, gamma * before + (1 - gamma) * now + (1 + gamma) * f(now)
    return now


RULES = {  # the rule, its formula, and whether undoing it divides
    "euler": (rg.Euler(), euler, False),
    "midpoint": (rg.Midpoint(0.25), two_step(1, 0, 0.5, first=0.25), False),
    "leapfrog": (rg.Leapfrog(0.25), two_step(-1, 2, 0.0625, first=0.25), False),
    "blend": (rg.Blend(1 / 4), two_step(0.25, 0.75, 1.25), True),
    "blend-h": (rg.Blend(1 / 4, h=0.5), two_step(0.25, 0.75, 0.5), True),
    "bdia": (rg.Bdia(0.5), bdia, True),
    "rewiring": (rg.TwoStep(1, 0, 1), two_step(1, 0, 1), False),
    "dr2net": (HALF, two_step(0.5, 0.5, 1), True),
    "dr2net-start": (rg.TwoStep(0, 1, 1), two_step(0, 1, 1), False),
}
MEMORY = {**zoo.MEMORY, "anchor": rg.Anchor(1), "budget": rg.Budget("60%")}


def gradients(functions, run, x, seed=3):
    torch.manual_seed(seed)
    y = run(x)
    wanted = [x, *functions.parameters()]
    return [y, *torch.autograd.grad(zoo.loss(y), wanted, allow_unused=True)]


def build(functions, rule, memory="reverse", **options):
    """Rules that divide run with anchors, so that float64 has digits enough."""
    rule, _, divides = RULES[rule]
    memory = MEMORY[memory]
    if divides and not isinstance(memory, (rg.Keep, rg.Budget)):
        memory = rg.Anchor(1)
    if divides and isinstance(memory, rg.Budget):
        options["exact"] = rg.Grid(dtype=torch.float64, bits=40)
    return rg.Residual(functions, rule=rule, memory=memory, **options)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_formula(rule, depth, memory):
    if memory == "budget" and depth < 7:
        pytest.skip("so few layers need what plain autograd needs")
    functions = layers(depth, dropout=0.3)
    net = build(functions, rule, memory)
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)
    expected = gradients(functions, lambda x: RULES[rule][1](list(functions), x), x)
    for _ in range(2):  # a budget measures the first step
        assert zoo.worst(gradients(functions, net, x), expected) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_24_layers(rule):
    functions = layers(24)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    expected = gradients(functions, lambda x: RULES[rule][1](list(functions), x), x)
    assert zoo.worst(gradients(functions, build(functions, rule), x), expected) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_layers_that_add_themselves(rule):
    class Whole(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return x + self.fn(x)

    functions = layers(5)
    net = build(nn.ModuleList(map(Whole, functions)), rule, skip=True)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = gradients(functions, lambda x: RULES[rule][1](list(functions), x), x)
    got = gradients(functions, net, x)
    assert zoo.worst(got, expected) < 1e-9
    if rule == "euler":
        assert all(map(torch.equal, got, expected))


def test_euler_is_the_ordinary_network_to_the_bit():
    functions = layers(6, dtype=torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    expected = gradients(functions, lambda x: euler(functions, x), x)
    for options in ({}, {"exact": True}, {"memory": rg.Budget("100%")}):
        net = rg.Residual(functions, **options)
        for _ in range(2):
            assert all(map(torch.equal, gradients(functions, net, x), expected))


@pytest.mark.parametrize("exact", [False, True])
def test_bdia_is_the_ordinary_network_in_evaluation(exact):
    functions = layers(6, dtype=torch.float32)
    memory = rg.Reverse() if exact else rg.Anchor(1)
    net = rg.Residual(functions, rule=rg.Bdia(), exact=exact, memory=memory)
    x = torch.randn(3, 8, requires_grad=True)
    assert not torch.equal(net(x), euler(functions, x))
    net.eval()
    expected = gradients(functions, lambda x: euler(functions, x), x)
    assert all(map(torch.equal, gradients(functions, net, x), expected))
    with torch.no_grad():
        assert torch.equal(net(x), expected[0])


def test_numbers_for_each_layer_and_numbers_that_change():
    functions = layers(4)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    rule = rg.TwoStep(previous=(1, 0.5, 0.25, 0.5), current=1.0, scale=(1, 1, 2, 1))
    net = rg.Residual(functions, rule=rule, memory=rg.Anchor(1))

    def formula(x):
        a, b, c, d = functions
        p, q = x, 2 * x + a(x)
        p, q = q, 0.5 * p + q + b(q)
        p, q = q, 0.25 * p + q + 2 * c(q)
        return 0.5 * p + q + d(q)

    expected = gradients(functions, formula, x)
    torch.manual_seed(3)
    y = net(x)
    rule.previous = 0.9  # a call uses the numbers of its forward
    got = [y, *torch.autograd.grad(zoo.loss(y), [x, *functions.parameters()])]
    assert zoo.worst(got, expected) < 1e-9
    assert not torch.equal(net(x), y)
    rule.previous = (1, 2)
    with pytest.raises(ValueError, match="has 2 numbers for 4 layers"):
        net(x)


@pytest.mark.parametrize("exact", [False, rg.Grid(dtype=torch.float64, bits=44)])
@pytest.mark.parametrize("skip", [False, True])
def test_an_ordinary_layer_among_others(skip, exact):
    """The state before it is lost there, so it is kept."""
    functions = layers(4)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

    def formula(x):
        a, b, c, d = functions
        p, q = x, x + a(x)
        p, q = q, q + b(q)
        p, q = q, 0.5 * p + q + c(q)
        return q + d(q)

    wholes = [lambda x, f=f: x + f(x) for f in functions] if skip else functions
    rule = rg.TwoStep(previous=(0, 0, 0.5, 0), current=1, scale=1)
    net = rg.Residual(wholes, rule=rule, skip=skip, exact=exact, memory=rg.Anchor(1))
    expected = gradients(functions, formula, x)
    assert zoo.worst(gradients(functions, net, x), expected) < (1e-9 if not exact else 1e-7)


def test_dr2net_on_its_way_from_the_ordinary_network():
    """The coefficients move while it trains; where `previous` is 0, states are kept."""
    functions = layers(5)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    net = rg.Residual(functions, rule=rg.TwoStep(0, 1, 1), memory=rg.Anchor(1))
    for beta in (0.0, 0.1, 0.5, 1.0):
        net.rule = rg.TwoStep(beta, 1 - beta, 1)
        formula = two_step(beta, 1 - beta, 1)
        expected = gradients(functions, lambda x: formula(list(functions), x), x)  # noqa: B023
        assert zoo.worst(gradients(functions, net, x), expected) < 1e-9


# --- exact


EXACT = {
    "midpoint": rg.Midpoint(0.25),
    "leapfrog": rg.Leapfrog(0.25),
    "bdia": rg.Bdia(0.5),
    "blend-1/2": rg.Blend(1 / 2),
    "blend-1/4": rg.Blend(1 / 4),
    "blend-1/8": rg.Blend(1 / 8),
    "nine-tenths": rg.TwoStep(0.9, 0.1, 1),
    "a-tenth": rg.TwoStep(0.1, 0.9, 1),
    "a-third": rg.TwoStep(-1 / 3, 1, 1),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("rule", EXACT)
def test_48_layers_are_exact(rule, dtype):
    functions = layers(48, dropout=0.1, dtype=torch.float32)
    x = torch.randn(4, 3, 8, requires_grad=True)
    results = []
    for memory in (rg.Keep(), rg.Reverse(), rg.Reverse(keep_last=False), rg.Anchor(5)):
        net = rg.Residual(functions, rule=EXACT[rule], exact=True, memory=memory)

        def run(x, net=net):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                return net(x)

        results.append(gradients(functions, run, x))
    for got in results[1:]:
        assert all(map(torch.equal, got, results[0]))


@pytest.mark.parametrize(
    "coupling", [rg.Momentum(0.9), rg.Scaled(0.1), rg.Scaled(-0.5), rg.Scaled(1.5)], ids=str
)
def test_pairs_with_scaled_couplings_are_exact(coupling):
    torch.manual_seed(0)
    pairs = [(mlp(dropout=0.1), mlp(dropout=0.1)) for _ in range(6)]
    x = {"a": torch.randn(4, 8, requires_grad=True), "b": torch.randn(8, requires_grad=True)}

    class Both(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return {name: self.fn(leaf) for name, leaf in x.items()}

    results = []
    for memory in (rg.Keep(), rg.Reverse(), rg.Budget("70%")):
        stack = rg.ReversibleSequence(
            [(Both(f), Both(g)) for f, g in pairs], coupling=coupling, memory=memory, exact=True
        )
        for _ in range(2):
            torch.manual_seed(2)
            y = stack(x)
            got = zoo.gradients(stack, y, x)
        results.append(got)
    assert all(torch.equal(a, b) for got in results[1:] for a, b in zip(got, results[0]))


def test_two_backwards_through_the_same_digits():
    functions = layers(9, dtype=torch.float32)
    net = rg.Residual(functions, rule=rg.Blend(1 / 4), exact=True)
    x = torch.randn(4, 8, requires_grad=True)
    y = net(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], first)


def test_two_forwards_before_a_backward():
    functions = layers(9, dropout=0.2, dtype=torch.float32)
    net = rg.Residual(functions, rule=rg.Blend(1 / 4), exact=True)
    keep = rg.Residual(functions, rule=rg.Blend(1 / 4), exact=True, memory=rg.Keep())
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    torch.manual_seed(1)
    expected = [torch.autograd.grad(keep(x).sum(), x)[0] for x in inputs]
    torch.manual_seed(1)
    outputs = [net(x) for x in inputs]
    for i in (0, 1):
        assert torch.equal(torch.autograd.grad(outputs[i].sum(), inputs[i])[0], expected[i])


def test_numbers_that_are_no_ratios_are_refused():
    with pytest.raises(ValueError, match=r"ratios of whole numbers.*for instance to 0.12"):
        rg.Residual(layers(3), rule=rg.TwoStep(0.123456789, 0.5, 1), exact=True)


# --- bytes and FLOPs


def activations(net, x):
    def step():
        net(x).square().mean().backward()

    for _ in range(2):
        step()
    return measure.activation_bytes(step, [x])


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(0)
    x = torch.randn(8, 128, 32)
    functions = nn.ModuleList(mlp(32) for _ in range(48))
    functions.requires_grad_(False)  # gradients would hide what is kept
    return functions, x.requires_grad_()


def test_bytes_do_not_grow_but_for_digits(wide):
    functions, x = wide
    stream = x.nbytes
    midpoint = activations(rg.Residual(functions, rule=rg.Midpoint(0.25), exact=True), x)
    half = activations(rg.Residual(functions[:24], rule=rg.Midpoint(0.25), exact=True), x)
    assert midpoint - half < stream / 8
    bits = {rg.Bdia(0.5): 2.0, rg.Blend(1 / 2): 2.0, rg.Blend(1 / 4): 3.5}
    for rule, streams in bits.items():
        more = activations(rg.Residual(functions, rule=rule, exact=True), x) - midpoint
        assert more <= streams * stream, rule


def test_euler_costs_what_checkpointing_costs(wide):
    functions, x = wide

    def checkpointed(x):
        for f in functions:
            x = checkpoint(lambda f, x: x + f(x), f, x, use_reentrant=False)
        return x

    def flops(run):
        with measure.Flops() as counted:
            run(x).square().mean().backward()
        return counted.total

    net = rg.Residual(functions)

    def checkpoint_step():
        checkpointed(x).square().mean().backward()

    assert activations(net, x) <= measure.activation_bytes(checkpoint_step, [x])
    assert flops(net) <= flops(checkpointed)


def test_a_budget_below_checkpointing_runs_updates_twice(wide):
    functions, x = wide
    net = rg.Residual(functions)
    usual = activations(net, x)
    expected = torch.autograd.grad(net(x).sum(), x)[0]
    calls, peaks = [], []
    for share in (1.0, 0.6, 0.4):
        net.memory = rg.Budget(int(share * usual))
        peaks.append(activations(net, x))
        assert peaks[-1] <= share * usual
        counted = measure.step(lambda: net(x).sum().backward(), net)
        calls.append(sum(counted.evaluations.values()))
        assert torch.equal(torch.autograd.grad(net(x).sum(), x)[0], expected)
    assert calls[0] < calls[1] <= calls[2] <= 3 * 48
    plan = net.plan(x)
    assert "nothing, and runs twice" in str(plan)
    assert "its target" in str(plan)
    net.memory = rg.Budget(int(0.1 * usual))
    with pytest.raises(rg.BudgetError, match="that this stack needs in any case"):
        net(x)


def test_the_plan_says_what_is_kept():
    plan = rg.Residual(layers(4)).plan(torch.randn(3, 8, dtype=torch.float64))
    assert [row.keeps for row in plan.rows] == ["its target"] * 3 + ["everything"]


# --- promises of checkpointing, and those that it does not keep


def test_buffers_are_updated_once():
    functions = nn.ModuleList(nn.Sequential(mlp(), nn.BatchNorm1d(8)) for _ in range(5)).double()
    plain = copy.deepcopy(functions)
    for memory in (rg.Reverse(), rg.Budget("80%")):
        net = rg.Residual(functions, memory=memory)
        for _ in range(3):
            x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
            expected = gradients(plain, lambda x: euler(plain, x), x)
            assert zoo.worst(gradients(functions, net, x), expected) < 1e-9
            assert zoo.worst([*functions.buffers()], [*plain.buffers()]) < 1e-12


def test_evaluation_between_forward_and_backward():
    functions = layers(4, dropout=0.5)
    net = rg.Residual(functions)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    expected = gradients(functions, lambda x: euler(functions, x), x)
    torch.manual_seed(3)
    y = net(x)
    net.eval()
    got = [y, *torch.autograd.grad(zoo.loss(y), [x, *functions.parameters()])]
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("rule", ["euler", "midpoint"])
def test_backwards_in_any_order(rule, order):
    functions = layers(5, dropout=0.3)
    net = build(functions, rule)
    inputs = [torch.randn(2, 8, dtype=torch.float64, requires_grad=True) for _ in order]
    torch.manual_seed(1)
    plain = [RULES[rule][1](list(functions), x) for x in inputs]
    expected = [torch.autograd.grad(zoo.loss(y), x)[0] for x, y in zip(inputs, plain)]
    torch.manual_seed(1)
    outputs = [net(x) for x in inputs]
    for i in order:
        got = torch.autograd.grad(zoo.loss(outputs[i]), inputs[i])[0]
        assert zoo.worst([got], [expected[i]]) < 1e-9


@pytest.mark.parametrize("rule", ["euler", "midpoint", "leapfrog"])
def test_double_backward_and_retained_graphs(rule):
    functions = layers(4)
    net = build(functions, rule)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for run in (net, lambda x: RULES[rule][1](list(functions), x)):
        y = run(x)
        (first,) = torch.autograd.grad(zoo.loss(y), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(zoo.loss(y), x)
        results.append([first, second, again])
    assert zoo.worst(*results) < 1e-9


def test_torch_func():
    functions = layers(4)
    net = rg.Residual(functions, rule=rg.Blend(1 / 4), exact=rg.Grid(dtype=torch.float64, bits=44))
    x = torch.randn(3, 8, dtype=torch.float64)
    got = torch.func.vmap(torch.func.grad(lambda x: net(x).sin().sum()))(x)
    formula = RULES["blend"][1]
    expected = torch.func.vmap(torch.func.grad(lambda x: formula(list(functions), x).sin().sum()))(
        x
    )
    assert torch.allclose(got, expected, atol=1e-8)


def test_dropping_the_output_frees_everything():
    functions = layers(6)
    for rule in ("euler", "midpoint"):
        net = build(functions, rule)
        x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
        net(x).sum().backward()
        with measure.LiveBytes() as live:
            y = net(x)
            assert live.now > 0
            del y
            assert live.now == 0


def test_edits_in_place_are_noticed():
    functions = layers(4)
    x = torch.randn(2, 8, dtype=torch.float64)
    net = rg.Residual(functions, memory=rg.Reverse(keep_last=False))
    y = net(x)
    x.add_(1)
    with pytest.raises(rg.InPlaceError, match="a stream that was kept"):
        y.sum().backward()


# --- arguments, aux, tuples, pytrees


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, mask=None):
        y = self.linear(hidden).tanh()
        y = y if mask is None else y * mask
        return y, y.square().mean()


@pytest.mark.parametrize("rule", ["euler", "midpoint"])
def test_tuples_arguments_and_aux(rule):
    functions = nn.ModuleList(Attending() for _ in range(4)).double()
    net = build(functions, rule)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, dtype=torch.float64, requires_grad=True)

    def plain(x):
        extras = []

        def called(f):
            def run(x):
                y, extra = f(x, mask)
                extras.append(extra)
                return y

            return run

        return RULES[rule][1]([called(f) for f in functions], x), extras

    y, aux = net(x, mask=mask)
    expected, extras = plain(x)
    assert len(aux) == 4 and all(isinstance(item, tuple) for item in aux)
    wanted = [x, mask, *functions.parameters()]
    total = zoo.loss(y) + sum(item[0] for item in aux)
    got = torch.autograd.grad(total, wanted)
    assert (
        zoo.worst(list(got), list(torch.autograd.grad(zoo.loss(expected) + sum(extras), wanted)))
        < 1e-9
    )
    with pytest.raises(TypeError, match="none of the functions accepts: 'masks'"):
        net(x, masks=mask)


def test_renamed_arguments():
    net = rg.Residual(
        nn.ModuleList(Attending() for _ in range(2)), route={"mask": "attention_mask"}
    )
    y, _ = net(torch.ones(2, 8), attention_mask=torch.zeros(8))
    assert torch.equal(y, torch.ones(2, 8))


@pytest.mark.parametrize("rule", RULES)
def test_trees(rule):
    class Both(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return {name: self.fn(leaf) for name, leaf in x.items()}

    functions = layers(3)
    net = build(nn.ModuleList(map(Both, functions)), rule)
    net.rule = net.rule if rule != "bdia" else rg.Midpoint(0.25)
    name = rule if rule != "bdia" else "midpoint"
    x = {
        "a": torch.randn(2, 8, dtype=torch.float64, requires_grad=True),
        "b": torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True),
    }
    got = zoo.gradients(net, net(x), x)
    y = {key: RULES[name][1](list(functions), leaf) for key, leaf in x.items()}
    assert zoo.worst(got, zoo.gradients(net, y, x)) < 1e-9


# --- lists, states, inverse


def test_a_network_is_a_list():
    functions = layers(5)
    net = rg.Residual(functions, rule=rg.Midpoint(0.25), drift="raise")
    assert len(net) == 5 and list(net) == list(functions) and net[-1] is functions[4]
    part = net[1:3]
    assert isinstance(part, rg.Residual) and list(part) == list(functions[1:3])
    assert (part.rule, part.drift) == (net.rule, "raise")
    net.append(torch.tanh)
    assert len(net) == 6
    assert next(name for name, _ in net.named_parameters()) == "functions.0.0.weight"


@pytest.mark.parametrize("rule", ["euler", "midpoint"])
def test_states_on_the_way(rule):
    functions = layers(6)
    net = build(functions, rule)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    y, states = net.states(x, after=(0, 3, -2))
    expected = [RULES[rule][1](list(functions[:count]), x) for count in (1, 4, 5, 6)]
    assert zoo.worst([*states, y], expected) < 1e-12
    got = zoo.gradients(net, [*states, y], x)
    assert zoo.worst(got, zoo.gradients(net, expected, x)) < 1e-9
    with pytest.raises(IndexError):
        net.states(x, after=(6,))


@pytest.mark.parametrize("depth", [4, 5])
@pytest.mark.parametrize("rule", ["midpoint", "leapfrog", "rewiring"])
def test_inverse(rule, depth):
    net = build(layers(depth), rule)
    x = torch.randn(3, 8, dtype=torch.float64)
    last, (previous,) = net.states(x, after=[-2])
    assert torch.allclose(net.inverse(previous, last), x, atol=1e-10)


def test_what_has_no_inverse():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="has one state only at some layer"):
        rg.Residual(layers(3)).inverse(x, x)
    with pytest.raises(ValueError, match="with exact=True the digits"):
        rg.Residual(layers(3), rule=rg.Blend(0.5), exact=True).inverse(x, x)


# --- what is refused


@pytest.mark.parametrize("rule", [rg.Blend(1 / 4), rg.Bdia(0.5), HALF], ids=str)
def test_rules_that_divide_ask_for_exact(rule):
    says = r"rounding errors grow by [24] for each layer.*exact=True"
    with pytest.raises(ValueError, match=says):
        rg.Residual(layers(24), rule=rule)
    net = rg.Residual(layers(24), rule=rule, exact=True)
    with pytest.raises(ValueError, match=says):
        net.exact = False
    assert net.exact is True
    rg.Residual(layers(24), rule=rule, memory=rg.Keep())
    near = rg.Residual(layers(24), rule=rule, memory=rg.Anchor(1))
    with pytest.raises(ValueError, match=says):
        near.memory = rg.Reverse()
    with pytest.raises(ValueError, match=says):
        rg.Residual(layers(24), rule=rule, memory=rg.Anchor(12))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rg.Blend(0), "a lies between 0 and 1"),
        (lambda: rg.Blend(float("nan")), "must be a finite number"),
        (lambda: rg.Bdia(-1), "gamma lies between 0 and 1"),
        (lambda: rg.Midpoint("fast"), "must be a finite number"),
        (lambda: rg.TwoStep(1, [1, "x"], 1), "must be a finite number"),
        (lambda: rg.Scaled(0), "a must be a number other than zero"),
    ],
)
def test_numbers_that_make_no_sense(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_rules_that_are_none():
    with pytest.raises(TypeError, match="pass rg.Euler"):
        rg.Residual(layers(2), rule=rg.Euler)
    with pytest.raises(TypeError, match=r"functions\[1\] is 3, which is not callable"):
        rg.Residual([torch.tanh, 3])


def test_midpoint_in_float32():
    """Close to plain autograd at 24 layers, or a word about it."""
    functions = layers(24, width=32, dtype=torch.float32)
    x = torch.randn(4, 16, 32, requires_grad=True)
    got = gradients(functions, build(functions, "midpoint", drift="raise"), x)
    expected = gradients(functions, lambda x: RULES["midpoint"][1](list(functions), x), x)
    assert zoo.worst(got, expected) < 1e-3
