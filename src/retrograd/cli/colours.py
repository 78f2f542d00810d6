"""Colours for verdicts on a terminal, where rich is installed. Elsewhere, text stays as it is."""

from __future__ import annotations

import sys

STYLES = {r"(?m)(?<=  )ok(?=  )|(?<=: )ok(?=\.)": "green", r"\bWRONG\b|\bwrong\b": "bold red"}


def show(text: str) -> None:
    """Print a report."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(text)
        return
    console = Console(file=sys.stdout, soft_wrap=True)
    if not console.is_terminal:
        print(text)
        return
    coloured = Text(text)
    for pattern, style in STYLES.items():
        coloured.highlight_regex(pattern, style)
    console.print(coloured)
