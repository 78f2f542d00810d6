"""What `python -m benchmarks.gpu` measures: gradients, bytes, tokens per second, a captured step.

All contestants wrap the same modules f and g, so that the device holds the weights once. Each takes
the step below. It differs from that of `steps` in two ways:

- Autocast runs without its cache. Each weight is used once in a forward, so the cache would save no
  time, and would hold a copy of all weights until forward ends.
- The loss is a sum over 32, not a mean. The gradient of a mean over millions of elements is too
  small for float16.

Backward runs outside of autocast, as torch's documentation asks. The peers are the exception: they
recompute in the precision in which backward is called, and would run in float32.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.cases import CONTESTANTS, Pairs, Plain, Size, pairs
from benchmarks.gpu_table import BUDGET_TOO_SMALL, NOT_INSTALLED, OUT_OF_MEMORY
from benchmarks.precision import difference
from benchmarks.steps import example, in_turn
from retrograd.measure import Allocator, activation_bytes

PEERS = ("reformer-pytorch", "revtorch", "revlib", "memcnn")
NAMES = ("plain", "checkpoint", "retrograd", "retrograd, exact", "retrograd, 25%", *PEERS)

# 48 layers of it take 6 GiB in plain autograd and float32, and 1.2 GiB of weights and gradients.
FULL = Size("gpu", blocks=48, width=512, batch=8, tokens=512, heads=8)
FULL_LAYERS = (9, 24, 48)
QUICK = Size("gpu", blocks=12, width=16, batch=2, tokens=16, heads=2)
QUICK_LAYERS = (3, 12)

Row = dict[str, Any]


def sizes(quick: bool) -> list[Size]:
    size, layers = (QUICK, QUICK_LAYERS) if quick else (FULL, FULL_LAYERS)
    return [replace(size, blocks=blocks) for blocks in layers]


# --- precision


def has_bfloat16(device: torch.device) -> bool:
    """Whether its bfloat16 is fast. GPUs before compute capability 8, such as a T4, emulate it."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def training_precision(device: torch.device) -> str:
    return "bfloat16" if has_bfloat16(device) else "float16"


def precisions(device: torch.device) -> list[str]:
    """In which gradients are compared."""
    return ["float32", "bfloat16", *([] if has_bfloat16(device) else ["float16"])]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision), cache_enabled=False)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits every time. An operation that has none raises."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- a step


def example_on(size: Size, device: torch.device) -> Tensor:
    return example(size).detach().to(device).requires_grad_()


def pairs_on(size: Size, device: torch.device) -> Pairs:
    return [(f.to(device), g.to(device)) for f, g in pairs(size)]


def leaves(network: nn.Module, x: Tensor) -> list[Tensor]:
    return [*network.parameters(), x]


def step(network: nn.Module, x: Tensor, precision: str, backward_inside: bool = False) -> None:
    """A forward and a backward, from gradients that are None."""
    clear_gradients(leaves(network, x))
    with autocast(x.device, precision):
        loss = network(x * 1.0).square().sum() / 32  # times one: memcnn frees its input
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()


def clear_gradients(of: list[Tensor]) -> None:
    for leaf in of:
        leaf.grad = None


def copied_gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    """On the host: six sets of them may be more than the device holds."""
    grads = [leaf.grad for leaf in leaves(network, x) if leaf.grad is not None]
    return [grad.detach().to("cpu", copy=True) for grad in grads]


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def has_allocator(device: torch.device) -> bool:
    """Whether bytes are those that the device's allocator reports."""
    return Allocator.of(nn.Linear(1, 1, device=device)) is not None


def free_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        with contextlib.suppress(RuntimeError):  # of a device that has failed for good
            torch.accelerator.empty_cache()


# --- failures are results


def in_words(error: BaseException) -> str:
    """A line with the error, and with the first one of those that led to it."""
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    if any(map(is_out_of_memory, chain)):
        return OUT_OF_MEMORY
    if isinstance(error, rg.BudgetError):
        return BUDGET_TOO_SMALL
    return " after ".join(map(first_line, chain[:: max(1, len(chain) - 1)]))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


