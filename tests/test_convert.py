"""`rg.convert`: the layers of an existing model follow a rule, and everything else of it stays.

The oracles: the original model, and `rg.Residual` over the same layers in plain autograd.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.converting.finding import find_layers

RULES = {
    "euler": (rg.Euler(), False),
    "midpoint": (rg.Midpoint(), True),
    "leapfrog": (rg.Leapfrog(), True),
    "blend": (rg.Blend(1 / 4), True),
    "bdia": (rg.Bdia(0.5), True),
    "rewiring": (rg.TwoStep(1, 0, 1), True),
    "dr2net": (rg.TwoStep(0.5, 0.5, 1), True),
}
rules = pytest.mark.parametrize("name", RULES)


class Layer(nn.Module):
    """A residual layer that takes a mask and a context, and draws random numbers."""

    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, mask=None, context=None):
        out = self.mlp(self.norm(hidden if context is None else hidden + context))
        return hidden + self.dropout(out if mask is None else out * mask)


class Model(nn.Module):
    def __init__(self, depth=5, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.context = nn.Parameter(torch.randn(width))

    def forward(self, ids, mask=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, context=self.context)
        return self.norm(hidden)


IDS = torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)[:, None]


def model(depth=5):
    torch.manual_seed(0)
    return Model(depth).double()


def step(net, *args):
    """The output of a training step, and all gradients."""
    torch.manual_seed(1)
    net.zero_grad()
    y = net(*args)
    y.square().sum().backward()
    return y.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


def assert_equal(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        assert torch.equal(grad, other[1][name]), name


def stacks(net):
    conversions = [vars(module).get("retrograd") for module in net.modules()]
    return [stack for one in conversions if one is not None for stack in one.stacks]


def set_memory(net, memory):
    for stack in stacks(net):
        stack.memory = memory


class Loop(Model):
    """The same model, whose layers are run by a `Residual` in plain autograd."""

    def forward(self, ids, mask=None):
        return self.norm(self.stack(self.embed(ids), mask=mask, context=self.context))


@rules
def test_gradients_are_those_of_the_rule(name):
    rule, exact = RULES[name]
    net = rg.convert(model(), rule, exact=exact)
    first = step(net, IDS, MASK)
    again = step(net, IDS, MASK)
    assert_equal(first, again)
    loop = model()
    loop.__class__ = Loop
    settings = {"rule": rule, "skip": True, "exact": stacks(net)[0].exact, "memory": rg.Keep()}
    vars(loop)["stack"] = rg.Residual(loop.layers, **settings)
    assert_equal(first, step(loop, IDS, MASK))
    set_memory(net, rg.Keep())
    assert_equal(first, step(net, IDS, MASK))


def test_euler_is_the_original_to_the_bit():
    original = step(model(), IDS, MASK)
    for memory in (rg.Reverse(), rg.Budget("50%"), rg.Keep()):
        net = rg.convert(model(), rg.Euler(), memory, exact=False)
        for _ in range(2):
            assert_equal(step(net, IDS, MASK), original)


@rules
def test_memory_is_flat_in_depth(name):
    rule, exact = RULES[name]

    def peak(depth):
        net = rg.convert(model(depth), rule, exact=exact)
        net.requires_grad_(False)
        net.embed.requires_grad_(True)
        net(IDS, MASK).sum().backward()
        return rg.measure.step(lambda: net(IDS, MASK).sum().backward(), net).activation_bytes

    stream = 2 * 6 * 8 * 8
    kept = {"blend": 2 / 64, "bdia": 1 / 64, "dr2net": 1 / 64, "euler": 1}.get(name, 0)
    signs = 3 * 2 * 8 if name == "bdia" else 0
    assert peak(40) - peak(20) <= 20 * (kept * stream + signs + 4)


@rules
def test_evaluation_follows_the_rule(name):
    rule, exact = RULES[name]
    net = rg.convert(model(), rule, exact=exact).eval()
    with torch.no_grad():
        y = net(IDS, MASK)
        original = model().eval()(IDS, MASK)
    if name in ("euler", "bdia"):
        assert torch.equal(y, original)
    else:
        assert not torch.equal(y, original)
        assert torch.equal(y, step(net, IDS, MASK)[0])


def test_names_classes_and_hooks_stay():
    net = model()
    names = list(net.state_dict())
    modules = [(name, id(module), type(module)) for name, module in net.named_modules()]
    seen = []
    net.layers[2].register_forward_hook(lambda layer, args, out: seen.append(out))
    rg.convert(net)
    assert list(net.state_dict()) == names
    assert [(name, id(m), type(m)) for name, m in net.named_modules()] == modules
    y = step(net, IDS)[0]
    assert len(seen) == 1
    assert seen[0].shape == y.shape
    assert inspect.signature(net.forward) == inspect.signature(Model(2).forward)
    assert inspect.signature(net.layers[0].forward) == inspect.signature(Layer(2).forward)
    rg.revert(net)
    assert [(name, id(m), type(m)) for name, m in net.named_modules()] == modules
    assert not any("forward" in vars(m) or "retrograd" in vars(m) for m in net.modules())
    assert_equal(step(net, IDS), step(model(), IDS))


def test_a_hook_sees_the_states_of_the_rule():
    net = rg.convert(model(), rg.Midpoint())
    seen = []
    for layer in net.layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append(out))
    torch.manual_seed(1)
    y = net(IDS)
    assert torch.equal(net.norm(seen[-1]), y)
    torch.manual_seed(1)
    stack = stacks(net)[0]
    plain = rg.Residual(net.layers, rule=rg.Midpoint(), skip=True, exact=stack.exact)
    _, states = plain.states(net.embed(IDS), after=range(5), context=net.context)
    for one, other in zip(seen, states):
        assert torch.equal(one, other)


def test_gradients_of_states_on_the_way():
    net = rg.convert(model(), rg.Midpoint())
    hidden = []
    net.layers[1].register_forward_hook(lambda layer, args, out: hidden.append(out))

    def gradients():
        hidden.clear()
        torch.manual_seed(1)
        net.zero_grad()
        (net(IDS).sum() + hidden[0].square().sum()).backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    gradients()
    reversed_ = gradients()
    set_memory(net, rg.Keep())
    for name, grad in gradients().items():
        assert torch.equal(grad, reversed_[name]), name


@rules
def test_copies_and_pickles_are_converted(name):
    rule, exact = RULES[name]
    net = rg.convert(model(), rule, exact=exact)
    expected = step(net, IDS, MASK)
    copied = copy.deepcopy(net)
    assert stacks(copied)[0] is not stacks(net)[0]
    assert_equal(step(copied, IDS, MASK), expected)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(step(loaded, IDS, MASK), expected)
    assert_equal(step(pickle.loads(pickle.dumps(net)), IDS, MASK), expected)
    with torch.no_grad():
        net.layers[0].norm.weight.zero_()
    assert_equal(step(copied, IDS, MASK), expected)
    assert_equal(step(rg.revert(copied), IDS, MASK), step(model(), IDS, MASK))


def test_converting_again_changes_the_settings():
    net = rg.convert(rg.convert(model()), rg.Euler(), exact=False)
    assert_equal(step(net, IDS, MASK), step(model(), IDS, MASK))
    rg.revert(net)
    assert not any("forward" in vars(m) for m in net.modules())


def test_reverting_a_model_that_is_not_converted():
    net = model()
    assert rg.revert(net) is net


# --- finding the layers


def test_the_longest_list_is_found_and_others_of_its_class():
    net = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
            "encoder": nn.ModuleList(Layer(8) for _ in range(3)),
            "decoder": nn.Sequential(Layer(8), Layer(8)),
            "heads": nn.ModuleList(nn.Sequential(nn.Linear(8, 2)) for _ in range(9)),
        }
    )
    assert [one.name for one in find_layers(net, None)] == ["encoder", "decoder"]
    assert [one.name for one in find_layers(net, "decoder")] == ["decoder"]
    assert [one.name for one in find_layers(net, ["decoder", "encoder"])] == ["decoder", "encoder"]


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ("nowhere", rg.ConversionError, "no such module"),
        ("norm", rg.ConversionError, "is a LayerNorm, not a list"),
        (3, TypeError, 'such as "model.layers"'),
        ([], TypeError, 'such as "model.layers"'),
    ],
)
def test_a_list_that_is_none(layers, error, words):
    net = model()
    with pytest.raises(error, match=words):
        rg.convert(net, layers=layers)
    assert not any("forward" in vars(m) for m in net.modules())


def test_a_model_without_layers():
    with pytest.raises(rg.ConversionError, match="found no list of layers"):
        rg.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_a_layer_at_two_places():
    net = nn.Sequential(*[Layer(8)] * 3)
    with pytest.raises(rg.ConversionError, match="a layer stands at two places of the list"):
        rg.convert(net)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("order", [["one", "two"], ["two", "one"]])
def test_lists_that_are_converted_one_by_one(order):
    def build():
        torch.manual_seed(0)
        parts = {"one": nn.Sequential(Layer(8), Layer(8)), "two": nn.Sequential(Layer(8), Layer(8))}
        return nn.Sequential(OrderedDict(parts)).double()

    x = torch.randn(2, 6, 8, dtype=torch.float64)
    net = build()
    for name in (*order, *order):  # the second time with the same settings
        rg.convert(net, rg.Midpoint(), layers=name)
    expected = step(rg.convert(build(), rg.Midpoint(), layers=["one", "two"]), x)
    assert_equal(step(net, x), expected)
    rg.revert(net)
    assert not any("forward" in vars(m) or "retrograd" in vars(m) for m in net.modules())
    assert_equal(step(net, x), step(build(), x))


def test_wrong_settings_leave_the_model_as_it_was():
    net = model()
    with pytest.raises(ValueError, match="exact=True"):
        rg.convert(net, rg.Blend(1 / 4), exact=False)
    assert not any("forward" in vars(m) for m in net.modules())


# --- models that cannot be converted


class Between(Model):
    def forward(self, ids, mask=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden) * 2
        return hidden


class TwoStates(nn.Module):
    """Passes two values on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TwoLayer() for _ in range(4))

    def forward(self, x):
        other = x
        for layer in self.layers:
            x, other = layer(x, other)
        return x


class TwoLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, other):
        return x + self.linear(other), other + x


class Skips(Model):
    def forward(self, ids, mask=None):
        hidden = self.embed(ids)
        for layer in self.layers[::2]:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Between, r"layers.1: this layer did not get what the layer before it returned"),
        (TwoStates, r"layers.1: this layer passes more than one changing value on"),
        (Skips, r"layers.2: this layer was called where layers.1 comes next"),
    ],
)
def test_a_model_that_cannot_be_converted_is_left_as_it_was(kind, words):
    net = kind()
    x = IDS if issubclass(kind, Model) else torch.randn(2, 8)
    rg.convert(net)
    with pytest.raises(rg.ConversionError, match=words):
        net(x)
    assert not any("forward" in vars(m) or "retrograd" in vars(m) for m in net.modules())
    net(x).sum().backward()


class Transposes(Model):
    """A square of hidden states, whose rows and columns take turns."""

    def forward(self, ids, mask=None):
        hidden = self.embed(ids.repeat(1, 2)[:, :8])
        for layer in self.layers:
            hidden = layer(hidden.transpose(1, 2))
        return hidden


class Detaches(Model):
    def forward(self, ids, mask=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden.detach())
        return hidden


@pytest.mark.parametrize("kind", [Transposes, Detaches])
def test_a_view_of_what_a_layer_returned(kind):
    """At the same memory, but with its elements elsewhere, or without a gradient."""
    torch.manual_seed(0)
    net = kind().double()
    expected = step_of_last(copy.deepcopy(net))
    rg.convert(net, rg.Euler(), exact=False)
    assert_equal(step_of_last(net), expected)
    rg.convert(net, rg.Midpoint())
    with pytest.raises(rg.ConversionError, match=r"layers.1: this layer did not get what"):
        net(IDS)


