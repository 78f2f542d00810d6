"""`install`: which packages are recognised, what is replaced and put back, and what is said about
the others.

The packages made here have modules of their own, in plain autograd, with the names and signatures
of the five systems: so they are also the oracle of what is put in their place.
"""

import importlib
import random
import sys
import warnings
from types import ModuleType

import pytest
import torch
from torch import nn

import retrograd as rg
from tests.packages import load

# --- the five systems in plain autograd

FUNCTION = """
import torch
from torch import nn

class Deterministic(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *args, record_rng=False, set_rng=False, **kwargs):
        return self.net(*args, **kwargs)
"""

BLOCK = """
class ReversibleBlock(nn.Module):
    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = Deterministic(f), Deterministic(g)

    def forward(self, x, f_args={}, g_args={}):
        x1, x2 = x.chunk(2, AXIS)
        y1 = x1 + self.f(x2, **f_args)
        y2 = x2 + self.g(y1, **g_args)
        return torch.cat((y1, y2), AXIS)
"""

ORDINARY = """
class IrreversibleBlock(nn.Module):
    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x, f_args, g_args):
        return ReversibleBlock(self.f, self.g)(x, f_args, g_args)
"""

SIGNALLED = BLOCK.replace("(self, f, g)", "(self, f, g, depth=None, send_signal=False)")

REFORMER = f"""{FUNCTION}{SIGNALLED.replace("AXIS", "2")}{ORDINARY}
class ReversibleSequence(nn.Module):
    def __init__(self, blocks, layer_dropout=0.0, reverse_thres=0, send_signal=False):
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.irrev_blocks = nn.ModuleList([IrreversibleBlock(f, g) for f, g in blocks])

    def forward(self, x, arg_route=(True, False), **kwargs):
        for block in self.blocks:
            x = block(x, *(kwargs if route else {{}} for route in arg_route))
        return x
"""

AXIAL = f"""{FUNCTION}{BLOCK.replace("AXIS", "1")}{ORDINARY}
class ReversibleSequence(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])

    def forward(self, x, arg_route=(True, True), **kwargs):
        x = torch.cat((x, x), 1)
        for block in self.blocks:
            x = block(x, *(kwargs if route else {{}} for route in arg_route))
        return sum(x.chunk(2, 1)) / 2
"""

NUWA = f"""{FUNCTION}{BLOCK.replace("AXIS", "2")}
def route_args(router, args, depth):
    def chosen(block, function):
        names = [n for n in args if n in router and router[n][block][function]]
        return {{name: args[name] for name in names}}

    return [(chosen(block, 0), chosen(block, 1)) for block in range(depth)]

class ReversibleSequence(nn.Module):
    def __init__(self, blocks, args_route={{}}):
        super().__init__()
        self.args_route = args_route
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])

    def forward(self, x, **kwargs):
        x = torch.cat((x, x), 2)
        for block, args in zip(self.blocks, route_args(self.args_route, kwargs, len(self.blocks))):
            x = block(x, *args)
        return sum(x.chunk(2, 2))
"""

SE3 = f"""{FUNCTION}
def plus(x, y):
    return {{degree: x[degree] + y[degree] for degree in x}}

class ReversibleBlock(nn.Module):
    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = Deterministic(f), Deterministic(g)

    def forward(self, x, **kwargs):
        halves = [{{degree: v.chunk(2, -1)[half] for degree, v in x.items()}} for half in (0, 1)]
        x1, x2 = halves
        y1 = plus(x1, self.f(x2, **kwargs))
        y2 = plus(x2, self.g(y1))
        return {{degree: torch.cat((y1[degree], y2[degree]), -1) for degree in x}}

class SequentialSequence(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, **kwargs):
        for f, g in self.blocks:
            x = g(f(x, **kwargs))
        return x

class ReversibleSequence(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])

    def forward(self, x, **kwargs):
        x = {{degree: torch.cat((value, value), -1) for degree, value in x.items()}}
        for block in self.blocks:
            x = block(x, **kwargs)
        return {{degree: sum(value.chunk(2, -1)) / 2 for degree, value in x.items()}}
"""

