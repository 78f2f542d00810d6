"""retrograd's columns of docs/compatibility.md, on the CPU and on the test device: every row equal;
and the page is what was measured.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from compatibility import page, runner
from compatibility.__main__ import merged
from compatibility.networks import ON_DEVICE, OURS, SHOWN
from compatibility.rows import ROWS
from compatibility.verdict import EQUAL, NOT_RUN, RAISED, WRONG, Row, judge
from retrograd.compiling.seams import TOO_OLD
from retrograd.core.torch_version import VERSION
from tests import device, planted, processes

pytestmark = pytest.mark.distributed

# Pipelines of torch 2.9 do not run on this device. From 2.15 on they reduce a tensor of the device
# first, which gloo cannot. Both without retrograd, too.
PIPELINES_RUN = (2, 10) <= VERSION < (2, 15)
PIPELINES = ("gpipe", "1f1b", "a-pipeline-cut-by--torch-distributed-pipelining-pipeline")
WHOLE = "`fullgraph=True`"  # a stack is a part of the graph
DOCS = Path(__file__).parent.parent / "docs"
RESULTS = page.read(DOCS / "figures" / "compatibility.jsonl")
# Compiling takes seconds: on the device, tests run these rows only, and `make compatibility` all.
COMPILED_ON_DEVICE = (
    "f and g, with dropout",
    "`stack.compile()`",
    "the whole model, under autocast",
)


def integration(row: Row) -> bool:
    return bool(row.needs)


def on_device() -> list[Row]:
    """The rows that plain autograd can run on the device, by the stored results."""
    names = {
        (r["group"], r["title"])
        for r in RESULTS
        if r["contestant"] == ON_DEVICE and r["verdict"] != NOT_RUN
    }
    return [
        row
        for row in ROWS.values()
        if (row.group, row.title) in names
        and (row.group != "torch.compile" or row.title in COMPILED_ON_DEVICE)
        and (PIPELINES_RUN or not row.key.endswith(PIPELINES))
    ]


def check(row: Row, on_device: bool = False) -> None:
    outcome = runner.run(row, "retrograd", on_device=on_device)
    assert (outcome["verdict"], outcome["detail"]) == (EQUAL, "")


@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if not integration(row)], ids=lambda row: row.key
)
def test_retrograd(row):
    if "pipeline" in row.title and not processes.PIPELINES_WORK:
        pytest.skip(processes.NO_PIPELINES)
    if row.title.endswith(WHOLE) and TOO_OLD:
        outcome = runner.run(row, "retrograd")
        assert outcome["verdict"] == RAISED
        assert "no place for retrograd's pass" in outcome["detail"]
        return
    check(row)


@pytest.mark.integration
@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if integration(row)], ids=lambda row: row.key
)
def test_retrograd_in(row):
    check_needs(row)
    check(row)


def check_needs(row: Row) -> None:
    missing = [package for package in row.needs if importlib.util.find_spec(package) is None]
    assert not missing, f"{missing} not installed; run make test-integrations"


@pytest.fixture(scope="module")
def built_device():
    """Built, or the test is skipped. Only the processes of the rows load it."""
    device.library()


@pytest.mark.parametrize(
    "row", [row for row in on_device() if not integration(row)], ids=lambda row: row.key
)
def test_retrograd_on_the_test_device(built_device, row):
    check(row, on_device=True)


@pytest.mark.integration
@pytest.mark.parametrize(
    "row", [row for row in on_device() if integration(row)], ids=lambda row: row.key
)
def test_retrograd_on_the_test_device_in(built_device, row):
    check_needs(row)
    check(row, on_device=True)


# --- the page


def test_the_page_is_made_of_the_results():
    assert (DOCS / "compatibility.md").read_text() == page.render(RESULTS)


def test_rows_that_are_equal_for_everyone_are_folded_and_the_others_are_not():
    text = page.render(RESULTS)
    lines = re.findall(r"^- (.*): (?:\*\*wrong\*\*|raised) ", text, re.MULTILINE)
    titles = [title for line in lines for title in line.split("; ")]
    differ = {(r["group"], r["title"]) for r in RESULTS if r["verdict"] in (WRONG, RAISED)}
    assert sorted(titles) == sorted(title for _, title in differ)


def test_the_readme_has_its_sums():
    """Of our column, of checkpointing and of the best of the other libraries."""
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    equal = {
        name: sum(r["contestant"] == name and r["verdict"] == EQUAL for r in RESULTS)
        for name in SHOWN
    }
    ours, checkpoint = equal.pop("retrograd"), equal.pop("checkpoint")
    equal.pop(ON_DEVICE)
    best, rows = max(equal.values()), len(RESULTS) // len(SHOWN)
    assert f"in {ours} of {rows} uses" in readme
    assert f"{checkpoint} for `torch.utils.checkpoint`, at most {best} for" in readme


def test_the_results_are_of_every_row_and_contestant():
    expected = [(row.group, row.title, contestant) for row in ROWS.values() for contestant in SHOWN]
    assert [(r["group"], r["title"], r["contestant"]) for r in RESULTS] == expected


def test_retrograd_is_everywhere_equal():
    for result in RESULTS:
        if result["contestant"] in OURS and result["verdict"] != NOT_RUN:
            assert result["verdict"] == EQUAL, result["title"]


def test_only_the_device_has_rows_that_are_not_run_and_each_has_the_reason_of_plain_autograd():
    for result in RESULTS:
        if result["verdict"] == NOT_RUN:
            assert result["contestant"] == ON_DEVICE
            assert result["detail"].startswith(
                ("plain autograd raised: ", "plain autograd wrong: ")
            )


def test_no_place_of_a_machine_is_on_the_page():
    for result in RESULTS:
        assert (
            "/home" not in result["detail"]
            and "/tmp" not in result["detail"]
            and "site-packages" not in result["detail"]
        )
    assert (
        page.brief("no /opt/a/b/site-packages/x.py here\n\nsecond | line\nthird")
        == "no x.py here second \\| line"
    )


def test_a_column_that_runs_again_replaces_its_stored_results():
    case = ("group", "title", "contestant")
    new = RESULTS[1] | {"verdict": RAISED}
    assert merged(RESULTS, []) == RESULTS
    assert merged(RESULTS, [new]) == [RESULTS[0], new, *RESULTS[2:]]
    with pytest.raises(SystemExit, match=", ".join(RESULTS[1][part] for part in case)):
        merged(RESULTS[:1] + RESULTS[2:], [])


# --- the instrument: it sees what is wrong


@pytest.mark.parametrize(
    ("key", "contestant", "verdict", "detail"),
    [
        ("ddp-dropout--another-seed-in-each-process", "revtorch", WRONG, "off by"),
        (
            "ddp-weights-shared-between-blocks",
            "reformer-pytorch",
            RAISED,
            "mark a variable ready only once",
        ),
        ("autograd-itself-batchnorm-s-statistics", "checkpoint", WRONG, "buffers, "),
    ],
)
def test_others_fail_where_they_are_known_to(key, contestant, verdict, detail):
    outcome = runner.run(ROWS[key], contestant)
    assert outcome["verdict"] == verdict
    assert detail in outcome["detail"]


@pytest.mark.parametrize(
    ("got", "expected", "detail"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(2) * (1 + 1e-6)}, "a: off by 1e-06"),
        ({"a": torch.tensor([1.0, float("nan")])}, {"a": torch.ones(2)}, "a: off by nan"),
        ({"a": None}, {"a": torch.ones(2)}, "a: no gradient"),
        ({"a": torch.ones(2)}, {"a": None}, "a: a gradient that plain autograd has not"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "a: shape [2] for [3]"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, "other results: a"),
        ({"a": [0, 1]}, {"a": [0, 2]}, "a, 1: 1 for 2"),
        ({"a": torch.tensor([1])}, {"a": torch.tensor([2])}, "a differs"),
    ],
)
def test_what_differs_is_wrong(got, expected, detail):
    assert judge(got, expected, 1e-9) == (WRONG, detail)
    assert judge(expected, expected, 1e-9) == (EQUAL, "")


@pytest.mark.parametrize(
    ("key", "verdict", "detail"),
    [
        ("planted-dies", RAISED, "died of SIGSEGV"),
        ("planted-hangs", RAISED, "still running after 3 s"),
        ("planted-raises", RAISED, "ZeroDivisionError"),
        ("planted-gives-something-else", WRONG, "a: 1 for 2"),
        ("planted-fails-before-its-last-stage", RAISED, "IndexError"),
    ],
)
def test_a_library_may_die_hang_raise_or_be_wrong(key, verdict, detail):
    outcome = runner.run(planted.ROWS[key], "plain", limit=3.0, registry="tests.planted")
    assert outcome["verdict"] == verdict
    assert detail in outcome["detail"]


@pytest.mark.parametrize(
    ("key", "verdict", "detail"),
    [
        ("planted-lives-on-the-test-device", EQUAL, ""),
        ("planted-raises", NOT_RUN, "plain autograd raised: ZeroDivisionError"),
        ("planted-moves-to-the-cpu", NOT_RUN, "plain autograd wrong: a: on cpu for rgdev:0"),
        ("planted-fails-with-retrograd-only", WRONG, "'retrograd' for 'plain'"),
    ],
)
def test_a_row_is_not_run_on_the_device_where_plain_autograd_fails(
    built_device, key, verdict, detail
):
    outcome = runner.run_if_plain_can(planted.ROWS[key], registry="tests.planted")
    assert outcome["verdict"] == verdict
    assert detail in outcome["detail"]
