"""`rg.check` as adviser: what is not wrong, but could be better; progress; converted models."""

from __future__ import annotations

import io
import json
import random
import sys

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.checking import Problem
from retrograd.checking.progress import Progress
from retrograd.core.private import surrounding_hooks
from tests import zoo
from tests.test_check import WIDTH, example, mlp, stack_of


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def advice(report, kind):
    """The advice of this kind, as text."""
    return "\n".join(str(one) for one in report.advice if one.kind == kind)


# --- functions that contain their own skip


class Skip(nn.Module):
    """f(x) = post(x + g(pre(x)))"""

    def __init__(self, g=mlp, pre=nn.Identity, post=nn.Identity):
        super().__init__()
        self.g = g()
        self.pre = pre()
        self.post = post()

    def forward(self, x):
        return self.post(x + self.g(self.pre(x)))


class Block(nn.Module):
    """A residual block of convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        return (x + self.norm(self.conv(x))).relu()


def encoder_layer(norm_first):
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, norm_first=norm_first, batch_first=True)


def closure(dtype):
    linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    return lambda x: x + linear(x).tanh()


def norm():
    return nn.LayerNorm(WIDTH)


IMAGE = (2, WIDTH, 5, 5)
TOKENS = (2, 5, WIDTH)
WITH_SKIP = {
    "x + g(x)": (lambda dtype: Skip().to(dtype), TOKENS),
    "x + g(norm(x))": (lambda dtype: Skip(pre=norm).to(dtype), TOKENS),
    "norm(x + g(x))": (lambda dtype: Skip(post=norm).to(dtype), TOKENS),
    "gelu(x + g(x))": (lambda dtype: Skip(post=nn.GELU).to(dtype), TOKENS),
    "a closure": (closure, TOKENS),
    "a pre-norm transformer layer": (lambda dtype: encoder_layer(True).to(dtype), TOKENS),
    "a post-norm transformer layer": (lambda dtype: encoder_layer(False).to(dtype), TOKENS),
    "a residual block": (lambda dtype: Block().to(dtype), IMAGE),
}


@pytest.mark.parametrize("name", WITH_SKIP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_with_a_skip_of_its_own(name, dtype):
    build, shape = WITH_SKIP[name]
    pairs = [(build(dtype), build(dtype)) for _ in range(2)]
    report = rg.check(pairs, example(*shape).to(dtype))
    text = advice(report, "skip")
    assert "blocks.0.f (and 3 more): contains a skip of its own" in text, str(report)
    assert "rg.Residual(layers, skip=True)" in text and "rg.convert(model)" in text
    assert report.ok, str(report)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x * self.linear(x).sigmoid()


class GatedNorm(Gate):
    """Without its weights, it is half of a norm."""

    def __init__(self):
        super().__init__()
        self.norm = norm()

    def forward(self, x):
        return self.norm(x) * self.linear(x).sigmoid()


class Modulated(GatedNorm):
    """Without its weights, it is a norm."""

    def forward(self, x):
        return self.norm(x) * (1 + self.linear(x)) + self.linear(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)),
            *(nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 1)),
        )


def identity():
    linear = nn.Linear(WIDTH, WIDTH)
    nn.init.eye_(linear.weight)
    return linear


WITHOUT_SKIP = {
    "an mlp": (mlp, TOKENS),
    "a linear layer": (lambda: nn.Linear(WIDTH, WIDTH), TOKENS),
    "the identity matrix": (identity, TOKENS),
    "a norm": (norm, TOKENS),
    "a gate": (Gate, TOKENS),
    "a gated norm": (GatedNorm, TOKENS),
    "a norm that is modulated": (Modulated, TOKENS),
    "attention": (Attention, TOKENS),
    "convolutions": (Convolutions, IMAGE),
    "no weights": (lambda: torch.tanh, TOKENS),
    "dropout": (lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), TOKENS),
    "a stack": (lambda: stack_of(mlp, blocks=2), TOKENS),
}


@pytest.mark.parametrize("name", WITHOUT_SKIP)
def test_ordinary_functions_have_no_skip(name):
    build, shape = WITHOUT_SKIP[name]
    report = rg.check(stack_of(build, build, blocks=2), example(*shape).requires_grad_())
    assert not advice(report, "skip"), str(report)


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_the_zoo_needs_no_advice_on_functions(case):
    stack, x = case.build(dropout=0.1)[:2]
    report = rg.check(stack, x)
    assert report.ok
    assert {one.kind for one in report.advice} <= {"memory"}, str(report)


def test_a_residual_network_that_takes_whole_layers_is_fine():
    layers = [Skip() for _ in range(4)]
    report = rg.check(rg.Residual(layers, skip=True), example())
    assert report.ok and not advice(report, "skip"), str(report)
    report = rg.check(rg.Residual(layers, skip=False), example())
    assert "functions.0 (and 3 more)" in advice(report, "skip"), str(report)


def test_weights_are_put_back_after_the_search_for_skips():
    stack = stack_of(Skip)
    before = [(p.data_ptr(), p._version, p.clone()) for p in stack.parameters()]
    rg.check(stack, example())
    for (address, version, value), p in zip(before, stack.parameters()):
        assert (p.data_ptr(), p._version) == (address, version)
        assert torch.equal(p, value)


# --- masks that flip


class Large(nn.Module):
    """Its output is 100, so that undoing it rounds its target to a grid of 2 ** -17."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, 100.0)

    def forward(self, x):
        return self.linear(x)