VIDEO_AUDIO = f"""{FUNCTION}
class Four(nn.Module):
    def __init__(self, f, g, j, k):
        super().__init__()
        self.f, self.g, self.j, self.k = map(Deterministic, (f, g, j, k))

class ReversibleSelfAttnBlock(Four):
    def forward(self, x, m, _reverse=True, **kwargs):
        (x1, x2), (m1, m2) = x.chunk(2, 2), m.chunk(2, 2)
        x1 = x1 + self.f(x2)
        x2 = x2 + self.g(x1)
        m1 = m1 + self.j(m2)
        m2 = m2 + self.k(m1)
        return torch.cat((x1, x2), 2), torch.cat((m1, m2), 2)

class ReversibleCrossAttnBlock(Four):
    def forward(
        self, x, m, *, context, context_mask, video_mask=None, audio_mask=None,
        _reverse=True, **kwargs,
    ):
        (x1, x2), (m1, m2) = x.chunk(2, 2), m.chunk(2, 2)
        x1 = x1 + self.f(x2, context=context, context_mask=context_mask, mask=video_mask)
        x2 = x2 + self.g(x1)
        m1 = m1 + self.j(m2, context=context, context_mask=context_mask, mask=audio_mask)
        m2 = m2 + self.k(m1)
        return torch.cat((x1, x2), 2), torch.cat((m1, m2), 2)

class ReversibleCrossModalityAttnBlock(Four):
    def forward(self, x, m, *, video_mask=None, audio_mask=None, _reverse=True, **kwargs):
        (x1, x2), (m1, m2) = x.chunk(2, 2), m.chunk(2, 2)
        x1 = x1 + self.f(x2, m2, mask=video_mask, context_mask=audio_mask)
        x2 = x2 + self.k(x1)
        m1 = m1 + self.j(m2, x2, mask=audio_mask, context_mask=video_mask)
        m2 = m2 + self.g(m1)
        return torch.cat((x1, x2), 2), torch.cat((m1, m2), 2)

def irreversible_apply(inputs, ind, blocks, kwargs):
    x, m = inputs[:, :ind], inputs[:, ind:]
    for block in blocks:
        x, m = block(x, m, _reverse=False, **kwargs)
    return torch.cat((x, m), 1)

def reversible_apply(inp, ind, blocks, kwargs):
    return irreversible_apply(inp, ind, blocks, kwargs)

TYPES = {{
    "intra_modality_self_attn": ReversibleSelfAttnBlock,
    "intra_modality_cross_attn": ReversibleCrossAttnBlock,
    "inter_modality_cross_attn": ReversibleCrossModalityAttnBlock,
}}

class DualModalityReversibleSequence(nn.Module):
    def __init__(self, input_blocks, block_types):
        super().__init__()
        pairs = zip(input_blocks, block_types)
        self.blocks = nn.ModuleList([TYPES[name](*block) for block, name in pairs])

    def forward(
        self, video, audio, *, context, context_mask=None, video_mask=None, audio_mask=None,
        reverse=True,
    ):
        x = torch.cat([torch.cat((t, t), 2) for t in (video, audio)], 1)
        masks = dict(context_mask=context_mask, video_mask=video_mask, audio_mask=audio_mask)
        kwargs = dict(context=context, **masks)
        x = reversible_apply(x, video.shape[1], self.blocks, kwargs)
        return [sum(t.chunk(2, 2)) / 2 for t in (x[:, :video.shape[1]], x[:, video.shape[1]:])]
"""

PLAIN = {
    "reformer": REFORMER,
    "axial": AXIAL,
    "nuwa": NUWA,
    "se3": SE3,
    "nuwa_video_audio": VIDEO_AUDIO,
}


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


@pytest.fixture(autouse=True)
def _no_files(monkeypatch):
    """se3-transformer-pytorch keeps files in the home directory, unless this is set when it is
    imported.
    """
    monkeypatch.setenv("CLEAR_CACHE", "1")


