"""The page: tables of verdicts, and a reason for each that is not "equal".

It is made from stored results only.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from compatibility.networks import ON_DEVICE, SHOWN
from compatibility.verdict import EQUAL, NOT_RUN, RAISED, WRONG
from retrograd.files import write_whole

Result = dict[str, Any]  # group, title, contestant, version, verdict, detail, note

PACKAGES = {"checkpoint": "torch", ON_DEVICE: "retrograd"}
HEADINGS = {"checkpoint": "`torch.utils.checkpoint`"}
CELLS = {EQUAL: "equal", WRONG: "**wrong**", RAISED: "raised", NOT_RUN: "–"}
INTRODUCTION = """\
# Compatibility

How retrograd, `torch.utils.checkpoint` (`use_reentrant=False`, one call per block) and other
reversible libraries work with the tools that PyTorch users use. Each row is one use of the real
tool, in processes of its own; two for everything distributed. All contestants compute the same
network. The results (gradients, parameters, buffers, random state, the values that hooks see) are
compared with the same equations in plain autograd, in one process and without the tool: to 1e-9 in
float64, unless the tool itself rounds. For revtorch and memcnn, the options that replay dropout are
switched on.

- **equal**: it ran, and everything agrees.
- **wrong**: it ran without an error, and something differs.
- **raised**: it raised an error, crashed or hung.
- **–**: not run on the test device, because plain autograd with the same tool fails there, or the
  tool moves the model to the CPU.

The last column is retrograd with the model and the data on the test device (`tests/device`),
compared with plain autograd on the same device. It is not a GPU: its memory and its kernels are
those of the CPU. It has its own allocator, generators, autocast and autograd threads, as a GPU has.

This page is written by `python -m compatibility` (`make compatibility`, eight minutes). Tests run
retrograd's two columns (`tests/test_compatibility.py`; `make test` and `make test-integrations`),
but of `torch.compile` only three rows on the device. How to use each tool with retrograd:
[tools](tools.md).
"""


def version_of(contestant: str) -> str:
    return metadata.version(PACKAGES.get(contestant, contestant)).split("+")[0]


def summary(results: list[Result]) -> str:
    """A table of how many rows have each verdict."""
    columns = _contestants(results)
    lines = _header(results, columns)
    for verdict in CELLS:
        counts = []
        for name in columns:
            verdicts = [r["verdict"] for r in results if r["contestant"] == name]
            counts.append(str(verdicts.count(verdict)))
        lines.append(_table_row(CELLS[verdict], counts))
    return "\n".join(lines)


def render(results: list[Result]) -> str:
    """The whole page."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["group"], []).append(result)
    header = _header(results, _contestants(results))
    lines = [INTRODUCTION, summary(results)]
    for group, members in groups.items():
        lines += ["", f"## {group}", "", *header, *_verdicts(members), *_notes(members)]
    lines += ["", "## Reasons", ""]
    for members in groups.values():
        lines += _reasons(members)
    return "\n".join(lines).rstrip() + "\n"


def _contestants(results: list[Result]) -> list[str]:
    present = {r["contestant"] for r in results}
    return [name for name in SHOWN if name in present]


def _heading(contestant: str) -> str:
    return HEADINGS.get(contestant, contestant)


def _with_version(contestant: str, version: str) -> str:
    if contestant == ON_DEVICE:
        return contestant.replace("retrograd", f"retrograd {version}")
    return f"{_heading(contestant)} {version}"


def _header(results: list[Result], columns: list[str]) -> list[str]:
    """The first two lines of a table."""
    versions = {r["contestant"]: r["version"] for r in results}
    titles = [_with_version(name, versions[name]) for name in columns]
    return [f"| | {' | '.join(titles)} |", "| --- |" + " --- |" * len(columns)]


def _table_row(title: str, cells: list[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _by_title(results: list[Result]) -> dict[str, list[Result]]:
    """The results of each row, in the order of the columns."""
    rows: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: SHOWN.index(r["contestant"])):
        rows.setdefault(result["title"], []).append(result)
    return {title: rows[title] for title in dict.fromkeys(r["title"] for r in results)}


def _verdicts(results: list[Result]) -> list[str]:
    return [
        _table_row(title, [CELLS[r["verdict"]] for r in row])
        for title, row in _by_title(results).items()
    ]


def _notes(results: list[Result]) -> list[str]:
    """Notes that rows have besides their verdicts, below the table of a group."""
    noted = [r for row in _by_title(results).values() for r in row if r["note"]]
    if not noted:
        return []
    return ["", *(f"- {_heading(r['contestant'])}: {r['note']}" for r in noted)]


def _reasons(results: list[Result]) -> list[str]:
    """For each row of a group why it is not equal; contestants with the same reason together."""
    lines = []
    for title, row in _by_title(results).items():
        names_by_reason: dict[str, list[str]] = {}
        for r in row:
            if r["verdict"] != EQUAL:
                reason = f"{r['verdict']}: {r['detail']}"
                names_by_reason.setdefault(reason, []).append(_heading(r["contestant"]))
        if names_by_reason:
            lines.append(f"**{row[0]['group']}, {title}**\n")
            lines += [f"- {', '.join(names)} {why}" for why, names in names_by_reason.items()]
            lines.append("")
    return lines


def brief(detail: str) -> str:
    """An error in one line, without paths and addresses of the machine."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    text = " ".join(lines[:2])
    text = re.sub(r"(?<![\w:/])(?:/[\w.+-]+){2,}/?", lambda match: Path(match[0]).name, text)
    text = re.sub(r"127\.0\.0\.1\]?:\d+", "the other process", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    if len(text) > 300:
        text = text[:300].rsplit(" ", 1)[0] + " …"
    # Escape Markdown, but not inside code.
    return re.sub(r"(`[^`]*`)|([<>|*_])", lambda match: match[1] or rf"\{match[2]}", text)


def write(results: list[Result], page: Path, rows: Path) -> None:
    """Write the page, and the results that it is made from."""
    text = render(results)
    write_whole(rows, "".join(json.dumps(result) + "\n" for result in results))
    write_whole(page, text)


def read(rows: Path) -> list[Result]:
    return [json.loads(line) for line in rows.read_text().splitlines()]
