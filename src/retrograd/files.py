"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Aside, and then renamed: whoever is interrupted leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(text)
    aside.replace(path)
