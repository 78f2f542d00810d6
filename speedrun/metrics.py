"""`metrics.jsonl`: a line of JSON for each step. Lines that are damaged are passed over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from retrograd.files import open_regular, write_whole

Metrics = dict[str, float]


def append(path: Path, metrics: Metrics) -> None:
    with path.open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def read(path: Path) -> list[Metrics]:
    """The metrics of all steps in order, each step once."""
    with open_regular(path) as file:
        lines = file.read().splitlines()
    found = {}
    for line in lines:
        metrics = _parsed(line)
        if metrics is not None:
            found[metrics["step"]] = metrics
    return [found[step] for step in sorted(found)]


def keep(path: Path, steps: int) -> int:
    """Keep the first steps: those after the checkpoint are taken again. Returns how many of them
    are lost.
    """
    if not path.exists():
        return steps
    kept = [metrics for metrics in read(path) if metrics["step"] <= steps]
    write_whole(path, "".join(json.dumps(metrics) + "\n" for metrics in kept))
    return steps - len(kept)


def _parsed(line: bytes) -> Metrics | None:
    """The metrics of a line; None if it is damaged."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not {"step", "bits_per_byte"} <= found.keys():
        return None
    if not all(_is_finite(value) for value in found.values()) or not _is_step(found["step"]):
        return None
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
