"""Promise 12, from the inside: whatever changes between forward and backward is put back for the
recompute, or raises.
"""

import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from benchmarks.cases import Attention, FeedForward
from tests import zoo

MODES = ["reverse", "reverse-all"]


def stack_of(make, memory, depth=3):
    torch.manual_seed(3)
    return rg.ReversibleSequence(
        [(make(), make()) for _ in range(depth)], memory=zoo.MEMORY[memory]
    ).double()


def rows(n=6):
    torch.manual_seed(4)
    return torch.randn(n, 4, dtype=torch.float64, requires_grad=True)


def agrees(make, memory, between=lambda stack: None, run=lambda stack, x: stack(x)):
    """Gradients after `between` (called between forward and backward) are those of plain autograd,
    which does not care.
    """
    results = []
    for mode in ("keep", memory):
        stack, x = stack_of(make, mode), rows()
        wanted = [x, *stack.parameters()]
        y = run(stack, x)
        between(stack)
        wanted = [tensor for tensor in wanted if tensor.requires_grad]
        results.append(
            [
                g
                for g in torch.autograd.grad(zoo.loss(y), wanted, allow_unused=True)
                if g is not None
            ]
        )
    return zoo.worst(results[1], results[0]) < 1e-9


@pytest.mark.parametrize("memory", MODES)
def test_functional_call_outside_a_transform(memory):
    """As in meta-learning: the parameters are there only while forward runs."""
    results = []
    for mode in ("keep", memory):
        stack, x = stack_of(lambda: zoo.Mix(4), mode), rows()
        fast = {
            name: (p * 1.5 + 0.1).detach().requires_grad_() for name, p in stack.named_parameters()
        }
        y = torch.func.functional_call(stack, fast, (x,))
        results.append(list(torch.autograd.grad(zoo.loss(y), [x, *fast.values()])))
    assert zoo.worst(*results) < 1e-9


def assign(stack):
    stack.load_state_dict(
        {name: value * 2 for name, value in stack.state_dict().items()}, assign=True
    )


def replace(stack):
    stack.blocks[1].f.up = nn.Linear(4, 8).double()


def freeze(stack):
    stack.requires_grad_(False)


def evaluate(stack):
    stack.eval()


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("between", [assign, replace, freeze, evaluate])
def test_what_is_replaced_or_switched_after_forward_does_not_matter(memory, between):
    assert agrees(lambda: zoo.Mix(4), memory, between)


class Buffered(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((size, 4), 2.0))

    def forward(self, x):
        return self.linear(x) * self.scale[: len(x)]


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("size", [6, 10_000])
def test_a_constant_buffer_replaced_after_forward(memory, size):
    def between(stack):
        stack.blocks[0].f.scale = torch.zeros(size, 4, dtype=torch.float64)

    assert agrees(lambda: Buffered(size), memory, between)


@pytest.mark.parametrize("size", [6, 10_000])
def test_a_constant_buffer_edited_after_forward_raises(size):
    stack = stack_of(lambda: Buffered(size), "reverse")
    y = stack(rows())
    stack.blocks[0].f.scale.mul_(2)
    with pytest.raises(
        rg.InPlaceError,
        match=r"(?s)update 0 of 6 \(blocks.0.f\) needs buffer 'scale'.*assign a new tensor",
    ):
        y.sum().backward()


class LateBuffer(nn.Module):
    """Registers or fills a buffer on its first call, and then uses it."""

    def __init__(self, declared):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fresh = not declared
        if declared:
            self.register_buffer("first", None)

    def forward(self, x):
        if getattr(self, "first", None) is None:
            y = self.linear(x)
            self.register_buffer("first", x.detach().mean(0))
            return y * 2
        return self.linear(x) + self.first


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("declared", [False, True])
def test_a_buffer_that_the_function_itself_makes(memory, declared):
    assert agrees(lambda: LateBuffer(declared), memory)
    stack = stack_of(lambda: LateBuffer(declared), memory)
    stack(rows()).sum().backward()
    assert all(block.f.first is not None for block in stack.blocks)