def forget(package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def classes_and_functions():
    """Of every loaded module except tests, by module and name."""
    return {
        (home, name): value
        for home, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not home.startswith("test")
        for name, value in list(vars(module).items())
        if callable(value)
    }


def replaced(before):
    now = classes_and_functions()
    return {key for key, value in before.items() if now.get(key) is not value}


# --- the four packages

HOLDERS = {
    "reformer_pytorch": {
        "reformer_pytorch.reversible": "Deterministic ReversibleBlock IrreversibleBlock "
        "ReversibleSequence",
        "reformer_pytorch.reformer_pytorch": "ReversibleSequence",
    },
    "axial_attention": {
        "axial_attention.reversible": "Deterministic ReversibleBlock IrreversibleBlock "
        "ReversibleSequence",
        "axial_attention.axial_attention": "ReversibleSequence",
    },
    "se3_transformer_pytorch": {
        "se3_transformer_pytorch.reversible": "Deterministic ReversibleBlock ReversibleSequence "
        "SequentialSequence",
        "se3_transformer_pytorch.se3_transformer_pytorch": "ReversibleSequence SequentialSequence",
    },
    "nuwa_pytorch": {
        "nuwa_pytorch.reversible": "Deterministic ReversibleBlock ReversibleSequence route_args",
        "nuwa_pytorch.reversible_video_audio": "Deterministic ReversibleSelfAttnBlock "
        "ReversibleCrossAttnBlock "
        "ReversibleCrossModalityAttnBlock DualModalityReversibleSequence reversible_apply "
        "irreversible_apply",
        "nuwa_pytorch.nuwa_pytorch": "ReversibleSequence DualModalityReversibleSequence",
    },
}


@pytest.mark.parametrize("name", HOLDERS)
def test_every_name_is_replaced_and_put_back(name, package):
    """In all modules that have it; nothing else changes in any module."""
    package(name)
    before = classes_and_functions()
    rg.compat.install(name)
    assert replaced(before) == {
        (module, each) for module, names in HOLDERS[name].items() for each in names.split()
    }
    for module, names in HOLDERS[name].items():
        for each in names.split():
            assert getattr(sys.modules[module], each).__module__.startswith("retrograd.compat.")
    rg.compat.uninstall(name)
    assert replaced(before) == set()


@pytest.mark.parametrize("name", HOLDERS)
def test_the_report(name, package):
    package(name)
    report = rg.compat.install(name)
    systems = {
        "reformer_pytorch": ["reformer"],
        "axial_attention": ["axial"],
        "se3_transformer_pytorch": ["se3"],
    }
    assert [each.system for each in report] == [
        f"retrograd.compat.{system}" for system in systems.get(name, ["nuwa", "nuwa_video_audio"])
    ]
    for each in report:
        assert isinstance(each, rg.compat.Installed)
        assert each.module in HOLDERS[name]
        for one in each.names:
            assert getattr(sys.modules[each.module], one) is getattr(sys.modules[each.system], one)
        assert str(each) == f"{each.module} runs on {each.system} ({', '.join(each.names)})"


def test_before_the_package_was_imported(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "reformer_pytorch"]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rg.compat.install("reformer_pytorch")
    try:
        from reformer_pytorch import Reformer
        from reformer_pytorch.reversible import ReversibleSequence

        assert ReversibleSequence is rg.compat.reformer.ReversibleSequence
        assert type(Reformer(dim=8, depth=1, heads=2).layers) is ReversibleSequence
    finally:
        rg.compat.uninstall("reformer_pytorch")
    assert (
        type(Reformer(dim=8, depth=1, heads=2).layers).__module__ == "reformer_pytorch.reversible"
    )


def test_after_the_package_was_imported(package):
    Reformer = package("reformer_pytorch").Reformer
    before = Reformer(dim=8, depth=1, heads=2)
    rg.compat.install("reformer_pytorch")
    between = Reformer(dim=8, depth=1, heads=2)
    rg.compat.uninstall("reformer_pytorch")
    after = Reformer(dim=8, depth=1, heads=2)
    homes = [type(model.layers).__module__ for model in (before, between, after)]
    assert homes == [
        "reformer_pytorch.reversible",
        "retrograd.compat.reformer",
        "reformer_pytorch.reversible",
    ]


def test_random_states_are_left_alone(package):
    for name in HOLDERS:
        package(name)
        states = torch.get_rng_state(), random.getstate()
        rg.compat.install(name)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]


