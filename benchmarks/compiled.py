"""The line between time and memory of compiled steps.

    python -m benchmarks.compiled [--sizes tiny] [--depths 4,16,64] [--budgets 0.1,0.5] [--rounds 9]

Transformer blocks, compiled by Inductor: plain; plain with torch's `activation_memory_budget`;
checkpointed by block; a stack whose functions are compiled one by one (`stack.compile()`); and the
stack compiled whole. Beside them the stack in eager mode.

- saved: bytes that forward leaves for backward, of the compiled graph
- peak: the most bytes alive at any time, of torch's CPU allocator, without parameters and gradients
- FLOPs: of the compiled graphs, as torch counts them; of the eager stack, of the step
- sources: different C++ sources that Inductor generates: what the C++ compiler has to do
- Python: seconds of CPU time until the first step is over, without the C++ compiler
- time: CPU time of a step on one thread, relative to compiled plain: medians of steps run in turn

Writes the table of docs/benchmarks.md, and docs/figures/compiled.jsonl. Rows that were not measured
this time stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo
from torch import fx, nn
from torch._C._profiler import _EventType
from torch._functorch import config as functorch_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import retrograd as rg
from benchmarks.cases import Attention, FeedForward, Plain
from benchmarks.drift import FIGURES
from benchmarks.page import write_table
from retrograd.compiling.budgets import size_of
from retrograd.compiling.seams import min_cut

MIB = 2**20
PATH = FIGURES / "compiled.jsonl"
INVOKE = torch.ops.higher_order.invoke_subgraph


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
if ATTENTION not in flop_registry:  # before torch 2.14

    @register_flop_formula(ATTENTION)
    def _(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(q, k, v)

    @register_flop_formula(ATTENTION_BACKWARD)
    def _(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(grad, q, k, v)


class Size(NamedTuple):
    width: int
    batch: int
    tokens: int
    dropout: float = 0.1


SIZES = {"tiny": Size(64, 2, 64), "large": Size(192, 2, 256)}


class Observed(CustomPartitionerFn):
    """torch's own partitioner, which remembers what it made."""

    graphs: list[tuple[fx.GraphModule, fx.GraphModule, int]] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        forward, backward = min_cut()(gm, inputs, **kwargs)
        count = kwargs["num_fwd_outputs"]
        stats = (saved_bytes(forward, count), graph_flops(forward) + graph_flops(backward))
        self.graphs.append(stats)  # type: ignore[arg-type]
        return forward, backward

    def uuid(self) -> None:
        return None  # nothing is cached


def saved_bytes(forward: fx.GraphModule, outputs: int) -> int:
    returned: Any = forward.graph.find_nodes(op="output")[0].args[0]
    values = [node.meta["val"] for node in returned[outputs:] if node.op != "placeholder"]
    return sum(size_of(value) for value in values if isinstance(value, torch.Tensor))


def graph_flops(gm: fx.GraphModule) -> int:
    total = 0
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE):
        total += graph_flops(getattr(gm, node.args[0].target))  # type: ignore[union-attr]
    for node in gm.graph.nodes:
        formula: Any = flop_registry.get(getattr(node.target, "_overloadpacket", None))
        if formula is not None:
            value = lambda n: n.meta["val"] if isinstance(n, fx.Node) else n  # noqa: E731
            args, kwargs = tree_map(value, (node.args, dict(node.kwargs)))
            total += formula(*args, **kwargs, out_val=node.meta.get("val"))
    return total


def step(run: Callable[..., Any], x: torch.Tensor) -> None:
    run(x).square().mean().backward()


