"""For mkdocs: what pages show on the site beside their text. The compatibility page gets the table
of all rows, coloured, from the stored results; that of the command line the help of each command.
"""

import html
import json
import os
import re
from pathlib import Path
from typing import Any

MARKER = "<!-- the whole table -->"
RESULTS = Path(__file__).parent / "figures" / "compatibility.jsonl"
SIGNS = {"equal": "equal", "wrong": "wrong", "raised": "raised", "not run": "–"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "api/cli.md":
        return with_help(markdown)
    if page.file.src_uri != "compatibility.md":
        return markdown
    assert MARKER in markdown
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return markdown.replace(MARKER, whole_table(results))


def whole_table(results: list[dict[str, str]]) -> str:
    """A row for each use, a coloured cell for each contestant; a cell's tooltip is its reason."""
    columns = list(dict.fromkeys(result["contestant"] for result in results))
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows, group = [], None
    cells: dict[tuple[str, str], list[str]] = {}
    for result in results:
        cells.setdefault((result["group"], result["title"]), []).append(_cell(result))
    for (of_group, title), row in cells.items():
        if of_group != group:
            group = of_group
            rows.append(f'<tr><th colspan="{len(columns) + 1}">{html.escape(group)}</th></tr>')
        rows.append(f"<tr><td>{_code(title)}</td>{''.join(row)}</tr>")
    head = f"<thead><tr><th></th>{titles}</tr></thead>"
    table = f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"
    summary = f"Every use, with the reason of a cell as its tooltip ({len(cells)} rows)"
    return (
        f'<details class="verdicts" open><summary>{summary}</summary>'
        f'<div class="scroll">{table}</div></details>'
    )


def _cell(result: dict[str, str]) -> str:
    verdict = result["verdict"]
    reason = html.escape(result["detail"].replace("\\", ""), quote=True)
    tooltip = f' title="{reason}"' if reason else ""
    return f'<td class="{verdict.replace(" ", "-")}"{tooltip}>{SIGNS[verdict]}</td>'


def _code(title: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(title))


def with_help(markdown: str) -> str:
    """The help of each command, below what the page says of it."""
    from retrograd import cli

    os.environ["COLUMNS"] = "100"
    parser = cli.parser()
    verbs = next(action.choices for action in parser._actions if action.dest == "command")
    assert isinstance(verbs, dict)
    sections = re.split(r"(?m)^(?=## retrograd )", markdown)
    for i, section in enumerate(sections[1:], 1):
        verb = verbs[section.split()[2]]
        sections[i] = f"{section.rstrip()}\n\n```text\n{verb.format_help()}```\n\n"
    return "".join(sections)
