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
    below = 0.0
    for label in sorted(labels, key=lambda label: label.y):
        x, y = to_axes.transform((label.x, label.y))
        y = max(y + rise, below)
        below = y + GAP * (1 + label.text.count("\n"))
        halo = [withStroke(linewidth=3, foreground="white")]  # where a line passes under the text
        options = {"va": "bottom", "color": label.colour, "path_effects": halo, **style}
        text = axes.text(x + 0.015, y, label.text, transform=axes.transAxes, **options)
        text.set_parse_math(False)  # names may have a "$"