# --- packages that carry one of the five under another name


class Mixer(nn.Module):
    """A function for all of them: tensors or dicts, with channels on any axis, one input or two, a
    context or none.
    """

    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *others, context=None, **masks):
        if isinstance(x, dict):
            return {key: self(value, context=context) for key, value in x.items()}
        y = self.linear(x.movedim(self.axis, -1)).tanh().movedim(-1, self.axis)
        return y * (1 + sum(other.mean() for other in others)) + (
            0 if context is None else context.sum()
        )


def outputs(module, system):
    """A network of this module's blocks, and what it makes of fixed inputs, in one tensor."""
    torch.manual_seed(3)
    x, short, context = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 5, 4), (2, 3, 4), (3,))
    )
    pairs = [
        (Mixer(1 if system == "axial" else 2), Mixer(1 if system == "axial" else 2))
        for _ in range(3)
    ]
    if system == "nuwa_video_audio":
        types = [
            "intra_modality_self_attn",
            "intra_modality_cross_attn",
            "inter_modality_cross_attn",
        ]
        net = module.DualModalityReversibleSequence(
            [[Mixer(2) for _ in range(4)] for _ in types], types
        ).double()
        return net, torch.cat(net(x, short, context=context), 1)
    if system == "nuwa":
        net = module.ReversibleSequence(
            pairs, {"context": [(True, False), (False, False), (True, True)]}
        ).double()
        return net, net(x, context=context)
    net = module.ReversibleSequence(pairs).double()
    if system == "reformer":
        return net, net(torch.cat((x, 2 * x), 2), context=context)
    if system == "axial":
        return net, net(x.transpose(1, 2), context=context)
    return net, torch.cat(list(net({"0": x, "1": short}, context=context).values()), 1)


def gradients(module, system):
    net, output = outputs(module, system)
    output.square().sum().backward()
    return {"output": output.detach()} | {
        name: weight.grad for name, weight in net.named_parameters()
    }


@pytest.mark.parametrize("system", PLAIN)
def test_a_copy_is_recognised_whatever_it_is_called(system, shelf):
    """And what takes its place has the same parameters, outputs and gradients."""
    name = shelf(f"network_{system}", {"layers": PLAIN[system]})
    module = importlib.import_module(f"{name}.layers")
    theirs = gradients(module, system)
    [report] = rg.compat.install(name)
    assert (report.module, report.system) == (f"{name}.layers", f"retrograd.compat.{system}")
    torch.testing.assert_close(gradients(module, system), theirs, rtol=1e-9, atol=1e-12)
    assert type(outputs(module, system)[0]).__module__ == report.system
    rg.compat.uninstall(name)
    assert type(outputs(module, system)[0]).__module__ == report.module


@pytest.mark.parametrize(
    "place", ["__init__", "deep/__init__", "deep/deeper/layers", "space/of/names"]
)
def test_it_may_be_anywhere_in_the_package(place, shelf):
    inits = {"deep/__init__": "", "deep/deeper/__init__": ""}
    name = shelf(
        "anywhere",
        {**inits, place: AXIAL, "other": "raise ImportError('nobody asked for this module')"},
    )
    [report] = rg.compat.install(name)
    assert report.module == ".".join([name, *place.split("/")]).removesuffix(".__init__")


def test_a_package_may_carry_several(shelf):
    name = shelf("several", PLAIN)
    report = rg.compat.install(name)
    assert {each.module: each.system for each in report} == {
        f"{name}.{each}": f"retrograd.compat.{each}" for each in PLAIN
    }


def test_packages_are_independent(shelf):
    one, other = (shelf(name, {"layers": AXIAL}) for name in ("one", "other"))
    rg.compat.install(one)
    rg.compat.install(other)
    rg.compat.uninstall(one)
    homes = [sys.modules[f"{name}.layers"].ReversibleSequence.__module__ for name in (one, other)]
    assert homes == ["one.layers", "retrograd.compat.axial"]