VALUE = 0.1
REBUILT = (torch.tensor(VALUE) + 100 - 100).item()  # what undoing `Large` makes of it
BETWEEN = (VALUE + REBUILT) / 2


class Kink(nn.Module):
    """Its kink is between a value of the stream and the rebuilt value."""

    def __init__(self, kink):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.kink = kink

    def forward(self, x):
        return self.kink(self.linear(x) - BETWEEN) / 1e3


def below_and_above(x):
    return torch.where(x > 0, x, -x)


def pooled(x):
    """The larger one of each value and 0, by max-pooling."""
    pairs = torch.stack([x, torch.zeros_like(x)], -1)
    return torch.nn.functional.max_pool1d(pairs, 2)[..., 0]


KINKS = {
    "relu": torch.relu,
    "leaky_relu": lambda x: nn.functional.leaky_relu(x, 0.1),
    "clamp": lambda x: x.clamp(0.0, 1.0),
    "hardtanh": lambda x: nn.functional.hardtanh(x, 0.0, 1.0),
    "abs": torch.abs,
    "gt": below_and_above,
    "max_pool2d_with_indices": pooled,
}


def kinked_stack(kink, **options):
    return rg.ReversibleSequence([(Kink(kink), Large()), (mlp(), mlp())], **options)


def kinked_input(rows=4):
    """One value in 4 * rows lies at the kink."""
    x = torch.full((rows, WIDTH), 0.5)
    x[0, 0] = VALUE
    return x


def test_undoing_rounds_across_the_kink():
    assert min(VALUE, REBUILT) < BETWEEN < max(VALUE, REBUILT)


@pytest.mark.parametrize("name", KINKS)
def test_a_mask_that_flips_is_named(name):
    """A value at a kink has another gradient when its rebuilt input is on the other side."""
    report = rg.check(kinked_stack(KINKS[name]), kinked_input())
    assert report.masks["blocks.0.f"][0] == 1, str(report)
    assert max(report.gradients.values()) > 0.01
    (problem,) = report.problems
    assert problem.kind == "gradients"
    assert "1 of " in problem.cause and f"({name})" in problem.cause
    assert "blocks.0.f" in problem.cause and "exact=True" in problem.fix
    assert "1 flipped in recompute" in str(report)
    report = rg.check(kinked_stack(KINKS[name], exact=True), kinked_input())
    assert report.ok and not advice(report, "masks"), str(report)
    assert report.masks["blocks.0.f"][0] == 0


