"""Whether a refactor changed anything: every network of the zoo, in this checkout and in another.

    git worktree add ../before main
    python -m benchmarks.compare_checkouts ../before [--json]

Each checkout runs in a process of its own (one thread), with its own `retrograd` and the
`tests/zoo.py` of this checkout. Every network takes two training steps with SGD. Then two things
are compared:

1. outputs, gradients, parameters, buffers and the state of the generator: they must be bit-equal;
2. activation bytes, FLOPs and evaluations of each function: they must be equal or lower here.

Only public names of retrograd are used, so that it works across redesigns of the engine. Exits
with 1 if anything differs. Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from tests import zoo

ROOT = Path(__file__).resolve().parents[1]


# --- the networks


class Network(NamedTuple):
    """A module and what it is called with."""

    module: Any
    x: Any
    keywords: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A network to train. `build` gives the same one at every call."""

    name: str
    build: Callable[[], Network]
    autocast: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # attributes of the stack, set last

    def network(self) -> Network:
        network = self.build()
        for name, value in self.options.items():
            setattr(network.module, name, value)
        return network


# Beyond those of the zoo.
LIMITED = {"anchor": rg.Anchor(every=1), "budget": rg.Budget("90%")}
MEMORY = {**zoo.MEMORY, **LIMITED}


def cases() -> Iterator[Case]:
    yield from zoo_cases()
    yield from precision_cases()
    yield from limited_cases()
    yield from context_cases()
    yield from special_cases()


def zoo_cases() -> Iterator[Case]:
    """Every coupling, stream type and memory mode, with and without dropout, in both dtypes."""
    for case in zoo.CASES:
        for dropout, dtype in itertools.product((0.0, 0.3), (torch.float32, torch.float64)):
            yield Case(f"{case} {name_of(dtype)} dropout={dropout}", builder(case, dropout, dtype))


def precision_cases() -> Iterator[Case]:
    """bfloat16 autocast and exact reversal. Couplings that have no exact form raise."""
    for case in zoo.CASES:
        build = builder(case, 0.3, torch.float32)
        if case.value == "tensor":
            yield Case(f"{case} autocast", build, autocast=True)
        if case.memory != "keep":
            yield Case(f"{case} exact", build, options={"exact": True})
    for memory in MEMORY:
        case = zoo.Case("additive", "mean", "tensor", "keep")
        build = builder(case, 0.3, torch.float32)
        options = {"exact": True, "memory": MEMORY[memory]}
        yield Case(f"{case} exact autocast {memory}", build, True, options)


def limited_cases() -> Iterator[Case]:
    """The memory modes that keep a part."""
    for case in zoo.CASES:
        if case.memory == "keep":
            for name, memory in LIMITED.items():
                build = builder(case, 0.3, torch.float64)
                yield Case(f"{case} {name}", build, options={"memory": memory})


def context_cases() -> Iterator[Case]:
    """A keyword argument that needs a gradient."""
    for coupling, value, memory in itertools.product(zoo.COUPLINGS, zoo.VALUES, zoo.MEMORY):
        case = zoo.Case(coupling, "mean", value, memory)
        yield Case(f"{case} context", builder(case, 0.3, torch.float64, context=True))


def special_cases() -> Iterator[Case]:
    """Functions that keep state or return more than a tensor, in every memory mode."""
    for build, (name, memory) in itertools.product(SPECIAL, MEMORY.items()):
        yield Case(f"{build.__name__} {name}", build, options={"memory": memory})


def builder(
    case: zoo.Case, dropout: float, dtype: torch.dtype, context: bool = False
) -> Callable[[], Network]:
    def build() -> Network:
        stack, x = case.build(dropout=dropout, dtype=dtype)
        keywords = {}
        if context:
            keywords["context"] = torch.randn(3, dtype=dtype, requires_grad=True)
        return Network(stack, x, keywords)

    return build


def batch_norm() -> Network:
    def function() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))

    return sequence([(function(), function()) for _ in range(4)])


def shared_weights() -> Network:
    shared = zoo.Mix(4, dropout=0.3)
    return sequence([(shared, zoo.Mix(4)), (zoo.Mix(4), shared), (shared, shared)])


