"""On which versions of torch all tests were run.

    make test-torch TORCH=2.15.0     # runs them on that version, in an environment of its own
    python -m compatibility.versions # writes the table of all records into docs/limits.md

`make test-torch` loads this module as a plugin of pytest. It writes a record when all tests are
done, one for each version: the last run counts. A run of some of the tests leaves no record.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "figures" / "torch_versions.jsonl"
PAGE = ROOT / "docs" / "limits.md"
START, END = "<!-- torch versions -->\n", "<!-- end of torch versions -->"

Record = dict[str, Any]  # torch, python, tests, passed, skipped, failed, date, commit


# --- records


def read(path: Path = RECORDS) -> list[Record]:
    """All records, the oldest torch first."""
    if not path.exists():
        return []
    return sorted(map(json.loads, path.read_text().splitlines()), key=number)


def number(record: Record) -> tuple[int, ...]:
    """The version of torch, to compare: 2.10 is newer than 2.9."""
    return tuple(map(int, record["torch"].split(".")))


def add(record: Record, path: Path = RECORDS) -> None:
    """Store a record instead of the one that its version had."""
    others = [other for other in read(path) if other["torch"] != record["torch"]]
    lines = [json.dumps(one) + "\n" for one in sorted([*others, record], key=number)]
    path.write_text("".join(lines))


def commit() -> str:
    """The commit that is checked out, with a plus if files other than the records have changed."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return ""
    records = [f":!{path.relative_to(ROOT)}" for path in (RECORDS, PAGE)]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *records]).returncode
    return head.stdout.strip() + "+" * bool(changed)


# --- the plugin


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: Any) -> None:
    if not is_whole(config) or exitstatus not in (0, 1):  # 0: all passed, 1: some failed
        terminalreporter.write_line("Not all tests ran: no record.")
        return
    add(record_of({kind: len(reports) for kind, reports in terminalreporter.stats.items()}))
    write()


def is_whole(config: Any) -> bool:
    """Whether pytest was asked for all tests."""
    last_failed = getattr(config.option, "lf", False)
    chosen = config.option.keyword or config.option.deselect or last_failed
    return config.args_source.name == "TESTPATHS" and not chosen


def record_of(counts: dict[str, int]) -> Record:
    """The record of a run that ended just now, of which pytest counted the outcomes."""
    passed = counts.get("passed", 0)
    skipped = counts.get("skipped", 0)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return {
        "torch": metadata.version("torch").split("+")[0],
        "python": platform.python_version(),
        "tests": passed + skipped + failed,
        "passed": passed,
        "skipped": skipped,
        "failed": failed,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


# --- the table


def table(records: list[Record]) -> str:
    """The records as a table."""
    lines = [
        "| torch | Python | tests | passed | skipped | date |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for one in records:
        counts = " | ".join(f"{one[name]:,}" for name in ("tests", "passed", "skipped"))
        lines.append(f"| {one['torch']} | {one['python']} | {counts} | {one['date']} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, records: list[Record]) -> str:
    """A page with the table of these records between its two marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table(records)}{END}{after}"


def write(path: Path = PAGE) -> None:
    path.write_text(with_table(path.read_text(), read()))


if __name__ == "__main__":
    write()
