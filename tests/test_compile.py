"""Promise 13: `torch.compile` of f and g, or of the whole model, gives the gradients of plain
autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import retrograd as rg
from retrograd.core import private
from tests import zoo

# While it looks at an input, the compiler reads `.grad` even where it is no leaf.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

REVERSED = {name: memory for name, memory in zoo.MEMORY.items() if name != "keep"}
DEPTH = 3


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """A stack between two layers; the same weights at every call."""

    def __init__(self, memory: Any, fn: Callable[[], nn.Module] = lambda: zoo.Mix(4)) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stack = rg.ReversibleSequence([(fn(), fn()) for _ in range(DEPTH)], memory=memory)
        self.double()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.after(self.stack(self.before(x), **kwargs).sin())


def compile_functions(model: Any, backend: Any) -> Any:
    for block in (model.stack if isinstance(model, Model) else model).blocks:
        block.f, block.g = (
            torch.compile(block.f, backend=backend),
            torch.compile(block.g, backend=backend),
        )
    return model


def compile_functions_in_place(model: Model, backend: Any) -> Model:
    for block in model.stack.blocks:
        block.f.compile(backend=backend)
        block.g.compile(backend=backend)
    return model


def compile_stack(model: Model, backend: Any) -> Model:
    model.stack.compile(backend=backend)
    return model


WAYS = {
    "f-and-g": compile_functions,
    "f-and-g-in-place": compile_functions_in_place,
    "stack": compile_stack,
    "model": lambda model, backend: torch.compile(model, backend=backend),
}
every_way = pytest.mark.parametrize("way", WAYS)
every_memory = pytest.mark.parametrize("memory", REVERSED)


def batch(n: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(
        n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def end_inspection(model: nn.Module, x: Any) -> None:
    """Run the step that is inspected. In torch 2.9 and 2.10 functions run uncompiled in it."""
    if not private.RUNS_COMPILED_IN_MODES:
        zoo.gradients(model, model(x), x)


# --- the same gradients


@every_memory
@every_way
def test_gradients(way, memory):
    x, plain = batch(), Model(rg.Keep())
    model = WAYS[way](Model(REVERSED[memory]), "aot_eager")
    assert zoo.worst(zoo.gradients(model, model(x), x), zoo.gradients(plain, plain(x), x)) < 1e-9


@every_memory
@every_way
def test_dropout(way, memory):
    def step(model: nn.Module) -> tuple[list[Tensor | None], Tensor]:
        torch.manual_seed(3)
        return zoo.gradients(model, model(x), x), torch.get_rng_state()

    x, dropping = batch(), lambda: zoo.Mix(4, dropout=0.5)
    expected, random_state = step(Model(rg.Keep(), dropping))
    got, random_state_now = step(WAYS[way](Model(REVERSED[memory], dropping), "aot_eager"))
    assert zoo.worst(got, expected) < 1e-9
    assert torch.equal(random_state_now, random_state)


@every_memory
@every_way
def test_autocast(way, memory):
    def step(model: nn.Module) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return zoo.gradients(model, y, x)

    x, plain = batch().detach().float().requires_grad_(), Model(rg.Keep()).float()
    full = zoo.gradients(plain, plain(x), x)
    expected, got = step(plain), step(WAYS[way](Model(REVERSED[memory]).float(), "aot_eager"))
    limit = 4 * torch.finfo(torch.bfloat16).eps
    assert zoo.worst(got, expected) < limit
    assert zoo.worst(got, full) > limit / 8, "autocast had no effect"


@pytest.mark.parametrize(
    "case",
    [case for case in zoo.REVERSED if case.streams == "split" and case.memory == "reverse"],
    ids=str,
)
def test_every_coupling(case):
    stack, x = case.build()
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    compile_functions(stack, "aot_eager")
    assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9


@every_memory
def test_compiled_functions_get_keyword_arguments(memory):
    x, context, plain = batch(), batch(seed=1), Model(rg.Keep())
    model = compile_functions(Model(REVERSED[memory]), "aot_eager")
    expected = zoo.gradients(plain, plain(x, context=context), x, context)
    assert zoo.worst(zoo.gradients(model, model(x, context=context), x, context), expected) < 1e-9


@every_memory
def test_functions_need_not_be_modules(memory):
    def f(x: Tensor) -> Tensor:
        return x.sin() * x

    plain, x = rg.ReversibleSequence([(f, torch.tanh)] * 4, memory=rg.Keep()), batch()
    compiled = torch.compile(f, backend="aot_eager")
    stack = rg.ReversibleSequence([(compiled, torch.tanh)] * 4, memory=REVERSED[memory])
    assert zoo.worst(zoo.gradients(stack, stack(x), x), zoo.gradients(plain, plain(x), x)) < 1e-9


@every_memory
def test_two_shapes_before_backward(memory):
    """The second compiles anew, with dynamic shapes, so that two compiled functions fit when the
    first is recomputed.
    """
    x, longer, plain = batch(2), batch(5, seed=1), Model(rg.Keep())
    expected = zoo.gradients(plain, [plain(x), plain(longer)], x, longer)
    model = compile_functions(Model(REVERSED[memory]), "aot_eager")
    assert zoo.worst(zoo.gradients(model, [model(x), model(longer)], x, longer), expected) < 1e-9


@every_memory
def test_eval_between_forward_and_backward(memory):
    def step(model: Model) -> list[Tensor | None]:
        torch.manual_seed(3)
        y = model(x)
        model.eval()
        return zoo.gradients(model, y, x)

    x, dropping = batch(), lambda: zoo.Mix(4, dropout=0.5)
    got = step(compile_functions(Model(REVERSED[memory], dropping), "aot_eager"))
    assert zoo.worst(got, step(Model(rg.Keep(), dropping))) < 1e-9


@every_memory
@every_way
def test_training(way, memory):
    """Parameters and BatchNorm statistics after three steps."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            zoo.loss(model(batch(6, seed=step))).backward()
            optimizer.step()
        return [value.double() for value in model.state_dict().values()]

    def normalized() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())

    expected = train(Model(rg.Keep(), normalized))
    assert (
        zoo.worst(train(WAYS[way](Model(REVERSED[memory], normalized), "aot_eager")), expected)
        < 1e-9
    )


