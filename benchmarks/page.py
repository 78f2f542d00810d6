"""Tables that benchmarks write into pages, each between two markers of its own."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def write_table(name: str, table: str, page: str = "rules.md") -> None:
    """Replace what stands between the markers of this name in a page of the documentation."""
    path = DOCS / page
    path.write_text(between_markers(path.read_text(), name, table))


def between_markers(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{table}\n{end}{after}"