def test_names_that_a_user_has_imported(shelf):
    """Under other names, too; and put back in those places, unless the user has changed
    them since.
    """
    name = shelf("theirs", {"layers": AXIAL})
    user = ModuleType("user_of_theirs")
    exec(
        "from theirs.layers import ReversibleSequence, ReversibleSequence as Stack, "
        "ReversibleBlock as Block",
        vars(user),
    )
    original = user.Stack
    sys.modules[user.__name__] = user
    try:
        rg.compat.install(name)
        assert user.ReversibleSequence is user.Stack is rg.compat.axial.ReversibleSequence
        assert user.Block is rg.compat.axial.ReversibleBlock
        user.Block = None
        rg.compat.uninstall(name)
        assert user.ReversibleSequence is user.Stack is original
        assert user.Block is None
    finally:
        del sys.modules[user.__name__]


def test_twice_is_harmless(shelf):
    name = shelf("twice", {"layers": AXIAL})
    importlib.import_module("twice.layers")
    before = classes_and_functions()
    rg.compat.uninstall(name)  # nothing to undo
    assert rg.compat.install(name) == rg.compat.install(name)
    rg.compat.uninstall(name)
    assert replaced(before) == set()
    rg.compat.uninstall(name)
    assert replaced(before) == set()
    rg.compat.install(name)
    assert replaced(before) == {
        ("twice.layers", each)
        for each in ("Deterministic", "ReversibleBlock", "IrreversibleBlock", "ReversibleSequence")
    }


# --- packages that are refused


@pytest.mark.parametrize(
    "name", ["no_such_package", "no_such_package.reversible", "reformer-pytorch"]
)
def test_a_package_that_is_not_there(name):
    text = r"there is no such package\. Give the name that you import, .*\(pip install"
    with pytest.raises(ModuleNotFoundError, match=text) as info:
        rg.compat.install(name)
    assert info.value.name == name


def refusal(name):
    """What is said about a package that is refused, and that nothing was changed for it."""
    before = classes_and_functions()
    state = torch.get_rng_state()
    with pytest.raises(
        ValueError, match=rf"^install\('{name}'\): no module of this package is one of the five"
    ) as info:
        rg.compat.install(name)
    assert replaced(before) == set()
    assert torch.equal(torch.get_rng_state(), state)
    return str(info.value)


def test_a_package_without_a_reversible_module():
    text = refusal("einops")
    for system in rg.compat.installing.SYSTEMS:
        assert f"{system.module.__name__.rpartition('.')[2]}: {', '.join(system.names)}" in text
    assert text.endswith("no file of it defines a reversible sequence")


def test_packages_with_another_reversible_module():
    load("revtorch")
    assert (
        "revtorch.revtorch is not retrograd.compat.reformer: it has no Deterministic, "
        "IrreversibleBlock" in refusal("revtorch")
    )
    load("linformer")
    text = refusal("linformer")
    assert "linformer.reversible is not retrograd.compat.axial: it has no IrreversibleBlock" in text
    assert (
        "ReversibleSequence.__init__ takes (blocks, args_route={}, layer_dropout=0.0), not "
        "(blocks, args_route={})" in text
    )


OTHER_SIGNATURES = {
    "a missing name": (
        "reformer",
        "class IrreversibleBlock",
        "class Irreversible",
        "it has no IrreversibleBlock",
    ),
    "another argument": (
        "axial",
        "(self, blocks)",
        "(self, blocks, dim)",
        "ReversibleSequence.__init__ takes (blocks, dim), not (blocks)",
    ),
    "another default": (
        "axial",
        "arg_route=(True, True)",
        "arg_route=(True, False)",
        "ReversibleSequence.forward takes (x, arg_route=(True, False), **kwargs), not (x, "
        "arg_route=(True, True), **kwargs)",
    ),
    "another order": (
        "nuwa",
        "(router, args, depth)",
        "(args, router, depth)",
        "route_args takes (args, router, depth), not",
    ),
    "another block": (
        "se3",
        "(self, x, **kwargs):\n        halves",
        "(self, x, mask=None):\n        halves",
        "ReversibleBlock.forward takes (x, mask=None), not (x, **kwargs)",
    ),
    "another apply": (
        "nuwa_video_audio",
        "(inputs, ind, blocks, kwargs)",
        "(inputs, blocks, kwargs)",
        "irreversible_apply takes (inputs, blocks, kwargs), not (inputs, ind, blocks, kwargs)",
    ),
}


