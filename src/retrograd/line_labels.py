"""Names of lines, written beside the lines. A legend makes the eye go back and forth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAP = 0.065  # of the height of the axes: a line of text


class LineLabel(NamedTuple):
    """What to write at a point of a line, in the colour of the line."""

    x: float
    y: float
    text: str
    colour: Any


def label_lines(axes: Axes, labels: Sequence[LineLabel], rise: float = 0.01, **style: Any) -> None:
    """Write each label to the right of its point, `rise` above it; those that would overlap are
    moved up.
    """
    from matplotlib.patheffects import withStroke

    axes.get_xlim()  # fits the limits to what is drawn
    axes.get_ylim()
    to_axes = axes.transScale + axes.transLimits
    placed: list[_Box] = []
    for label in sorted(labels, key=lambda label: label.y):
        x, y = to_axes.transform((label.x, label.y))
        right = x + _width(axes, label.text, style.get("fontsize", 10))
        y += rise
        for box in placed:  # from the bottom to the top
            if box.left < right and x < box.right and box.bottom <= y < box.top:
                y = box.top
        placed.append(_Box(x, right, y, y + GAP * (1 + label.text.count("\n"))))
        placed.sort(key=lambda box: box.bottom)
        halo = [withStroke(linewidth=3, foreground="white")]  # where a line passes under the text
        options = {"va": "bottom", "color": label.colour, "path_effects": halo, **style}
        text = axes.text(x + 0.015, y, label.text, transform=axes.transAxes, **options)
        text.set_parse_math(False)  # names may have a "$"


class _Box(NamedTuple):
    left: float
    right: float
    bottom: float
    top: float


def _width(axes: Axes, text: str, points: float) -> float:
    """Roughly the width of a text, as a share of that of the axes."""
    letters = max(map(len, text.split("\n")))
    pixels = 0.6 * points * axes.figure.dpi / 72
    return letters * pixels / axes.get_window_extent().width