@pytest.mark.parametrize("memory", REVERSED)
def test_a_compiled_step_that_calls_backward(memory):
    """Backward is then called with the compiler at work, and forward ran without.

    With compiled autograd, it is a row of `compatibility`: that takes seconds for each block.
    """
    x = batch()

    def step(stack: nn.Module) -> None:
        zoo.loss(stack(x)).backward()

    def train(step: Callable[[nn.Module], None], memory: Any) -> list[Tensor | None]:
        torch.manual_seed(3)
        stack = rg.ReversibleSequence(
            [(zoo.Mix(4, 0.5), zoo.Mix(4, 0.5)) for _ in range(DEPTH)], memory=memory
        ).double()
        step(stack)
        step(stack)
        return [p.grad for p in stack.parameters()]

    got = train(torch.compile(step, backend="aot_eager"), REVERSED[memory])
    assert zoo.worst(got, train(step, rg.Keep())) < 1e-9


def test_fullgraph_says_what_to_do_instead():
    """Where a stack cannot be a part of the graph; where it can: `test_compile_whole.py`."""
    stack = rg.ReversibleSequence([(zoo.Mix(4), zoo.Mix(4))] * 2, exact=True).double()
    model = torch.compile(stack, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"functions with stack.compile\(\)"):
        model(batch())
    plain = torch.compile(Model(rg.Keep()), backend="aot_eager", fullgraph=True)
    assert plain(batch()).requires_grad


# --- stack.compile()


def test_a_stack_compiles_its_functions():
    """Each where it is: names and state stay; what is no module is replaced; what is used twice
    stays one.
    """
    shared = zoo.Mix(4)

    def g(x: Tensor) -> Tensor:
        return x.sin()

    counter = CompileCounterWithBackend("aot_eager")
    stack = rg.ReversibleSequence([(shared, g), (zoo.Mix(4), g), (shared, g)]).double()
    names, x = list(stack.state_dict()), batch()
    expected = zoo.gradients(stack, stack(x), x)
    stack.compile(backend=counter)
    end_inspection(stack, x)
    assert list(stack.state_dict()) == names
    assert stack.blocks[0].f is stack.blocks[2].f is shared
    assert stack.blocks[0].g is stack.blocks[1].g is not g
    assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9
    assert counter.frame_count == 2  # Mix, and g


