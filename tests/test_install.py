"""`install`: which calls are replaced and put back, what is learned of a block, what is refused.

The packages made here have a reversible sequence whose own backward fails the test. Their blocks
compute in plain autograd, so they are also the oracle of what is put in their place.
"""

import importlib
import random
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.compat.engine_searching import engines_in
from tests.packages import load

SOURCE = """
import torch
from torch import nn
from torch.autograd import Function

class Block(nn.Module):
    forwards = 0

    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x, f_args={}, g_args={}):
        Block.forwards += 1
        x1, x2 = x.chunk(2, 2)
        y1 = x1 + self.f(x2, **f_args)
        y2 = x2 + self.g(y1, **g_args)
        return torch.cat((y1, y2), 2)

class Engine(Function):
    @staticmethod
    def forward(ctx, x, blocks, args):
        ctx.blocks, ctx.args = blocks, args
        for block, kwargs in zip(blocks, args):
            x = block(x, **kwargs)
        ctx.y = x.detach()
        return x

    @staticmethod
    def backward(ctx, dy):
        raise AssertionError("their backward")

class Sequence(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([Block(*functions) for functions in blocks])

    def forward(self, x, engine=Engine, **kwargs):
        x = torch.cat((x, x), 2)
        args = [{"f_args": kwargs, "g_args": {}} for _ in self.blocks]
        x = Engine.apply(x, self.blocks, args)
        return sum(x.chunk(2, 2))

    def plain(self, x, **kwargs):
        x = torch.cat((x, x), 2)
        x = Engine.forward(Engine, x, self.blocks, [{"f_args": kwargs, "g_args": {}}] * 3)
        return sum(x.chunk(2, 2))
"""


def altered(*changes):
    """The source with replacements, each of which is in it."""
    source = SOURCE
    for old, new in zip(changes[::2], changes[1::2]):
        assert old in source, old
        source = source.replace(old, new)
    return source


class Mixer(nn.Module):
    """A function that uses everything it gets."""

    def __init__(self, width=4, aux=False):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.aux = aux

    def forward(self, x, *others, context=None, scale=1.0, other=None, **kwargs):
        out = self.inner(x).tanh() * scale
        for value in (*others, context, other):
            if value is not None:
                out = out * (1 + value.mean())
        if kwargs.get("_reverse") is not None:
            assert kwargs["_reverse"] == rg.is_recomputing()
        return (out, out.square().mean()) if self.aux else out


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """`shelf("name", {"layers": source})` makes a package of these modules. All are uninstalled and
    forgotten at the end.
    """
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def put(name, modules):
        made.append(name)
        for module, source in {"__init__": "", **modules}.items():
            path = tmp_path / name / f"{module}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        importlib.invalidate_caches()
        return name

    yield put
    for name in made:
        rg.compat.uninstall(name)
        forget(name)


@pytest.fixture
def package():
    """`package("reformer_pytorch")` imports it, and uninstalls it at the end."""
    loaded = []

    def get(name):
        loaded.append(name)
        return load(name)

    yield get
    for name in loaded:
        rg.compat.uninstall(name)


