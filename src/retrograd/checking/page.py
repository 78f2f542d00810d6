"""A report as HTML: for notebooks and for `retrograd check --html`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from retrograd.checking.compare import severity

if TYPE_CHECKING:
    from retrograd.checking.report import Report

GREEN = "#1a7f37"
RED = "#cf222e"
_CELL_STYLES = {"ok": f"; color:{GREEN}", "WRONG": f"; color:{RED}; font-weight:bold"}


def as_html(report: Report) -> str:
    """The verdict, the tables and, if matplotlib is installed, the figure."""
    colour = GREEN if report.ok else RED
    parts = [f'<p style="color:{colour}"><b>{_escape(report.verdict())}</b></p>']
    parts.append("<br>".join(map(_escape, report.subject())))
    parts.append(_table([("", "kept", "reversed", "ratio"), *report.figures()], has_head=True))
    parts.append(_table(list(report.findings())))
    if report.problems:
        rows = [(p.where, p.what, p.cause, p.fix) for p in report.problems]
        parts.append(_table([("where", "what", "likely cause", "fix"), *rows], has_head=True))
    if report.advice:
        rows = [(a.where, a.what, a.cause, a.fix) for a in report.advice]
        parts.append(_table([("where", "advice", "likely cause", "what to do"), *rows], True))
    differences = _largest_differences(report)
    if differences:
        head = ("gradient", "relative difference")
        parts.append(_table([head, *differences], has_head=True))
    with contextlib.suppress(ImportError):
        parts.append(_svg(report))
    return "".join(parts)


def _largest_differences(report: Report, count: int = 10) -> list[tuple[str, str]]:
    different = [(name, value) for name, value in report.gradients.items() if value]
    different.sort(key=lambda item: -severity(item[1]))
    return [(name, f"{value:.1e}") for name, value in different[:count]]


def _svg(report: Report) -> str:
    file = io.StringIO()
    report.plot().savefig(file, format="svg")
    text = file.getvalue()
    return text[text.index("<svg") :]


def _table(rows: Sequence[Sequence[str]], has_head: bool = False) -> str:
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if has_head and i == 0 else "td"
        cells = "".join(_cell(tag, text) for text in row)
        lines.append(f"<tr>{cells}</tr>")
    style = "margin:0.8em 0; border-collapse:collapse"
    return f'<table style="{style}">{"".join(lines)}</table>'


def _escape(text: str) -> str:
    """What `html.escape` does. Importing that takes time, and few need it."""
    for character, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}.items():
        text = text.replace(character, entity)
    return text


def _cell(tag: str, text: str) -> str:
    style = f"text-align:left; padding:2px 12px 2px 0{_CELL_STYLES.get(text, '')}"
    return f'<{tag} style="{style}">{_escape(text)}</{tag}>'
