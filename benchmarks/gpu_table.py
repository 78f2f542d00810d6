"""The record of `python -m benchmarks.gpu` as Markdown, and its place in docs/benchmarks.md."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from retrograd.files import write_whole

MIB = 2**20
PAGE = Path("docs/benchmarks.md")
FIGURES = Path("docs/figures/gpu.json")
BEGIN = "<!-- gpu: begin -->"
END = "<!-- gpu: end -->"
OUT_OF_MEMORY = "out of memory"
BUDGET_TOO_SMALL = "budget too small"
NOT_INSTALLED = "not installed"
PROMISED = 1e-5  # of float32, reversed against kept

LABELS = {
    "plain": "plain autograd",
    "checkpoint": "`torch.utils.checkpoint` per block",
    "retrograd": "**retrograd**",
    "retrograd, exact": "retrograd, `exact=True`",
    "retrograd, 25%": 'retrograd, `memory=rg.Budget("25%")`',
}

Record = dict[str, Any]
Row = dict[str, Any]


def report(record: Record) -> str:
    """All of a record, as Markdown."""
    found = problems(record)
    parts = [_where(record), _tests(record), _steps(record), _gradients(record), _graph(record)]
    if found:
        parts.append(f"**Not as promised:** {'; '.join(found)}.")
    else:
        parts.append("What was run is as promised.")
    return "\n\n".join(part for part in parts if part)


def problems(record: Record) -> list[str]:
    """What is not as retrograd promises. Failures of other contestants are not here."""
    return [
        *(
            f"{name} ended with {_failure(record, name)}"
            for name in record
            if _failure(record, name)
        ),
        *_problems_of_tests(record),
        *_problems_of_gradients(record),
        *_problems_of_steps(record),
        *_problems_of_graph(record),
    ]


def _problems_of_tests(record: Record) -> list[str]:
    tests = _section(record, "tests") or {}
    return [f"{tests['failed']} device tests failed"] if tests.get("failed") else []


def _problems_of_gradients(record: Record) -> list[str]:
    found = []
    for row in _section(record, "gradients") or ():
        where = f"{row['layers']} layers, {row['precision']}"
        failures = {name: text for name, text in row["failures"].items() if text != OUT_OF_MEMORY}
        found += [f"{name} failed with {text} ({where})" for name, text in failures.items()]
        if row["exact_keep"] or (row["exact_keep"] is None and not row["failures"]):
            found.append(f"exact is not Keep to the bit ({where})")
        off, is_lost = row["reverse_keep"], row["reverse_keep"] is None and not row["failures"]
        if row["precision"] == "float32" and (is_lost or (off or 0) > PROMISED):
            found.append(f"gradients off by {_difference(off)} ({where})")
    return found


def _problems_of_steps(record: Record) -> list[str]:
    """A budget may be too small for a network. Memory may be too small for any contestant."""
    known = (BUDGET_TOO_SMALL, OUT_OF_MEMORY, None)
    return [
        f"{row['contestant']}, {row['blocks']} layers: {row['failure']}"
        for row in _section(record, "steps") or ()
        if row["contestant"].startswith("retrograd") and row["failure"] not in known
    ]


def _problems_of_graph(record: Record) -> list[str]:
    return [
        f"a captured step of {row['contestant']} is not equal"
        for row in _graph_rows(record)
        if not row.get("equal")
    ]


# --- parts of the report


def _section(record: Record, name: str) -> Any:
    """None if a section was not run, or ended with an error."""
    return None if _failure(record, name) else record.get(name)


def _failure(record: Record, name: str) -> str | None:
    section = record.get(name)
    return section.get("error") if isinstance(section, dict) else None


def _where(record: Record) -> str:
    facts = _section(record, "facts") or {}
    memory = facts.get("memory_bytes")
    words = [
        facts.get("name") or record["device"],
        f"{memory / 2**30:.1f} GiB" if memory else "",
        f"torch {facts.get('torch')}",
        f"CUDA {facts['CUDA']}" if facts.get("CUDA") else "",
        f"driver {facts['driver']}" if facts.get("driver") else "",
        f"Python {facts.get('Python')}",
        f"commit {facts['commit'][:10]}" if facts.get("commit") else "",
        "with local changes" if facts.get("changed") else "",
        record["date"],
    ]
    return f"Measured on {', '.join(word for word in words if word)}."


def _tests(record: Record) -> str:
    tests = _section(record, "tests")
    if tests is None:
        return ""
    if "not_run" in tests:
        return f"Device tests: {tests['not_run']}."
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    return f"Device tests: {counts}."


def _steps(record: Record) -> str:
    rows = _section(record, "steps")
    if not rows:
        return ""
    first = rows[0]
    how = "the allocator" if record["has_allocator"] else "counting tensors"
    title = (
        f"A training step in {_precision(first)}, width {first['width']}, {first['batch']} x "
        f"{first['tokens']} tokens: activations in MiB by {how}, tokens per second, and time of a "
        "step (plain = 1)."
    )
    layers = list(dict.fromkeys(row["blocks"] for row in rows))
    header = [""]
    for blocks in layers:
        header += [f"{blocks} layers: MiB", "tokens/s", "time"]
    lines = [[_label(record, name), *_cells(rows, name, layers)] for name in _contestants(rows)]
    return f"{title}\n\n{_markdown(header, lines)}"


def _contestants(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["contestant"] for row in rows))


def _label(record: Record, name: str) -> str:
    facts = _section(record, "facts") or {}
    version = facts.get("packages", {}).get(name, "")
    return LABELS.get(name) or f"{name} {version}".strip()


def _cells(rows: list[Row], name: str, layers: list[int]) -> list[str]:
    by_layers = {row["blocks"]: row for row in rows if row["contestant"] == name}
    return list(itertools.chain(*(_three(by_layers.get(blocks)) for blocks in layers)))


def _three(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    if row["failure"] is not None:
        return [row["failure"], "", ""]
    ratio = "" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}"
    size = f"{row['activation_bytes'] / MIB:,.1f}"
    return [size, f"{row['tokens_per_second']:,.0f}", ratio]


def _gradients(record: Record) -> str:
    rows = _section(record, "gradients")
    if not rows:
        return ""
    title = (
        "Gradients of a step, by deterministic kernels: largest difference of any gradient, "
        "relative to the largest gradient."
    )
    header = [
        *("layers", "precision", "plain, run twice", "`Keep` against plain"),
        *("`Reverse` against `Keep`", "`Reverse` against plain", "exact against exact `Keep`"),
    ]
    keys = ("plain_again", "keep_plain", "reverse_keep", "reverse_plain", "exact_keep")
    lines = [
        [str(row["layers"]), _precision(row), *(_difference(row[key]) for key in keys)]
        for row in rows
    ]
    failures = [
        f"{row['layers']} layers, {row['precision']}, {name}: {failure}"
        for row in rows
        for name, failure in row["failures"].items()
    ]
    drifted = [f"{row['layers']} layers, {row['precision']}" for row in rows if row["warnings"]]
    notes = [f"Failed: {'; '.join(failures)}."] if failures else []
    notes += [f"`DriftWarning` was given at: {'; '.join(drifted)}."] if drifted else []
    return "\n\n".join([title, _markdown(header, lines), *notes])


def _graph(record: Record) -> str:
    section = _section(record, "graph")
    if section is None:
        return ""
    if isinstance(section, dict):
        return f"A step captured in a CUDA graph: {section['not_run']}."
    rows = [f"{row['contestant']}: {_captured(row)}" for row in section]
    return f"A step captured in a CUDA graph, against the same step run: {'; '.join(rows)}."


def _graph_rows(record: Record) -> list[Row]:
    section = _section(record, "graph")
    return section if isinstance(section, list) else []


def _captured(row: Row) -> str:
    if row["failure"] is not None:
        return row["failure"]
    return "equal to the bit" if row["equal"] else f"differs by {_difference(row['difference'])}"


def _precision(row: Row) -> str:
    return row["precision"] if row["precision"] == "float32" else f"{row['precision']} autocast"


def _difference(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}" if value else "0"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- stored


def write(record: Record, path: Path) -> None:
    write_whole(path, json.dumps(record, indent=2) + "\n")


def read(path: Path) -> Record:
    """The record of a file; `ValueError`, `KeyError` or `TypeError` if it does not have one."""
    record = json.loads(path.read_text())
    report(record)
    return record


def write_page(record: Record, root: Path) -> None:
    """Put the record where the docs keep figures, and the report between the page's markers."""
    page = root / PAGE
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    write(record, root / FIGURES)
    write_whole(page, f"{before}{BEGIN}\n\n{report(record)}\n\n{END}{after}")