def forget(package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def sequence(module, functions=2, aux=False):
    torch.manual_seed(0)
    return module.Sequence([[Mixer(aux=aux) for _ in range(functions)] for _ in range(3)]).double()


def inputs(requires_grad=True):
    torch.manual_seed(1)
    shapes = {"x": (2, 6, 4), "context": (2, 3, 4)}
    return {
        n: torch.randn(s, dtype=torch.float64).requires_grad_(requires_grad)
        for n, s in shapes.items()
    }


def result(run, net, **given):
    """An output with all gradients."""
    given = {**inputs(), **given}
    net.zero_grad()
    output = run(given.pop("x"), **given)
    main = output[0] if isinstance(output, tuple) else output
    loss = main.square().sum()
    if isinstance(output, tuple):
        loss = loss + sum((i + 2) * each.sum() for i, each in enumerate(output[1:]))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return {"output": main.detach(), "loss": loss.detach()} | gradients


def assert_right(net, **given):
    torch.testing.assert_close(
        result(net, net, **given), result(net.plain, net, **given), rtol=1e-12, atol=1e-12
    )


# --- what is replaced


def test_real_packages(package):
    expected = {
        "reformer_pytorch": {"reformer_pytorch.reversible": ("_ReversibleFunction",)},
        "axial_attention": {"axial_attention.reversible": ("_ReversibleFunction",)},
        "se3_transformer_pytorch": {"se3_transformer_pytorch.reversible": ("_ReversibleFunction",)},
        "nuwa_pytorch": {
            "nuwa_pytorch.reversible": ("_ReversibleFunction",),
            "nuwa_pytorch.reversible_video_audio": ("ReversibleFunction",),
        },
        "linformer": {"linformer.reversible": ("_ReversibleFunction",)},
    }
    for name, replaced in expected.items():
        package(name)
        states = torch.get_rng_state(), random.getstate()
        report = rg.compat.install(name)
        assert {each.module: each.names for each in report} == replaced
        assert all(isinstance(each, rg.compat.Installed) for each in report)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]


def test_nothing_else_changes(package):
    """No class of any module; `uninstall` gives everything back, also a bound `apply`."""
    package("nuwa_pytorch")
    before = names_and_values()
    rg.compat.install("nuwa_pytorch")
    now = names_and_values()
    changed = {key for key, value in before.items() if now.get(key) is not value}
    assert changed == {
        ("nuwa_pytorch.reversible", "_ReversibleFunction"),
        ("nuwa_pytorch.reversible_video_audio", "ReversibleFunction"),
        ("nuwa_pytorch.reversible_video_audio", "reversible_apply"),
    }
    rg.compat.uninstall("nuwa_pytorch")
    now = names_and_values()
    assert not [key for key, value in before.items() if now.get(key) is not value]


def names_and_values():
    return {
        (home, name): value
        for home, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and home.startswith("nuwa_pytorch")
        for name, value in list(vars(module).items())
    }


def test_models_built_before_and_after(shelf):
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    before = sequence(module)
    report = rg.compat.install("family")
    assert report == [rg.compat.Installed("family.layers", ("Engine",))]
    assert str(report[0]) == "Engine of family.layers runs on retrograd"
    after = sequence(module)
    assert_right(before)
    assert_right(after)
    assert list(before.state_dict()) == list(after.state_dict())
    rg.compat.uninstall("family")
    with pytest.raises(AssertionError, match="their backward"):
        result(after, after)


def test_whatever_it_is_called_and_wherever_it_is(shelf):
    renamed = SOURCE.replace("Engine", "WalkThem").replace("Block", "Layer")
    modules = {"deep/__init__": "", "deep/deeper/layers": renamed}
    shelf("anywhere", {**modules, "other": "raise ImportError('nobody asked for this module')"})
    report = rg.compat.install("anywhere")
    assert report == [rg.compat.Installed("anywhere.deep.deeper.layers", ("WalkThem",))]


def test_packages_and_modules_are_independent(shelf):
    for name in ("one", "other"):
        rg.compat.install(shelf(name, {"layers": SOURCE}))
    rg.compat.uninstall("one")
    engines = [type(sys.modules[f"{name}.layers"].Engine) for name in ("one", "other")]
    assert issubclass(engines[0], type(torch.autograd.Function))
    assert not issubclass(engines[1], type)
    rg.compat.uninstall("other")
    report = rg.compat.install("one.layers")
    assert [each.module for each in report] == ["one.layers"]
    rg.compat.uninstall("one.layers")


def test_names_that_others_have_imported(shelf):
    shelf("theirs", {"layers": SOURCE, "later": "from theirs.layers import Engine"})
    user = ModuleType("user_of_theirs")
    exec("from theirs.layers import Engine, Engine as E\nrun = Engine.apply", vars(user))
    original = user.E
    sys.modules[user.__name__] = user
    try:
        rg.compat.install("theirs")
        later = importlib.import_module("theirs.later")
        assert user.Engine is user.E is later.Engine is not original
        assert user.run.__self__ is user.E
        user.Engine = None
        rg.compat.uninstall("theirs")
        assert user.E is later.Engine is original
        assert user.run == original.apply
        assert user.Engine is None
    finally:
        del sys.modules[user.__name__]


