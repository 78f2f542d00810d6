"""The command: run the rows, write the page."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compatibility import page, runner
from compatibility.networks import ON_DEVICE, OURS, SHOWN
from compatibility.rows import ROWS
from compatibility.verdict import WRONG, Row

DOCS = Path("docs")


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    rows_file = options.out / "figures" / "compatibility.jsonl"
    page_file = options.out / "compatibility.md"
    if options.draw_only:
        page.write(page.read(rows_file), page_file, rows_file)
        return 0
    text = options.only.lower()
    rows = [row for row in ROWS.values() if text in f"{row.group} {row.title}".lower()]
    if not rows:
        parser.error(f"no row has {options.only!r} in its topic or title")
    needed = {package for row in rows for package in row.needs}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        parser.error(
            f"{', '.join(missing)}: not installed; run make compatibility, which installs them"
        )
    contestants = options.contestants or SHOWN
    if ON_DEVICE in contestants:
        _build_device(parser)
    results = []
    for result in run(rows, contestants, options.jobs):
        results.append(result)
        _print(result)
    if not options.only:
        stored = page.read(rows_file) if options.contestants else []
        page.write(merged(stored, results), page_file, rows_file)
        print(f"{page_file}, {rows_file}")
    wrong = [r for r in results if r["contestant"] in OURS and r["verdict"] == WRONG]
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compatibility", description=__doc__)
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="run rows with this text in their topic or title; writes nothing",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=SHOWN,
        metavar="NAME",
        help=f"of {', '.join(SHOWN)}; the stored results of the others stay",
    )
    parser.add_argument("--jobs", type=int, default=2, help="rows at once (2)")
    parser.add_argument(
        "--draw-only", action="store_true", help="write the page again from the stored results"
    )
    parser.add_argument("--out", type=Path, default=DOCS, help=f"the folder for the page ({DOCS})")
    return parser


def _build_device(parser: argparse.ArgumentParser) -> None:
    """Build the test device now, so that no row has to wait for it."""
    import pytest

    from tests import device

    try:
        device.library()
    except pytest.skip.Exception as reason:
        parser.error(str(reason))


def merged(stored: list[page.Result], results: list[page.Result]) -> list[page.Result]:
    """New results, and stored ones where there is no new one, in the order of rows."""
    found = {(r["group"], r["title"], r["contestant"]): r for r in (*stored, *results)}
    cases = [(row.group, row.title, name) for row in ROWS.values() for name in SHOWN]
    missing = [case for case in cases if case not in found]
    if missing:
        raise SystemExit(f"no stored result of {', '.join(missing[0])}; run without --contestants")
    return [found[case] for case in cases]


def _print(result: page.Result) -> None:
    row = f"{result['group']}, {result['title']}, {result['contestant']}"
    detail = f": {result['detail']}" if result["detail"] else ""
    print(f"{row}: {result['verdict']}{detail}", flush=True)


def run(
    rows: list[Row], contestants: list[str] | tuple[str, ...], jobs: int
) -> Iterator[page.Result]:
    """The results, in the order of rows."""
    cases = [(row, contestant) for row in rows for contestant in contestants]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = pool.map(lambda case: _outcome(*case), cases)
        for (row, contestant), outcome in zip(cases, outcomes):
            outcome["detail"] = page.brief(outcome["detail"])
            yield {
                "group": row.group,
                "title": row.title,
                "contestant": contestant,
                "version": page.version_of(contestant),
                **outcome,
            }


def _outcome(row: Row, contestant: str) -> runner.Outcome:
    if contestant == ON_DEVICE:
        return runner.run_if_plain_can(row)
    return runner.run(row, contestant)


if __name__ == "__main__":
    sys.exit(main())
