"""Promise 10: gradient hooks fire once a backward, even with shared weights; forward hooks run and
can tell a recompute.
"""

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo


@pytest.mark.parametrize("case", zoo.REVERSED, ids=str)
def test_gradient_hooks_fire_once_with_the_whole_gradient(case):
    stack, x = case.build()
    stack.blocks[2].f.load_state_dict(stack.blocks[0].f.state_dict())
    stack.blocks[2].f = stack.blocks[0].f  # shared weights
    expected = dict(zip(stack.parameters(), zoo.gradients(stack, zoo.plain_stack(stack, x))))
    seen, accumulated = [], []
    for p in stack.parameters():
        p.register_hook(lambda gradient, p=p: seen.append((p, gradient.clone())) and None)
        p.register_post_accumulate_grad_hook(accumulated.append)
    zoo.loss(stack(x)).backward()
    assert len(seen) == len(accumulated) == len(expected)
    assert all(torch.allclose(gradient, expected[p]) for p, gradient in seen)


def test_forward_hooks_run_and_can_tell_a_recompute():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse-all").build()
    calls = []
    for name, module in stack.named_modules():
        if name.endswith((".f", ".g")):
            module.register_forward_pre_hook(
                lambda m, a, name=name: calls.append(("pre", name, rg.is_recomputing()))
            )
            module.register_forward_hook(
                lambda m, a, o, name=name: calls.append(("post", name, rg.is_recomputing()))
            )
    stack(x).sum().backward()
    names = [f"blocks.{i}.{fn}" for i in range(3) for fn in "fg"]
    forward = [(kind, name, False) for name in names for kind in ("pre", "post")]
    recompute = [(kind, name, True) for name in reversed(names) for kind in ("pre", "post")]
    assert calls == forward + recompute
    assert not rg.is_recomputing()


def test_forward_hooks_that_change_the_output_change_it_both_times():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    for block in stack.blocks:
        block.f.register_forward_hook(lambda m, a, output: output * 2)
        block.g.register_forward_pre_hook(lambda m, args: (args[0] + 1, *args[1:]))
    assert (
        zoo.worst(
            zoo.gradients(stack, stack(x), x), zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        )
        < 1e-9
    )


def test_backward_hooks_see_what_they_see_in_plain():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    seen = []
    for block in stack.blocks:
        block.f.register_full_backward_hook(
            lambda m, grad_in, grad_out: seen.append((grad_in[0], grad_out[0]))
        )
    zoo.loss(stack(x)).backward()
    got, seen[:] = list(seen), []
    zoo.loss(zoo.plain_stack(stack, x)).backward()
    assert len(got) == len(seen) == 3
    assert all(torch.allclose(a, b) for pair in zip(got, seen) for a, b in zip(*pair))


def test_hooks_on_a_block_run_once_in_forward():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    runs = []
    for block in stack.blocks:
        block.register_forward_hook(lambda *_: runs.append(1))
    stack(x).sum().backward()
    assert len(runs) == 3


def test_a_hook_on_a_block_that_replaces_a_stream_is_refused():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    stack.blocks[1].register_forward_hook(
        lambda m, a, state: {name: [leaf * 2 for leaf in leaves] for name, leaves in state.items()}
    )
    with pytest.raises(
        rg.RetrogradError,
        match=r"(?s)a hook on the block replaced stream 'x1'.*Fix: hook f and g instead",
    ):
        stack(x)


class Bias(nn.Module):
    """Ends in an addition: autograd has its gradient before it asks for any saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.linear(x).tanh() + self.bias


@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_an_optimizer_that_steps_inside_backward(memory):
    """The step of a parameter comes before or after the recompute of its function; never is the
    result another.
    """
    stacks = [
        rg.ReversibleSequence([(Bias(), Bias()) for _ in range(3)], memory=m).double()
        for m in (rg.Keep(), zoo.MEMORY[memory])
    ]
    stacks[1].load_state_dict(stacks[0].state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    for stack in stacks:

        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in stack.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            zoo.loss(stack(x)).backward()
    assert (
        zoo.worst(
            [p.detach() for p in stacks[1].parameters()],
            [p.detach() for p in stacks[0].parameters()],
        )
        < 1e-9
    )


def test_tools_that_hook_modules_work():
    from torch.utils.flop_counter import FlopCounterMode

    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    for tool in (
        FlopCounterMode(display=False),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
    ):
        stack.zero_grad()
        x.grad = None
        with tool:
            zoo.loss(stack(x)).backward()
        assert zoo.worst([x.grad, *(p.grad for p in stack.parameters())], expected) < 1e-9


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
    with torch.autograd.detect_anomaly():
        assert zoo.worst(zoo.gradients(stack, stack(x), x), expected) < 1e-9


def test_hooks_on_an_update_run_as_on_its_function():
    calls = []
    updates = [rg.Update("ab"[i % 2], zoo.Mix(4), ("ba"[i % 2],)) for i in range(4)]
    net = rg.Reversible(updates, memory=rg.Reverse(keep_last=False)).double()
    for update in updates:
        update.register_forward_hook(
            lambda module, args, output: calls.append(rg.is_recomputing()) or 2 * output
        )
    streams = {name: torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for name in "ab"}
    got = zoo.gradients(net, net(streams), streams)
    assert calls == [False] * 4 + [True] * 4
    net.memory = rg.Keep()
    assert zoo.worst(got, zoo.gradients(net, net(streams), streams)) < 1e-9
