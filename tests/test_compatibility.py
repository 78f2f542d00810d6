"""retrograd's column of docs/compatibility.md: every row equal, or refused with a reason; and the
page is what was measured.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from compatibility import page, runner
from compatibility.networks import SHOWN
from compatibility.rows import ROWS
from compatibility.verdict import EQUAL, RAISED, WRONG, Row, judge
from tests import planted, processes

pytestmark = pytest.mark.distributed

# What retrograd refuses, and the way out that its message names.
REFUSED = {"torch-compile-the-whole-model---fullgraph-true": "stack.compile()"}
DOCS = Path(__file__).parent.parent / "docs"


def integration(row: Row) -> bool:
    return bool(row.needs)


def check(row: Row) -> None:
    outcome = runner.run(row, "retrograd")
    if row.key in REFUSED:
        assert outcome["verdict"] == RAISED
        assert REFUSED[row.key] in outcome["detail"]
    else:
        assert (outcome["verdict"], outcome["detail"]) == (EQUAL, "")


@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if not integration(row)], ids=lambda row: row.key
)
def test_retrograd(row):
    if "pipeline" in row.title and not processes.PIPELINES_WORK:
        pytest.skip(processes.NO_PIPELINES)
    check(row)


@pytest.mark.integration
@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if integration(row)], ids=lambda row: row.key
)
def test_retrograd_in(row):
    missing = [package for package in row.needs if importlib.util.find_spec(package) is None]
    assert not missing, f"{missing} not installed; run make test-integrations"
    check(row)


# --- the page


@pytest.fixture(scope="module")
def results():
    return page.read(DOCS / "figures" / "compatibility.jsonl")


def test_the_page_is_made_of_the_results(results):
    assert (DOCS / "compatibility.md").read_text() == page.render(results)


def test_the_readme_has_its_summary(results):
    assert page.summary(results) in (DOCS.parent / "README.md").read_text()


def test_the_results_are_of_every_row_and_contestant(results):
    expected = [(row.group, row.title, contestant) for row in ROWS.values() for contestant in SHOWN]
    assert [(r["group"], r["title"], r["contestant"]) for r in results] == expected


def test_retrograd_is_nowhere_wrong_and_has_a_reason_wherever_it_raises(results):
    keys = {(row.group, row.title): row.key for row in ROWS.values()}
    for result in results:
        if result["contestant"] == "retrograd":
            key = keys[result["group"], result["title"]]
            assert result["verdict"] == (RAISED if key in REFUSED else EQUAL)
            assert REFUSED.get(key, "") in result["detail"]


def test_no_place_of_a_machine_is_on_the_page(results):
    for result in results:
        assert (
            "/home" not in result["detail"]
            and "/tmp" not in result["detail"]
            and "site-packages" not in result["detail"]
        )
    assert (
        page.brief("no /opt/a/b/site-packages/x.py here\n\nsecond | line\nthird")
        == "no x.py here second \\| line"
    )


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