def test_the_replacement_has_what_the_original_had(shelf):
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    original = module.Engine
    rg.compat.install("family")
    assert module.Engine.__name__ == "Engine"
    assert module.Engine.forward is original.forward


def test_a_call_without_blocks_stays_theirs(shelf):
    source = altered(
        "        ctx.y = x.detach()\n", "        ctx.y = x.detach()\n        x = x + 1\n"
    )
    module = importlib.import_module(shelf("family", {"layers": source}) + ".layers")
    rg.compat.install("family")
    assert module.Engine.apply(torch.ones(2), [], []).tolist() == [2.0, 2.0]


def test_twice_and_reloaded(shelf):
    module = importlib.import_module(shelf("twice", {"layers": SOURCE}) + ".layers")
    rg.compat.uninstall("twice")  # nothing to undo
    assert rg.compat.install("twice") == rg.compat.install("twice")
    importlib.reload(module)
    rg.compat.install("twice")
    assert_right(sequence(module))
    rg.compat.uninstall("twice")
    assert isinstance(module.Engine, type)


def test_settings(shelf):
    """For all models, until it is installed with others; one model by `rg.set_memory`."""
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    rg.compat.install("family", exact=True)
    net = sequence(module)
    exact = result(net, net)
    rg.compat.install("family", exact=True, memory=rg.Keep())
    kept = result(net, net)
    assert all(torch.equal(exact[name], kept[name]) for name in exact)
    rg.compat.install("family")
    other = sequence(module)
    rg.set_memory(net, rg.Keep())
    modes = [rg.compat.installing.engines_of(model)[""].memory for model in (net, other)]
    assert modes == [rg.Keep(), rg.Reverse()]
    assert_right(net)
    assert len(rg.plan(other, inputs()["x"]).rows) == 6
    with pytest.raises(ValueError, match="a string is a budget"):
        rg.compat.install("family", memory="all of it")


# --- what is learned