@pytest.mark.parametrize("case", OTHER_SIGNATURES)
def test_another_signature_is_refused(case, shelf):
    system, old, new, difference = OTHER_SIGNATURES[case]
    name = shelf("look_alike", {"layers": altered(system, old, new)})
    assert f"look_alike.layers is not retrograd.compat.{system}: {difference}" in refusal(name)


def altered(system, *changes):
    """A system's source with replacements, each of which is in it."""
    source = PLAIN[system]
    for old, new in zip(changes[::2], changes[1::2]):
        assert old in source
        source = source.replace(old, new)
    return source


OTHER_RESULTS = {
    "mean for sum": ("nuwa", "return sum(x.chunk(2, 2))", "return sum(x.chunk(2, 2)) / 2"),
    "sum for mean": ("axial", "sum(x.chunk(2, 1)) / 2", "sum(x.chunk(2, 1))"),
    "another axis": ("reformer", "chunk(2, 2)", "chunk(2, 1)", "y2), 2)", "y2), 1)"),
    "merged": ("reformer", "        return x\n", "        return sum(x.chunk(2, 2))\n"),
    "streams apart": ("se3", "self.g(y1)", "self.g(x1)"),
    "the other stream first": (
        "reformer",
        "x1, x2 = x",
        "x2, x1 = x",
        "cat((y1, y2)",
        "cat((y2, y1)",
    ),
    "minus": ("reformer", "x2 + self.g", "x2 - self.g"),
    "sum for mean, of two": ("nuwa_video_audio", "sum(t.chunk(2, 2)) / 2", "sum(t.chunk(2, 2))"),
}


@pytest.mark.parametrize("case", OTHER_RESULTS)
def test_another_computation_is_refused(case, shelf):
    system, *changes = OTHER_RESULTS[case]
    name = shelf("look_alike", {"layers": altered(system, *changes)})
    expected = (
        f"look_alike.layers is not retrograd.compat.{system}: on an example it computes "
        "something else"
    )
    assert expected in refusal(name)


FIRST = "        x = torch.cat((x, x), 1)"  # line of AXIAL's forward


def test_an_example_that_fails_is_a_reason(shelf):
    """Also if it has drawn random numbers before: `refusal` looks."""
    failing = altered(
        "axial", FIRST, "        torch.randn(3)\n        raise OSError('no graphics card')"
    )
    text = refusal(shelf("look_alike", {"layers": failing}))
    assert (
        "look_alike.layers is not retrograd.compat.axial: on an example it raised OSError: no "
        "graphics card" in text
    )


def test_an_example_may_draw_random_numbers(shelf):
    name = shelf("drawing", {"layers": altered("axial", FIRST, f"        torch.randn(3)\n{FIRST}")})
    state = torch.get_rng_state()
    rg.compat.install(name)
    assert torch.equal(torch.get_rng_state(), state)


# --- imports that fail


@pytest.mark.parametrize("place", ["__init__", "broken"])
def test_an_import_that_fails_passes_its_error_through(place, shelf):
    """As it is, from the package or from a module that looks right; the module that was fine is
    left alone, too.
    """
    broken = "raise OSError('a library is missing')\nclass ReversibleSequence(object): ...\n"
    name = shelf("failing", {"a_good_one": AXIAL, place: broken})
    for _ in range(2):
        with pytest.raises(OSError, match="^a library is missing$"):
            rg.compat.install(name)
    if place == "broken":
        assert (
            sys.modules["failing.a_good_one"].ReversibleSequence.__module__ == "failing.a_good_one"
        )


def test_a_package_that_was_mended_can_be_installed(shelf):
    name = shelf("mended", {"layers": AXIAL, "__init__": "import no_such_library"})
    with pytest.raises(ModuleNotFoundError, match="^No module named 'no_such_library'$"):
        rg.compat.install(name)
    shelf("mended", {"__init__": ""})
    assert [each.module for each in rg.compat.install(name)] == ["mended.layers"]


# --- what signatures do not show, and what happens in between

