"""`rg.check`: it accepts correct networks, names planted faults, and puts everything back."""

from __future__ import annotations

import copy
import json
import random
import time

import numpy
import pytest
import torch
from torch import nn

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from retrograd.checking import Problem
from retrograd.compat.reformer import ReversibleSequence as ReformerSequence
from retrograd.core.observe import observers
from tests import zoo

WIDTH = 4


def mlp():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def stack_of(f, g=mlp, blocks=4, **options):
    return rg.ReversibleSequence([(f(), g()) for _ in range(blocks)], **options)


def example(*shape):
    return torch.randn(*(shape or (3, WIDTH)), generator=torch.Generator().manual_seed(0))


def kinds(report):
    return {problem.kind for problem in report.problems}


def text_of(report, *kinds):
    """The problems of these kinds, as text."""
    return "\n".join(str(problem) for problem in report.problems if problem.kind in kinds)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- correct networks


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_correct_networks_are_ok(case):
    stack, x = case.build(dropout=0.1)[:2]
    report = rg.check(stack, x)
    assert report.ok, str(report)
    assert max(report.gradients.values()) < 1e-9
    assert report.drift and report.determinism and report.evaluations
    assert set(report.determinism.values()) == {0.0}


class Norm(nn.Module):
    """BatchNorm, and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(self.norm(x)) - self.mean


class Counted(nn.Linear):
    """Counts its calls, except in recompute."""

    calls = 0

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.seen = []

    def forward(self, x):
        if not rg.is_recomputing():
            self.calls += 1
            self.seen.append(self.calls)
        return super().forward(x)


class Attending(nn.Linear):
    """Stores its output, which is the same in recompute."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.map = None

    def forward(self, x):
        self.map = super().forward(x).softmax(-1)
        return self.map


CORRECT = {
    "buffers": lambda: stack_of(Norm),
    "dropout": lambda: stack_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))),
    "a counter that recompute leaves alone": lambda: stack_of(Counted),
    "an attention map": lambda: stack_of(Attending),
    "a budget": lambda: stack_of(mlp, memory=rg.Budget("80%")),
    "anchors": lambda: stack_of(mlp, memory=rg.Anchor(every=2)),
    "exact": lambda: stack_of(mlp, exact=True),
    "compat": lambda: nn.Sequential(ReformerSequence([(mlp(), mlp()) for _ in range(3)])),
    "two stacks": lambda: nn.Sequential(stack_of(mlp), nn.Linear(WIDTH, WIDTH), stack_of(mlp)),
    "a stack used twice": lambda: nn.Sequential(*[stack_of(mlp)] * 2),
    "a stack in a stack": lambda: stack_of(lambda: stack_of(mlp)),
    "chunks": lambda: stack_of(lambda: rg.Chunked(nn.Linear(WIDTH, WIDTH), chunks=2, dim=0)),
    "frozen": lambda: stack_of(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
}


@pytest.mark.parametrize("name", CORRECT)
def test_what_the_engine_replays_is_ok(name):
    network = CORRECT[name]()
    x = example(2, 3, 2 * WIDTH) if name == "compat" else example(3, WIDTH)
    report = rg.check(network, x)
    assert report.ok, str(report)
    assert all(again >= kept for kept, again in report.evaluations.values())


def test_a_list_of_pairs():
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    report = rg.check([(mlp(), lambda x: (x @ weight).tanh()) for _ in range(3)], example())
    assert report.ok, str(report)
    assert any("tensor 0" in name for name in report.gradients)  # the weight that is in no module


def test_arguments_and_their_gradients():
    class Context(nn.Linear):
        def forward(self, x, context, scale):
            return super().forward(x) * context["a"] * scale

    stack = stack_of(lambda: Context(WIDTH, WIDTH))
    context = {"a": example(WIDTH).requires_grad_()}
    report = rg.check(stack, example().requires_grad_(), context=context, scale=0.5)
    assert report.ok, str(report)
    assert {"args[0]", "context['a']"} <= report.gradients.keys()
    assert context["a"].grad is None


def test_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        report = rg.check(stack_of(mlp, blocks=8), example())
    assert report.ok, str(report)
    assert report.limit == pytest.approx(0.03)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_enabled_inside(mode):
    stack = stack_of(mlp)
    with mode():
        assert rg.check(stack, example()).ok