BODY = "y1 = x1 + self.f(x2, **f_args)\n        y2 = x2 + self.g(y1, **g_args)"
RETURN = "return torch.cat((y1, y2), 2)"
BLOCKS = {
    "as it is": (),
    "the other half first": ("x1, x2 = x", "x2, x1 = x", "(y1, y2)", "(y2, y1)"),
    "halves that change places": ("cat((y1, y2)", "cat((y2, y1)"),
    "another axis": ("chunk(2, 2)", "chunk(2, 1)", "y2), 2", "y2), 1", "x), 2", "x), 1"),
    "functions of the same state": (
        BODY,
        "a, b = self.f(x2), self.g(x2)\n        y1, y2 = x1 + a + b, x2",
    ),
    "the target itself": (BODY, "y1 = x1 + self.f(x1)\n        y2 = x2 + self.g(y1)"),
    "a stream by name": (BODY, "y1 = x1 + self.f(x=x2)\n        y2 = x2 + self.g(y1, other=y1)"),
    "an argument by place": (
        BODY,
        "y1 = x1 + self.f(x2, f_args['context'])\n        y2 = x2 + self.g(y1)",
    ),
    "another name": (
        BODY,
        "y1 = x1 + self.f(x2, other=f_args['context'])\n        y2 = x2 + self.g(y1)",
    ),
    "a constant": (BODY, "y1 = x1 + self.f(x2, scale=0.5)\n        y2 = x2 + self.g(y1, scale=2)"),
    "a signal": (BODY, "y1 = x1 + self.f(x2, _reverse=False)\n        y2 = x2 + self.g(y1)"),
    "replay flags": (BODY, "y1 = x1 + self.f(x2)\n        y2 = x2 + self.g(y1)"),
    "a list of functions": (
        "self.f, self.g = f, g",
        "self.both = nn.ModuleList([f, g])",
        BODY,
        "y1 = x1 + self.both[0](x2)\n        y2 = x2 + self.both[1](y1)",
    ),
    "an attribute of the block": (
        "self.f, self.g = f, g",
        "self.f, self.g, self.depth = f, g, 3.0",
        BODY,
        "y1 = x1 + self.f(x2, scale=self.depth)\n        y2 = x2 + self.g(y1)",
    ),
    "in place": (BODY, "y1, y2 = x1 + self.f(x2), x2.clone()\n        y2 += self.g(y1)"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks(case, shelf):
    module = importlib.import_module(
        shelf("family", {"layers": altered(*BLOCKS[case])}) + ".layers"
    )
    rg.compat.install("family")
    assert_right(sequence(module))


def test_auxiliary_values(shelf):
    """One from each function, stacked by the package's own forward."""
    source = altered(
        BODY,
        "fx, f_loss = self.f(x2)\n        y1 = x1 + fx\n        gy, g_loss = self.g(y1)\n"
        "        y2 = x2 + gy",
        RETURN,
        RETURN + ", f_loss, g_loss",
        "        for block, kwargs in zip(blocks, args):\n            x = block(x, **kwargs)\n",
        "        losses = []\n        for block, kwargs in zip(blocks, args):\n"
        "            x, *both = block(x, **kwargs)\n            losses.append(torch.stack(both))\n",
        "x.detach()\n        return x",
        "x.detach()\n        return x, torch.stack(losses)",
        "        x = Engine.apply(x, self.blocks, args)\n        return sum(x.chunk(2, 2))",
        "        x, losses = Engine.apply(x, self.blocks, args)\n"
        "        return sum(x.chunk(2, 2)), losses[:, 0], losses[:, 1].exp()",
        SOURCE[SOURCE.index("        x = Engine.forward(") :],
        "        x, losses = Engine.forward(Engine, x, self.blocks, [{}] * 3)\n"
        "        return sum(x.chunk(2, 2)), losses[:, 0], losses[:, 1].exp()",
    )
    module = importlib.import_module(shelf("family", {"layers": source}) + ".layers")
    rg.compat.install("family")
    assert_right(sequence(module, aux=True))


def test_a_block_is_learned_once_for_a_structure(shelf):
    """Not at every call: its own forward runs once for new shapes, modes and arguments."""
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    rg.compat.install("family")
    net = sequence(module)
    counts = []
    shorter = torch.randn(2, 4, 4, dtype=torch.float64)
    calls = [{}, {}, {"x": shorter}, {"x": shorter}, {}, {"context": None}, {"context": None}]
    for given in calls:
        result(net, net, **given)
        counts.append(module.Block.forwards)
    assert counts == [3, 3, 6, 6, 6, 9, 9]
    net.eval()
    result(net, net)
    assert module.Block.forwards == 12


def test_one_argument_at_two_places_and_two(shelf):
    """What was learned with one tensor for both does not hold for two."""
    body = "y1 = x1 + self.f(x2, **f_args)\n        y2 = x2 + self.g(y1, other=f_args['other'])"
    module = importlib.import_module(shelf("family", {"layers": altered(BODY, body)}) + ".layers")
    rg.compat.install("family")
    net = sequence(module)
    one = torch.rand(3, dtype=torch.float64)
    assert_right(net, context=one, other=one)
    assert_right(net, context=one, other=one + 1)


def test_functions_that_are_exchanged_are_used(shelf):
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    rg.compat.install("family")
    net = sequence(module)
    assert_right(net)
    net.blocks[1].f = Mixer().double()
    assert_right(net)


def test_hooks_on_functions_run_and_on_blocks_do_not_see_noise(shelf):
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    rg.compat.install("family")
    net = sequence(module)
    seen = []
    net.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    net.blocks[0].f.register_forward_hook(lambda *_: seen.append("f"))
    result(net, net)
    assert seen == ["f", "f"]  # forward and recompute


def test_bytes_are_flat_in_depth(shelf):
    module = importlib.import_module(shelf("family", {"layers": SOURCE}) + ".layers")
    rg.compat.install("family")
    used = []
    x = torch.randn(8, 64, 32, requires_grad=True)
    for depth in (4, 16):
        net = module.Sequence([[nn.Linear(32, 32), nn.Linear(32, 32)] for _ in range(depth)])
        net(x).sum().backward()  # learned, so the step below is one like all others
        net.zero_grad()
        used.append(
            rg.measure.activation_bytes(lambda n=net: n(x).sum().backward(), [*net.parameters(), x])
        )
    assert used[1] - used[0] < 8 * 64 * 32 * 4


# --- what is refused

REFUSED = {
    "scaled": (
        BODY,
        BODY.replace("x2 + self.g(y1", "x2 + 2 * self.g(y1"),
        "its stream x2 is not what it was plus",
    ),
    "subtracted": (
        BODY,
        BODY.replace("x2 + self.g", "x2 - self.g"),
        "its stream x2 is not what it was plus",
    ),
    "damped": (BODY, BODY.replace("x1 + ", "0.9 * x1 + "), "its stream x1 is not what it was plus"),
    "normalised": (
        BODY,
        BODY.replace("self.g(y1", "self.g(y1 / y1.norm()"),
        "its function g is given a tensor that is neither a stream",
    ),
    "a mask that it computes": (
        BODY,
        BODY.replace("**g_args", "other=x1 > 0"),
        "its function g is given a tensor that is neither a stream",
    ),
    "used twice": (
        BODY,
        "v = self.f(x2)\n        y1, y2 = x1 + v, x2 + v + self.g(x1)",
        "it adds the same value to",
    ),
    "not used": (
        BODY,
        "self.g(x1)\n        y1, y2 = x1 + self.f(x2), x2",
        "what its function g returns is added to no stream",
    ),
    "random": (
        BODY,
        "torch.rand(1)\n        " + BODY,
        "it draws or seeds random numbers outside of its functions",
    ),
    "seeded": (
        BODY,
        "torch.manual_seed(3)\n        " + BODY,
        "it draws or seeds random numbers outside of its functions",
    ),
    "a parameter of the block": (
        "self.f, self.g = f, g",
        "self.f, self.g, self.w = f, g, nn.Parameter(torch.ones(4))",
        BODY,
        BODY.replace("x1 + self.f", "x1 * self.w + self.f"),
        "its stream x1 is not what it was plus",
    ),
    "an error": (
        BODY,
        "raise OSError('no graphics card')",
        "on an example its forward raised OSError: no graphics card",
    ),
    "another value": (RETURN, RETURN + ", y1.mean()", "it returns 1 values besides its streams"),
    "another shape": (
        RETURN,
        "return torch.cat((y1, y2), 2)[:, :1]",
        "its outputs have other shapes",
    ),
    "between blocks": (
        "x = block(x, **kwargs)",
        "x = block(x, **kwargs).relu()",
        "something else changes the streams between two blocks",
    ),
    "a middle that is used": (
        "        for block, kwargs in zip(blocks, args):",
        "        total = 0\n        for block, kwargs in zip(blocks, args):",
        "x = block(x, **kwargs)",
        "x = block(x, **kwargs)\n            total = total + x",
        "x.detach()\n        return x",
        "x.detach()\n        return total",
        "its outputs are also used before the last block has run",
    ),
    "detached": (
        "        ctx.y = x.detach()\n",
        "        x = ctx.y = x.detach()\n",
        "Engine.forward detaches its tensors",
    ),
    "a walk that draws": (
        "        ctx.y = x.detach()\n",
        "        ctx.y = x.detach()\n        torch.rand(1)\n",
        "Engine.forward draws random numbers, and it runs twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case, shelf):
    """When it first runs; nothing is computed, and random states stay."""
    *changes, reason = REFUSED[case]
    module = importlib.import_module(shelf("family", {"layers": altered(*changes)}) + ".layers")
    rg.compat.install("family")
    net = sequence(module)
    state = torch.get_rng_state()
    given = inputs()
    torch.set_rng_state(state)
    with pytest.raises(rg.ConversionError) as info:
        net(**given)
    text = str(info.value)
    assert text.startswith(
        f"rg.compat.install('family'): family.layers.Block cannot run on retrograd: {reason}"
    )
    assert "Fix: rg.compat.uninstall('family') puts the package's own engine back." in text


def test_blocks_that_split_along_different_axes(shelf):
    source = altered(
        "self.f, self.g = f, g",
        "self.f, self.g, self.axis = f, g, 2",
        "chunk(2, 2)\n        y1",
        "chunk(2, self.axis)\n        y1",
        "(y1, y2), 2)",
        "(y1, y2), self.axis)",
    )
    module = importlib.import_module(shelf("family", {"layers": source}) + ".layers")
    rg.compat.install("family")
    net = module.Sequence([[nn.Tanh(), nn.Sigmoid()] for _ in range(3)])
    net.blocks[1].axis = 1
    x = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(rg.ConversionError, match="different dimensions"):
        net(x)
    for block in net.blocks:
        block.axis = 1  # learned anew
    gradients = [torch.autograd.grad(run(x).square().sum(), x)[0] for run in (net, net.plain)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


# --- packages with nothing to replace


@pytest.mark.parametrize(
    "name", ["no_such_package", "no_such_package.reversible", "reformer-pytorch"]
)
def test_a_package_that_is_not_there(name):
    text = r"there is no such package\. Give the name that you import, .*\(pip install"
    with pytest.raises(ModuleNotFoundError, match=text) as info:
        rg.compat.install(name)
    assert info.value.name == name


def test_a_package_without_an_engine():
    with pytest.raises(ValueError, match=r"^install\('einops'\): there is nothing to replace\. "):
        rg.compat.install("einops")


@pytest.mark.parametrize("name", ["memcnn", "revlib", "momentumnet", "torch_geometric", "FrEIA"])
def test_a_package_with_a_page_is_pointed_there(name, shelf):
    if name in ("memcnn", "revlib"):
        load(name)
        expected = ValueError
    else:  # not installed here, or not in this environment
        shelf(name, {"layers": ""})
        expected = ValueError
    page = {"memcnn": "memcnn.md", "revlib": "revlib.md"}.get(name, "other-libraries.md")
    with pytest.raises(expected, match=f"docs/migrate/{page} shows how") as info:
        rg.compat.install(name)
    assert "nothing to replace" in str(info.value)


def test_every_page_is_there():
    from pathlib import Path

    folder = Path(__file__).parents[1] / "docs" / "migrate"
    for page in rg.compat.installing.PAGES.values():
        assert (folder / page).exists(), page


def test_a_package_that_cannot_be_imported_passes_its_error_through(shelf):
    broken = f"raise OSError('a library is missing')\n{SOURCE}"
    shelf("failing", {"a_good_one": SOURCE, "__init__": broken})
    for _ in range(2):
        with pytest.raises(OSError, match="^a library is missing$"):
            rg.compat.install("failing")


def test_a_module_that_cannot_be_imported_is_passed_over(shelf):
    broken = f"raise OSError('a library is missing')\n{SOURCE}"
    shelf("failing", {"a_good_one": SOURCE, "broken": broken})
    with pytest.warns(UserWarning, match=r"failing\.broken .*OSError: a library is missing"):
        report = rg.compat.install("failing")
    assert [each.module for each in report] == ["failing.a_good_one"]


# --- finding engines in source


FOUND = {
    "for block in blocks:\n            x = block(x)": True,
    "for block, kw in zip(blocks, args):\n            x = block(x, **kw)": True,
    "for i, block in enumerate(blocks[::-1]):\n            x = block(x)": True,
    "for i in range(len(blocks)):\n            x = blocks[i](x)": True,
    "x = [block(x) for block in blocks][-1]": True,
    "x = blocks(x)": False,
    "for block in blocks:\n            x = block.run(x)": False,
    "for name in NAMES:\n            x = name(x)": False,
}


@pytest.mark.parametrize("body", FOUND)
def test_what_counts_as_an_engine(body):
    source = (
        "class Any(Function):\n    def forward(ctx, x, blocks, args):\n        "
        f"{body}\n        return x\n\n    def backward(ctx, dy):\n        return dy\n"
    )
    assert engines_in(source) == (["Any"] if FOUND[body] else [])
    assert engines_in(source.replace("def backward", "def other")) == []
    assert engines_in("this is { not Python") == []