def test_a_mask_that_flips_without_much_effect_is_advice():
    report = rg.check(kinked_stack(torch.relu), kinked_input(rows=100_000))
    assert report.ok, str(report)
    text = advice(report, "masks")
    assert "blocks.0.f: 1 of" in text and "masks flipped in recompute" in text
    assert "Gradients are at most" in text and "exact=True" in text


def test_masks_that_stay_need_no_advice():
    def relu():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    report = rg.check(stack_of(relu), example())
    assert report.ok and not advice(report, "masks")
    assert report.masks["blocks.0.f"] == (0, example().numel())
    assert "masks, signs and indices: the same in recompute" in str(report)


# --- half precision


def test_many_blocks_under_autocast():
    x = example(16, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        report = rg.check(stack_of(mlp, blocks=16), x)
        assert report.ok, str(report)
        text = advice(report, "precision")
        assert "16 blocks in half precision: rebuilt streams are up to" in text, str(report)
        assert "exact=True" in text
        for options in ({"exact": True}, {"memory": rg.Anchor(every=4)}, {"memory": rg.Keep()}):
            assert not advice(rg.check(stack_of(mlp, blocks=16, **options), x), "precision")
        assert not advice(rg.check(stack_of(mlp, blocks=12), x), "precision")
    assert not advice(rg.check(stack_of(mlp, blocks=16), x), "precision")


def test_bfloat16_streams():
    options = {"stream_dtype": torch.bfloat16}
    stack = stack_of(mlp, blocks=13, **options).bfloat16()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(0.1)
    report = rg.check(stack, example(16, WIDTH).bfloat16())
    assert report.ok, str(report)
    assert "the streams are bfloat16" in advice(report, "precision"), str(report)
    assert "leave out stream_dtype" in advice(report, "precision")


# --- memory


def wide(width=32):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def wide_stack(blocks, **options):
    return rg.ReversibleSequence([(wide(), wide()) for _ in range(blocks)], **options)


def test_reversal_that_saves_bytes_needs_no_advice():
    report = rg.check(wide_stack(6), example(64, 32))
    assert report.ok and not report.advice, str(report)
    assert "advice" not in str(report).lower()


def test_one_block_saves_nothing():
    stack = rg.ReversibleSequence([(wide(), torch.sin)])
    text = advice(rg.check(stack, example(64, 32)), "memory")
    assert "reversal saves nothing here" in text and "one block" in text
    assert "memory=rg.Keep()" in text


def test_a_large_head_leaves_nothing_to_save():
    network = nn.Sequential(
        wide_stack(2), nn.Linear(32, 4096), nn.GELU(), nn.GELU(), nn.Softmax(-1)
    )
    text = advice(rg.check(network, example(64, 32)), "memory")
    assert "outside of the stacks" in text, text


def test_frozen_functions_leave_nothing_to_save():
    stack = wide_stack(4).requires_grad_(False)
    network = nn.Sequential(stack, nn.Linear(32, 32))
    text = advice(rg.check(network, example(64, 32)), "memory")
    assert "all functions are frozen" in text, text


def test_a_budget_that_keeps_everything():
    stack = wide_stack(4, memory=rg.Budget("1 GiB"))
    text = advice(rg.check(stack, example(64, 32)), "memory")
    assert "memory=Budget" in text and "keeps nearly everything" in text, text


def test_streams_as_large_as_what_is_saved():
    stack = stack_of(lambda: torch.sin, lambda: torch.neg, blocks=2)
    report = rg.check(stack, example(64, 32).requires_grad_())
    assert "reversal saves nothing here" in advice(report, "memory"), str(report)


# --- caches in keyword arguments


class KeysAndValues(nn.Linear):
    """Attends to all inputs in a cache."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, cache):
        cache.append(x.detach())
        return super().forward(torch.stack(list(cache)).sum(0))


class Cache:
    def __init__(self):
        self.items = []

    def append(self, item):
        self.items.append(item)

    def __iter__(self):
        return iter(self.items)


@pytest.mark.filterwarnings("ignore::retrograd.DriftWarning")
@pytest.mark.parametrize("cache", [list, Cache])
def test_a_cache_in_a_keyword_argument_is_named(cache):
    report = rg.check(stack_of(KeysAndValues), example(), cache=cache())
    first = report.problems[0]
    assert first.kind == "input", str(report)
    assert "changes a keyword argument: `cache" in first.what
    assert "a cache in a keyword argument" in first.cause
    assert "use_cache=False" in first.fix and "rg.WithAux" in first.fix
    assert "coupling" not in {problem.kind for problem in report.problems}


def test_a_list_that_is_only_written_to_is_fine():
    class Records(nn.Linear):
        def forward(self, x, seen):
            if not rg.is_recomputing():
                seen.append(1)
            return super().forward(x)

    report = rg.check(stack_of(lambda: Records(WIDTH, WIDTH)), example(), seen=Cache())
    assert report.ok, str(report)


# --- the determinism row


def row(report, title):
    return next(cells for cells in report.findings() if cells[0] == title)


class RaisesAgain(nn.Linear):
    def forward(self, x):
        if rg.is_recomputing():
            raise KeyError("theirs")
        return super().forward(x)


class Draws(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()


def test_the_determinism_row_does_not_contradict_itself():
    def sometimes(kind):
        return rg.ReversibleSequence([(kind(WIDTH, WIDTH), mlp()), (mlp(), mlp())])

    report = rg.check(sometimes(RaisesAgain), example())
    assert any(problem.kind == "determinism" for problem in report.problems)
    _, verdict, text = row(report, "determinism")
    assert verdict == "WRONG"
    assert "bit-identical" not in text and "not all of them returned" in text
    assert "blocks.0.f" in text
    _, verdict, text = row(rg.check(sometimes(Draws), example()), "determinism")
    assert verdict == "WRONG" and "off (blocks.0.f)" in text
    _, verdict, text = row(rg.check(sometimes(nn.Linear), example()), "determinism")
    assert verdict == "ok" and "bit-identical" in text
    problem = Problem("determinism", "blocks.0.f", "", "", "")
    report = rg.Report(problems=(problem,), determinism={"blocks.1.f": 0.0})
    assert "bit-identical" not in row(report, "determinism")[2]


@pytest.mark.filterwarnings("ignore::retrograd.DriftWarning")
def test_a_difference_is_never_ok():
    report = rg.check(stack_of(KeysAndValues), example(), cache=Cache())
    assert row(report, "determinism")[1] == "WRONG"


def test_the_buffers_row_does_not_contradict_itself():
    report = rg.Report(gradients={"w": 0.0}, buffers={"mean": 1e-9}, limit=1e-4)
    _, verdict, text = row(report, "buffers")
    assert verdict == "ok" and "not as" not in text and "1.0e-09 off (mean)" in text


# --- the reference


class WrongInRecompute(nn.Linear):
    """A fault that only recompute has."""

    def forward(self, x):
        factor = 1.5 if rg.is_recomputing() else 1.0
        return (super().forward(x) * factor).tanh()


def test_the_reference_runs_chunked_functions_as_plain_autograd():
    """Else the reference has the fault of recompute, too."""
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(rg.is_recomputing())
            return super().forward(x)

    from retrograd.checking.observers import KeepAll, StackRegistry
    from retrograd.checking.runs import Network

    chunked = rg.Chunked(Counted(WIDTH, WIDTH), chunks=2, dim=0)
    network = Network(nn.Sequential(chunked, mlp()), (example(4, WIDTH),), {})
    with KeepAll(StackRegistry(network)):
        network.step()
    assert calls == [False, False]


@pytest.mark.parametrize("place", ["in a stack", "alone"])
def test_a_fault_in_chunked_functions_is_found(place):
    def chunked():
        return rg.Chunked(WrongInRecompute(WIDTH, WIDTH), chunks=2, dim=0)

    network = stack_of(chunked, blocks=2) if place == "in a stack" else nn.Sequential(chunked())
    report = rg.check(network, example(4, WIDTH))
    found = {problem.kind for problem in report.problems}
    assert found & {"determinism", "gradients", "error"}, str(report)


def test_chunked_functions_alone_are_ok():
    network = nn.Sequential(rg.Chunked(mlp(), chunks=2, dim=0), nn.Linear(WIDTH, WIDTH))
    report = rg.check(network, example(4, WIDTH))
    assert report.ok and max(report.gradients.values()) < 1e-6, str(report)


# --- converted models


class Layer(nn.Module):
    def __init__(self, kink=torch.tanh):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kink = kink

    def forward(self, x):
        return x + self.kink(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self, layer=Layer, count=4):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


RULES = {
    "blend": {},
    "rounded": {"exact": False},
    "euler": {"rule": rg.Euler()},
    "midpoint": {"rule": rg.Midpoint()},
    "bdia": {"rule": rg.Bdia(0.25)},
}


@pytest.mark.parametrize("rule", RULES)
def test_converted_models_are_ok(rule):
    model = rg.convert(Model(), **RULES[rule])
    report = rg.check(model, example(2, 5, WIDTH))
    assert report.ok and not advice(report, "skip"), str(report)
    if "exact" not in RULES[rule]:
        assert set(report.gradients.values()) == {0.0}
    assert [stack.name for stack in report.stacks] == ["layers"]
    names = {f"layers.{i}" for i in range(4)}
    assert report.determinism.keys() == names
    assert {drift.name for drift in report.drift} <= names


class DynamicCache(type("Cache", (), {})):
    """As in Hugging Face's models, whose caches have a base class of that name."""

    def __init__(self):
        self.keys = []

    def get_seq_length(self):
        return len(self.keys)


class WithCache(Model):
    """Returns a cache that its layers fill. Converted layers get none."""

    class Caching(Layer):
        def forward(self, x, cache=None):
            if cache is not None:
                cache.keys.append(self.linear(x))
            return super().forward(x)

    def __init__(self):
        super().__init__(self.Caching)

    def forward(self, x):
        cache = DynamicCache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return {"output": self.head(x), "cache": cache}


def test_a_cache_in_the_output_is_not_compared():
    report = rg.check(rg.convert(WithCache()), example(2, 5, WIDTH))
    assert report.ok and set(report.gradients.values()) == {0.0}, str(report)


class NotesGraph(nn.Linear):
    """Notes whether autograd saves its tensors, or a stack saves numbers for them."""

    is_kept = False

    def forward(self, x):
        y = super().forward(x).tanh()
        if not rg.is_recomputing():
            type(self).is_kept = surrounding_hooks() is None
        return y


def test_other_outputs_when_reversed_are_named():
    class ReturnsMore(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(
                lambda: NotesGraph(WIDTH, WIDTH), memory=rg.Reverse(keep_last=False)
            )

        def forward(self, x):
            y = self.stack(x)
            return (y * 2, y) if self.stack.blocks[0].f.is_kept else (y,)

    report = rg.check(ReturnsMore(), example())
    assert "returns 2 tensors with gradients in plain autograd and 1" in str(report)


def test_names_are_paths_in_the_network_that_is_checked():
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), rg.convert(Model()))
    report = rg.check(network, example())
    assert [stack.name for stack in report.stacks] == ["1.layers"]
    assert "1.layers.3" in report.determinism