def test_compiled_networks_are_checked_eagerly():
    network = torch.compile(stack_of(mlp), backend="eager")
    network(example()).sum().backward()
    assert rg.check(network, example()).ok
    network = nn.Sequential(stack_of(mlp))
    network.compile(backend="eager")
    network(example()).sum().backward()
    before = network._compiled_call_impl
    assert rg.check(network, example()).ok
    assert network._compiled_call_impl is before


# While it looks at an input, the compiler reads `.grad` even where it is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_functions_stay_compiled():
    stack = stack_of(mlp)
    stack.compile(backend="aot_eager")
    assert rg.check(stack, example()).ok


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, tracing
def test_a_function_may_use_torch_cond():
    """Its branches are compiled, which torch refuses in a mode that does not allow it."""

    class Choosing(nn.Linear):
        def forward(self, x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (super().forward(x),))

    stack = stack_of(lambda: Choosing(WIDTH, WIDTH))
    report = rg.check(stack, example())
    assert report.ok and report.peak is not None
    report.plot()
    stack(example()).sum().backward()


def test_state_that_is_not_registered_is_replayed():
    assert rg.check(stack_of(FreeBuffer), example()).ok
    assert rg.check(stack_of(Hidden), example()).ok


# --- planted faults


class Cache(nn.Linear):
    """Uses all inputs that it has seen."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.cache = []

    def forward(self, x):
        self.cache.append(x.detach())
        return super().forward(x) * torch.cat(self.cache).sum()


class GrowingTensor(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.past = torch.zeros(0, WIDTH)

    def forward(self, x):
        self.past = torch.cat([self.past, x.detach()])
        return super().forward(x) * (self.past @ self.past.mT).sum()


class Draws(nn.Linear):
    def __init__(self, draw):
        super().__init__(WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x):
        return super().forward(x) * self.draw()


class OwnGenerator(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.generator = numpy.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) * float(self.generator.random())


class Timed(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (time.perf_counter_ns() % 1000 / 1000)


COUNTER = 0


class Global(nn.Linear):
    def forward(self, x):
        global COUNTER
        COUNTER += 1
        return super().forward(x) / COUNTER


class WrongInverse(rg.Coupling):
    def forward(self, x, out):
        return 0.5 * x + out

    def inverse(self, y, out):
        return y - out


class AlmostRight(rg.Coupling):
    """Off by less than the engine itself detects."""

    def forward(self, x, out):
        return x + out

    def inverse(self, y, out):
        return y - 1.0001 * out


class FreeBuffer(nn.Linear):
    """Its running mean is a plain tensor."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) - self.mean


class Hidden(nn.Linear):
    """A BatchNorm in an attribute of an object, where the engine does not search."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.settings = Settings(nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        return super().forward(self.settings.norm(x))


class Settings:
    def __init__(self, norm):
        self.norm = norm


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class BehindAutograd(nn.Linear):
    def forward(self, x):
        x.data.mul_(0.5)
        return super().forward(x)


def reading_its_target(shared):
    """f stores its input in a dict, and g reads it from there: it is g's target."""
    linear, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def f(x2):
        shared["x2"] = x2
        return linear(x2)

    return f, lambda y1: other(y1) * shared["x2"].tanh()