def test_a_program_compiles_its_functions():
    counter = CompileCounterWithBackend("aot_eager")
    net = rg.Reversible(
        [rg.Update("a", zoo.Mix(4), ("b",)), rg.Update("b", zoo.Mix(4), ("a",))]
    ).double()
    streams = {"a": batch(), "b": batch(seed=1)}
    expected = zoo.gradients(net, net(streams), streams)
    net.compile(backend=counter)
    end_inspection(net, streams)
    assert zoo.worst(zoo.gradients(net, net(streams), streams), expected) < 1e-9
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, 8),
        pytest.param(
            {"isolate_recompiles": True},
            12,
            marks=pytest.mark.skipif(
                "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
                reason=f"torch.compile of {torch.__version__} has no isolate_recompiles",
            ),
        ),
    ],
)
def test_functions_that_differ_in_their_attributes_may_be_compiled_each_for_itself(
    options, compiled
):
    """Torch compiles 8 variants of one code and then runs it as it is; both times."""

    class Scaled(zoo.Mix):
        def __init__(self, scale: int) -> None:
            super().__init__(4)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    counter = CompileCounterWithBackend("aot_eager")
    stack = rg.ReversibleSequence(
        [(Scaled(2 * i), Scaled(2 * i + 1)) for i in range(6)],
        memory=rg.Reverse(keep_last=False),
    ).double()
    x = batch()
    expected = zoo.gradients(stack, stack(x), x)
    stack.compile(backend=counter, **options)
    end_inspection(stack, x)
    assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9
    assert counter.frame_count == compiled


@pytest.mark.parametrize("memory", [*REVERSED.values(), rg.Budget("100%")])
def test_the_engine_itself_is_not_compiled(memory, caplog):
    """Its hooks run inside compiled functions, where the compiler would take them up, once for
    every number of saved tensors.
    """
    model = Model(memory)
    model.stack.compile(backend="aot_eager")
    with caplog.at_level("WARNING", logger="torch._dynamo"):
        for _ in range(2):
            zoo.loss(model(batch())).backward()
    assert not caplog.records


# --- compiled once, run twice


@every_way
def test_recompute_compiles_nothing(way):
    counter = CompileCounterWithBackend("aot_eager")
    model = WAYS[way](Model(rg.Reverse(keep_last=False), lambda: zoo.Mix(4, dropout=0.5)), counter)
    x = batch()
    end_inspection(model, x)
    y = model(x)
    compiled = counter.frame_count
    assert compiled >= 1
    for _ in range(2):
        zoo.gradients(model, y, x)
        y = model(x)
    assert counter.frame_count == compiled


def test_recompute_runs_what_forward_ran():
    """All functions have the same code, so that one graph serves them all: it runs in forward and
    again in recompute.
    """
    ran = []

    def logged(kind: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(args: list[Tensor]) -> Any:
                ran.append((kind, id(graph), rg.is_recomputing()))
                return torch.fx.Interpreter(graph).boxed_run(args)

            run._boxed_call = True
            return run

        return compiler

    backend = aot_autograd(fw_compiler=logged("forward"), bw_compiler=logged("backward"))
    model, x = compile_functions(Model(rg.Reverse(keep_last=False)), backend), batch()
    end_inspection(model, x)
    ran.clear()
    y = model(x)
    (graph,) = {graph for _, graph, _ in ran}
    forward, n = ("forward", graph, False), 2 * DEPTH
    assert ran == [forward] * n
    zoo.gradients(model, y, x)
    assert ran[n::2] == [("forward", graph, True)] * n
    assert [kind for kind, _, _ in ran[n + 1 :: 2]] == ["backward"] * n
    assert not any(recomputing for _, _, recomputing in ran[n + 1 :: 2])


def test_a_compiled_function_can_tell_a_recompute():
    class Counted(zoo.Mix):
        def __init__(self) -> None:
            super().__init__(4)
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(rg.is_recomputing())
            return super().forward(x)

    model, plain, x = Model(rg.Reverse(keep_last=False), Counted), Model(rg.Keep()), batch()
    functions = [fn for block in model.stack.blocks for fn in (block.f, block.g)]
    compile_functions(model, "aot_eager")
    assert zoo.worst(zoo.gradients(model, model(x), x), zoo.gradients(plain, plain(x), x)) < 1e-9
    assert [fn.seen for fn in functions] == [[False, True]] * len(functions)


# --- the default backend


@pytest.fixture
def _inductor():
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"inductor cannot compile here: {error}".splitlines()[0])


@pytest.mark.usefixtures("_inductor")
# Inductor imports modules of torch that still use torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_inductor(dropout):
    """Against plain autograd; with dropout against compiled functions in plain autograd, since
    inductor draws otherwise.
    """

    def step(model: Model) -> list[Tensor | None]:
        torch.manual_seed(3)
        return zoo.gradients(model, model(x), x)

    x, plain = batch(), Model(rg.Keep(), lambda: zoo.Mix(4, dropout))
    expected = step(compile_functions(plain, "inductor") if dropout else plain)
    for memory in REVERSED.values():
        model = compile_functions(Model(memory, lambda: zoo.Mix(4, dropout)), "inductor")
        end_inspection(model, x)
        assert zoo.worst(step(model), expected) < 1e-9
