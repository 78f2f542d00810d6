"""Promise 5: forwards before a backward, in any order, in train() and eval(), are independent."""

import itertools

import pytest
import torch

from tests import zoo


@pytest.mark.parametrize("case", zoo.REVERSED, ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_backwards_in_any_order(case, order):
    stack, _ = case.build(depth=2, dropout=0.3)
    inputs = [case.build(depth=2)[1] for _ in range(3)]
    for i, x in enumerate(inputs):
        for leaf in zoo.leaves(x):
            leaf.data.add_(i)
    training = [True, False, True]
    expected, outputs = [], []
    for make, results in ((zoo.plain_stack, expected), (lambda stack, x: stack(x), outputs)):
        torch.manual_seed(2)
        for x, flag in zip(inputs, training):
            stack.train(flag)
            results.append(make(stack, x))
    stack.eval()  # what holds at backward does not matter
    for i in order:
        got = zoo.gradients(stack, outputs[i], inputs[i])
        assert zoo.worst(got, zoo.gradients(stack, expected[i], inputs[i])) < 1e-9
    assert not any(module.training for module in stack.modules())


def test_one_backward_through_two_calls():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    got = zoo.gradients(stack, stack(stack(x) * 2), x)
    assert (
        zoo.worst(
            got, zoo.gradients(stack, zoo.plain_stack(stack, zoo.plain_stack(stack, x) * 2), x)
        )
        < 1e-9
    )


def test_gradients_accumulate_over_calls():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    for _ in range(2):
        zoo.loss(stack(x)).backward()
    once = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    assert (
        zoo.worst(
            [x.grad, *(p.grad for p in stack.parameters())], [2 * gradient for gradient in once]
        )
        < 1e-9
    )
