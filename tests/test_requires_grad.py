"""Promise 3: the output requires grad exactly when the plain network's would; frozen and partly
frozen networks train.
"""

import itertools

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo


@pytest.mark.parametrize("case", zoo.CASES, ids=str)
@pytest.mark.parametrize(
    ("input_needs", "weights_need"), list(itertools.product([True, False], repeat=2))
)
def test_output_requires_grad_as_in_plain(case, input_needs, weights_need):
    stack, x = case.build(depth=2)
    for leaf in zoo.leaves(x):
        leaf.requires_grad_(input_needs)
    stack.requires_grad_(weights_need)
    output, expected = stack(x), zoo.plain_stack(stack, x)
    assert [y.requires_grad for y in zoo.leaves(output)] == [
        y.requires_grad for y in zoo.leaves(expected)
    ]
    if input_needs or weights_need:
        assert zoo.worst(zoo.gradients(stack, output, x), zoo.gradients(stack, expected, x)) < 1e-9


@pytest.mark.parametrize("case", zoo.REVERSED, ids=str)
@pytest.mark.parametrize("trained", ["first", "middle", "last", "biases", "g"])
def test_any_part_may_be_frozen(case, trained):
    stack, x = case.build(depth=3)
    chosen = {
        "first": "blocks.0.",
        "middle": "blocks.1.f",
        "last": "blocks.2.g",
        "biases": "bias",
        "g": ".g.",
    }[trained]
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(chosen in name)
    for leaf in zoo.leaves(x):
        leaf.requires_grad_(False)
    got, expected = zoo.gradients(stack, stack(x)), zoo.gradients(stack, zoo.plain_stack(stack, x))
    assert zoo.worst(got, expected) < 1e-9


def test_only_some_leaves_of_a_stream_require_grad():
    stack, x = zoo.Case("additive", "mean", "tree", "reverse").build()
    x["b"].requires_grad_(False)
    stack.requires_grad_(False)
    assert (
        zoo.worst(
            zoo.gradients(stack, stack(x), x), zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        )
        < 1e-9
    )


class LoRA(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_lora_on_a_frozen_stack_trains(memory):
    """Injected after the stack was built and used, as adapters are."""
    stack, x = zoo.Case("additive", "mean", "tensor", memory).build()
    stack.requires_grad_(False)
    x.requires_grad_(False)
    assert not stack(x).requires_grad
    for block in stack.blocks:
        block.f.up, block.g.down = LoRA(block.f.up).double(), LoRA(block.g.down).double()
    assert (
        zoo.worst(zoo.gradients(stack, stack(x)), zoo.gradients(stack, zoo.plain_stack(stack, x)))
        < 1e-9
    )
    optimizer = torch.optim.SGD([p for p in stack.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(stack(x).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_a_frozen_embedding_before_the_stack():
    embedding = nn.Embedding(10, 4).double().requires_grad_(False)
    stack, _ = zoo.Case("additive", "mean", "tensor", "reverse").build()
    tokens = torch.arange(10)
    got, expected = (
        zoo.gradients(stack, net(embedding(tokens)))
        for net in (stack, lambda x: zoo.plain_stack(stack, x))
    )
    assert zoo.worst(got, expected) < 1e-9


def test_no_grad_and_inference_mode():
    stack, x = zoo.Case("additive", "split", "tree", "reverse").build()
    expected = zoo.leaves(stack(x))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = zoo.leaves(stack(x))
        assert all(torch.equal(a, b) for a, b in zip(output, expected))
        assert not any(leaf.requires_grad for leaf in output)


def test_memory_may_be_switched_at_any_time():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    y = stack(x)
    stack.memory = rg.Keep()
    assert zoo.worst(zoo.gradients(stack, y, x), zoo.gradients(stack, stack(x), x)) < 1e-9