class Widens(Layer):
    """One of its kind changes the shape."""

    def forward(self, x):
        y = super().forward(x)
        return torch.cat((y, y), 1) if self.widens else y


def test_a_layer_that_changes_the_shape_is_an_ordinary_one():
    model = Model(Widens, count=6)
    for i, layer in enumerate(model.layers):
        layer.widens = i == 2
    report = rg.check(rg.convert(model), example(2, 5, WIDTH))
    assert report.ok and set(report.gradients.values()) == {0.0}, str(report)
    assert report.determinism.keys() == {f"layers.{i}" for i in (0, 1, 3, 4, 5)}
    assert [stack.name for stack in report.stacks] == ["layers", "layers from layers.3"]


def test_the_settings_of_converted_models_are_put_back():
    model = rg.convert(Model())
    (stack,) = rg.stacks_of(model).values()
    before = stack.precision, stack.chooses_grid
    rg.check(model, example())
    assert (stack.precision, stack.chooses_grid) == before
    model(100 * example()).sum().backward()  # the first batch, by which the grid is chosen
    assert not stack.chooses_grid


def test_a_fault_in_a_converted_model_is_named_by_its_path():
    class Noisy(Layer):
        def forward(self, x):
            return super().forward(x) * (1 + random.random())

    report = rg.check(rg.convert(Model(Noisy)), example())
    first = report.problems[0]
    assert first.kind == "determinism" and first.where.startswith("layers.")
    assert "ConvertedLayers 1" not in str(report)


