"""A stack inside a compiled graph, `torch.compile(model, fullgraph=True)`: gradients of plain
autograd, and bytes that do not grow with depth.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.compiling import partition, seams
from tests import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.skipif(seams.VERSION < seams.OLDEST, reason="this torch has no place for the pass"),
]

WIDTH = 4


@pytest.fixture(autouse=True)
def reports() -> Iterator[list[Any]]:
    """What the pass did, for each graph with a stack."""
    from torch._functorch import config as functorch_config

    torch._dynamo.reset()
    found: list[Any] = []

    def observe(report: Any, forward: Any, backward: Any, outputs: int) -> None:
        returned = forward.graph.find_nodes(op="output")[0].args[0]
        made = [node for node in returned[outputs:] if node.op != "placeholder"]
        values = [node.meta["val"] for node in made]
        found.append((report, [v for v in values if isinstance(v, Tensor)], backward))

    partition.observers.append(observe)
    with functorch_config.patch(enable_autograd_cache=False):  # a cached graph needs no pass
        yield found
    partition.observers.remove(observe)
    torch._dynamo.reset()


class Between(nn.Module):
    """A stack between two layers."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.before, self.stack, self.after = (
            nn.Linear(WIDTH, WIDTH),
            stack,
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        y = self.stack(self.before(x), **kwargs)
        if isinstance(y, tuple):
            return self.after(y[0].sin()), y[1]
        return self.after(y.sin())


def mix(dropout: float = 0.0) -> nn.Module:
    return zoo.Mix(WIDTH, dropout)


def pairs(depth: int = 3, fn: Callable[[], nn.Module] = mix, **settings: Any) -> nn.Module:
    return rg.ReversibleSequence([(fn(), fn()) for _ in range(depth)], **settings)


