"""Functions that communicate: what is recomputed is the same in every process, whatever its shapes,
so collectives match.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import retrograd as rg
from tests import processes, zoo
from tests.processes import WORLD, Gradients

pytestmark = pytest.mark.distributed

LENGTHS = (3, 60)  # of the processes' inputs: what one has room to keep, the other has not
MEMORY: dict[str, Any] = {**zoo.MEMORY, "anchor": rg.Anchor(2)}
REVERSED = [name for name in MEMORY if name != "keep"]


class Balanced(nn.Module):
    """Returns beside its output how evenly all processes together use it, as routers of
    experts do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> rg.WithAux:
        hidden = self.up(x).softmax(-1)
        share = collectives.all_reduce(hidden.mean((0, 1))) / dist.get_world_size()
        return rg.WithAux(self.down(hidden), share.square().sum())


class Centred(nn.Module):
    """Takes the mean over all processes off its input, as SyncBatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = collectives.all_reduce(x.mean((0, 1))) / dist.get_world_size()
        return self.linear(x - mean).tanh()


# --- in the processes


def train(
    function: type[nn.Module],
    lengths: tuple[int, int],
    half_without_gradients: bool,
    memory: Any,
    rank: int,
) -> Gradients:
    """Two steps; which process has which length changes."""
    torch.manual_seed(17)
    stack = rg.ReversibleSequence(
        [(function(), function()) for _ in range(4)], memory=memory
    ).double()
    grads: Gradients = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(2, lengths[(rank + step) % 2], 4, dtype=torch.float64, generator=generator)
        result = stack(x)
        output, aux = result if isinstance(result, tuple) else (result, [])
        (output.square().mean() + sum(aux)).backward()
        grads += [p.grad.clone() for p in stack.parameters()]  # type: ignore[union-attr]
        stack.zero_grad(set_to_none=rank == 0 or not half_without_gradients)
    return grads


def plans(rank: int) -> list[list[Any]]:
    """What a budget keeps, in every process, where parameters cannot be sharded evenly."""

    def build(memory: Any) -> rg.ReversibleSequence:
        torch.manual_seed(17)
        stack = rg.ReversibleSequence(
            [
                (nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 17)), nn.Linear(17, 17))
                for _ in range(6)
            ],
            memory=memory,
        )
        for block in stack.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (WORLD,)))
        fully_shard(stack, mesh=init_device_mesh("cpu", (WORLD,)))
        return stack

    found = []
    for percent in range(60, 101, 2):
        stack = build(rg.Budget(f"{percent}%"))
        try:
            stack(torch.randn(3, 20, 17)).square().mean().backward()
            (profile,) = stack._cache.profiles.values()
            plan = profile.plans(stack.memory, True)[0]
            own = [
                plan.keep_from,
                sorted((i, choice.output) for i, choice in plan.choices.items()),
            ]
        except rg.BudgetError:
            own = []
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, own)
        found.append(everyone)
    return found


def sharded_updates(memory: Any, rank: int) -> Gradients:
    """FSDP on each update of a program, and at the root."""
    torch.manual_seed(17)
    updates = [rg.Update("ab"[i % 2], zoo.Mix(4), ("ba"[i % 2],)) for i in range(6)]
    program = rg.Reversible(updates, memory=memory).double()
    mesh = init_device_mesh("cpu", (WORLD,))
    for update in updates:
        fully_shard(update, mesh=mesh)
    fully_shard(program, mesh=mesh)
    generator = torch.Generator().manual_seed(rank)
    streams = {name: torch.randn(2, 4, dtype=torch.float64, generator=generator) for name in "ab"}
    zoo.loss(program(streams)).backward()
    return processes.gradients(program)


def exact_pipeline(rank: int) -> Gradients:
    """Shapes are given, so that torch does not try the stages on uninitialised memory."""
    stack = exact_stack()
    half = rg.ReversibleSequence(
        [(b.f, b.g) for b in list(stack.blocks)[2 * rank :][:2]], streams=rg.Split(), exact=True
    )
    shape = torch.empty(1, 8, device="meta", requires_grad=True)
    stage = PipelineStage(
        half, rank, WORLD, torch.device("cpu"), input_args=(shape,), output_args=(shape,)
    )
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x, target = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    return [p.grad for p in half.parameters()]


def exact_stack() -> rg.ReversibleSequence:
    torch.manual_seed(17)
    return rg.ReversibleSequence(
        [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)], streams=rg.Split(), exact=True
    )


SETUPS: dict[str, tuple[type[nn.Module], tuple[int, int], bool]] = {
    "aux": (Balanced, LENGTHS, False),
    "statistics": (Centred, LENGTHS, False),
    "gradients-of-one": (Centred, (5, 5), True),
}
CASES: dict[str, processes.Case] = {"plans": plans}
if processes.PIPELINES_WORK:
    CASES["exact-pipeline"] = exact_pipeline
for name, memory in MEMORY.items():
    CASES |= {
        f"{setup}-{name}": functools.partial(train, *options, memory)
        for setup, options in SETUPS.items()
    }
    CASES[f"updates-{name}"] = functools.partial(sharded_updates, memory)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    view = "FSDP2-wrapped module .* returned a view tensor"
    deprecated = "torch.distributed.nn.functional.all_reduce is deprecated"
    return processes.run(CASES, tmp_path_factory.mktemp("collectives"), ignore=[view, deprecated])


# --- against the same with everything kept


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize("setup", SETUPS)
def test_collectives_inside_functions_meet_their_match(results, setup, memory):
    for got, expected in zip(results[f"{setup}-{memory}"], results[f"{setup}-keep"]):
        assert zoo.worst(got, expected) < 1e-9


def test_every_process_comes_to_the_same_plan(results):
    everyone = results["plans"][0]
    assert all(own == other for own, other in everyone)
    assert len({str(own) for own, _ in everyone}) > 3, "the budgets did not differ"


@pytest.mark.parametrize("memory", MEMORY)
def test_updates_may_be_sharded(results, memory):
    torch.manual_seed(17)
    program = rg.Reversible(
        [rg.Update("ab"[i % 2], zoo.Mix(4), ("ba"[i % 2],)) for i in range(6)], memory=rg.Keep()
    ).double()
    of_ranks = []
    for rank in range(WORLD):
        generator = torch.Generator().manual_seed(rank)
        streams = {
            name: torch.randn(2, 4, dtype=torch.float64, generator=generator) for name in "ab"
        }
        zoo.loss(program(streams)).backward()
        of_ranks.append(processes.gradients(program))
    for got in results[f"updates-{memory}"]:
        assert zoo.worst(got, processes.mean(of_ranks)) < 1e-9


@pytest.mark.skipif(not processes.PIPELINES_WORK, reason=processes.NO_PIPELINES)
def test_an_exact_pipeline(results):
    """The gradients of one stack, to rounding: a pipeline adds those of parts of the batch."""
    stack = exact_stack()
    x, target = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    nn.functional.mse_loss(stack(x), target).backward()
    expected = [p.grad for p in stack.parameters()]
    got = [grad for rank in results["exact-pipeline"] for grad in rank]
    assert zoo.worst(got, expected) < 1e-5