FAULTS = {
    "a cache that grows": (
        lambda: stack_of(Cache),
        "determinism",
        "a cache that grows on each call",
        ".f.cache` has",
    ),
    "a tensor that grows": (
        lambda: stack_of(GrowingTensor),
        "determinism",
        "a cache that grows on each call",
        ".f.past` grew",
    ),
    "Python's random": (
        lambda: stack_of(lambda: Draws(random.random)),
        "determinism",
        "draws from Python's random",
        "with torch",
    ),
    "NumPy's random": (
        lambda: stack_of(lambda: Draws(lambda: float(numpy.random.rand()))),
        "determinism",
        "draws from NumPy's generator",
        "with torch",
    ),
    "a NumPy generator": (
        lambda: stack_of(OwnGenerator),
        "determinism",
        ".f.generator` drew",
        "torch.Generator",
    ),
    "time": (
        lambda: stack_of(lambda: Timed(WIDTH, WIDTH)),
        "determinism",
        "depends on time",
        "call it once",
    ),
    "a global counter": (
        lambda: stack_of(lambda: Global(WIDTH, WIDTH)),
        "determinism",
        "COUNTER`",
        "is_recomputing",
    ),
    "a wrong inverse": (
        lambda: stack_of(mlp, coupling=WrongInverse()),
        "coupling",
        "WrongInverse",
        "solve forward for x",
    ),
    "an inverse that is nearly right": (
        lambda: stack_of(mlp, coupling=AlmostRight()),
        "coupling",
        "AlmostRight.inverse(y, out) is not the inverse",
        "solve forward for x",
    ),
    "an input changed in place": (
        lambda: stack_of(lambda: InPlace(WIDTH, WIDTH)),
        "input",
        "changed its input in place",
        "out-of-place",
    ),
    "an input changed behind autograd's back": (
        lambda: stack_of(lambda: BehindAutograd(WIDTH, WIDTH)),
        "input",
        "through .data",
        "x.clone()",
    ),
    "a target read through a closure": (
        lambda: rg.ReversibleSequence([reading_its_target(shared) for shared in [{}] * 4]),
        "determinism",
        "reads its own target",
        "shared['x2']",
    ),
}