def peak_bytes(run: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> int:
    """The most bytes alive at any time of a step, without the gradients of parameters."""
    module.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(run, x)
    events, todo = [], list(profiled.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while todo:
        event = todo.pop()
        todo += event.children
        if event.typed[0] == _EventType.Allocation:
            events.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    events.sort(key=lambda event: event[0])
    found = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
    last = {ptr: i for i, (_, ptr, size) in enumerate(events) if size > 0 and ptr in found}
    now = most = 0
    for i, (_, ptr, size) in enumerate(events):
        now += 0 if last.get(ptr) == i else size  # gradients stay
        most = max(most, now)
    return most


def networks(size: Size, depth: int, budgets: list[float]) -> dict[str, tuple[nn.Module, float]]:
    """Each way by name, with its `activation_memory_budget`."""

    def blocks() -> list[tuple[nn.Module, nn.Module]]:
        torch.manual_seed(0)
        drop = size.dropout
        return [
            (
                nn.Sequential(Attention(size.width, 4), nn.Dropout(drop)),
                nn.Sequential(FeedForward(size.width), nn.Dropout(drop)),
            )
            for _ in range(depth)
        ]

    stack = lambda: rg.ReversibleSequence(blocks(), streams=rg.Split())  # noqa: E731
    found: dict[str, tuple[nn.Module, float]] = {"plain": (Plain(blocks()), 1.0)}
    found |= {f"plain, budget {b}": (Plain(blocks()), b) for b in budgets}
    found["checkpoint per block"] = (Plain(blocks(), checkpoint), 1.0)
    found["retrograd, eager"] = (stack(), 1.0)
    found["retrograd, `stack.compile()`"] = (stack(), 1.0)
    found["retrograd, whole"] = (stack(), 1.0)
    return found


def compiled(name: str, module: nn.Module) -> Callable[..., Any]:
    if name.endswith("eager"):
        return module
    if name.endswith("`stack.compile()`"):
        module.compile()
        return module
    options: Any = {"custom_partitioner_fn": Observed()}
    return torch.compile(module, fullgraph=True, dynamic=False, options=options)


@contextlib.contextmanager
def sources() -> Iterator[set[str]]:
    """The C++ sources of the kernels that are compiled, or loaded, meanwhile."""
    found: set[str] = set()
    load = AsyncCompile.cpp_pybinding

    def add_and_load(self: AsyncCompile, types: list[str], source: str) -> Any:
        found.add(source)
        return load(self, types, source)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", add_and_load):
        yield found


def eager_flops(run: Callable[..., Any], x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        step(run, x)
    return counter.get_total_flops()


def measure(
    size_name: str, depth: int, budgets: list[float], rounds: int, ways: str
) -> list[dict[str, Any]]:
    size = SIZES[size_name]
    x = torch.randn(size.batch, size.tokens, 2 * size.width).requires_grad_()
    rows, steps = [], {}
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # all ways run the same code
    for name, (module, budget) in networks(size, depth, budgets).items():
        if not re.search(ways, name):
            continue
        Observed.graphs.clear()
        run = compiled(name, module)
        start = time.process_time()
        settings = {"activation_memory_budget": budget, "enable_autograd_cache": False}
        with functorch_config.patch(settings), sources() as found:
            step(run, x)
        python = time.process_time() - start
        step(run, x)
        is_compiled = not name.endswith("eager")
        saved, flops = Observed.graphs[-1] if Observed.graphs else (None, None)  # type: ignore[misc]
        if not is_compiled:
            flops = eager_flops(run, x)
        row = {"size": size_name, "depth": depth, "way": name, "saved": saved, "flops": flops}
        row |= {"peak": peak_bytes(run, module, x)}
        row |= {"sources": len(found), "python": python} if is_compiled else {}
        rows.append(row)
        steps[name] = run
        print(row, flush=True)
    for row, ratio in zip(rows, ratios(steps, x, rounds)):
        row["time"] = ratio
    return rows


def ratios(steps: dict[str, Callable[..., Any]], x: torch.Tensor, rounds: int) -> list[float]:
    """The median CPU time of each way, relative to that of the first."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            start = time.process_time()
            step(run, x)
            taken[name].append(time.process_time() - start)
    medians = list(map(statistics.median, taken.values()))
    return [median / medians[0] for median in medians]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| blocks | | saved, MiB | peak, MiB | FLOPs | time | sources | Python, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    plain = {(row["size"], row["depth"]): row for row in rows if row["way"] == "plain"}
    for row in rows:
        base = plain.get((row["size"], row["depth"]))
        saved = "–" if row["saved"] is None else f"{row['saved'] / MIB:.2f}"
        of_plain = None if base is None else base["flops"]
        flops = f"{row['flops'] / of_plain:.2f}" if of_plain and row["flops"] else "–"
        taken = "–" if base is None else f"{row['time']:.2f}"
        found = str(row.get("sources", "–"))
        python = f"{row['python']:.0f}" if "python" in row else "–"
        cells = [f"{row['depth']} {row['size']}", row["way"], saved, f"{row['peak'] / MIB:.2f}"]
        cells += [flops, taken, found, python]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="tiny,large", type=lambda text: text.split(","))
    parser.add_argument("--depths", default="4,16,64")
    parser.add_argument("--budgets", default="0.1,0.2,0.3,0.5,0.7,0.9")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--ways", default="", help="a pattern: only ways with such a name")
    chosen = parser.parse_args()
    depths = list(map(int, chosen.depths.split(",")))
    budgets = [float(budget) for budget in chosen.budgets.split(",") if budget]
    known = [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []
    for size in chosen.sizes:
        for depth in depths:
            rows = measure(size, depth, budgets, chosen.rounds, chosen.ways)
            known = [row for row in known if (row["size"], row["depth"]) != (size, depth)] + rows
            known.sort(key=lambda row: (list(SIZES).index(row["size"]), row["depth"]))
            PATH.write_text("".join(f"{json.dumps(row)}\n" for row in known))
            write_table("compiled", table(known), "benchmarks.md")


if __name__ == "__main__":
    main()
