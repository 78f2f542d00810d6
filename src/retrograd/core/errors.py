"""Errors that arise while a network runs. Wrong arguments are plain `ValueError` or `TypeError`, raised before any work.

Every message has four parts: where (which update), what (the number beside its limit), why, and the fix to type.
"""

from __future__ import annotations


class RetrogradError(RuntimeError):
    """Parent of every error that retrograd raises while a network runs."""


class OutputError(RetrogradError, ValueError):
    """A function returned something that cannot enter its target stream."""


class InPlaceError(RetrogradError):
    """A tensor that backward needs was changed in place."""


class RecomputeError(RetrogradError):
    """A function did something else the second time it ran."""


class CouplingError(RetrogradError):
    """A coupling's `inverse` does not undo its `forward`."""


def explain(where: str, what: str, why: str, fix: str) -> str:
    """The text of an error: the facts on the first line, then the reason and what to type."""
    return f"{where} {what}\n  Why: {why}\n  Fix: {fix}"
