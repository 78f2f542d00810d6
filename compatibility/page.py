"""The page: who is not equal in which row. The stored results have every row and every reason.

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
SHORT = {"reformer-pytorch": "reformer", ON_DEVICE: "retrograd on the device"}
NOTED = ("retrograd", "checkpoint")
FAILED = (WRONG, RAISED)
CELLS = {EQUAL: "equal", WRONG: "**wrong**", RAISED: "raised", NOT_RUN: "–"}
INTRODUCTION = """\
# Compatibility

{rows} uses of the tools that PyTorch users use, each of the real tool in processes of its own, two
for everything distributed. All contestants compute the same network. Gradients, parameters,
buffers, random state and what hooks see are compared with plain autograd without the tool: to 1e-9
in float64, unless the tool itself rounds. `torch.utils.checkpoint` runs with `use_reentrant=False`,
one call per block; revtorch and memcnn with the options that replay dropout.

- **equal**: it ran, and everything agrees.
- **wrong**: it ran without an error, and something differs.
- **raised**: it raised an error, crashed or hung.
- **–**: not run on the [test device](limits.md#reasoned-not-run-cuda), because plain autograd fails
  there, or the tool moves the model to the CPU.

`make compatibility` makes this page (eight minutes). Tests run retrograd's two columns
(`tests/test_compatibility.py`; `make test-integrations`), but of `torch.compile` only three rows on
the device.
"""
WHOLE_TABLE = """\
Below are the {differing} uses that are not equal for everyone.
[compatibility.jsonl](figures/compatibility.jsonl) has every row and every reason. How to use each
tool: [tools](tools.md), [several processes](distributed.md).

<!-- the whole table -->
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
    """The whole page. On the site, `docs/hooks.py` puts the table of all rows at its marker."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["group"], []).append(result)
    rows = sum(len(_by_title(members)) for members in groups.values())
    differing = sum(len(_differing(members)) for members in groups.values())
    counts = {"rows": rows, "differing": differing, "equal": rows - differing}
    lines = [INTRODUCTION.format(**counts), summary(results), "", WHOLE_TABLE.format(**counts)]
    for group, members in groups.items():
        if _differing(members) or any(r["note"] for r in members):
            lines += [f"## {group}", "", *_list(members), *_notes(members), ""]
    return "\n".join(lines).rstrip() + "\n"


def _differing(results: list[Result]) -> dict[str, list[Result]]:
    """The rows in which some contestant ran and is not equal."""
    return {
        title: row
        for title, row in _by_title(results).items()
        if any(r["verdict"] not in (EQUAL, NOT_RUN) for r in row)
    }


def _list(results: list[Result]) -> list[str]:
    """Who is wrong and who raises, of rows not equal for everyone. Rows alike are one line."""
    titles: dict[str, list[str]] = {}
    for title, row in _differing(results).items():
        names = {v: [_short(r["contestant"]) for r in row if r["verdict"] == v] for v in FAILED}
        parts = [f"{CELLS[v]} {', '.join(found)}" for v, found in names.items() if found]
        titles.setdefault("; ".join(parts), []).append(title)
    return [f"- {'; '.join(alike)}: {verdicts}" for verdicts, alike in titles.items()]


def _contestants(results: list[Result]) -> list[str]:
    present = {r["contestant"] for r in results}
    return [name for name in SHOWN if name in present]


def _heading(contestant: str) -> str:
    return HEADINGS.get(contestant, contestant)


def _short(contestant: str) -> str:
    return SHORT.get(contestant, contestant)


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


def _notes(results: list[Result]) -> list[str]:
    """Notes that rows of ours have besides their verdicts, below the list of a group."""
    noted = [r for r in results if r["note"] and r["contestant"] in NOTED]
    return [f"- {_heading(r['contestant'])}: {r['note']}" for r in noted]


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
