"""Memory modes of one's own: any object with `plan(call)` works wherever a mode is taken."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.cli import main
from tests import zoo


@dataclasses.dataclass(frozen=True)
class KeepSecondHalf:
    """Rebuilds the first half, keeps the second."""

    def plan(self, call):
        return rg.Plan(keep_from=len(call.targets) // 2)


@dataclasses.dataclass(frozen=True)
class KeepEveryThird:
    """Keeps the output of every third function, and the streams before every fourth update."""

    def plan(self, call):
        choices = {i: rg.Choice(output=i % 3 == 0, streams=i % 4 == 0) for i in range(8)}
        return rg.Plan(len(call.targets), choices)


@dataclasses.dataclass(frozen=True)
class KeepCheapest:
    """Plans from measured bytes: keeps the outputs of the smaller half."""

    needs_profile = True

    def plan(self, call):
        updates = len(call.targets)
        if call.profile is None:
            return rg.Plan(updates)
        sizes = [update.output_bytes for update in call.profile.updates]
        limit = sorted(sizes)[updates // 2]
        chosen = [i for i, size in enumerate(sizes) if size <= limit]
        return rg.Plan(updates, dict.fromkeys(chosen, rg.Choice(output=True)))


MODES = [KeepSecondHalf(), KeepEveryThird(), KeepCheapest(), rg.Keep()]


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))


def stack_of(memory, blocks=4):
    torch.manual_seed(0)
    return rg.ReversibleSequence([(mlp(), mlp()) for _ in range(blocks)], memory=memory).double()


def example():
    torch.manual_seed(1)
    return torch.randn(6, 8, dtype=torch.float64)


def network():
    """For the command line."""
    return stack_of(KeepSecondHalf()), (example(),)


@pytest.mark.parametrize("memory", MODES, ids=repr)
def test_training(memory):
    stack = stack_of(memory)
    x = example().requires_grad_()
    for _ in range(3):  # a mode that asks for a profile gets it in the second call
        torch.manual_seed(2)
        expected = zoo.gradients(stack, zoo.plain_stack(stack, x), x)
        torch.manual_seed(2)
        got = zoo.gradients(stack, stack(x), x)
        assert zoo.worst(got, expected) < 1e-9


@pytest.mark.parametrize("memory", MODES, ids=repr)
def test_the_plan_is_what_runs(memory):
    stack = stack_of(memory)
    plan = stack.plan(example())
    assert plan.memory == memory
    stack(example())
    torch.manual_seed(2)
    step = rg.measure.step(lambda: stack(example()).sum().backward(), stack)
    kept = [row.name for row in plan.rows if row.keeps == "everything"]
    again = [name for name, count in step.evaluations.items() if count == 2]
    assert sorted(kept + again) == sorted(row.name for row in plan.rows)
    assert type(memory).__name__ in str(plan)


def test_the_plan_of_keep_keeps_everything():
    plan = stack_of(rg.Keep()).plan(example())
    assert {row.keeps for row in plan.rows} == {"everything"}
    assert plan.peak == plan.plain
    assert plan.time == 1.0


def test_what_a_plan_keeps_is_described():
    rows = stack_of(KeepEveryThird()).plan(example()).rows
    assert [row.keeps for row in rows[:5]] == [
        "streams + output",
        "nothing",
        "nothing",
        "output",
        "streams",
    ]
    assert rows[0].bytes == 3 * 6 * 8 * 8
    assert rows[1].bytes == 0


@pytest.mark.parametrize("memory", MODES, ids=repr)
def test_check(memory):
    report = rg.check(stack_of(memory), example())
    assert report.ok
    assert type(memory).__name__ in report.stacks[0].memory


def test_the_command_line(capsys):
    assert main(["plan", f"{__file__}:network", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert "KeepSecondHalf" in json.dumps(plans[0])
    assert main(["check", f"{__file__}:network"]) == 0
    assert "KeepSecondHalf" in capsys.readouterr().out


def test_a_measured_call_keeps_nothing_and_is_measured_once_for_each_shape():
    calls = []

    class Asks:
        needs_profile = True

        def plan(self, call):
            calls.append(call.profile is not None)
            return rg.Plan(len(call.targets))

    stack = stack_of(Asks())
    for rows in (6, 6, 4, 6):
        stack(torch.randn(rows, 8, dtype=torch.float64))
    # Planned at the end of each measured call, so that errors are raised at once, and then again.
    assert calls == [True] * 4
    with torch.autograd.graph.save_on_cpu():
        stack(example())  # cannot be measured: whoever surrounds it may run it again
    assert calls[-1] is False


def test_what_is_no_mode_raises_at_once():
    stack = stack_of(rg.Keep())
    for wrong in (rg.Reverse, None, 3):
        with pytest.raises(TypeError, match="memory is"):
            stack.memory = wrong
    with pytest.raises(ValueError, match="a share of plain autograd"):
        stack.memory = "reverse"
    assert stack.memory == rg.Keep()


def test_a_plan_that_does_not_fit_is_an_error():
    class Beyond:
        def plan(self, call):
            return rg.Plan(keep_from=99)

    class Negative:
        def plan(self, call):
            return rg.Plan(keep_from=-1)

    class NoPlan:
        def plan(self, call):
            return 3

    for memory, what in ((Beyond(), "99"), (Negative(), "-1"), (NoPlan(), "3")):
        stack = stack_of(memory)
        with pytest.raises((TypeError, ValueError), match=what):
            stack(example())