def test_advice_for_a_converted_model():
    with torch.autocast("cpu", torch.bfloat16):
        model = rg.convert(Model(count=16), rg.Midpoint(), exact=False)
        report = rg.check(model, example(2, 5, WIDTH))
    assert "layers: 16 blocks in half precision" in advice(report, "precision"), str(report)


# --- the report


def test_advice_is_in_every_form_of_the_report():
    report = rg.check(stack_of(Skip), example())
    assert report.ok
    assert report.verdict().endswith("See the advice below.")
    assert "Advice 1. blocks.0.f (and 3 more): contains a skip" in str(report)
    assert "contains a skip" in report._repr_html_()
    assert json.loads(report.to_json())["advice"][0]["kind"] == "skip"


# --- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Broken(Terminal):
    def write(self, text):
        raise OSError("no space left")


def lines_of(stream):
    return stream.getvalue().split("\r")


@pytest.mark.parametrize("progress", [None, True])
def test_progress_is_one_line_on_a_terminal(progress, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert rg.check(stack_of(mlp), example(), progress=progress).ok
    written = sys.stderr.getvalue()
    assert "\n" not in written
    lines = lines_of(sys.stderr)
    steps = [line.split(",")[0] for line in lines if "step" in line]
    assert steps[0] == "retrograd check: step 1 of 20"
    assert steps[-1].endswith("20 of 20")
    assert any("masks compared" in line for line in lines)
    assert not lines[-1].strip() and not lines[-2].strip()  # cleared


def test_no_progress_elsewhere(monkeypatch):
    for stream, progress in [(io.StringIO(), None), (Terminal(), False)]:
        monkeypatch.setattr(sys, "stderr", stream)
        rg.check(stack_of(mlp), example(), progress=progress)
        assert not stream.getvalue()


def test_progress_is_cleared_after_an_error(monkeypatch):
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError("theirs")

    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError):
        rg.check(stack_of(lambda: Fails(WIDTH, WIDTH)), example())
    assert "step 1" in sys.stderr.getvalue()
    assert not lines_of(sys.stderr)[-2].strip()


@pytest.mark.parametrize("progress", [None, True])
def test_a_broken_stderr_does_not_matter(progress, monkeypatch):
    closed = Terminal()
    closed.close()
    for stream in (None, Broken(), closed, object()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert rg.check(stack_of(mlp, blocks=1), example(), progress=progress).ok


def test_a_line_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stderr", Terminal())
    line = Progress(3)
    line.enter("a long text that does not fit")
    line.advance()
    line.close()
    assert max(map(len, lines_of(sys.stderr))) < 20


def test_an_argument_of_the_network_called_progress(monkeypatch):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack_of(mlp)

        def forward(self, x, progress):
            assert progress == 0.5
            return self.stack(x) * progress

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert rg.check(Grows(), example(), progress=0.5).ok
    assert not sys.stderr.getvalue()