def step_of_last(net):
    torch.manual_seed(1)
    net.zero_grad()
    y = net(IDS)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in net.layers[-1].named_parameters()}
    return y.detach(), {name: grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("kind", [Between, Transposes])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_batch_is_checked_in_evaluation(kind, mode):
    net = rg.convert(kind(), rg.Midpoint()).eval()
    with mode(), pytest.raises(rg.ConversionError, match=r"layers.1: this layer did not get what"):
        net(IDS)
    assert not any("forward" in vars(m) for m in net.modules())


@rules
def test_inference_mode(name):
    """Before the first step, and after one."""
    rule, exact = RULES[name]
    net = rg.convert(model(), rule, exact=rg.Grid(dtype=torch.float64) if exact else False).eval()
    for _ in range(2):
        with torch.inference_mode():
            y = net(IDS, MASK)
        with torch.no_grad():
            assert torch.equal(net(IDS, MASK), y)
        step(net.train(), IDS, MASK)
        net.eval()


@pytest.mark.parametrize("kind", [Between, TwoStates])
def test_euler_takes_what_other_rules_cannot(kind):
    torch.manual_seed(0)
    net = kind().double()
    x = IDS if issubclass(kind, Model) else torch.randn(2, 8, dtype=torch.float64)
    if kind is TwoStates:
        expected = step(net, x)
        assert_equal(step(rg.convert(net, rg.Euler(), exact=False), x), expected)
    else:
        rg.convert(net, rg.Euler(), exact=False)
        with pytest.raises(rg.ConversionError, match="did not get"):
            net(x)


class Shrinks(Layer):
    def forward(self, hidden):
        return super().forward(hidden)[:, ::2]


def test_layers_that_change_the_shape_stay_ordinary():
    def build():
        torch.manual_seed(0)
        layers = [Layer(8), Layer(8), Layer(8), Shrinks(8), Layer(8), Layer(8)]
        return nn.Sequential(*layers).double()

    x = torch.randn(2, 6, 8, dtype=torch.float64)
    net = rg.convert(build(), rg.Euler(), exact=False, layers="")
    original = step(build(), x)
    for _ in range(2):
        assert_equal(step(net, x), original)
    assert [len(stack) for stack in stacks(net)] == [3, 2]
    net = rg.convert(build(), layers="")
    first = step(net, x)
    set_memory(net, rg.Keep())
    assert_equal(step(net, x), first)


def test_if_all_layers_change_the_shape():
    net = nn.Sequential(*[Shrinks(8) for _ in range(3)])
    rg.convert(net)
    with pytest.raises(rg.ConversionError, match="no two layers in a row keep the shape"):
        net(torch.randn(2, 8, 8))
    assert "retrograd" not in vars(net)
    assert net(torch.randn(2, 8, 8)).shape == (2, 1, 8)


class OfTwo(nn.Module):
    """Takes and returns a tuple of two hidden states."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x[0] + self.linear(x[1]), x[1] + x[0]


def test_hidden_states_that_are_no_tensors():
    net = rg.convert(nn.Sequential(*[OfTwo() for _ in range(3)]))
    x = (torch.randn(2, 8), torch.randn(2, 8))
    with pytest.raises(rg.ConversionError, match=r"got a tuple and returned a tensor"):
        net(x)
    assert "retrograd" not in vars(net)
    net(x)[0].sum().backward()


# --- grids


def test_the_first_batch_chooses_the_grid(caplog):
    caplog.set_level("INFO", "retrograd")
    net = rg.convert(model())
    assert stacks(net)[0].exact == rg.Grid(dtype=torch.float64)
    step(net, IDS)
    assert stacks(net)[0].exact == rg.Grid()
    assert "hidden states of up to" in caplog.text
    net = rg.convert(model())
    with torch.no_grad():
        net.embed.weight.mul_(2000)
    step(net, IDS)
    assert stacks(net)[0].exact == rg.Grid(dtype=torch.float64)
    net = rg.convert(model(), exact=rg.Grid(bits=20))
    step(net, IDS)
    assert stacks(net)[0].exact == rg.Grid(bits=20)


# --- everything that may happen in between


def test_two_forwards_before_a_backward():
    net = rg.convert(model(), rg.Midpoint())

    def gradients():
        net.zero_grad()
        torch.manual_seed(1)
        one = net(IDS)
        two = net(IDS.flip(0), MASK)
        (one * two.detach()).sum().backward()
        two.sum().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    gradients()
    reversed_ = gradients()
    set_memory(net, rg.Keep())
    for name, grad in gradients().items():
        assert torch.equal(grad, reversed_[name]), name


@pytest.mark.parametrize("rule", [rg.Euler(), rg.Midpoint(), rg.Blend(1 / 4)])
def test_a_model_that_stops_early(rule):
    """After another layer in each call."""

    class Early(Model):
        def forward(self, ids, count):
            hidden = self.embed(ids)
            for layer in self.layers[:count]:
                hidden = layer(hidden)
            return self.norm(hidden)

    def outputs(net):
        return [early_step(net, count) for count in (5, 2, 1, 4, 5, 3)]

    def early_step(net, count):
        torch.manual_seed(1)
        net.zero_grad(set_to_none=False)
        y = net(IDS, count)
        y.square().sum().backward()
        named = net.named_parameters()
        return y.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}

    def build():
        net = model()
        net.__class__ = Early
        return net

    exact = False if rule == rg.Euler() else rg.Grid(dtype=torch.float64)
    kept = outputs(rg.convert(build(), rule, rg.Keep(), exact))
    for one, other in zip(outputs(rg.convert(build(), rule, exact=exact)), kept):
        assert_equal(one, other)


def test_an_exception_in_a_layer_leaves_nothing_behind():
    net = rg.convert(model())
    expected = step(net, IDS)
    conversion = vars(net.layers)["retrograd"]
    handle = net.layers[3].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(IDS)
    assert not conversion.runs
    handle.remove()
    assert_equal(step(net, IDS), expected)


def test_layers_called_outside_of_the_model_are_ordinary():
    net = rg.convert(model()).eval()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    assert torch.equal(net.layers[2](x), model().eval().layers[2](x))


def test_a_layer_that_edits_what_it_was_handed():
    class Edits(Model):
        def forward(self, ids, mask=None):
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = layer(hidden)
                hidden.mul_(2)
            return hidden

    net = rg.convert(Edits(), rg.Midpoint())
    with pytest.raises(rg.ConversionError, match="did not get what"):
        net(IDS)


def test_hidden_states_by_keyword():
    class ByKeyword(Model):
        def forward(self, ids, mask=None):
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = layer(mask=mask, hidden=hidden, context=self.context)
            return self.norm(hidden)

    net = model()
    net.__class__ = ByKeyword
    assert_equal(step(rg.convert(net), IDS, MASK), step(rg.convert(model()), IDS, MASK))


def test_gradient_checkpointing_of_layers_raises():
    class Checkpointed(Model):
        def forward(self, ids, mask=None):
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            return hidden

    net = rg.convert(Checkpointed())
    with pytest.raises(rg.ConversionError, match="under gradient checkpointing of its own"):
        net(IDS)


def test_a_compiled_model():
    net = rg.convert(model(3), rg.Midpoint())
    expected = step(net, IDS)
    compiled = torch.compile(net, backend="aot_eager")
    for one, other in zip(step(compiled, IDS)[1].values(), expected[1].values()):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_functions():
    net = rg.convert(model(3), rg.Midpoint())
    expected = step(net, IDS)
    for stack in stacks(net):
        stack.compile(backend="aot_eager")
    for _ in range(2):
        for one, other in zip(step(net, IDS)[1].values(), expected[1].values()):
            torch.testing.assert_close(one, other)


def test_a_whole_model_compiles_where_nothing_is_rebuilt():
    net = rg.convert(model(3), rg.Bdia(0.5)).eval()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS), model(3).eval()(IDS))


# --- caches of keys and values


class Cache:
    """As Hugging Face's: layers add their keys to it."""

    def __init__(self):
        self.keys: dict[int, list[torch.Tensor]] = {}

    def get_seq_length(self):
        return len(self.keys.get(0, []))


class CachedLayer(Layer):
    def __init__(self, width, number):
        super().__init__(width, dropout=0.0)
        self.number = number

    def forward(self, hidden, cache=None):
        keys = [] if cache is None else cache.keys.setdefault(self.number, [])
        context = sum(keys, torch.zeros(()))
        if cache is not None:
            keys.append(hidden.mean(1, keepdim=True))
        return super().forward(hidden, context=context)


class CachedModel(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CachedLayer(8, number) for number in range(4))
        self.double()

    def forward(self, ids, cache=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, cache=cache)
        return self.norm(hidden + self.context)


def cached_model():
    torch.manual_seed(0)
    return CachedModel()


def continued(net, cache):
    """The output and the gradients of a call that goes on with the cache of another."""
    net.zero_grad()
    net(IDS[:, :3], cache)
    y = net(IDS[:, 3:], cache)
    y.square().sum().backward()
    return y.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


@rules
def test_caches_in_evaluation_with_gradients(name):
    rule, exact = RULES[name]
    original = continued(cached_model().eval(), Cache())
    net = rg.convert(cached_model(), rule, exact=exact).eval()
    reversed_ = continued(net, Cache())
    set_memory(net, rg.Keep())
    assert_equal(reversed_, continued(net, Cache()))
    if name in ("euler", "bdia"):
        assert_equal(reversed_, original)


def test_a_filled_cache_while_training():
    """As prefix tuning passes it."""

    def filled():
        cache = Cache()
        keys = torch.arange(16.0, dtype=torch.float64).sin().view(2, 1, 8)
        cache.keys = {number: [keys] for number in range(4)}
        return cache

    net = rg.convert(cached_model(), rg.Euler(), exact=False)
    assert_equal(step(net, IDS, filled()), step(cached_model(), IDS, filled()))
    net = rg.convert(cached_model(), rg.Midpoint())
    plain = rg.convert(cached_model(), rg.Midpoint(), rg.Keep())
    assert_equal(step(net, IDS, filled()), step(plain, IDS, filled()))
    assert not torch.equal(step(net, IDS, filled())[0], step(net, IDS)[0])


@pytest.mark.parametrize("rule", [rg.Euler(), rg.Midpoint()])
def test_a_cache_that_training_left_empty(rule):
    net = rg.convert(cached_model(), rule)
    cache = Cache()
    expected = step(net, IDS)
    assert_equal(step(net, IDS, cache), expected)
    with pytest.raises(rg.ConversionError, match="cache that an earlier call left empty"):
        net(IDS, cache)
    assert_equal(step(copy.deepcopy(net), IDS, Cache()), expected)
