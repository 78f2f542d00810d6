"""All stacks of a model: one budget for all of them, and what a step of the whole model keeps.

The oracles: measured bytes, and plain autograd.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.compat.reformer import ReversibleSequence as ReformerSequence
from retrograd.measure import LiveBytes, step


def mlp(width):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class Stages(nn.Module):
    """Three stacks of other widths, with ordinary layers between them."""

    def __init__(self, memory=rg.Reverse(), depth=4):
        super().__init__()
        self.stages = nn.ModuleList(
            rg.ReversibleSequence([(mlp(w), mlp(w)) for _ in range(depth)], memory=memory)
            for w in (16, 16, 8)
        )
        self.between = nn.Linear(16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.stages[1](self.stages[0](x))
        return self.head(self.stages[2](self.between(x)))


class Twice(nn.Module):
    """One stack that runs twice in a forward."""

    def __init__(self):
        super().__init__()
        self.stack = rg.ReversibleSequence([(mlp(16), mlp(16)) for _ in range(4)])

    def forward(self, x):
        return self.stack(self.stack(x))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = mlp(width)

    def forward(self, x):
        return x + self.mlp(x)


class Converted(nn.Module):
    """Two lists of layers, to convert."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(*[Layer(16) for _ in range(4)])
        self.between = nn.Linear(16, 8)
        self.narrow = nn.Sequential(*[Layer(8) for _ in range(4)])

    def forward(self, x):
        return self.narrow(self.between(self.wide(x)))


X = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))


def train_step(model, x=X):
    model(x).square().mean().backward()


def of_stacks(model, accumulating=False, x=X):
    """The peak of a step, less gradients and less what the ordinary layers make."""
    for _ in range(3):
        if not accumulating:
            model.zero_grad()
        train_step(model, x)
    if not accumulating:
        model.zero_grad()
    with LiveBytes() as live:
        train_step(model, x)
    gradients = 0 if accumulating else sum(p.grad.nbytes for p in model.parameters())
    return live.peak - gradients


OUTSIDE = 512 * (8 + 3) * 4  # what `between`, `head` and the loss of `Stages` keep


# --- one budget


@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("share", ["12%", "25%", "50%", "90%", "150%"])
@pytest.mark.parametrize("make", [Stages, Twice, Converted])
def test_the_peak_of_all_stacks_stays_below_it(make, share, accumulating):
    model = make()
    if make is Converted:
        rg.convert(model, rg.Euler(), exact=False)
    train_step(model)
    plan = rg.plan(model, X)
    limit = rg.Budget(share).bytes_of(plan.plain)
    rg.set_memory(model, rg.Budget(limit))
    try:
        peak = of_stacks(model, accumulating)
    except rg.BudgetError:
        assert limit < (1.2 if accumulating else 1) * plan.floor
        return
    assert peak <= limit + OUTSIDE
    if share in ("50%", "90%") and not accumulating:
        assert peak >= 0.85 * limit  # it is used


def test_more_bytes_cost_no_more_flops():
    flops = []
    for share in ("15%", "30%", "50%", "70%", "100%"):
        model = rg.set_memory(Stages(), share)
        for _ in range(2):
            train_step(model)
        flops.append(step(lambda: train_step(model), model).flops)  # noqa: B023
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1]


def test_gradients_are_those_of_plain_autograd():
    torch.manual_seed(0)
    model = Stages().double()
    plain = rg.set_memory(copy.deepcopy(model), rg.Keep())
    rg.set_memory(model, "40%")
    for _ in range(3):
        for network in (plain, model):
            network.zero_grad()
            train_step(network, X.double())
        for ours, expected in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-12)


