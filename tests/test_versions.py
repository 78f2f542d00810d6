"""Versions of torch: the table in the docs is what was recorded, and what was not run is not
claimed.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from compatibility import versions
from compatibility.versions import ROOT
from retrograd.core.torch_version import NEWEST, OLDEST

RECORD = {
    "torch": "2.10.0",
    "python": "3.11.7",
    "tests": 1200,
    "passed": 1198,
    "skipped": 2,
    "failed": 0,
    "date": "2026-11-18",
    "commit": "1234567",
}


def test_the_table_is_what_was_recorded():
    page = versions.PAGE.read_text()
    assert versions.START in page and versions.END in page
    assert versions.with_table(page, versions.read()) == page, "python -m compatibility.versions"


def test_the_package_asks_for_the_oldest_that_is_supported():
    found = re.findall(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert [tuple(map(int, version)) for version in found] == [OLDEST]


def test_the_newest_version_that_is_claimed_was_run(request):
    if request.config.pluginmanager.hasplugin("compatibility.versions"):
        pytest.skip("this run makes the record")
    records = versions.read()
    if not records:
        pytest.skip("nothing is recorded yet: make test-torch")
    passed = {versions.number(one)[:2] for one in records if not one["failed"]}
    assert max(passed) == NEWEST
    assert min(passed) >= OLDEST


def test_a_version_has_one_record_and_the_oldest_is_first(tmp_path):
    path = tmp_path / "records.jsonl"
    assert versions.read(path) == []
    for torch, passed in (("2.10.0", 1), ("2.9.1", 2), ("2.10.0", 3)):
        versions.add({**RECORD, "torch": torch, "passed": passed}, path)
    assert [(one["torch"], one["passed"]) for one in versions.read(path)] == [
        ("2.9.1", 2),
        ("2.10.0", 3),
    ]


def test_the_table_replaces_what_is_between_its_marks():
    page = f"before\n{versions.START}old\n{versions.END}\nafter\n"
    once = versions.with_table(page, [RECORD])
    assert once == versions.with_table(once, [RECORD])
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "old" not in once
    assert "| 2.10.0 | 3.11.7 | 1,200 | 1,198 | 2 | 2026-11-18 |" in once


def test_outcomes_add_up():
    record = versions.record_of({"passed": 5, "skipped": 2, "failed": 1, "error": 1, "": 9})
    counts = [record[name] for name in ("tests", "passed", "skipped", "failed")]
    assert counts == [9, 5, 2, 2]


@pytest.mark.parametrize(
    ("source", "keyword", "is_whole"),
    [("TESTPATHS", "", True), ("TESTPATHS", "budget", False), ("ARGS", "", False)],
)
def test_some_of_the_tests_are_no_record(source, keyword, is_whole):
    option = SimpleNamespace(keyword=keyword, deselect=None, lf=False)
    config = SimpleNamespace(option=option, args_source=SimpleNamespace(name=source))
    assert versions.is_whole(config) == is_whole
