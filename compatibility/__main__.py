"""The command: run the rows, write the page."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compatibility import page, runner
from compatibility.networks import SHOWN
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
    results = []
    for result in run(rows, options.contestants or SHOWN, options.jobs):
        results.append(result)
        _print(result)
    if not options.only and not options.contestants:
        page.write(results, page_file, rows_file)
        print(f"{page_file}, {rows_file}")
    wrong = [r for r in results if r["contestant"] == "retrograd" and r["verdict"] == WRONG]
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
        help=f"of {', '.join(SHOWN)}; writes nothing",
    )
    parser.add_argument("--jobs", type=int, default=2, help="rows at once (2)")
    parser.add_argument(
        "--draw-only", action="store_true", help="write the page again from the stored results"
    )
    parser.add_argument("--out", type=Path, default=DOCS, help=f"the folder for the page ({DOCS})")
    return parser


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
        outcomes = pool.map(lambda case: runner.run(*case), cases)
        for (row, contestant), outcome in zip(cases, outcomes):
            outcome["detail"] = page.brief(outcome["detail"])
            yield {
                "group": row.group,
                "title": row.title,
                "contestant": contestant,
                "version": page.version_of(contestant),
                **outcome,
            }


if __name__ == "__main__":
    sys.exit(main())