def test_it_is_shared_outside_of_a_forward_of_the_model():
    """Where stacks are called by themselves, a forward ends when a call comes again."""
    model = rg.set_memory(Stages(), "40%")
    limit = rg.Budget("40%").bytes_of(rg.plan(model, X).plain)

    def run():
        x = model.stages[1](model.stages[0](X))
        model.head(model.stages[2](model.between(x))).square().mean().backward()

    for _ in range(3):
        model.zero_grad()
        run()
    model.zero_grad()
    with LiveBytes() as live:
        run()
    peak = live.peak - sum(p.grad.nbytes for p in model.parameters())
    assert 0.85 * limit <= peak <= limit + OUTSIDE


def test_a_new_shape_is_measured_first():
    model = rg.set_memory(Stages(), "50%")
    of_stacks(model)
    small = of_stacks(model, x=X[:256])
    limit = rg.Budget("50%").bytes_of(rg.plan(model, X[:256]).plain)
    assert 0.85 * limit <= small <= limit + OUTSIDE


def test_one_that_is_too_small_raises_in_the_first_forward():
    model = rg.set_memory(Stages(), "1 KiB")
    with pytest.raises(rg.BudgetError, match=r"1 KiB are less than the .* KiB"):
        model(X)
    rg.set_memory(model, rg.Reverse())
    train_step(model)


def test_a_forward_that_fails_is_forgotten():
    model = rg.set_memory(Stages(), "50%")
    with pytest.raises(RuntimeError):
        model.stages[2](model.stages[0](X))  # 16 wide, where 8 are expected
    assert of_stacks(model) <= rg.Budget("50%").bytes_of(rg.plan(model, X).plain) + OUTSIDE


def test_copies_and_pickles_have_a_budget_of_their_own():
    model = rg.set_memory(Stages(), "50%")
    peak = of_stacks(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        first = other.stages[0].memory
        assert first is not model.stages[0].memory
        assert all(stage.memory is first for stage in other.stages)
        assert of_stacks(other) == peak


# --- the head


class Words(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, words, loss):
        super().__init__()
        self.embedding = nn.Embedding(words, 16)
        self.stacks = nn.Sequential(
            *[rg.ReversibleSequence([(mlp(16), mlp(16)) for _ in range(4)]) for _ in range(2)]
        )
        self.out = nn.Linear(16, words)
        self.loss = loss

    def forward(self, tokens):
        return self.head(self.stacks(self.embedding(tokens)), tokens)

    def head(self, hidden, tokens):
        return self.loss(hidden, self.out.weight, self.out.bias, tokens)


def of_logits(hidden, weight, bias, targets):
    return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias), targets)