def frozen_weights() -> Network:
    network = sequence([(zoo.Mix(4), zoo.Mix(4)) for _ in range(4)])
    network.module.blocks[:2].requires_grad_(False)
    return network


def with_aux() -> Network:
    return sequence([(WithPenalty(4), zoo.Mix(4)) for _ in range(4)])


def chunked() -> Network:
    return sequence([(rg.Chunked(zoo.Mix(4), chunks=2, dim=0), zoo.Mix(4)) for _ in range(4)])


def program() -> Network:
    """Three streams; every function reads the two others."""
    updates = []
    for i in range(9):
        target, *reads = ("abc"[(i + j) % 3] for j in range(3))
        updates.append(rg.Update(target, Sum(zoo.Mix(4, dropout=0.3)), reads))
    streams = {name: torch.randn(8, 4, requires_grad=True) for name in "abc"}
    return Network(rg.Reversible(updates), streams, {})


SPECIAL = (batch_norm, shared_weights, frozen_weights, with_aux, chunked, program)


def sequence(blocks: list[tuple[nn.Module, nn.Module]]) -> Network:
    return Network(rg.ReversibleSequence(blocks), torch.randn(8, 4, requires_grad=True), {})


class WithPenalty(zoo.Mix):
    """Returns an auxiliary loss, too."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        y = super().forward(x, context)
        return rg.WithAux(y, y.square().mean())


class Sum(nn.Module):
    """Adds up what it reads."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *reads: Tensor) -> Tensor:
        return self.fn(sum(reads))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- in the process of a checkout: what each network gives


@dataclass
class Result:
    """What a network gave. `error` is the class of the exception that it raised instead."""

    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def run_all(source: Path, to: Path) -> None:
    """Run every case with the retrograd in `source` and save the results."""
    found = Path(rg.__file__).resolve()
    if not found.is_relative_to(source.resolve()):
        raise SystemExit(f"retrograd was imported from {found}, not from {source}.")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.disable()  # a collection in the middle of a step would change the count of live bytes
    run(next(cases()))  # torch imports more when it first runs
    results = {}
    for case in cases():
        gc.collect()
        gc.freeze()  # results stay: they need not be looked at again
        results[case.name] = vars(run(case))
    torch.save(results, to)


def run(case: Case) -> Result:
    result = Result()
    try:
        torch.manual_seed(17)
        network = case.network()
        train(case, network, result.tensors)
        gc.collect()
        count(case, network, result.counts)
    except (rg.RetrogradError, ValueError, TypeError) as error:
        result.error = type(error).__name__
    return result


def train(case: Case, network: Network, tensors: dict[str, Tensor | None]) -> None:
    """Take two training steps, and note every tensor that they leave behind."""
    optimizer = torch.optim.SGD(network.module.parameters(), lr=0.1)
    inputs = zoo.leaves((network.x, network.keywords))
    for step in (1, 2):
        output = take_step(case, network)
        note(tensors, f"step {step}, output", enumerate(zoo.leaves(output)))
        note(
            tensors, f"step {step}, gradient of input", ((i, x.grad) for i, x in enumerate(inputs))
        )
        parameters = network.module.named_parameters()
        note(tensors, f"step {step}, gradient of", ((name, p.grad) for name, p in parameters))
        optimizer.step()
        clear_gradients(network)
    note(tensors, "parameter", network.module.named_parameters())
    note(tensors, "buffer", network.module.named_buffers())
    tensors["state of the generator"] = torch.get_rng_state()


def count(case: Case, network: Network, counts: dict[str, int]) -> None:
    """Note what a third step takes: a budget has made its plan by then."""
    measured = rg.measure.step(lambda: take_step(case, network), network.module)
    counts["activation bytes"] = measured.activation_bytes
    counts["FLOPs"] = measured.flops
    for name, evaluations in measured.evaluations.items():
        counts[f"evaluations of {name}"] = evaluations


def take_step(case: Case, network: Network) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        output = network.module(network.x, **network.keywords)
    zoo.loss(output).backward()
    return output


