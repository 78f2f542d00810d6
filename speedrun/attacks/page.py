"""The table of `docs/reliability.md`, between two markers."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from retrograd.files import write_whole
from speedrun.attacks.outcome import Outcome

PAGE = Path("docs/reliability.md")
FIGURES = Path("docs/figures/reliability.json")
BEGIN = "<!-- begin: python -m speedrun.attacks -->"
END = "<!-- end -->"

Row = dict[str, str | int]


def write(found: dict[str, tuple[str, Outcome]]) -> None:
    """Replace the rows of these attacks; the others stay."""
    rows: dict[str, Row] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name, (title, outcome) in found.items():
        rows[name] = {
            "title": title,
            "tried": outcome.tried,
            "lost": len(outcome.lost),
            "torch": torch.__version__.split("+")[0],
            "python": platform.python_version(),
            "system": platform.system(),
        }
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    write_whole(FIGURES, json.dumps(rows, indent=1) + "\n")
    write_whole(PAGE, f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}")


def table(rows: dict[str, Row]) -> str:
    lines = ["| what is tried | tried | lost |", "| --- | ---: | ---: |"]
    for row in rows.values():
        lines.append(f"| {row['title']} | {row['tried']:,} | {row['lost']:,} |")
    where = sorted(
        {f"torch {r['torch']}, Python {r['python']}, {r['system']}" for r in rows.values()}
    )
    return "\n".join([*lines, "", f"Run with {'; '.join(where)}, on a CPU."])