class Attempts:
    """Runs functions until one fails. What failed is kept in words, and memory is freed."""

    def __init__(self) -> None:
        self.failure: str | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        """What the function returns; None if it fails, or if one has failed before."""
        if self.failure is None:
            try:
                return function()
            except Exception as error:
                self.failure = in_words(error)
            free_memory()  # here, where the error and what its frames hold are gone
        return None


# --- gradients


VARIANTS: dict[str, Callable[[Pairs], nn.Module]] = {
    "plain": Plain,
    "plain again": Plain,
    "keep": partial(rg.ReversibleSequence, streams=rg.Split(), memory=rg.Keep()),
    "reverse": partial(rg.ReversibleSequence, streams=rg.Split()),
    "exact keep": partial(rg.ReversibleSequence, streams=rg.Split(), memory=rg.Keep(), exact=True),
    "exact": partial(rg.ReversibleSequence, streams=rg.Split(), exact=True),
}
COMPARED = {
    "plain_again": ("plain again", "plain"),
    "keep_plain": ("keep", "plain"),
    "reverse_keep": ("reverse", "keep"),
    "reverse_plain": ("reverse", "plain"),
    "exact_keep": ("exact", "exact keep"),
}


def gradients(size: Size, device: torch.device, precision: str) -> Row:
    """All gradients of a step, each variant against another. 0 means equal to the bit."""
    attempts = Attempts()
    row = attempts.run(partial(_gradients_row, size, device, precision))
    return {
        "layers": size.blocks,
        "precision": precision,
        **(row or dict.fromkeys(COMPARED)),
        "warnings": row["warnings"] if row else [],
        "failures": row["failures"] if row else {"all": attempts.failure},
    }


