"""Promise 9: retain_graph, autograd.grad, backward(inputs=...), double backward and torch.func all
give plain results.
"""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import retrograd as rg
from tests import zoo


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_retain_graph_and_a_second_backward(case):
    stack, x = case.build(dropout=0.2)
    torch.manual_seed(1)
    y = stack(x)
    torch.manual_seed(1)
    expected = zoo.plain_stack(stack, x)
    wanted = [*zoo.leaves(x), *stack.parameters()]
    for scale in (1.0, 2.0, -1.0):
        got = torch.autograd.grad(scale * zoo.loss(y), wanted, retain_graph=True)
        assert (
            zoo.worst(
                list(got),
                list(torch.autograd.grad(scale * zoo.loss(expected), wanted, retain_graph=True)),
            )
            < 1e-9
        )
    got, reference = (torch.autograd.grad(zoo.loss(out), wanted) for out in (y, expected))
    assert zoo.worst(list(got), list(reference)) < 1e-9
    with pytest.raises(
        RuntimeError,
        match="backward through the graph a second time|after backward has already passed",
    ):
        torch.autograd.grad(zoo.loss(y), wanted)


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_double_backward(case):
    stack, x = case.build(depth=2)
    leaf = zoo.leaves(x)[0]
    second = []
    for output in (stack(x), zoo.plain_stack(stack, x)):
        (gradient,) = torch.autograd.grad(zoo.loss(output), leaf, create_graph=True)
        second.append(
            list(
                torch.autograd.grad(
                    gradient.square().sum(), [leaf, *stack.parameters()], allow_unused=True
                )
            )
        )
    assert zoo.worst(*second) < 1e-9


def test_gradgradcheck():
    stack, _ = zoo.Case("additive", "split", "tensor", "reverse-all").build(depth=2)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(stack, x)
    assert torch.autograd.gradgradcheck(stack, x)


@pytest.mark.parametrize("case", zoo.REVERSED, ids=str)
def test_backward_for_chosen_inputs_only(case):
    """A parameter in the middle first; then, through what the first left, one at the start."""
    stack, x = case.build(depth=4)
    y, expected = stack(x), zoo.plain_stack(stack, x)
    names = dict(stack.named_parameters())
    for name in [
        next(n for n in names if n.startswith(prefix))
        for prefix in ("blocks.2.g", "blocks.0.f", "blocks.3.f")
    ]:
        got, reference = (
            torch.autograd.grad(zoo.loss(out), names[name], retain_graph=True)
            for out in (y, expected)
        )
        assert zoo.worst(list(got), list(reference)) < 1e-9
    zoo.loss(y).backward(inputs=[names[name]])
    assert [n for n, p in names.items() if p.grad is not None] == [name]


def test_a_part_of_the_output_first_without_retaining():
    """What the first backward did not run may still be run, as in plain autograd."""

    class Aux(zoo.Mix):
        def forward(self, x, context=None):
            return rg.WithAux(super().forward(x), self.norm(x).sin().sum())

    stack = rg.ReversibleSequence([(Aux(4), zoo.Mix(4)) for _ in range(4)]).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    y, aux = stack(x)
    last = list(stack.blocks[3].g.parameters())
    first = torch.autograd.grad(zoo.loss(y), last)
    assert all(gradient is not None for gradient in first)
    (gradient,) = torch.autograd.grad(aux[1], [stack.blocks[0].f.up.weight])
    y, aux = stack(x)
    assert torch.allclose(gradient, torch.autograd.grad(aux[1], [stack.blocks[0].f.up.weight])[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, inside vmap
@pytest.mark.parametrize("case", [case for case in zoo.REVERSED if case.value == "tensor"], ids=str)
def test_torch_func(case):
    stack, x = case.build(depth=2)
    x = x.detach()
    parameters = {name: p.detach() for name, p in stack.named_parameters()}

    def f(parameters, x):
        return zoo.loss(torch.func.functional_call(stack, parameters, (x,)))

    got = torch.func.grad(f, argnums=(0, 1))(parameters, x)
    leaf = x.clone().requires_grad_()
    expected = zoo.gradients(stack, zoo.plain_stack(stack, leaf), leaf)
    assert zoo.worst([got[1], *got[0].values()], expected) < 1e-9

    rows = torch.func.vmap(torch.func.grad(f, argnums=1), (None, 0))(
        parameters, x[:, None]
    )  # a gradient for each sample
    assert rows.shape == (2, 1, *x.shape[1:])
    _, tangent = torch.func.jvp(stack, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(
            zoo.plain_stack(stack, forward_ad.make_dual(x, torch.ones_like(x)))
        ).tangent
    assert torch.allclose(tangent, dual)
    hessian = torch.func.hessian(lambda x: stack(x).sin().sum())(x[:1, :1])
    assert torch.allclose(
        hessian, torch.func.hessian(lambda x: zoo.plain_stack(stack, x).sin().sum())(x[:1, :1])
    )


class Energy(nn.Module):
    """A function that is itself a gradient, as in Hamiltonian networks."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_a_function_that_calls_autograd_itself(memory):
    stack = rg.ReversibleSequence(
        [(Energy(), Energy()) for _ in range(3)], memory=zoo.MEMORY[memory]
    ).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert (
        zoo.worst(
            zoo.gradients(stack, stack(x), x), zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        )
        < 1e-9
    )


class ReadsTwice(torch.autograd.Function):
    """Asks for its saved tensors again and again, which checkpointing refuses."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


def test_saved_tensors_may_be_read_twice_at_the_cost_of_one_evaluation():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(4))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return ReadsTwice.apply(ReadsTwice.apply(x, self.w), self.w)

    stack = rg.ReversibleSequence(
        [(Scale(), Scale()) for _ in range(3)], memory=rg.Reverse(keep_last=False)
    ).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    got = zoo.gradients(stack, stack(x), x)
    calls = [fn.calls for block in stack.blocks for fn in (block.f, block.g)]
    assert calls == [3] * 6  # forward, recompute, and once more when asked again
    assert zoo.worst(got, zoo.gradients(stack, zoo.plain_stack(stack, x), x)) < 1e-9


def test_checkpoint_inside_and_around_and_a_stack_in_a_stack():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(zoo.Mix):
        def forward(self, x, context=None):
            return checkpoint(super().forward, x, context, use_reentrant=False)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = rg.ReversibleSequence(
                [(zoo.Mix(4, 0.2), Checkpointed(4, 0.2)) for _ in range(3)]
            )
            self.make = nn.Linear(4, 4)

        def forward(self, x):
            return self.stack(x, context=self.make(x))

    stack = rg.ReversibleSequence([(Inner(), Checkpointed(4, 0.2)) for _ in range(3)]).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    keep = [m for m in stack.modules() if isinstance(m, rg.ReversibleSequence)]

    def run(f):
        torch.manual_seed(0)
        return zoo.gradients(stack, f(x), x)

    inside, around = run(stack), run(lambda x: checkpoint(stack, x, use_reentrant=False))
    with torch.autograd.graph.save_on_cpu():
        offloaded = run(stack)
    for module in keep:
        module.memory = rg.Keep()
    expected = run(stack)
    for got in (inside, around, offloaded):
        assert zoo.worst(got, expected) < 1e-9
