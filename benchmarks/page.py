"""Tables that benchmarks write into docs/rules.md, each between two markers of its own."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"


def write_table(name: str, table: str) -> None:
    """Replace what stands between the markers of this name."""
    PAGE.write_text(between_markers(PAGE.read_text(), name, table))


def between_markers(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{table}\n{end}{after}"
