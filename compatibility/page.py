"""The page: tables of verdicts, and a reason for each that is not "equal". Made of results, and of
nothing else.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from compatibility.networks import SHOWN
from compatibility.verdict import EQUAL, RAISED, WRONG
from retrograd.files import write_whole

Result = dict[str, Any]  # group, title, contestant, version, verdict, detail, note

PACKAGES = {"checkpoint": "torch"}
HEADINGS = {"checkpoint": "`torch.utils.checkpoint`"}
CELLS = {EQUAL: "equal", WRONG: "**wrong**", RAISED: "raised"}
INTRODUCTION = """\
# Compatibility

What becomes of retrograd, of `torch.utils.checkpoint` (`use_reentrant=False`, one call per block)
and of other reversible libraries under the tools that PyTorch users use. Each row is one use of the
real tool, in processes of its own; two for everything distributed. All contestants compute the same
network, and what comes out (gradients, parameters, buffers, random state, what hooks saw) is
compared with the same equations in plain autograd, in one process and without the tool: to 1e-9 in
float64, unless the tool itself rounds. What revtorch and memcnn offer for dropout is switched on.

- **equal**: it ran, and everything agrees.
- **wrong**: it ran, and something does not. Nobody is told.
- **raised**: it ended in an error, or died, or hung.

This page is written by `python -m compatibility` (`make compatibility`, five minutes);
`tests/test_compatibility.py` runs retrograd's column, with `make test` and `make
test-integrations`. How to use each tool with retrograd: [tools](tools.md).
"""


def version_of(contestant: str) -> str:
    return metadata.version(PACKAGES.get(contestant, contestant)).split("+")[0]


def summary(results: list[Result]) -> str:
    """How many rows of each verdict."""
    header, rule, columns = _header(results)
    lines = [header, rule]
    for verdict in (EQUAL, WRONG, RAISED):
        counts = [
            sum(r["contestant"] == name and r["verdict"] == verdict for r in results)
            for name in columns
        ]
        lines.append(f"| {CELLS[verdict]} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _header(results: list[Result]) -> tuple[str, str, list[str]]:
    columns = [name for name in SHOWN if any(r["contestant"] == name for r in results)]
    versions = {r["contestant"]: r["version"] for r in results}
    header = (
        "| | "
        + " | ".join(f"{HEADINGS.get(name, name)} {versions[name]}" for name in columns)
        + " |"
    )
    return header, "| --- |" + " --- |" * len(columns), columns


def render(results: list[Result]) -> str:
    header, rule, columns = _header(results)
    cells = {(r["group"], r["title"], r["contestant"]): r for r in results}
    rows = list(dict.fromkeys((r["group"], r["title"]) for r in results))
    lines = [INTRODUCTION, summary(results)]
    for group in dict.fromkeys(group for group, _ in rows):
        lines += ["", f"## {group}", "", header, rule]
        for row in (row for row in rows if row[0] == group):
            lines.append(
                f"| {row[1]} | "
                + " | ".join(CELLS[cells[(*row, name)]["verdict"]] for name in columns)
                + " |"
            )
        notes = [
            r
            for row in rows
            if row[0] == group
            for name in columns
            if (r := cells[(*row, name)])["note"]
        ]
        if notes:
            lines += [
                "",
                *(
                    f"- {HEADINGS.get(r['contestant'], r['contestant'])}: {r['note']}"
                    for r in notes
                ),
            ]
    lines += ["", "## Reasons", ""]
    for row in rows:
        reasons: dict[str, list[str]] = {}
        for name in columns:
            if cells[(*row, name)]["verdict"] != EQUAL:
                verdict, detail = cells[(*row, name)]["verdict"], cells[(*row, name)]["detail"]
                reasons.setdefault(f"{verdict}: {detail}", []).append(HEADINGS.get(name, name))
        if reasons:
            lines.append(f"**{row[0]}, {row[1]}**\n")
            lines += [f"- {', '.join(names)} {reason}" for reason, names in reasons.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def brief(detail: str) -> str:
    """An error in one line, without the places of one machine."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    text = " ".join(lines[:2])
    text = re.sub(r"(?<![\w:/])(?:/[\w.+-]+){2,}/?", lambda match: Path(match[0]).name, text)
    text = re.sub(r"127\.0\.0\.1\]?:\d+", "the other process", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = text if len(text) <= 300 else text[:300].rsplit(" ", 1)[0] + " …"
    return re.sub(
        r"(`[^`]*`)|([<>|*_])", lambda match: match[1] or rf"\{match[2]}", text
    )  # not inside code


def write(results: list[Result], page: Path, rows: Path) -> None:
    """The page and what it is made of; each aside, and then renamed."""
    texts = {rows: "".join(json.dumps(result) + "\n" for result in results), page: render(results)}
    for path, text in texts.items():
        write_whole(path, text)


def read(rows: Path) -> list[Result]:
    return [json.loads(line) for line in rows.read_text().splitlines()]