@pytest.mark.filterwarnings("ignore::retrograd.DriftWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    build, kind, *texts = FAULTS[fault]
    report = rg.check(build(), example())
    assert not report.ok
    text = text_of(report, kind)
    assert text, str(report)
    for expected in texts:
        assert expected in text, str(report)
    # It comes first, because the other problems follow from it.
    assert report.problems[0].kind == kind, str(report)


def test_bfloat16_streams_at_depth_64():
    blocks = [(Attention(32, 4), FeedForward(32)) for _ in range(64)]
    stack = rg.ReversibleSequence(blocks, stream_dtype=torch.bfloat16).bfloat16()
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    report = rg.check(stack, x)
    assert kinds(report) & {"drift", "gradients"}
    text = str(report.problems[0])
    assert "the streams are bfloat16" in text
    assert "leave out stream_dtype" in text
    stack.stream_dtype = None
    assert rg.check(stack, x).ok


def test_a_choice_that_rounding_changes():
    class Top(nn.Module):
        """A threshold on digits that rounding changes."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x) * (torch.frac(x * 1e6) > 0.5)

    report = rg.check(stack_of(Top, blocks=8), example(64, WIDTH))
    assert "gradients" in kinds(report)
    assert "exact=True" in str(report)
    assert rg.check(stack_of(Top, blocks=8, exact=True), example(64, WIDTH)).ok


def test_faults_of_many_blocks_are_one_problem():
    report = rg.check(stack_of(lambda: Draws(random.random), blocks=16), example())
    assert [problem.kind for problem in report.problems].count("determinism") == 1
    assert "(and 15 more)" in text_of(report, "determinism")


# --- wrong arguments


def test_a_network_without_stacks():
    report = rg.check(nn.Linear(WIDTH, WIDTH), example())
    assert kinds(report) == {"nothing"}


def test_wrong_arguments_raise():
    with pytest.raises(TypeError, match="a module or a list of"):
        rg.check(3, example())
    with pytest.raises(ValueError, match="nothing to compare"):
        rg.check(stack_of(mlp).requires_grad_(False), example())
    with pytest.raises(ValueError, match=r"call the network once before"):
        rg.check(stack_of(lambda: nn.LazyLinear(WIDTH)), example())


def test_errors_of_the_network_itself_pass_through():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        rg.check(stack_of(lambda: Fails(WIDTH, WIDTH)), example())


# --- putting everything back


class Everything(nn.Module):
    """All kinds of state, changed by every call."""

    shared = 0

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.cache = []
        self.table = {}
        self.kinds = set()
        self.free = torch.zeros(WIDTH)
        self.count = 0
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = numpy.random.default_rng(0)

    def forward(self, x):
        type(self).shared += 1
        self.count += 1
        self.late = self.count
        self.cache.append(self.count)
        self.table[self.count] = self.kinds.add(self.count)
        self.free += 1
        self.numpy.random()
        random.random()
        numpy.random.rand()
        return self.linear(self.drop(self.norm(x))) * torch.rand(WIDTH, generator=self.generator)


def state_of(network):
    block = network.blocks[0].f
    return {
        "state dict": {name: value.clone() for name, value in network.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in network.parameters()],
        "attributes": [
            Everything.shared,
            block.count,
            list(block.cache),
            list(block.table),
            list(block.kinds),
            hasattr(block, "late"),
        ],
        "free": block.free.clone(),
        "random": [
            torch.get_rng_state(),
            block.generator.get_state(),
            repr(block.numpy.bit_generator.state),
            random.getstate(),
            repr(numpy.random.get_state()),
        ],
        "versions": [t._version for t in network.parameters()],
        "stack": [network.memory, network._cache, network.training, torch.is_grad_enabled()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()],
    }


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Budget("80%")])
def test_everything_is_put_back(memory):
    network = rg.ReversibleSequence([(Everything(), mlp()) for _ in range(3)], memory=memory)
    network(example()).sum().backward()
    x = example().requires_grad_()
    before = state_of(network)
    identities = [id(t) for t in (*network.parameters(), *network.buffers())]
    report = rg.check(network, x)
    assert not report.ok  # it has every fault
    after = state_of(network)
    for what in ("state dict", "gradients", "free"):
        torch.testing.assert_close(after[what], before[what], rtol=0, atol=0, msg=what)
    for what in ("attributes", "versions", "stack", "hooks"):
        assert after[what] == before[what], what
    for a, b in zip(after["random"], before["random"]):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    assert identities == [id(t) for t in (*network.parameters(), *network.buffers())]
    assert x.grad is None


def test_a_graph_of_the_caller_stays_valid():
    def gradients(with_check):
        torch.manual_seed(0)
        network = stack_of(Norm)
        loss = network(example()).square().sum()
        if with_check:
            assert rg.check(network, example()).ok
        loss.backward()
        return [p.grad for p in network.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


def test_an_error_leaves_everything_as_it_was():
    network = stack_of(Norm)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        rg.check(nn.Sequential(network, nn.Linear(WIDTH + 1, WIDTH)), example())
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert observers == []


# --- the report


@pytest.fixture(scope="module")
def reports():
    torch.manual_seed(0)
    return rg.check(stack_of(Norm), example()), rg.check(stack_of(Cache), example())


def test_it_prints_as_a_table(reports):
    good, bad = map(str, reports)
    assert good.startswith("retrograd check: ok.")
    for title in (
        "activations",
        "time of a step",
        "calls of functions",
        "gradients",
        "drift",
        "determinism",
        "buffers",
        "random",
    ):
        assert title in good
    assert "WRONG" not in good and "WRONG" in bad
    assert "Cause:" in bad and "Fix:" in bad


def test_it_serialises(reports):
    for report in reports:
        data = json.loads(report.to_json())
        assert data["ok"] == report.ok
        assert len(data["problems"]) == len(report.problems)
    assert json.loads(reports[0].to_json())["peak"]["kept"] == reports[0].peak.kept


def test_it_shows_in_a_notebook(reports):
    pages = [report._repr_html_() for report in reports]
    assert "<table" in pages[0] and "<svg" in pages[0]
    assert "a cache that grows" in pages[1]
    page = rg.Report(problems=(Problem("state", "<i>", "<i>", "", ""),))._repr_html_()
    assert "<i>" not in page and "&lt;i&gt;" in page


def test_it_draws(reports, tmp_path):
    for i, report in enumerate(reports):
        figure = report.plot(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 5000
        assert len(figure.axes) == 2


def test_figures_are_those_of_measure():
    """Bytes and calls, as `rg.measure` counts them."""
    stack, x = stack_of(mlp, blocks=8), example(32, WIDTH)
    report = rg.check(stack, x)
    weight = torch.ones(32, WIDTH)
    measured = rg.measure.step(lambda: (stack(x) * weight).sum().backward(), stack)
    assert {name: again for name, (_, again) in report.evaluations.items()} == measured.evaluations
    assert all(kept == 1 for kept, _ in report.evaluations.values())
    assert report.peak.reversed < report.peak.kept
    assert report.peak.reversed == pytest.approx(measured.activation_bytes, rel=0.3)
