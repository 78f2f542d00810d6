"""Tables for notebooks, in as little HTML as they need."""

from __future__ import annotations

from collections.abc import Sequence

GREEN = "#1a7f37"
RED = "#cf222e"
_CELL_STYLES = {"ok": f"; color:{GREEN}", "WRONG": f"; color:{RED}; font-weight:bold"}


def html_table(rows: Sequence[Sequence[str]], has_head: bool = False) -> str:
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if has_head and i == 0 else "td"
        cells = "".join(_cell(tag, text) for text in row)
        lines.append(f"<tr>{cells}</tr>")
    style = "margin:0.8em 0; border-collapse:collapse"
    return f'<table style="{style}">{"".join(lines)}</table>'


def escape(text: str) -> str:
    """What `html.escape` does. Importing that takes time, and few need it."""
    for character, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}.items():
        text = text.replace(character, entity)
    return text


def _cell(tag: str, text: str) -> str:
    style = f"text-align:left; padding:2px 12px 2px 0{_CELL_STYLES.get(text, '')}"
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'
