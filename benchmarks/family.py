"""`rg.compat.install` on every package of the family: is it right, and what does it keep?

    python -m benchmarks.family            # print the table
    python -m benchmarks.family --write    # and put it into docs/migrate/README.md

Each package's smallest real model takes one training step in float64: with its own engine, with
retrograd, and in plain autograd. Plain autograd is the package's own `forward` of its blocks, in
which `torch.no_grad` does nothing: the package's equations, without its backward and without
retrograd. The columns compare gradients of parameters with it; bytes are the peak of activations.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.family_models import CASES, Case, load

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrate" / "README.md"
START, END = "<!-- benchmarks.family: start -->", "<!-- benchmarks.family: end -->"
SEED = 7


class Step(NamedTuple):
    """What a training step left behind."""

    gradients: dict[str, Tensor]
    random: Tensor
    buffers: dict[str, Tensor]
    bytes: int


class Row(NamedTuple):
    """A line of the table. A text in place of a number says what was raised."""

    name: str
    version: str
    own: float | str
    ours: float | str
    bytes: tuple[int, int | str, int | str]  # plain, own, retrograd
    same_keys: bool
    same_random: bool
    same_buffers: bool


class TorchWithGradients:
    """torch, in which `no_grad` does nothing."""

    no_grad = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def plain_autograd(case: Case) -> Iterator[None]:
    """Inside, the package's engine calls its blocks, and autograd records them."""
    module = load(case.engine)
    changed: list[tuple[Any, str, Any]] = [(module, "torch", TorchWithGradients())]
    for value in list(vars(module).values()):
        if is_engine(module, value):
            changed += [(value, "apply", direct(value))]
            changed += [(module, alias, direct(value)) for alias in applies(module, value)]
    with replaced(changed):
        yield


def is_engine(module: ModuleType, value: Any) -> bool:
    is_function = isinstance(value, type) and issubclass(value, torch.autograd.Function)
    return is_function and value.__module__ == module.__name__ and "Reversible" in value.__name__


def applies(module: ModuleType, function: type) -> list[str]:
    return [n for n, v in vars(module).items() if getattr(v, "__self__", None) is function]


def direct(function: Any) -> Any:
    class Context:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    return staticmethod(lambda *args: function.forward(Context(), *args)).__func__


@contextlib.contextmanager
def replaced(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(holder, name, vars(holder).get(name)) for holder, name, _ in values]
    for holder, name, value in values:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in before:
            if value is None:
                delattr(holder, name)
            else:
                setattr(holder, name, value)


@contextlib.contextmanager
def without_seeds(case: Case) -> Iterator[None]:
    """Hugging Face's layers seed the global generator from the clock. Inside, they do not."""
    if case.package != "transformers":
        yield
        return
    layer = load(case.engine).ReformerLayer
    names = ("_init_attention_seed", "_init_feed_forward_seed")
    with replaced([(layer, name, lambda self: None) for name in names]):
        yield


@contextlib.contextmanager
def counted_seeds(case: Case) -> Iterator[None]:
    """Inside, they take seeds that repeat, so that their own step can be compared."""
    if case.package != "transformers":
        yield
        return
    count = iter(range(1, 10**6))
    with replaced([(torch, "seed", lambda: next(count))]):
        yield


@contextlib.contextmanager
def softmax_of_any_type() -> Iterator[None]:
    """nuwa asks for its softmax in float32, and cannot go on from there in float64."""
    softmax = torch.Tensor.softmax
    with replaced([(torch.Tensor, "softmax", lambda x, dim, dtype=None: softmax(x, dim))]):
        yield


def made(case: Case) -> nn.Module:
    """The model in float64. Its weights are moved, because some functions start as zero."""
    torch.manual_seed(1)
    model = case.build().to(torch.float64).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def step(case: Case, model: nn.Module) -> Step:
    """One step with the inputs and draws of one seed, on a model that has not run yet."""
    held: list[Tensor] = []
    torch.manual_seed(SEED)

    def run() -> None:
        held.append(case.run(model))
        held[0].backward()

    used = rg.measure.activation_bytes(run, list(model.parameters()))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Step(gradients, torch.get_rng_state(), buffers, used)


