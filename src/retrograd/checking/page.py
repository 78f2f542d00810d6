"""A report as HTML: for notebooks and for `retrograd check --html`."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from retrograd.checking.compare import severity
from retrograd.html_tables import GREEN, RED, escape, html_table

if TYPE_CHECKING:
    from retrograd.checking.report import Report


def as_html(report: Report) -> str:
    """The verdict, the tables and, if matplotlib is installed, the figure."""
    colour = GREEN if report.ok else RED
    parts = [f'<p style="color:{colour}"><b>{escape(report.verdict())}</b></p>']
    parts.append("<br>".join(map(escape, report.subject())))
    parts.append(html_table([("", "kept", "reversed", "ratio"), *report.figures()], has_head=True))
    parts.append(html_table(list(report.findings())))
    if report.problems:
        rows = [(p.where, p.what, p.cause, p.fix) for p in report.problems]
        parts.append(html_table([("where", "what", "likely cause", "fix"), *rows], has_head=True))
    if report.advice:
        rows = [(a.where, a.what, a.cause, a.fix) for a in report.advice]
        parts.append(html_table([("where", "advice", "likely cause", "what to do"), *rows], True))
    differences = _largest_differences(report)
    if differences:
        head = ("gradient", "relative difference")
        parts.append(html_table([head, *differences], has_head=True))
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
