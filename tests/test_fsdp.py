"""Promise 2: FSDP2 (`fully_shard`) gives the gradients of one process in plain autograd, wherever
it is applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import retrograd as rg
from compatibility.rows.sharding import average, shard
from tests import processes, zoo
from tests.processes import REVERSED, WORLD, Gradients, Model

pytestmark = pytest.mark.distributed

STEPS = 2
PLACES: dict[
    str, Callable[[Model], list[nn.Module]]
] = {  # inner modules first, as fully_shard wants them
    "f-and-g": lambda model: functions(model.stack),
    "blocks": lambda model: [*model.stack.blocks],
    "stack": lambda model: [model.stack],
    "root": lambda model: [model],
    "f-and-g-and-root": lambda model: [*functions(model.stack), model],
    "blocks-and-root": lambda model: [*model.stack.blocks, model],
    "everywhere": lambda model: [*functions(model.stack), *model.stack.blocks, model.stack, model],
}
RESHARD = {"resharded": True, "left-unsharded": False}  # after forward
MODELS: dict[str, dict[str, Any]] = {
    "shared-weights": {"shared": True},
    "frozen-embedding": {"frozen": True},
    "unused-parameter": {"second": processes.Unused},
}
EPS = torch.finfo(torch.bfloat16).eps
MIXED: dict[
    str, tuple[str, bool, float]
] = {  # where, whether FSDP casts the inputs, and how far gradients may be off
    "f-and-g": (
        "f-and-g",
        True,
        2 * EPS,
    ),  # the streams stay float32: what f and g get is off by one rounding at most
    "blocks": ("blocks", True, 2 * EPS),  # and so do they here: only what f and g read is cast
    "blocks-and-root": ("blocks-and-root", True, 4 * EPS),  # the embedding too runs in bfloat16
    "blocks-that-leave-streams-alone": ("blocks", False, 2 * EPS),  # f and g cast for themselves
}
ZOO = [case for case in zoo.REVERSED if case.memory == "reverse"]


def functions(stack: rg.ReversibleSequence) -> list[nn.Module]:
    return list(dict.fromkeys(fn for block in stack.blocks for fn in (block.f, block.g)))


# --- in the processes


def train(
    place: str, reshard: bool, model_options: dict[str, Any], memory: Any, rank: int
) -> list[Gradients]:
    """The gradients of each step and, at the end, the parameters."""
    model = Model(memory, **model_options)
    shard(PLACES[place](model), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(STEPS):
        processes.loss(model, step, rank).backward()
        average(model)
        optimizer.step()
        steps.append(processes.gradients(model))
    return [
        *steps,
        [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()],
    ]


def accumulate(memory: Any, rank: int) -> Gradients:
    model = Model(memory)
    shard(PLACES["f-and-g-and-root"](model))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        processes.loss(model, step, rank).backward()
    return processes.gradients(model)


def two_forwards(memory: Any, rank: int) -> Gradients:
    """And a third, of an evaluation."""
    model = Model(memory)
    shard(PLACES["f-and-g-and-root"](model))
    losses = [processes.loss(model, step, rank) for step in range(2)]
    with torch.no_grad():
        processes.loss(model, 2, rank)
    sum(losses).backward()
    return processes.gradients(model)


def drop(memory: Any, rank: int) -> Gradients:
    model = Model(memory, dropout=0.5)
    shard(PLACES["f-and-g-and-root"](model))
    return processes.dropout_gradients(model, rank)


def mixed(place: str, cast: bool, memory: Any, rank: int) -> Gradients:
    """In bfloat16 where FSDP is applied; the rest in float32."""
    model = Model(memory, dtype=torch.float32)
    shard(
        PLACES[place](model),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast),
    )
    for fn in functions(model.stack) if not cast else ():
        fn.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))
    processes.loss(model, 0, rank).backward()
    average(model)
    return processes.gradients(model)


def resharded(memory: Any, rank: int) -> list[bool]:
    """Whether the last block's parameters were put away again when backward ran the first block,
    whose input FSDP casts.
    """
    model = Model(memory, dtype=torch.float32)
    shard(PLACES["blocks"](model), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    first, last = model.stack.blocks[0], model.stack.blocks[-1]
    seen = []

    def look(*_: Any) -> None:
        if rg.is_recomputing():
            seen.append(all(isinstance(p, DTensor) for p in last.parameters()))

    first.f.register_forward_pre_hook(look)
    processes.loss(model, 0, rank).backward()
    return seen


def whole_zoo(place: str, rank: int) -> dict[str, Gradients]:
    def wrap(stack: rg.ReversibleSequence) -> rg.ReversibleSequence:
        shard(functions(stack) if place == "f-and-g" else [*stack.blocks])
        return stack

    return {str(case): processes.zoo_gradients(case, rank, wrap) for case in ZOO}


CASES: dict[str, processes.Case] = {
    f"zoo-{place}": functools.partial(whole_zoo, place) for place in ("f-and-g", "blocks")
}
for name, memory in zoo.MEMORY.items():
    for setup, (place, cast, _) in MIXED.items():
        CASES[f"mixed-{setup}-{name}"] = functools.partial(mixed, place, cast, memory)
for name, memory in REVERSED.items():
    for when, reshard in RESHARD.items():
        CASES |= {
            f"{place}-{when}-{name}": functools.partial(train, place, reshard, {}, memory)
            for place in PLACES
        }
    for model, options in MODELS.items():
        CASES[f"{model}-{name}"] = functools.partial(
            train, "f-and-g-and-root", True, options, memory
        )
    for place in ("f-and-g", "blocks"):
        CASES[f"late-{place}-{name}"] = functools.partial(
            train, place, True, {"second": processes.Shift}, memory
        )
    for case in (accumulate, two_forwards, drop, resharded):
        CASES[f"{case.__name__}-{name}"] = functools.partial(case, memory)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    # FSDP says so of every linear layer's output with more than two dimensions. Nothing edits it in
    # place.
    view = "FSDP2-wrapped module .* returned a view tensor"
    return processes.run(CASES, tmp_path_factory.mktemp("fsdp"), ignore=[view])


# --- against one process in plain autograd


def plain_training(**model_options: Any) -> list[Gradients]:
    model = Model(**model_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(STEPS):
        processes.loss(model, step).backward()
        optimizer.step()
        steps.append(processes.gradients(model))
    return [*steps, [p.detach() for p in model.parameters()]]


def assert_trains(ranks: list[list[Gradients]], expected: list[Gradients]) -> None:
    for got in ranks:
        for values, wanted in zip(got, expected, strict=True):
            assert zoo.worst(values, wanted) < 1e-9


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize("when", RESHARD)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_and_parameters_are_those_of_one_process(results, place, when, memory):
    assert_trains(results[f"{place}-{when}-{memory}"], plain_training())


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize("model", MODELS)
def test_shared_frozen_and_unused_parameters(results, model, memory):
    assert_trains(results[f"{model}-{memory}"], plain_training(**MODELS[model]))


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize("place", ["f-and-g", "blocks"])
def test_a_function_that_saves_nothing(results, place, memory):
    """Nothing asks for its recompute during its own backward, while FSDP has its parameters
    gathered.
    """
    assert_trains(results[f"late-{place}-{memory}"], plain_training(second=processes.Shift))


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize(("case", "steps"), [("accumulate", 3), ("two_forwards", 2)])
def test_several_forwards_before_a_step(results, case, steps, memory):
    expected = processes.accumulated(steps)
    for got in results[f"{case}-{memory}"]:
        assert zoo.worst(got, expected) < 1e-9


@pytest.mark.parametrize("memory", REVERSED)
def test_dropout_replays_the_draws_of_each_rank(results, memory):
    expected = processes.mean(
        processes.dropout_gradients(Model(dropout=0.5), rank) for rank in range(WORLD)
    )
    for got in results[f"drop-{memory}"]:
        assert zoo.worst(got, expected) < 1e-9


@pytest.mark.parametrize("place", ["f-and-g", "blocks"])
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_whole_zoo(results, case, place):
    plain = zoo.Case(case.coupling, case.streams, case.value, "keep")
    expected = processes.mean(processes.zoo_gradients(plain, rank) for rank in range(WORLD))
    for got in results[f"zoo-{place}"]:
        assert zoo.worst(got[str(case)], expected) < 1e-9


# --- mixed precision, against the same policy in plain autograd


@pytest.mark.parametrize("memory", REVERSED)
@pytest.mark.parametrize("setup", MIXED)
def test_mixed_precision(results, setup, memory):
    expected = results[f"mixed-{setup}-keep"][0]
    for got in results[f"mixed-{setup}-{memory}"]:
        assert all(grad.dtype == torch.float32 for grad in got)
        assert zoo.worst(got, expected) < MIXED[setup][2]
    model = Model(dtype=torch.float32)
    processes.loss(model, 0).backward()
    assert zoo.worst(expected, processes.gradients(model)) > EPS / 2, "the policy had no effect"


@pytest.mark.parametrize("memory", REVERSED)
def test_blocks_whose_input_is_cast_are_put_away_in_time(results, memory):
    assert results[f"resharded-{memory}"] == [[True]] * WORLD
