"""The drop-in classes of revtorch, revlib, memcnn and `GroupAddRev`: the originals' keys, outputs
and gradients. And the adaptors of docs/migrate, against the originals that are installed.
"""

import copy
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg
from examples import adaptors
from retrograd.compat import memcnn, revlib, revtorch, torch_geometric
from tests.packages import load

PAGE = Path(__file__).parents[1] / "docs" / "migrate" / "other-libraries.md"


def mlp(width=4, dropout=0.0):
    layers = nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width)
    return nn.Sequential(*layers).double()


def outcome(net, x, run=None):
    """The output and all gradients, by name. The input is no leaf: memcnn is wrong for leaves."""
    leaf = x.detach().clone().requires_grad_()
    net.zero_grad()
    output = (run or net)(leaf * 1)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    value = output.detach().clone()
    (output * weights).sum().backward()
    return {"output": value, "input": leaf.grad} | {
        name: weight.grad for name, weight in net.named_parameters()
    }


def assert_same(ours, theirs, x, run=None):
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    expected = outcome(theirs, x, run)
    found = outcome(ours, x)
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


X = torch.linspace(-1, 1, 5 * 8, dtype=torch.float64).view(5, 8).sin()


def of_revtorch(module, **options):
    blocks = [module.ReversibleBlock(mlp(), mlp(), **options) for _ in range(3)]
    return module.ReversibleSequence(nn.ModuleList(blocks))


def of_revlib(module, count=4, **options):
    return module.ReversibleSequential(*[mlp() for _ in range(count)], **options)


def of_memcnn(module, coupling="AdditiveCoupling", **options):
    make = getattr(module, coupling)
    adapter = options.pop("adapter", None)
    if adapter is not None:
        options["adapter"] = getattr(module, adapter)
    wrappers = [module.InvertibleModuleWrapper(make(mlp(), **options)) for _ in range(3)]
    return nn.Sequential(*wrappers)