def test_batch_norm_in_eval_and_then_in_train_before_backward():
    """Plain autograd saves the statistics without noticing that the second forward changes them;
    ours does not.
    """
    stack, x = (
        stack_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "reverse-all"),
        rows(),
    )
    stack(x)  # statistics that are not the initial ones
    stack.eval()
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    y = stack(x)
    stack.train()
    stack(x * 3)
    assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9


HIDDEN = {
    "lambda": lambda module: lambda x: module(x),
    "default argument": lambda module: lambda x, module=module: module(x),
    "partial": lambda module: functools.partial(torch.func.functional_call, module, {}),
    "method": lambda module: module.forward,
    "nested": lambda module: (lambda inner: lambda x: inner(x))(lambda x: module(x)),
}


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_modules_inside_other_callables_are_replayed_too(memory, hidden):
    results = []
    for mode in ("keep", memory):
        torch.manual_seed(3)
        modules = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)).double()
            for _ in range(6)
        ]
        fns = [HIDDEN[hidden](module) for module in modules]
        stack, x = rg.ReversibleSequence(zip(fns[::2], fns[1::2]), memory=zoo.MEMORY[mode]), rows()
        y = stack(x)
        for module in modules:
            module.eval()
        gradients = torch.autograd.grad(
            zoo.loss(y), [x, *(p for m in modules for p in m.parameters())]
        )
        results.append([*gradients, *(b.double() for m in modules for b in m.buffers())])
    assert zoo.worst(*results) < 1e-9


@pytest.mark.parametrize("memory", MODES)
def test_a_module_in_a_keyword_argument(memory):
    class Uses(nn.Linear):
        def forward(self, x, norm):
            return norm(super().forward(x))

    results = []
    for mode in ("keep", memory):
        stack, x, norm = stack_of(lambda: Uses(4, 4), mode), rows(), nn.BatchNorm1d(4).double()
        results.append(
            [*zoo.gradients(stack, stack(x, norm=norm), x), *(b.double() for b in norm.buffers())]
        )
    assert zoo.worst(*results) < 1e-9