SAME_ON_THE_EXAMPLE = {
    "f and g exchanged": (
        "axial",
        "self.f(x2",
        "self.GG(x2",
        "self.g(y1",
        "self.f(y1",
        "self.GG",
        "self.g",
    ),
    "keyword arguments for g, too": ("se3", "self.g(y1)", "self.g(y1, **kwargs)"),
    "modalities that do not see each other": (
        "nuwa_video_audio",
        "(x2, m2, ",
        "(x2, 0 * m2, ",
        "(m2, x2, ",
        "(m2, 0 * x2, ",
    ),
    "g for video, k for audio": (
        "nuwa_video_audio",
        "self.k(x1)",
        "self.g(x1)",
        "m2 + self.g(m1)",
        "m2 + self.k(m1)",
    ),
}


@pytest.mark.parametrize("case", SAME_ON_THE_EXAMPLE)
def test_another_use_of_the_functions_is_refused(case, shelf):
    system, *changes = SAME_ON_THE_EXAMPLE[case]
    assert "computes something else" in refusal(
        shelf("look_alike", {"layers": altered(system, *changes)})
    )


def test_another_kind_of_output_is_refused(shelf):
    changed = altered("axial", "return sum(x.chunk(2, 1)) / 2", "return x.chunk(2, 1)")
    assert "computes something else" in refusal(shelf("look_alike", {"layers": changed}))


def test_a_class_that_is_no_module_is_refused(shelf):
    changed = altered(
        "axial",
        "class Deterministic(nn.Module)",
        "class Deterministic",
        "super().__init__()\n        self.net",
        "self.net",
    )
    refusal(
        shelf(
            "look_alike",
            {"layers": changed.replace("def forward(self, *args", "def __call__(self, *args")},
        )
    )


def test_a_module_imported_later_is_put_back(shelf):
    name = shelf("lazy", {"layers": AXIAL, "later": "from lazy.layers import ReversibleSequence"})
    rg.compat.install(name)
    later = importlib.import_module("lazy.later")
    rg.compat.uninstall(name)
    assert later.ReversibleSequence is sys.modules["lazy.layers"].ReversibleSequence


def test_a_module_that_was_reloaded_can_be_installed(shelf):
    name = shelf("reloaded", {"layers": AXIAL})
    rg.compat.install(name)
    layers = importlib.reload(sys.modules["reloaded.layers"])
    rg.compat.install(name)
    assert layers.ReversibleSequence is rg.compat.axial.ReversibleSequence


def test_a_module_may_carry_two_systems(shelf):
    rest = VIDEO_AUDIO.removeprefix(FUNCTION)
    report = rg.compat.install(shelf("both", {"layers": NUWA + rest}))
    assert [each.system for each in report] == [
        "retrograd.compat.nuwa",
        "retrograd.compat.nuwa_video_audio",
    ]


def test_a_reload_leaves_other_modules_on_ours(shelf):
    name = shelf("twice", {"layers": AXIAL, "model": "from twice.layers import ReversibleSequence"})
    model = importlib.import_module("twice.model")
    rg.compat.install(name)
    importlib.reload(sys.modules["twice.layers"])
    rg.compat.install(name)
    assert (
        model.ReversibleSequence
        is sys.modules["twice.layers"].ReversibleSequence
        is rg.compat.axial.ReversibleSequence
    )


def test_names_that_were_ours_before_stay_so(shelf):
    source = "from retrograd.compat.axial import ReversibleSequence as Fast"
    name = shelf("compared", {"layers": AXIAL, "compare": source})
    compare = importlib.import_module("compared.compare")
    rg.compat.install(name)
    rg.compat.uninstall(name)
    assert compare.Fast is rg.compat.axial.ReversibleSequence
    assert sys.modules["compared.layers"].ReversibleSequence is not compare.Fast


def test_another_default_device(shelf):
    name = shelf("elsewhere", {"layers": altered("axial", "/ 2", "/ 1")})
    with torch.device("meta"):
        assert "computes something else" in refusal(name)


def test_one_module_of_a_package(shelf):
    assert [
        each.module for each in rg.compat.install(shelf("single", {"layers": AXIAL}) + ".layers")
    ] == ["single.layers"]
    rg.compat.uninstall("single.layers")
