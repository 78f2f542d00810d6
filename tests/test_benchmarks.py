"""Benchmarks: every command can be imported, and `python -m benchmarks` measures, stores and draws.

Their figures are not tested: they are measurements.
"""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg
from benchmarks import __main__ as command
from benchmarks import (
    cases,
    compare_checkouts,
    frontier,
    long,
    matrix,
    overhead,
    page,
    rivals,
    steps,
)
from benchmarks.__main__ import main
from retrograd.core.observe import Observer

# Of the commands `python -m benchmarks` and `python -m benchmarks.gpu`.
PARTS = {
    "__init__",
    "cases",
    "steps",
    "matrix",
    "gpu_measure",
    "gpu_table",
    "page",
    "family_models",
    "frontier",
    "rivals",
}
COMMANDS = {path.stem for path in Path(overhead.__file__).parent.glob("*.py")} - PARTS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_they_import(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


def test_what_is_left_out_for_a_promise_is_there():
    """Each promise names guards that a call has; without all of them, gradients are still there."""
    kinds = overhead.PROMISES["all of these"]
    stack = rg.ReversibleSequence([(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(3)])
    seen = []

    class Look(Observer):
        def guards(self, stack, program, guards):
            seen.extend(map(type, guards))
            return guards

    with overhead.Without(kinds), Look():
        stack(torch.randn(4, 4)).sum().backward()
    assert stack.blocks[0].f.weight.grad is not None
    left = set(seen)
    with Look():
        stack(torch.randn(4, 4))
    assert set(seen) - left == set(kinds)


# --- python -m benchmarks


@pytest.fixture
def tiny(monkeypatch):
    size = replace(matrix.SHOWN, width=8, batch=1, tokens=8)
    sizes = [replace(size, name="depth", blocks=2), replace(size, name="tiny", blocks=4)]
    monkeypatch.setattr(matrix, "QUICK", sizes)


@pytest.mark.filterwarnings("ignore")  # of the peers
def test_it_measures_stores_and_draws(tiny, tmp_path, capsys):
    contestants = ["checkpoint", "selective, attention", "retrograd", "retrograd, 50%"]
    options = ["--quick", "--rounds", "1", "--contestants", *contestants, "--out", str(tmp_path)]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "4 blocks, width 8, 1 x 8 tokens (ordinary)" in printed and "| retrograd |" in printed
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    for network in rivals.NETWORKS:
        found = {row["contestant"] for row in rows if row["network"] == network}
        assert found >= {"plain", *contestants[:3]}
    assert all(row["gradient_difference"] < 1e-5 for row in rows)
    pictures = [tmp_path / "memory.svg", tmp_path / "frontier-tiny.svg"]
    assert all(picture.stat().st_size > 5000 for picture in pictures)
    for picture in pictures:
        picture.unlink()
    assert main(["--draw-only", "--out", str(tmp_path), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert all(picture.exists() for picture in pictures)


def test_it_writes_its_tables(tiny, tmp_path, monkeypatch, capsys):
    """What was not measured this time stays."""
    docs = tmp_path / "docs"
    monkeypatch.setattr(page, "DOCS", docs)
    monkeypatch.setattr(command, "FIGURES", docs / "figures")
    (docs / "figures").mkdir(parents=True)
    for name in ("README.md", "docs/benchmarks.md"):
        text = (Path(__file__).parents[1] / name).read_text()
        (tmp_path / name).write_text(text)
    options = ["--quick", "--rounds", "1", "--write", "--contestants", "checkpoint"]
    assert main([*options, "retrograd"]) == 0
    capsys.readouterr()
    assert main([*options, "--sizes", "tiny", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == len(matrix.merged(rows, []))
    assert {row["contestant"] for row in rows} == {"plain", "checkpoint", "retrograd"}
    text = (docs / "benchmarks.md").read_text()
    assert "| blocks | 2 | 4 |" in text
    assert "tiny, ordinary | 1 of 1 | " in text


# Rules are other networks than the plain one.
SAME = [
    (network.name, name)
    for network in rivals.NETWORKS.values()
    for name in network.contestants
    if name.startswith(("checkpoint", "selective", "torch_remat", "offloaded"))
]


@pytest.mark.parametrize(("network", "name"), SAME)
def test_rivals_have_the_gradients_of_plain_autograd(network, name):
    size = cases.Size("", blocks=4, width=8, batch=1, tokens=8)
    found = cases.contestants(size, [name], rivals.NETWORKS[network].contestants)
    if name not in found:
        pytest.skip("not installed")
    streams = rivals.NETWORKS[network].streams
    x = steps.example(size, streams).double().detach().requires_grad_()
    plain, rival = (found[key].double() for key in ("plain", name))
    assert steps.difference(rival, plain, x) < 1e-12
    moved = steps.bus_bytes(rival, x)
    blocks = {"offloaded, every block": 4, "offloaded, every second block": 2}.get(name, 0)
    assert moved == 2 * blocks * x.nbytes


def row(contestant, mib, flops):
    fixed = {"name": "tiny", "network": "pairs", "time_ratio": 2.0}
    costs = {"activation_bytes": mib * 2**20, "flops_ratio": flops}
    return {**fixed, "contestant": contestant, **costs}


def test_who_is_ahead_is_named():
    """Between two points by interpolation; a point with more bytes and more FLOPs is on no line."""
    rows = [
        *(row("plain", 9, 1.0), row("retrograd", 2, 1.3), row("retrograd, 50%", 5, 1.15)),
        *(row("checkpoint", 3, 1.2), row("checkpoint, worse", 4, 1.4), row("offloaded", 1, 1.4)),
    ]
    lines = frontier.lines_of(rows)
    assert frontier.at(lines["checkpoint"], 5 * 2**20).flops == pytest.approx(1.2 - 2 / 6 * 0.2)
    assert [point.name for point in frontier.behind(lines, "flops")] == ["retrograd, 50%"]
    assert frontier.behind(lines, "time") == []
    ahead = {point.name: there for point, there in frontier.ahead(lines)}
    assert ahead["checkpoint"].flops == pytest.approx(1.25)
    assert ahead == {"checkpoint": ahead["checkpoint"], "offloaded": None}
    assert frontier.text(rows).endswith(
        "| tiny, pairs | 1 of 2 | 2 of 2 | offloaded: 1.00, 1.400 in 2.00 (needs more)<br>"
        "checkpoint: 3.00, 1.200 in 2.00 (1.250 in 2.00) |"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "{file}"], "is a file; name a folder"),
        (["--out", "{file}/inside"], "is a file; name a folder"),
        (["--draw-only", "--out", "{folder}"], "measure first"),
        (["--contestants", "nobody"], "no contestant nobody; there are plain, checkpoint"),
        (["--sizes", "huge"], "no size huge; there are"),
        (["--rounds", "0"], "must be at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, text, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    arguments = [a.format(file=file, folder=tmp_path) for a in arguments]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert file.read_text() == "mine"


@pytest.mark.parametrize("rows", ['{"a": 1', '{"a": 1}', "", None])
def test_rows_that_cannot_be_read(rows, tmp_path, capsys):
    steps = tmp_path / "steps.jsonl"
    steps.mkdir() if rows is None else steps.write_text(rows)
    assert main(["--draw-only", "--out", str(tmp_path)]) == 2
    assert "measure first" in capsys.readouterr().err


def result(**changes):
    tensors = {"output": torch.ones(2), "gradient": None}
    counts = {"activation bytes": 100, "evaluations of blocks.0.f": 2}
    for name, value in changes.items():
        (counts if isinstance(value, int) else tensors)[name.replace("_", " ")] = value
    return compare_checkouts.Result(tensors, counts)


@pytest.mark.parametrize(
    ("changes", "verdict", "difference"),
    [
        ({}, "equal", None),
        ({"activation_bytes": 99}, "lower", None),
        ({"activation_bytes": 101}, "different", "activation bytes: 100 before, 101 now"),
        ({"FLOPs": 1}, "different", "FLOPs is new"),
        ({"output": torch.ones(2) + 1e-7}, "different", "output is not bit-equal"),
        ({"output": torch.ones(2).double()}, "different", "output is not bit-equal"),
        ({"gradient": torch.zeros(2)}, "different", "gradient is not bit-equal"),
        ({"buffer": torch.zeros(2)}, "different", "buffer is new"),
    ],
)
def test_what_counts_as_a_difference_between_checkouts(changes, verdict, difference):
    found = compare_checkouts.compare("case", result(), result(**changes))
    assert found.verdict == verdict
    assert found.differences == ([] if difference is None else [difference])


def test_an_error_in_one_checkout_only_is_a_difference():
    failed = compare_checkouts.Result(error="DriftError")
    found = compare_checkouts.compare("case", failed, compare_checkouts.Result())
    assert found.differences == ["raised DriftError before, None now"]


def test_the_cases_that_are_compared_have_names_of_their_own_and_give_something():
    cases = list(compare_checkouts.cases())
    assert len({case.name for case in cases}) == len(cases)
    for case in cases[-5:]:
        found = compare_checkouts.run(case)
        assert found.error is None
        assert found.tensors["step 2, gradient of updates.0.fn.fn.up.weight"] is not None
        assert found.counts["evaluations of updates.0"] in (1, 2)


def test_long_sequences_are_counted():
    """A stack needs less than plain autograd, and a loss in chunks less than one of all logits."""
    of = long.Geometry(layers=3, width=64, heads=4, pairs=2, hidden=128, words=500)
    plain, *_ = names = ["plain autograd", "checkpoint, offloaded", "retrograd, pairs, `Chunked`"]
    rows = {name: long.measure(name, of, 2048) for name in names}
    assert max(rows.values(), key=lambda row: row.bytes).name == plain
    assert min(rows.values(), key=lambda row: row.flops).name == plain
    assert rows["checkpoint, offloaded"].bus == 2 * 3 * 2048 * 64 * 2  # the inputs of the layers
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        return
    heads = [long.measure_head(name, of, 16 * long.HEAD_CHUNK) for name in long.HEADS]
    assert heads[0].flops == heads[1].flops
    assert heads[1].bytes < heads[0].bytes / 2
    assert "| loss head, all logits | 0.1 | 1.000 |" in long.table([*rows.values(), *heads])