@pytest.mark.parametrize("memory", MODES)
def test_a_generator_of_the_modules_own(memory):
    class Own(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.noise = torch.Generator().manual_seed(1)

        def forward(self, x):
            return super().forward(x) * torch.rand(x.shape, dtype=x.dtype, generator=self.noise)

    assert agrees(Own, memory)


# --- functions that cannot run again: kept


class ActNorm(nn.Module):
    """Initialises its own parameters from the first batch."""

    def __init__(self):
        super().__init__()
        self.bias, self.ready = nn.Parameter(torch.zeros(4)), False

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.ready = True
        return (x + self.bias).tanh()


@pytest.mark.parametrize("memory", MODES)
def test_a_function_that_edits_its_own_parameters_is_kept(memory):
    assert agrees(ActNorm, memory)
    stack, x = stack_of(ActNorm, memory), rows()
    y = stack(x)
    for _ in range(2):  # kept for more than one backward
        zoo.loss(y).backward(retain_graph=True)
    assert all(block.f.bias.grad is not None for block in stack.blocks)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("memory", MODES)
def test_lazy_modules(memory):
    results = []
    for mode in ("keep", memory):
        torch.manual_seed(3)
        stack = rg.ReversibleSequence(
            [(nn.LazyLinear(4), nn.LazyLinear(4)) for _ in range(3)], memory=zoo.MEMORY[mode]
        )
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            y = stack(x)
        results.append(zoo.gradients(stack, y, x))
    assert zoo.worst(*results) < 1e-5


# --- what surrounds a stack


@pytest.mark.parametrize("memory", MODES)
def test_the_plan_does_not_depend_on_gradients_when_forward_may_run_again(memory):
    """Checkpoint runs the whole stack again, after zero_grad() or another backward."""

    def nested():
        inner = rg.ReversibleSequence([(zoo.Mix(4), zoo.Mix(4)) for _ in range(3)])
        return inner

    for make, run in (
        (lambda: zoo.Mix(4), lambda stack, x: checkpoint(stack, x, use_reentrant=False)),
        (nested, lambda stack, x: stack(x)),
    ):
        stack, x = stack_of(make, memory), rows()
        expected = zoo.gradients(stack, run(stack, x), x)
        zoo.loss(stack(x)).backward()
        x.grad = None
        y = run(stack, x)
        stack.zero_grad(set_to_none=True)
        assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9
        y = run(stack, x)
        zoo.loss(stack(x)).backward()
        assert zoo.worst(zoo.gradients(stack, y, x), expected) < 1e-9


@pytest.mark.parametrize("memory", MODES)
def test_an_edit_between_two_backwards_raises(memory):
    """Of a stream that no update writes, so that it is the caller's own tensor all along."""
    torch.manual_seed(0)
    net = rg.Reversible(
        [rg.Update("a", zoo.Mix(4), ("b",)) for _ in range(4)], memory=zoo.MEMORY[memory]
    )
    out = net({"a": torch.randn(2, 4), "b": torch.randn(2, 4)})
    zoo.loss(out["a"]).backward(retain_graph=True)
    out["b"].add_(1)
    with pytest.raises(RuntimeError, match="edited in place|modified by an inplace operation"):
        zoo.loss(out["a"]).backward()


def test_a_hook_on_a_block_that_edits_the_state_it_is_given():
    stack, x = stack_of(lambda: zoo.Mix(4), "reverse"), rows()

    def edit(module, args):
        args[0]["x1"] = (args[0]["x1"][0] * 2,)

    stack.blocks[1].register_forward_pre_hook(edit)
    with pytest.raises(rg.RetrogradError, match="a hook on the block replaced stream 'x1'"):
        stack(x)


def test_an_activation_stored_in_recompute_cannot_be_used_afterwards():
    class Stores(zoo.Mix):
        def forward(self, x, context=None):
            self.seen = self.up(x).tanh()
            return super().forward(x)

    stack, x = stack_of(lambda: Stores(4), "reverse-all"), rows()
    zoo.loss(stack(x)).backward()
    with pytest.raises(rg.RetrogradError, match=r"(?s)stored while it was recomputed.*rg.WithAux"):
        stack.blocks[0].f.seen.square().sum().backward()


def test_a_dict_may_come_back_in_another_order():
    stack = rg.ReversibleSequence(
        [(lambda x: {"b": x["b"].sin(), "a": x["a"].cos()}, lambda x: x)] * 3
    )
    x = {"a": torch.randn(2, requires_grad=True), "b": torch.randn(3, requires_grad=True)}
    y = stack(x)
    assert y["a"].shape == (2,)
    zoo.loss(y).backward()


def test_a_coupling_that_edits_in_place_is_refused():
    class Greedy(rg.Coupling):
        def forward(self, x, out):
            return x + out

        def inverse(self, y, out):
            return y.sub_(out)

    stack = rg.ReversibleSequence([(torch.sin, torch.cos)] * 2, coupling=Greedy())
    with pytest.raises(rg.CouplingError, match=r"coupling Greedy, whose inverse edits y in place"):
        stack(torch.randn(3, requires_grad=True))


def test_a_valid_coupling_is_not_suspected():
    class Lerp(rg.Coupling):
        def forward(self, x, out):
            return torch.lerp(x, out, 0.3)

        def inverse(self, y, out):
            return (y - 0.3 * out) / 0.7

    for scale in (0.0, 1e-6, 1.0, float("nan")):
        x = torch.full((3,), scale, requires_grad=True)
        stack = rg.ReversibleSequence(
            [(torch.sin, torch.exp)] * 2, coupling=Lerp(), streams=rg.AtRest()
        )
        stack(x).sum().backward()


def test_export_while_gradients_are_on():
    stack = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    x = torch.randn(2, 4)
    exported = torch.export.export(stack, (x,), strict=False).module()
    assert torch.allclose(exported(x), stack(x))


def test_copies_and_pickles():
    import io

    stack, x = stack_of(lambda: zoo.Mix(4), "reverse"), rows()
    expected = zoo.gradients(stack, stack(x), x)
    buffer = io.BytesIO()
    torch.save(stack, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(stack), torch.load(buffer, weights_only=False)):
        assert zoo.worst(zoo.gradients(other, other(x), x), expected) == 0.0


def test_meta_tensors():
    with torch.device("meta"):
        stack = rg.ReversibleSequence([(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(3)])
        stack(torch.empty(3, 4, requires_grad=True)).sum().backward()
    assert stack.blocks[0].g.weight.grad.is_meta


@pytest.mark.parametrize("memory", MODES)
def test_functions_that_save_nothing_in_a_retained_graph(memory):
    """Found by fuzzing: nothing asks for them, so nothing keeps a state for them; and in a second
    backward none is needed.
    """

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + self.bias

    results = []
    for mode in ("keep", memory):
        torch.manual_seed(0)
        stack, x = (
            rg.ReversibleSequence(
                [(zoo.Mix(4), Shift()), (Shift(), Shift()), (Shift(), Shift())]
            ).double(),
            rows(),
        )
        stack.memory = zoo.MEMORY[mode]
        y = stack(x)
        for _ in range(3):
            gradients = torch.autograd.grad(
                zoo.loss(y), [x, *stack.parameters()], retain_graph=True
            )
        results.append(list(gradients))
    assert zoo.worst(*results) < 1e-9


# --- what cannot be replayed is noticed where the walk arrives


class Counter(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Hidden(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x) * random.random()


def louder(stack):
    for module in stack.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize(
    ("make", "between"),
    [
        (lambda: Counter(), lambda stack: None),
        (lambda: Hidden(), lambda stack: None),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), louder),
        (lambda: nn.Linear(4, 4), lambda stack: stack.blocks[0].g.weight.data.mul_(2)),
    ],
    ids=["counter", "python-random", "dropout-p", "data-edit"],
)
@pytest.mark.parametrize("verify", ["first", "never"])
def test_state_outside_the_modules_raises(memory, make, between, verify):
    stack, x = stack_of(make, memory), rows()
    stack.verify = verify
    y = stack(x)
    between(stack)
    place = r"update \d of \d \([a-z.0-9]+\)"
    message = {
        "first": f"{place} did something else when it ran again in backward",
        "never": f"the walk back to {place} did not arrive where forward was: stream 'x\\d'",
    }
    with pytest.raises(rg.RecomputeError, match=message[verify]):
        zoo.loss(y).backward()


def test_rounding_that_grew_beyond_use_raises_too():
    stack, x = zoo.Case("own", "mean", "tensor", "reverse").build(depth=64, dtype=torch.float32)
    y = stack(x)
    with (
        pytest.warns(rg.DriftWarning),
        pytest.raises(rg.RecomputeError, match=r"(?s)or rounding grew on the way.*exact=True"),
    ):
        zoo.loss(y).backward()


def test_healthy_rounding_does_not():
    for dtype in (torch.float32, torch.float64):
        stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build(depth=256, dtype=dtype)
        zoo.loss(stack(x)).backward()


@pytest.mark.parametrize("narrow", ["autocast", "everything"])
def test_nor_does_bfloat16_in_a_deep_transformer(narrow):
    """Rebuilt streams drift, but stay well within the limit: it is for what went wrong, not for
    rounding.
    """
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(Attention(32, 4), FeedForward(32)) for _ in range(128)])
    x = torch.randn(2, 16, 32)
    if narrow == "everything":
        stack, x = stack.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow == "autocast"):
        y = stack(x)
    y.float().square().mean().backward()