def clear_gradients(network: Network) -> None:
    network.module.zero_grad(set_to_none=True)
    for leaf in zoo.leaves((network.x, network.keywords)):
        leaf.grad = None


def note(
    tensors: dict[str, Tensor | None], what: str, named: Iterable[tuple[Any, Tensor | None]]
) -> None:
    for name, tensor in named:
        tensors[f"{what} {name}"] = None if tensor is None else copy.deepcopy(tensor.detach())


# --- in the first process: both results, compared


@dataclass
class Comparison:
    """One case in both checkouts."""

    case: str
    verdict: str  # equal, lower, or different
    differences: list[str]
    before: dict[str, int]
    after: dict[str, int]
    error: str | None


def compare(case: str, before: Result, after: Result) -> Comparison:
    differences = []
    if before.error != after.error:
        differences.append(f"raised {before.error} before, {after.error} now")
    differences += compare_tensors(before.tensors, after.tensors)
    differences += compare_counts(before.counts, after.counts)
    verdict = "equal"
    if differences:
        verdict = "different"
    elif before.counts != after.counts:
        verdict = "lower"
    return Comparison(case, verdict, differences, before.counts, after.counts, after.error)


def compare_tensors(before: dict[str, Tensor | None], after: dict[str, Tensor | None]) -> list[str]:
    differences = one_sided(before, after)
    for name in before.keys() & after.keys():
        if not are_equal(before[name], after[name]):
            differences.append(f"{name} is not bit-equal")
    return sorted(differences)


def are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def compare_counts(before: dict[str, int], after: dict[str, int]) -> list[str]:
    differences = one_sided(before, after)
    for name in before.keys() & after.keys():
        if after[name] > before[name]:
            differences.append(f"{name}: {before[name]:,} before, {after[name]:,} now")
    return sorted(differences)


def one_sided(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missing = [f"{name} is missing now" for name in before.keys() - after.keys()]
    added = [f"{name} is new" for name in after.keys() - before.keys()]
    return missing + added


def results_of(*checkouts: Path) -> list[dict[str, Result]]:
    """Run all cases with the retrograd of each checkout, in a process of its own, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.pt" for number in range(len(checkouts))]
        processes = [start(checkout, file) for checkout, file in zip(checkouts, files)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a checkout did not get through all cases; see above.")
        return [
            {case: Result(**values) for case, values in torch.load(file).items()} for file in files
        ]


def start(checkout: Path, file: Path) -> subprocess.Popen[bytes]:
    source = checkout.resolve() / "src"
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.compare_checkouts", str(source)]
    return subprocess.Popen([*command, "--save", str(file)], cwd=ROOT, env=environment)


def line(comparison: Comparison) -> str:
    text = f"{comparison.verdict:9}  {comparison.case}"
    if comparison.error is not None:
        text += f"  (raises {comparison.error})"
    for name in ("activation bytes", "FLOPs"):
        before = comparison.before.get(name)
        after = comparison.after.get(name)
        if before != after:
            text += f"  {name}: {before} → {after}"
    shown = comparison.differences[:3]
    more = len(comparison.differences) - len(shown)
    if shown:
        text += "\n           " + "; ".join(shown) + (f"; and {more} more" if more else "")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout: what this one is compared with")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)  # in a checkout's process
    options = parser.parse_args()
    if options.save is not None:
        run_all(options.other, options.save)
        return
    if not (options.other / "src" / "retrograd").is_dir():
        parser.error(f"{options.other} is no checkout: it has no src/retrograd.")
    before, after = results_of(options.other, ROOT)
    both = [case for case in after if case in before]  # an older checkout may lack a coupling
    comparisons = [compare(case, before[case], after[case]) for case in both]
    verdicts = [comparison.verdict for comparison in comparisons]
    summary = {verdict: verdicts.count(verdict) for verdict in ("equal", "lower", "different")}
    if options.json:
        print(json.dumps({**summary, "cases": [vars(c) for c in comparisons]}, indent=2))
    else:
        print("\n".join(map(line, comparisons)))
        print(", ".join(f"{number} {verdict}" for verdict, number in summary.items()))
    sys.exit(1 if summary["different"] else 0)


if __name__ == "__main__":
    main()