CASES = {
    "revtorch": ("revtorch", revtorch, of_revtorch, {}),
    "revtorch, dim": ("revtorch", revtorch, of_revtorch, {"split_along_dim": -1}),
    "revlib": ("revlib", revlib, of_revlib, {}),
    "revlib, odd": ("revlib", revlib, of_revlib, {"count": 5}),
    "revlib, dim": ("revlib", revlib, of_revlib, {"split_dim": -1}),
    "revlib, kept": ("revlib", revlib, of_revlib, {"memory_mode": 0}),
    "memcnn": ("memcnn", memcnn, of_memcnn, {}),
    "memcnn, affine": (
        "memcnn",
        memcnn,
        of_memcnn,
        {"coupling": "AffineCoupling", "adapter": "AffineAdapterNaive"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # of memcnn
def test_the_same_as_the_original(case):
    name, ours, build, options = CASES[case]
    assert_same(build(ours, **options), build(load(name), **options), X)


def test_blocks_of_revtorch():
    """Alone, a block has gradients; blocks may split along different dimensions."""
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    first = revtorch.ReversibleBlock(nn.Tanh(), nn.Sigmoid(), split_along_dim=1)
    second = revtorch.ReversibleBlock(nn.Sigmoid(), nn.Tanh(), split_along_dim=2)
    net = revtorch.ReversibleSequence(nn.ModuleList([first, second, first]))

    def equations(x):
        for f, g, dim in (
            (torch.tanh, torch.sigmoid, 1),
            (torch.sigmoid, torch.tanh, 2),
            (torch.tanh, torch.sigmoid, 1),
        ):
            x1, x2 = x.chunk(2, dim)
            x1 = x1 + f(x2)
            x = torch.cat((x1, x2 + g(x1)), dim)
        return x

    torch.testing.assert_close(outcome(net, x), outcome(net, x, equations))
    assert first(x.requires_grad_()).requires_grad
    with pytest.raises(TypeError, match=r"torch\.nn\.ModuleList"):
        revtorch.ReversibleSequence([first])


def test_revlib_couplings_arguments_and_refusals():
    class Shift(nn.Linear):
        def forward(self, x, shift, *, scale=1.0):
            return super().forward(x).tanh() * scale + shift

    functions = [Shift(4, 4).double() for _ in range(4)]
    weighted = {
        "coupling_forward": [lambda x, out: 0.9 * x + 0.1 * out],
        "coupling_inverse": [lambda y, out: (y - 0.1 * out) / 0.9],
    }
    net = revlib.ReversibleSequential(*functions, **weighted)
    own = [((0.1 * i,), {"scale": 1.0 + i}) for i in range(4)]

    def equations(x):
        x1, x2 = x.chunk(2, 1)
        for fn, ((shift,), named) in zip(functions, own):
            x1, x2 = x2, 0.9 * x1 + 0.1 * fn(x2, shift, **named)
        return torch.cat((x1, x2), 1)

    given = lambda x: net(x, layerwise_args_kwargs=own)  # noqa: E731
    torch.testing.assert_close(outcome(net, X, given), outcome(net, X, equations))
    for wrong in ({"split_dim": None}, {"target_device": "cpu"}, {"fused_optimizer": object}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            revlib.ReversibleSequential(mlp(), **wrong)


def test_memcnn_inverses_and_other_modules():
    for coupling in (
        memcnn.AdditiveCoupling(mlp()),
        memcnn.AffineCoupling(mlp(), adapter=memcnn.AffineAdapterNaive),
    ):
        wrapper = memcnn.InvertibleModuleWrapper(coupling)
        torch.testing.assert_close(wrapper.inverse(wrapper(X)), X)

    class Double(nn.Module):
        def forward(self, x):
            return 2 * x.sinh()

        def inverse(self, y):
            return (y / 2).asinh()

    wrapper = memcnn.InvertibleModuleWrapper(Double())
    torch.testing.assert_close(outcome(wrapper, X), outcome(wrapper, X, Double()))
    torch.testing.assert_close(wrapper.inverse(wrapper(X)), X)
    both = memcnn.AffineAdapterSigmoid(nn.Identity())(X)
    torch.testing.assert_close(both, (torch.sigmoid(X[:, 1::2] + 2), X[:, 0::2]))


@pytest.mark.parametrize("kind", ["revtorch", "memcnn", "GroupAddRev"])
def test_bytes_are_flat_in_depth(kind):
    """Of one program. Random draws replay, too."""
    x = torch.randn(64, 32, requires_grad=True)
    used = []
    for depth in (4, 16):
        functions = lambda n=depth: [mlp(16, 0.2).float() for _ in range(n)]  # noqa: E731
        edges = torch.randint(0, 64, (2, 10))
        if kind == "revtorch":
            blocks = [revtorch.ReversibleBlock(f, copy.deepcopy(f)) for f in functions()]
            net = revtorch.ReversibleSequence(nn.ModuleList(blocks))
            run = net
        elif kind == "memcnn":
            couplings = nn.Sequential(*map(memcnn.AdditiveCoupling, functions()))
            run = net = memcnn.InvertibleModuleWrapper(couplings)
        else:
            net = graph_layers(depth, 16, 2).float()
            run = lambda x, net=net, e=edges: torch_geometric.run_layers(net, x, e)  # noqa: E731
        step = lambda run=run: run(x).square().sum().backward()  # noqa: E731
        step()
        net.zero_grad()
        used.append(rg.measure.activation_bytes(step, [*net.parameters(), x]))
    assert used[1] - used[0] < x.nbytes


# --- GroupAddRev


class Conv(nn.Linear):
    def forward(self, x, edge_index, mask=None):
        source, target = edge_index
        x = x + torch.zeros_like(x).index_add(0, target, x[source])
        x = super().forward(x).tanh()
        return x if mask is None else x * mask

    def reset_parameters(self):
        nn.init.uniform_(self.weight, -0.5, 0.5)
        nn.init.zeros_(self.bias)


def graph_layers(depth, width, groups):
    layers = [
        torch_geometric.GroupAddRev(Conv(width, width), num_groups=groups) for _ in range(depth)
    ]
    return nn.ModuleList(layers).double()


def graph_equations(layers, x, edges, mask=None):
    for layer in layers:
        groups = list(x.chunk(len(layer.convs), -1))
        masks = [None] * len(groups) if mask is None else [mask] * len(groups)
        if mask is not None and mask.shape[-1] == x.shape[-1]:
            masks = mask.chunk(len(groups), -1)
        last = sum(groups[1:])
        for i, conv in enumerate(layer.convs):
            last = groups[i] = groups[i] + conv(last, edges, masks[i])
        x = torch.cat(groups, -1)
    return x


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("mask_width", [None, 1, 8])
def test_group_add_rev(groups, mask_width):
    layers = graph_layers(3, 8 // groups, groups)
    edges = torch.randint(0, 5, (2, 9))
    args = () if mask_width is None else (torch.rand(5, mask_width, dtype=torch.float64),)
    together = lambda x: torch_geometric.run_layers(layers, x, edges, *args)  # noqa: E731
    expected = outcome(layers, X, lambda x: graph_equations(layers, x, edges, *args))
    torch.testing.assert_close(outcome(layers, X, together), expected)

    def one_by_one(x):
        for layer in layers:
            x = layer(x, edges, *args)
        return x

    torch.testing.assert_close(outcome(layers, X, one_by_one), expected)
    torch.testing.assert_close(layers[0].inverse(layers[0](X, edges, *args), edges, *args), X)


@pytest.mark.parametrize("groups", [2, 4])
def test_group_add_rev_is_that_of_pyg(groups):
    if importlib.util.find_spec("torch_geometric") is None:
        pytest.skip("PyTorch Geometric is not installed")
    original = load("torch_geometric.nn.models.rev_gnn").GroupAddRev
    edges = torch.randint(0, 5, (2, 9))
    width = 8 // groups
    theirs = original(Conv(width, width), num_groups=groups).double()
    ours = torch_geometric.GroupAddRev(Conv(width, width), num_groups=groups).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    expected = outcome(theirs, X, lambda x: theirs(x, edges))
    found = outcome(ours, X, lambda x: ours(x, edges))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_group_add_rev_arguments():
    layer = torch_geometric.GroupAddRev(nn.ModuleList([Conv(4, 4), Conv(4, 4)]))
    assert layer.num_groups == 2
    assert next(iter(layer.state_dict())) == "convs.0.weight"
    before = layer.convs[0].weight.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.convs[0].weight)
    with pytest.raises(ValueError, match="num_groups=1: there must be at least 2"):
        torch_geometric.GroupAddRev(Conv(4, 4), num_groups=1)
    with pytest.raises(ValueError, match="give num_groups="):
        torch_geometric.GroupAddRev(Conv(4, 4))


@pytest.mark.parametrize("name", ["revtorch", "revlib", "memcnn", "torch_geometric"])
def test_memory_of_a_model_reaches_them(name):
    module = {"revtorch": revtorch, "revlib": revlib, "memcnn": memcnn}.get(name)
    build = {"revtorch": of_revtorch, "revlib": of_revlib, "memcnn": of_memcnn}.get(name)
    net = graph_layers(2, 4, 2) if module is None else build(module)
    rg.set_memory(net, rg.Keep())
    engines = rg.whole_model.memory_holders(net)
    assert engines and all(isinstance(each.memory, rg.Keep) for each in engines.values())


# --- the adaptors of the page, against the originals


def names():
    """What the page defines, and the file that it names."""
    found = dict(vars(adaptors))
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, found)
    return found


def needs(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make .venv/peers")
    return load(name)


@pytest.fixture(scope="module")
def page():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return names()


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_momentumnet(page, gamma):
    original = needs("momentumnet")
    functions = nn.ModuleList([mlp(8) for _ in range(5)])
    theirs = original.MomentumNet(list(functions), gamma=gamma)
    ours = page["momentum_net"](functions, gamma)
    torch.testing.assert_close(outcome(functions, X, ours), outcome(functions, X, theirs))
    start = mlp(8)
    theirs = original.MomentumNet(list(functions), gamma, init_speed=True, init_function=start)
    ours = page["momentum_net"](functions, gamma, start)
    both = nn.ModuleList([functions, start])
    torch.testing.assert_close(outcome(both, X, ours), outcome(both, X, theirs))


def test_freia(page):
    needs("FrEIA")
    modules = load("FrEIA.modules")
    subnet = lambda i, o: nn.Sequential(nn.Linear(i, 6), nn.Tanh(), nn.Linear(6, o))  # noqa: E731
    blocks = []
    for seed in range(3):
        blocks.append(modules.GLOWCouplingBlock([(8,)], subnet_constructor=subnet))
        blocks.append(modules.RNVPCouplingBlock([(8,)], subnet_constructor=subnet))
        blocks.append(modules.PermuteRandom([(8,)], seed=seed))
    net = nn.ModuleList(blocks).double()
    flow = page["Flow"](blocks)

    def theirs(x):
        total = 0.0
        for block in blocks:
            (x,), log_det = block((x,))
            total = total + log_det
        return torch.cat((x, total[:, None]), 1)

    def ours(x):
        y, log_det = flow(x)
        return torch.cat((y, log_det[:, None]), 1)

    torch.testing.assert_close(outcome(net, X, ours), outcome(net, X, theirs))


@pytest.mark.filterwarnings("ignore")  # it calls a deprecated name of torch
def test_iunets(page):
    needs("iunets")
    layers = load("iunets.layers")
    coupling = lambda c: layers.StandardAdditiveCoupling(  # noqa: E731
        nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.Tanh()), c
    )
    down = layers.InvertibleDownsampling2D(8, stride=2, method="cayley", learnable=True)
    net = nn.Sequential(coupling(4), coupling(4), down, coupling(16), coupling(16)).double()
    program = page["as_program"](net)
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    ours = lambda x: program({"x": x})["x"]  # noqa: E731
    torch.testing.assert_close(outcome(net, x, ours), outcome(net, x), rtol=1e-9, atol=1e-9)


# --- the adaptors of the page, against the published equations


def hidden(inside, outside=None):
    layers = nn.Linear(inside, 2 * inside), nn.Tanh(), nn.Linear(2 * inside, outside or inside)
    return nn.Sequential(*layers).double()


def compare(ours, plain, x, parameters):
    """Gradients agree to 1e-9, in less than half of the activations."""
    found, used = [], []
    leaves = [x, *parameters]

    def forget():
        for leaf in leaves:
            leaf.grad = None

    for run in (ours, plain):

        def step(run=run):
            torch.manual_seed(0)
            y = run(x)
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()

        step()  # the first one measures and verifies
        forget()
        used.append(rg.measure.activation_bytes(step, leaves))
        found.append([leaf.grad for leaf in leaves])
        forget()
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert used[0] < used[1] / 2


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def weighted_features(module):
    """A convolution of PyTorch Geometric: each node gets the sum of its neighbours."""

    class Conv(nn.Linear):
        def forward(self, x, edge_index):
            source, target = edge_index
            gathered = torch.zeros_like(x).index_add(0, target, x[source])
            return super().forward(x + gathered).tanh()

    layers = [module.GroupAddRev(Conv(8, 8), num_groups=4) for _ in range(12)]
    return nn.ModuleList(layers).double()


def test_group_add_rev_is_its_equations():
    layers = weighted_features(torch_geometric)
    edges = torch.randint(0, 50, (2, 120))

    def equations(x):
        for layer in layers:
            groups = list(x.chunk(4, -1))
            last = sum(groups[1:])
            for i, conv in enumerate(layer.convs):
                last = groups[i] = groups[i] + conv(last, edges)
            x = torch.cat(groups, -1)
        return x

    run = lambda x: torch_geometric.run_layers(layers, x, edges)  # noqa: E731
    compare(run, equations, leaf(50, 32), list(layers.parameters()))


def test_the_reversible_vit_is_its_equations(page):
    norm = lambda: nn.LayerNorm(16).double()  # noqa: E731
    layers = [(norm(), hidden(16), norm(), hidden(16)) for _ in range(6)]
    vit = page["ReversibleViT"](layers, drop_path=0.3)

    def equations(x):
        masks = vit.masks(x)
        x1, x2 = x.chunk(2, -1)
        for i, (norm1, attention, norm2, mlp) in enumerate(layers):
            x1 = x1 + attention(norm1(x2)) * masks[f"keep{i}"]
            x2 = x2 + mlp(norm2(x1)) * masks[f"keep{i}"]
        return torch.cat((x1, x2), -1)

    with torch.random.fork_rng():
        compare(vit, equations, leaf(4, 32, 32), list(vit.parameters()))


class SplitAndAdd(nn.Module):
    """`iunets.layers.StandardAdditiveCoupling`'s equations."""

    def __init__(self, channels):
        super().__init__()
        self.F = nn.Conv2d(channels, channels, 3, padding=1).double()
        self.fn = nn.Sequential(self.F, nn.Tanh())

    def forward(self, x):
        x1, x2 = x.chunk(2, 1)
        return torch.cat((x2, x1 + self.fn(x2)), 1)

    def inverse(self, y):
        x2, total = y.chunk(2, 1)
        return torch.cat((total - self.fn(x2), x2), 1)


class Down(nn.PixelUnshuffle):
    def inverse(self, y):
        return nn.functional.pixel_shuffle(y, self.downscale_factor)


def test_invertible_layers_are_their_equations(page):
    before, after = ([SplitAndAdd(channels) for _ in range(6)] for channels in (4, 16))
    layers = [*before, Down(2), *after]
    program = page["as_program"](layers)
    run = lambda x: program({"x": x})["x"]  # noqa: E731
    x = leaf(2, 8, 16, 16)
    compare(run, nn.Sequential(*layers), x, list(program.parameters()))


class Affine(nn.Module):
    """`FrEIA.modules.RNVPCouplingBlock`'s equations, with its clamp."""

    def __init__(self, width):
        super().__init__()
        self.half = width // 2
        self.subnets = nn.ModuleList([hidden(width // 2, width) for _ in range(2)])

    def coupled(self, x, other, subnet, sign):
        s, t = subnet(other).chunk(2, 1)
        s = 2 * 0.636 * torch.atan(s)
        return (x * s.exp() + t if sign > 0 else (x - t) * (-s).exp()), sign * s.sum(1)

    def forward(self, x, rev=False):
        x1, x2 = x[0].split(self.half, 1)
        if not rev:
            y1, j1 = self.coupled(x1, x2, self.subnets[1], 1)
            y2, j2 = self.coupled(x2, y1, self.subnets[0], 1)
        else:
            y2, j2 = self.coupled(x2, x1, self.subnets[0], -1)
            y1, j1 = self.coupled(x1, y2, self.subnets[1], -1)
        return (torch.cat((y1, y2), 1),), j1 + j2


class Permutation(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.order, self.back = order, order.argsort()

    def forward(self, x, rev=False):
        return (x[0][:, self.back if rev else self.order],), 0.0


def test_a_flow_is_its_equations(page):
    blocks = [b for _ in range(6) for b in (Affine(16), Permutation(torch.randperm(16)))]
    flow = page["Flow"](blocks)

    def likelihood(y, log_det):  # output and log-determinant, each with a weight of its own
        return torch.cat((0.5 * y.square(), -log_det[:, None]), 1)

    def equations(x):
        total = 0.0
        for block in blocks:
            (x,), log_det = block((x,))
            total = total + log_det
        return likelihood(x, total)

    run = lambda x: likelihood(*flow(x))  # noqa: E731
    compare(run, equations, leaf(32, 16), list(flow.parameters()))


def test_revcol_is_its_equations(page):
    def level():
        return page["Level"](hidden(16), 0.5 + torch.rand(16, dtype=torch.float64))

    parts = [[level() for _ in range(4)] for _ in range(8)]
    net = page["columns"](parts)
    start = lambda x: {f"level{at}": (at + 1) * x for at in range(4)}  # noqa: E731

    def equations(x):
        state = start(x)
        for levels in parts:
            for at, level in enumerate(levels):
                scale, out = level(*(state[name] for name in page["neighbours"](at, 4)))
                state[f"level{at}"] = scale * state[f"level{at}"] + out
        return torch.cat(list(state.values()), 1)

    run = lambda x: torch.cat(list(net(start(x)).values()), 1)  # noqa: E731
    compare(run, equations, leaf(32, 16), list(net.parameters()))


def test_momentumnet_is_its_equations(page):
    functions = nn.ModuleList([hidden(16) for _ in range(24)])

    def equations(x):
        v = torch.zeros_like(x)
        for f in functions:
            v = 0.9 * v + (1 - 0.9) * f(x)
            x = x + v
        return x

    run = page["momentum_net"](functions, 0.9)
    compare(run, equations, leaf(32, 16), list(functions.parameters()))