def in_chunks(hidden, weight, bias, targets):
    parts = zip(hidden.split(8), targets.split(8))
    return sum(checkpoint(of_logits, h, weight, bias, t, use_reentrant=False) for h, t in parts)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("words", "loss", "sets_peak"),
    [(1000, of_logits, True), (20, of_logits, False), (1000, in_chunks, False)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_plan_names_the_head_if_it_sets_the_peak(words, loss, sets_peak, tied):
    model = Words(words, loss)
    tokens = torch.randint(words, (256,), generator=torch.Generator().manual_seed(0))
    if tied:
        model.out.weight = model.embedding.weight
    plan = rg.plan(model, tokens)
    hidden = torch.randn(256, 16, requires_grad=True)
    with LiveBytes() as live:
        torch.autograd.grad(model.head(hidden, tokens), hidden)
    name = "embedding.weight" if tied else "out.weight"
    assert abs(plan.head.bytes - live.peak) <= 64  # numbers
    assert plan.head._replace(bytes=0) == (name, 0, sets_peak)
    assert (f"The head ({name}) sets the peak of the model" in str(plan)) == sets_peak
    assert (f"{plan.head.bytes / 2**20:.2f} MiB beside" in str(plan)) == sets_peak
    with LiveBytes() as live:
        model(tokens).backward()
    gradients = sum(p.grad.nbytes for p in model.parameters())
    at_head = plan.rows[-1].backward < live.peak  # what the figures of the plan do not explain
    assert at_head if sets_peak else live.peak - gradients < plan.peak + 256 * 16 * 4


def test_the_largest_operation_names_a_head_without_a_parameter():
    stack = rg.Residual([nn.Linear(8, 8) for _ in range(3)])
    plan = rg.plan(lambda x: (stack(x)[:, None] - stack(x)[None]).square().mean(), X[:64, :8])
    assert plan.head.name == "sub, float32[64, 64, 8]" and plan.head.sets_peak


def test_models_whose_head_cannot_be_measured():
    stack = rg.Residual([nn.Linear(16, 16) for _ in range(3)])
    assert rg.plan(stack, X).head is None  # there is none

    def train(x):
        loss = stack(x).square().mean()
        loss.backward()
        return loss

    assert rg.plan(train, X).head is None
    with torch.no_grad():
        assert rg.plan(lambda x: stack(x).detach(), X).head is None


# --- other modes


def test_only_the_last_stack_keeps_its_last_block():
    model = Stages()
    before = of_stacks(model)
    rg.set_memory(model, rg.Reverse())
    assert [stage.memory.keep_last for stage in model.stages] == [False, False, True]
    assert of_stacks(model) < 0.8 * before
    rg.set_memory(model, rg.Anchor(2))
    assert [stage.memory.keep_last for stage in model.stages] == [False, False, True]


def test_the_lists_of_a_converted_model_share_as_well():
    model = rg.convert(Converted(), rg.Midpoint())
    modes = [stack.memory.keep_last for stack in rg.stacks_of(model).values()]
    assert modes == [False, True]
    rg.convert(model, rg.Midpoint(), "50%")
    shared = {id(stack.memory) for stack in rg.stacks_of(model).values()}
    assert len(shared) == 1 and len(model._forward_pre_hooks) == 1
    rg.revert(model)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_the_systems_of_the_seeds():
    model = nn.Sequential(ReformerSequence([(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]))
    mode = rg.Keep()
    rg.set_memory(model, mode)
    assert model[0].engine.memory is mode
    rg.set_memory(model, "1 MiB")
    for _ in range(2):
        model(torch.randn(1, 2, 8)).sum().backward()


def test_setting_it_again_leaves_nothing_behind():
    model = Stages()
    for _ in range(3):
        rg.set_memory(model, "50%")
        assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    rg.set_memory(model, rg.Reverse())
    assert not model._forward_pre_hooks and not model._forward_hooks


# --- mistakes


def test_a_mode_that_one_stack_cannot_have_changes_none():
    blend = rg.Residual(
        [nn.Linear(8, 8) for _ in range(20)], rule=rg.Blend(1 / 4), memory=rg.Keep()
    )
    model = nn.Sequential(rg.Residual([nn.Linear(8, 8)]), blend)
    before = [stack.memory for stack in model]
    for mode in (rg.Reverse(), "50%"):
        with pytest.raises(ValueError, match="exact=True"):
            rg.set_memory(model, mode)
        assert [stack.memory for stack in model] == before
        assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("memory", "error", "words"),
    [
        (None, TypeError, 'a budget such as "2 GiB"'),
        (rg.Reverse, TypeError, "the class Reverse"),
        (2**30, TypeError, 'a budget such as "2 GiB"'),
        ("much", ValueError, "a share of plain autograd"),
    ],
)
def test_what_is_no_memory_mode_is_told_at_once(memory, error, words):
    stack = rg.Residual([nn.Linear(8, 8)])
    with pytest.raises(error, match=words):
        stack.memory = memory
    with pytest.raises(error, match=words):
        rg.Residual([nn.Linear(8, 8)], memory=memory)
    with pytest.raises(error, match=words):
        rg.set_memory(stack, memory)
    with pytest.raises(error, match=words):
        rg.convert(Converted(), memory=memory)


def test_a_string_is_a_budget():
    pair = (nn.Linear(8, 8), nn.Linear(8, 8))
    update = rg.Update("a", pair[0], reads=("b",))
    for stack in (
        rg.ReversibleSequence([pair], memory="25%"),
        rg.Residual(pair, memory="25%"),
        rg.Reversible([update], memory="25%"),
    ):
        assert stack.memory == rg.Budget("25%")
        stack.memory = "2 GiB"
        assert stack.memory == rg.Budget("2 GiB")


@pytest.mark.parametrize("call", [lambda m: rg.set_memory(m, "1 GiB"), lambda m: rg.plan(m, X)])
def test_a_model_without_stacks(call):
    with pytest.raises(ValueError, match=r"no stack of retrograd.*rg\.convert"):
        call(nn.Linear(16, 16))


def test_the_plan_of_one_stack_that_shares():
    model = rg.set_memory(Stages(), "50%")
    with pytest.raises(ValueError, match=r"rg\.plan\(model, \.\.\.\)"):
        model.stages[0].plan(X)


# --- the plan


@pytest.mark.parametrize("memory", [rg.Reverse(keep_last=False), rg.Keep(), "30%", "60%"])
def test_a_plan_foretells_the_peak(memory):
    model = rg.set_memory(Stages(), memory)
    plan = rg.plan(model, X)
    assert of_stacks(model) <= plan.peak + OUTSIDE
    assert of_stacks(model) >= 0.9 * plan.peak
    assert plan.floor <= plan.peak <= plan.plain


def test_a_plan_names_every_update_and_its_mode():
    plan = rg.plan(rg.set_memory(Stages(depth=2), "60%"), X)
    assert [row.name for row in plan.rows][:5] == [
        "stages.0.blocks.0.f",
        "stages.0.blocks.0.g",
        "stages.0.blocks.1.f",
        "stages.0.blocks.1.g",
        "stages.1.blocks.0.f",
    ]
    assert str(plan).startswith("Budget(limit='60%'): 12 updates, ")
    model = Stages()
    model.stages[0].memory = rg.Keep()
    assert "[Keep(), Reverse(keep_last=True)]" in str(rg.plan(model, X))


def test_a_plan_leaves_the_model_as_it_was():
    model = Stages()
    model.stages[0].blocks[0].f.append(nn.Dropout(0.5))
    model.between = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    rg.set_memory(model, "50%")
    x = X.clone().requires_grad_()
    train_step(model, x)
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    caches = [stage._cache for stage in model.stages]
    rg.plan(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    assert torch.equal(random_state, torch.get_rng_state())
    assert [stage._cache for stage in model.stages] == caches


def test_a_plan_of_a_converted_model():
    model = rg.convert(Converted(), rg.Blend(1 / 4), "50%")
    train_step(model)
    plan = rg.plan(model, X)
    assert plan.rows[0].name == "wide.0" and plan.rows[-1].name == "narrow.3"


# --- forwards that differ


class Branches(nn.Module):
    """Forwards that begin with the same stack and go on with another."""

    def __init__(self):
        super().__init__()
        depths = {"first": 6, "small": 2, "big": 6}
        for name, depth in depths.items():
            setattr(self, name, rg.Residual([Layer(16) for _ in range(depth)], skip=True))

    def forward(self, x, goes_on):
        x = self.first(x)
        return self.big(x) if goes_on == "big" else self.small(x[:2])


def peak_of(model, *args):
    model.zero_grad()
    with LiveBytes() as live:
        model(*args).square().mean().backward()
    gradients = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    return live.peak - sum(gradients)


def test_forwards_that_begin_alike():
    """The first stack does not know yet which forward it is in."""
    model = Branches()
    limit = int(rg.plan(model, X, "small").plain * 1.05)
    rg.set_memory(model, rg.Budget(limit))
    for _ in range(2):
        peaks = [peak_of(model, X, goes_on) for goes_on in ("small", "big")]
    assert max(peaks) <= limit
    with pytest.raises(rg.BudgetError, match="are less than"):
        rg.set_memory(model, "1 KiB")
        model(X, "big")


class Sliced(Converted):
    """Runs as many of its layers as it is told."""

    def forward(self, x, count):
        for layer in self.wide[:count]:
            x = layer(x)
        return x


def test_a_pass_that_leaves_out_layers_measures_nothing():
    model = rg.convert(Sliced(), rg.Euler(), exact=False, layers="wide")
    limit = int(rg.plan(model, X, 4).plain * 0.5)
    rg.set_memory(model, rg.Budget(limit))
    peaks = [peak_of(model, X, count) for count in (2, 4, 4, 4, 2)]
    assert max(peaks) <= limit


class WithContext(nn.Module):
    """Only its later layers get a context."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(16, 16)

        def forward(self, x, context=None):
            if context is None:
                return x + torch.tanh(self.q(x))
            return x + (self.q(x) @ context.t()).softmax(-1) @ context

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(8))

    def forward(self, x, context):
        for i, layer in enumerate(self.layers):
            x = layer(x, context if i % 2 else None)
        return x


def test_arguments_of_later_layers_are_measured():
    short, long = torch.randn(8, 16), torch.randn(256, 16)
    model = rg.convert(WithContext(), rg.Euler(), exact=False)
    limit = int(rg.plan(model, X, long).floor * 1.2)
    rg.set_memory(model, rg.Budget(limit))
    for context in (short, short, long):  # the first long one is new
        peak_of(model, X, context)
    peaks = [peak_of(model, X, context) for context in (long, short, long, short, long)]
    assert max(peaks) <= limit


class Nested(nn.Module):
    """A stack with stacks in its functions."""

    def __init__(self):
        super().__init__()
        inner = lambda: rg.Residual([Layer(16) for _ in range(3)], skip=True)  # noqa: E731
        functions = [nn.Sequential(inner(), nn.Linear(16, 16)) for _ in range(4)]
        self.stack = rg.Residual(functions, skip=True)

    def forward(self, x):
        return self.stack(x)


@pytest.mark.parametrize("share", ["80%", "100%"])
def test_stacks_inside_of_functions_are_rebuilt(share):
    model = Nested()
    limit = rg.Budget(share).bytes_of(rg.plan(model, X).plain)
    rg.set_memory(model, share)
    inner = [stack.memory for path, stack in rg.stacks_of(model).items() if path != "stack"]
    assert inner == [rg.Reverse(keep_last=False)] * 4
    assert max(peak_of(model, X) for _ in range(3)) <= limit


def test_plans_do_not_depend_on_addresses():
    """What is freed inside of a function may be made again at the same address."""
    assert len({rg.plan(Nested(), X) for _ in range(8)}) == 1


# --- plans of converted models that have not run


class Shrinks(Layer):
    def forward(self, x):
        return super().forward(x)[: len(x) // 2]


def test_a_plan_of_a_model_that_has_not_run_is_that_of_one_that_has():
    def build():
        torch.manual_seed(0)
        layers = [Layer(16) for _ in range(10)]
        layers[4] = Shrinks(16)
        return rg.convert(nn.Sequential(*layers), rg.Midpoint(), "50%", layers="")

    fresh = build()
    conversion = vars(fresh)["retrograd"]
    before = conversion.parts, conversion.unchecked.copy(), conversion.stacks[0].exact
    plan = rg.plan(fresh, X)
    assert (conversion.parts, conversion.unchecked, conversion.stacks[0].exact) == before
    settled = build()
    train_step(settled)
    train_step(settled)
    assert rg.plan(settled, X) == plan
    assert len(plan.rows) == 9


def test_a_first_batch_is_that_of_training():
    """Not that of a plan, which may have other values."""
    model = rg.convert(Converted())
    rg.plan(model, torch.zeros_like(X))
    train_step(model, 1e5 * X)
    train_step(model, 1e5 * X)