def error(step: Step, plain: Step) -> float:
    """The largest difference of a gradient, of the largest gradient."""
    if step.gradients.keys() != plain.gradients.keys():
        return float("inf")
    differences = [step.gradients[n] - plain.gradients[n] for n in plain.gradients]
    return largest(differences) / largest(plain.gradients.values())


def largest(tensors: Iterable[Tensor]) -> float:
    sizes = torch.stack([tensor.abs().max() for tensor in tensors if tensor.numel()])
    return sizes.max().item() if sizes.isfinite().all() else float("inf")


def attempted(case: Case, model: nn.Module) -> Step | str:
    try:
        return step(case, model)
    except Exception as raised:
        return f"{type(raised).__name__}: {str(raised).splitlines()[0]}"


def row(name: str, case: Case) -> Row:
    load(case.package)
    with softmax_of_any_type():
        with plain_autograd(case), without_seeds(case):
            plain = step(case, made(case))
        with plain_autograd(case), counted_seeds(case):
            plain_seeded = step(case, made(case))
        with counted_seeds(case):
            own_model = made(case)
            own = attempted(case, own_model)
        rg.compat.install(case.package)
        try:
            our_model = made(case)
            ours = attempted(case, our_model)
        finally:
            rg.compat.uninstall(case.package)
    has_ours = not isinstance(ours, str)
    return Row(
        name,
        importlib.metadata.version(case.distribution),
        own if isinstance(own, str) else error(own, plain_seeded),
        error(ours, plain) if has_ours else ours,
        (plain.bytes, own if isinstance(own, str) else own.bytes, ours.bytes if has_ours else ours),
        list(our_model.state_dict()) == list(own_model.state_dict()),
        has_ours and torch.equal(ours.random, plain.random),
        has_ours and same_tensors(ours.buffers, plain.buffers),
    )


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# --- the table


def table(rows: list[Row]) -> str:
    lines = [
        "| package | own gradients | with retrograd | activations, KiB: plain | own | retrograd |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for each in rows:
        version = f"{each.name.partition(',')[0]} {each.version}"
        named = version + each.name[len(each.name.partition(",")[0]) :]
        cells = [named, judged(each.own), judged(each.ours) + differing(each)]
        cells += map(kib, each.bytes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differing(row: Row) -> str:
    """Which of the state that a step leaves is not that of plain autograd, if any."""
    same = {"keys": row.same_keys, "random": row.same_random, "buffers": row.same_buffers}
    names = [name for name, equal in same.items() if not equal]
    return f", **differ**: {', '.join(names)}" if names else ""


def judged(value: float | str) -> str:
    if isinstance(value, str):
        return f"raised {value.partition(':')[0]}"
    return f"{value:.0e}" if value <= 1e-12 else f"**wrong**, {value:.0e}"


def kib(value: int | str) -> str:
    return "–" if isinstance(value, str) else f"{value / 1024:,.0f}"


def write(text: str, page: Path = PAGE) -> None:
    """Put the table between the markers of the page."""
    before, start, rest = page.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        sys.exit(f"{page} has no lines {START} and {END}; put them where the table belongs.")
    page.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = options.packages or list(CASES)
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}. Choose among {', '.join(CASES)}.")
    rows = []
    for name in names:
        try:
            rows.append(row(name, CASES[name]))
        except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as missing:
            print(f"{name}: {missing}. make family installs it.", file=sys.stderr)
            if options.write:
                return 1
    text = table(rows)
    print(text)
    if options.write:
        write(text)
    return 0 if all(isinstance(each.ours, float) and each.ours <= 1e-12 for each in rows) else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.family", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument("packages", nargs="*", help="some rows only, such as linformer")
    made.add_argument("--write", action="store_true", help="put the table into docs/migrate")
    return made


if __name__ == "__main__":
    sys.exit(main())