def batch(n: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def model_of(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(17)
    return Between(build()).double()


def whole(model: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def keeping(model: nn.Module) -> nn.Module:
    """A copy in plain autograd."""
    model = copy.deepcopy(model)
    rg.set_memory(model, rg.Keep())
    return model


def check(model: nn.Module, *xs: Tensor, limit: float = 1e-9, **kwargs: Any) -> None:
    """The gradients of a compiled model are those of plain autograd."""
    plain, compiled = keeping(model), whole(model)
    tensors = [value for value in kwargs.values() if isinstance(value, Tensor)]

    def step(run: Any, module: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(3)
        return zoo.gradients(module, [run(x, **kwargs) for x in xs], *xs, *tensors)

    expected = step(plain, plain)
    for _ in range(2):
        assert zoo.worst(step(compiled, model), expected) < limit


# --- stacks


STACKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many streams are rebuilt
    "pairs": (pairs, 4),
    "split": (lambda: pairs(fn=lambda: zoo.Mix(WIDTH // 2), streams=rg.Split(-1)), 5),
    "momentum": (lambda: pairs(coupling=rg.Momentum(0.9), streams=rg.AtRest()), 11),
    "scaled": (lambda: pairs(coupling=rg.Scaled(-0.8)), 4),
    "affine": (lambda: pairs(fn=lambda: zoo.Mix(WIDTH, outputs=2), coupling=rg.Affine()), 4),
    "anchor": (lambda: pairs(4, memory=rg.Anchor(2)), 4),
    "nothing kept": (lambda: pairs(memory=rg.Reverse(keep_last=False)), 5),
    "midpoint": (lambda: rg.Residual([mix() for _ in range(4)], rule=rg.Midpoint()), 2),
    "leapfrog": (lambda: rg.Residual([mix() for _ in range(4)], rule=rg.Leapfrog()), 2),
    "euler": (lambda: rg.Residual([mix() for _ in range(4)]), 0),
    "whole layers": (lambda: rg.Residual([mix() for _ in range(4)], skip=True), 0),
}


@pytest.mark.parametrize("name", STACKS)
def test_gradients(name, reports):
    build, rebuilt = STACKS[name]
    check(model_of(build), batch())
    assert [report.rebuilt for report, *_ in reports] == [rebuilt]


def test_programs_of_several_streams(reports):
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            updates = [("a", ("b", "c")), ("b", ("c",)), ("c", ("a",)), ("a", ("a", "b"))] * 2
            self.net = rg.Reversible([rg.Update(t, Sum(len(r)), r) for t, r in updates])

        def forward(self, x: Tensor) -> Any:
            out = self.net({"a": x, "b": x.sin(), "c": x.cos()})
            return out["a"] * out["b"] + out["c"]

    class Sum(nn.Module):
        def __init__(self, reads: int) -> None:
            super().__init__()
            self.fn = nn.Linear(reads * WIDTH, WIDTH)

        def forward(self, *reads: Tensor) -> Tensor:
            return self.fn(torch.cat(reads, -1)).tanh()

    torch.manual_seed(17)
    check(Program().double(), batch())
    ((report, *_),) = reports
    assert report.rebuilt == 6  # what reads its own target is saved, and the last update is kept


def test_streams_may_be_trees(reports):
    case = zoo.Case("additive", "mean", "tree", "reverse")
    stack, x = case.build()
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    assert zoo.worst(zoo.gradients(stack, whole(stack)(x), x), expected) < 1e-9
    assert reports[0][0].rebuilt


def test_bytes_saved_do_not_grow_with_depth(reports):
    for depth in (2, 4):
        torch._dynamo.reset()
        whole(model_of(functools.partial(pairs, depth)))(batch(64))
    few, many = [sum(tensor.nbytes for tensor in saved) for _, saved, _ in reports]
    assert few == many


def test_a_second_step_compiles_nothing():
    model = model_of(pairs)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        zoo.loss(compiled(batch())).backward()
    assert counter.frame_count == 1


# --- random numbers


class Reveal(nn.Module):
    """`out = dropout(weight)`, whatever it reads. Forward shows the mask in the output, and the
    gradient of the weight is the mask of the run that backward uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.weight + 0 * x, 0.5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_masks_of_forward_and_of_recompute_are_equal(backend, reports):
    torch.manual_seed(17)
    net = rg.Reversible(
        [rg.Update(name, Reveal(), ("z",)) for name in "abc"], memory=rg.Reverse(keep_last=False)
    )
    streams = {name: torch.zeros(64, WIDTH) for name in "abcz"}
    out = whole(net, backend)(streams)
    (out["a"] + out["b"] + out["c"]).sum().backward()
    for name, update in zip("abc", net.updates):
        assert torch.equal(update.fn.weight.grad != 0, out[name] != 0)
    masks = [out[name] != 0 for name in "abc"]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    ((report, saved, _),) = reports
    assert report.rebuilt == 3
    assert not [tensor for tensor in saved if tensor.dtype == torch.bool], "masks were saved"


def test_dropout(reports):
    model = model_of(lambda: pairs(fn=lambda: mix(0.5)))
    check(model, batch(8))
    assert reports[0][0].replayed == 5


# --- what surrounds functions


def test_autocast(reports):
    model, x = model_of(pairs).float(), batch().detach().float().requires_grad_()

    def step(run: Any, module: nn.Module) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        return zoo.gradients(module, y, x)

    plain = keeping(model)
    expected, full = step(plain, plain), zoo.gradients(plain, plain(x), x)
    limit = 4 * torch.finfo(torch.bfloat16).eps
    assert zoo.worst(step(whole(model), model), expected) < limit
    assert zoo.worst(expected, full) > limit / 8, "autocast had no effect"
    assert reports[0][0].rebuilt == 4


def test_keyword_arguments_get_gradients_and_their_producer_runs_backward_once():
    class Encoder(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            backwards.append(1)
            return grad

    backwards: list[int] = []
    model, x, context = model_of(pairs), batch(), batch(seed=1)
    check(model, x, context=context)
    zoo.loss(whole(model)(x, context=Encoder.apply(context))).backward()
    assert len(backwards) == 1


class WithAux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fn = mix()

    def forward(self, x: Tensor) -> Any:
        out = self.fn(x)
        return rg.WithAux(out, out.square().mean())


def test_aux_outputs(reports):
    check(model_of(lambda: pairs(fn=WithAux)), batch())
    assert reports[0][0].rebuilt == 4


def test_frozen_parameters_and_adapters(reports):
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return (self.base(x) + self.up(self.down(x))).tanh()

    model = model_of(lambda: pairs(fn=Adapted))
    for part in (model.before, model.after):
        part.requires_grad_(False)
    check(model, batch().detach())
    assert reports[0][0].rebuilt == 5 - 1


def test_shared_weights(reports):
    shared = mix()
    check(model_of(lambda: pairs(fn=lambda: shared)), batch())
    assert reports[0][0].rebuilt == 4


def test_buffers_are_updated_once():
    def normalized() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    model = model_of(lambda: pairs(fn=normalized))
    plain, compiled = keeping(model), whole(model)
    for step in range(3):
        for module, run in ((plain, plain), (model, compiled)):
            zoo.loss(run(batch(6, seed=step))).backward()
            for p in module.parameters():
                p.data -= 0.1 * p.grad
    state = [value.double() for value in model.state_dict().values()]
    assert zoo.worst(state, [value.double() for value in plain.state_dict().values()]) < 1e-9


class Counting(nn.Module):
    """Reads a buffer, and then writes it: recompute must see what forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.fn = mix()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.fn(x * self.count.clone())
        self.count += 1
        return out


def test_recompute_reads_buffers_as_forward_did(reports):
    model = model_of(lambda: pairs(fn=Counting))
    plain, compiled = keeping(model), whole(model)
    for _ in range(2):
        x = batch()
        expected = zoo.gradients(plain, plain(x), x)
        assert zoo.worst(zoo.gradients(model, compiled(x), x), expected) < 1e-9
    assert [int(b.f.count) for b in model.stack.blocks] == [3] * 3
    assert reports[0][0].rebuilt == 4


# --- calls


def test_dynamic_batch_sizes(reports):
    model = model_of(lambda: pairs(fn=lambda: mix()))
    plain, compiled = keeping(model), whole(model, dynamic=True)
    for n in (2, 5, 7):
        x = batch(n)
        expected = zoo.gradients(plain, plain(x), x)
        assert zoo.worst(zoo.gradients(model, compiled(x), x), expected) < 1e-9
    assert len(reports) == 1


def test_two_calls_before_a_backward():
    check(model_of(lambda: pairs()), batch(), batch(seed=1))


def test_gradients_accumulate():
    model = model_of(pairs)
    plain, compiled = keeping(model), whole(model)
    for run in (plain, compiled):
        for seed in range(3):
            zoo.loss(run(batch(seed=seed))).backward()
    got, expected = ([p.grad for p in m.parameters()] for m in (model, plain))
    assert zoo.worst(got, expected) < 1e-9


def test_two_stacks_in_one_graph(reports):
    model = model_of(lambda: nn.Sequential(pairs(), nn.Tanh(), pairs(2)))
    check(model, batch())
    assert [report.rebuilt for report, *_ in reports] == [4 + 2]


def test_a_stack_inside_of_a_function(reports):
    check(model_of(lambda: pairs(2, fn=lambda: nn.Sequential(pairs(2), nn.Tanh()))), batch())
    assert reports


def test_checkpoint_around_a_stack():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = pairs(fn=lambda: mix(0.5))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.stack, x, use_reentrant=False)

    torch.manual_seed(17)
    check(Model().double(), batch(8))


# --- memory modes


def test_keep_leaves_the_graph_alone(reports):
    check(model_of(lambda: pairs(memory=rg.Keep())), batch())
    assert not reports


def test_anchors_are_saved(reports):
    for memory in (rg.Reverse(), rg.Anchor(2), rg.Anchor(1)):
        torch._dynamo.reset()
        whole(model_of(functools.partial(pairs, 4, memory=memory, drift="ignore")))(batch(64))
    none, two, one = [sum(tensor.nbytes for tensor in saved) for _, saved, _ in reports]
    stream = batch(64).nbytes
    assert two - none == 2 * stream
    assert one - none == 5 * stream  # the sixth is the target of the last update


def test_budgets_keep_what_fits(reports):
    for memory in (rg.Reverse(keep_last=False), "60%", "100%"):
        torch._dynamo.reset()
        model = pairs(3, memory=memory).double()
        plain, x = keeping(model), batch(64)
        expected = zoo.gradients(plain, plain(x), x)
        assert zoo.worst(zoo.gradients(model, whole(model)(x), x), expected) < 1e-9
    rebuilt = [report.rebuilt for report, *_ in reports]
    saved = [sum(tensor.nbytes for tensor in saved) for _, saved, _ in reports]
    assert rebuilt == sorted(rebuilt, reverse=True)
    assert rebuilt[-1] == 0
    assert saved == sorted(saved)
    assert rebuilt[1] < rebuilt[0]
    assert saved[1] <= saved[2] * 0.6


def test_a_setting_that_changes_compiles_anew(reports):
    model = model_of(lambda: pairs(2))
    compiled = whole(model)
    for memory in (rg.Reverse(), rg.Budget("100%"), rg.Keep()):
        model.stack.memory = memory
        compiled(batch())
    assert [report.rebuilt for report, *_ in reports] == [2, 0]


# --- drift


def drifting(depth: int, **settings: Any) -> nn.Module:
    """Undoing divides by 0.3 at every function."""
    torch.manual_seed(0)
    return pairs(depth, coupling=rg.Momentum(0.3), streams=rg.AtRest(), **settings)


def test_drift_is_noticed():
    x = batch().detach().float().requires_grad_()
    with pytest.warns(rg.DriftWarning, match="start of a stack in a compiled graph .* is off by"):
        zoo.loss(whole(drifting(5))(x)).backward()
    torch._dynamo.reset()
    with pytest.raises(rg.RecomputeError, match="rounding grew on the way"):
        zoo.loss(whole(drifting(7))(x)).backward()
    torch._dynamo.reset()
    zoo.loss(whole(drifting(7, drift="ignore"))(x)).backward()


# --- what cannot be traced


OBSTACLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "exact": (lambda: pairs(exact=True), "equal to the bit"),
    "own coupling": (lambda: pairs(coupling=zoo.Scaled()), "tried on live data"),
    "chunked": (lambda: pairs(fn=lambda: rg.Chunked(mix(), 2, dim=0)), "rg.Chunked"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_are_named(name, reports, caplog):
    build, why = OBSTACLES[name]
    model = model_of(build)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
        whole(model)(batch())
    torch._dynamo.reset()
    x, plain = batch(), keeping(model)
    seams._say_once.cache_clear()
    with caplog.at_level("WARNING", logger="retrograd"):
        y = torch.compile(model, backend="aot_eager")(x)
    assert zoo.worst(zoo.gradients(model, y, x), zoo.gradients(plain, plain(x), x)) < 1e-9
    assert any(why in record.message for record in caplog.records)
    assert not reports


def test_a_function_that_breaks_the_graph_runs_with_the_engine(reports):
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn = mix()

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            recomputed.append(rg.is_recomputing())
            return self.fn(x)

    recomputed: list[bool] = []
    model = model_of(lambda: pairs(fn=Breaking))
    plain, compiled, x = keeping(model), torch.compile(model, backend="aot_eager"), batch()
    expected = zoo.gradients(plain, plain(x), x)
    recomputed.clear()
    assert zoo.worst(zoo.gradients(model, compiled(x), x), expected) < 1e-9
    assert any(recomputed)
    assert not reports


def test_backends_without_the_pass_say_so(caplog, reports):
    model, x = model_of(pairs), batch()
    plain = keeping(model)
    expected = zoo.gradients(plain, plain(x), x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="does not derive backward"):
        whole(model, "eager")(x)

    def own(graph: Any, inputs: Any) -> Any:
        return graph

    with caplog.at_level("WARNING", logger="retrograd"):
        y = whole(model, own)(x)
    assert zoo.worst(zoo.gradients(model, y, x), expected) < 1e-9
    assert [r for r in caplog.records if "without retrograd's pass" in r.message]
    assert not reports


# --- Inductor


def test_inductor(reports):
    model = model_of(lambda: pairs(fn=lambda: mix())).float()
    plain, compiled = keeping(model), whole(model, "inductor")
    x = batch(64).detach().float().requires_grad_()
    for _ in range(2):
        expected = zoo.gradients(plain, plain(x), x)
        assert zoo.worst(zoo.gradients(model, compiled(x), x), expected) < 1e-5
    assert reports[0][0].rebuilt == 4


class Varied(nn.Module):
    """A function whose code is the same for each object, but not what the code does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale, self.act, self.powers = 0.5, torch.tanh, [1, 2]
        self.table = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.0)
        self.last: nn.Module | None = None
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.act(self.linear(x))) * self.scale + self.table
        if self.last is not None:
            out = self.last(out)
        return sum(out**power for power in self.powers)


def varied() -> list[Callable[[], nn.Module]]:
    """Functions that differ from `Varied()` in one thing each."""

    def hooked() -> nn.Module:
        fn = Varied()
        fn.linear.register_forward_hook(lambda module, args, out: out * 3)
        return fn

    def frozen() -> nn.Module:
        fn = Varied()
        fn.linear.weight.requires_grad_(False)
        return fn

    def other_forward() -> nn.Module:
        fn = Varied()
        fn.linear.forward = lambda x: x.cos()
        return fn

    return [
        Varied,
        lambda: Varied(scale=0.25),
        lambda: Varied(act=torch.sin),
        lambda: Varied(powers=[1, 3]),
        lambda: Varied(table=torch.ones(WIDTH, dtype=torch.float64)),
        lambda: Varied(last=nn.Linear(WIDTH, WIDTH)),
        lambda: Varied(linear=nn.Linear(WIDTH, WIDTH, bias=False)),
        lambda: Varied(drop=nn.Dropout(1.0)),
        hooked,
        frozen,
        other_forward,
    ]


def test_functions_that_differ_are_not_one_region(reports):
    torch.manual_seed(1)
    shared = Varied()
    blocks = [(build(), build()) for build in varied()]  # the second of a kind is a region
    blocks += [(shared, Varied()), (Varied(), shared)]
    model = Between(rg.ReversibleSequence(blocks)).double()
    plain, x = keeping(model), batch(8)
    expected = zoo.gradients(plain, plain(x), x)
    assert zoo.worst(zoo.gradients(model, whole(model, "inductor")(x), x), expected) < 1e-9
    assert [report.rebuilt for report, *_ in reports] == [2 * len(blocks) - 2]