def _gradients_row(size: Size, device: torch.device, precision: str) -> Row:
    blocks, x = pairs_on(size, device), example_on(size, device)
    found: dict[str, list[Tensor]] = {}
    failures: dict[str, str] = {}
    with deterministic(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, build in VARIANTS.items():
            attempts = Attempts()
            result = attempts.run(partial(_gradients, build, blocks, x, precision))
            if attempts.failure is None:
                found[name] = result
            else:
                failures[name] = attempts.failure
    own = {one.category.__name__ for one in caught if issubclass(one.category, rg.DriftWarning)}
    return {
        **{key: _compared(found, *names) for key, names in COMPARED.items()},
        "warnings": sorted(own),
        "failures": failures,
    }


def _gradients(
    build: Callable[[Pairs], nn.Module], blocks: Pairs, x: Tensor, precision: str
) -> list[Tensor]:
    network = build(blocks).train()
    step(network, x, precision)
    return copied_gradients(network, x)


def _compared(found: dict[str, list[Tensor]], name: str, other: str) -> float | None:
    """None if there is nothing to compare, or a gradient is not finite."""
    if name not in found or other not in found:
        return None
    by_name, by_other = found[name], found[other]
    if len(by_name) != len(by_other):
        return None
    return finite(difference(by_name, by_other))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- bytes and tokens per second


class Contestant(Attempts):
    """One network on a device. A failure ends its part, and is its result."""

    def __init__(self, name: str, blocks: Pairs, x: Tensor, precision: str) -> None:
        super().__init__()
        self.name = name
        self.x = x
        self.precision = precision
        self.network: nn.Module = nn.Identity()
        try:
            self.network = CONTESTANTS[name](blocks).train()
        except ImportError:
            self.failure = NOT_INSTALLED
        except Exception as error:  # a peer may be too old for this torch
            self.failure = in_words(error)

    def step(self) -> None:
        step(self.network, self.x, self.precision, self.name in PEERS)

    def seconds(self) -> float:
        taken = self.run(self._timed)
        return math.nan if taken is None else taken

    def _timed(self) -> float:
        synchronize(self.x.device)
        start = time.perf_counter()
        self.step()
        synchronize(self.x.device)
        return time.perf_counter() - start

    def input_gradient(self) -> Tensor:
        self.step()
        assert self.x.grad is not None
        return self.x.grad.cpu()

    def activations(self) -> int:
        """The peak of a step beyond what was there before, less the gradients."""
        of = leaves(self.network, self.x)
        clear_gradients(of)
        allocator = Allocator.of(self.network)
        if allocator is None:
            return activation_bytes(self.step, of)
        self.step()
        return allocator.peak() - sum(leaf.grad.nbytes for leaf in of if leaf.grad is not None)


def steps(size: Size, device: torch.device, precision: str, rounds: int) -> list[Row]:
    """A row for each contestant: activation bytes and tokens per second."""
    attempts = Attempts()
    rows = attempts.run(partial(_steps_rows, size, device, precision, rounds))
    return rows or [_about(name, size, precision, attempts.failure) for name in NAMES]


def _steps_rows(size: Size, device: torch.device, precision: str, rounds: int) -> list[Row]:
    x = example_on(size, device)  # first: revlib asks whether CUDA is in use when it is built
    blocks = pairs_on(size, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers; drift is looked at with the gradients
        contestants = [Contestant(name, blocks, x, precision) for name in NAMES]
        inputs = {c.name: c.run(c.input_gradient) for c in contestants}
        times = in_turn({c.name: c.seconds for c in contestants}, rounds)
        return [_row(c, size, times, inputs) for c in contestants]


def _about(name: str, size: Size, precision: str, failure: str | None) -> Row:
    return {**asdict(size), "contestant": name, "precision": precision, "failure": failure}


def _row(
    contestant: Contestant,
    size: Size,
    times: dict[str, list[float]],
    inputs: dict[str, Tensor | None],
) -> Row:
    peak = contestant.run(contestant.activations)
    row = _about(contestant.name, size, contestant.precision, contestant.failure)
    if contestant.failure is not None:
        return row
    taken = statistics.median(times[contestant.name])
    ratios = [own / plain for own, plain in zip(times[contestant.name], times["plain"])]
    return row | {
        "activation_bytes": peak,
        "milliseconds": round(1e3 * taken, 3),
        "tokens_per_second": round(size.batch * size.tokens / taken, 1),
        "time_ratio": finite(statistics.median(ratios)),
        "gradient_difference": _input_difference(inputs, contestant.name),
    }


def _input_difference(inputs: dict[str, Tensor | None], name: str) -> float | None:
    got, expected = inputs[name], inputs["plain"]
    if got is None or expected is None:
        return None
    return finite(difference([got], [expected]))


# --- a captured step


def capture(size: Size, device: torch.device, precision: str) -> list[Row]:
    """A whole step captured in a CUDA graph, and replayed with another input."""
    rows = []
    for name in ("retrograd", "retrograd, exact"):
        attempts = Attempts()
        row = attempts.run(partial(_captured_against_eager, name, size, device, precision))
        rows.append({"contestant": name, "failure": attempts.failure, **(row or {})})
    return rows


def _captured_against_eager(name: str, size: Size, device: torch.device, precision: str) -> Row:
    stack: Any = CONTESTANTS[name](pairs_on(size, device)).train()
    stack.drift = "ignore"
    stack.verify = "never"
    x = example_on(size, device)
    with deterministic():
        captured = _captured_step(stack, x, precision)
        step(stack, x, precision)
        of_eager = copied_gradients(stack, x)
    return {
        "precision": precision,
        "layers": size.blocks,
        "equal": all(map(torch.equal, captured, of_eager)),
        "difference": finite(difference(captured, of_eager)),
    }


def _captured_step(stack: nn.Module, x: Tensor, precision: str) -> list[Tensor]:
    """The gradients after a replay. Warms up on a side stream, as torch's documentation says."""
    module = torch.get_device_module(x.device)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for _ in range(3):
            step(stack, x, precision)
    module.current_stream().wait_stream(side)
    clear_gradients(leaves(stack, x))  # so that the graph makes them, in memory of its own
    graph = module.CUDAGraph()
    with module.graph(graph):
        step(stack, x, precision)
    with torch.no_grad():
        x.copy_(x.flip(0))  # replay computes with what is there now
    graph.replay()
    synchronize(x.device)
    return copied_gradients(stack, x)
