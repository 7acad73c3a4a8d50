"""A strip of marks below a timeline, on the same axis of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from asyncmem.insight.pictures.drawn import colours
from asyncmem.insight.pictures.drawn.scales import SIZE, TimeUnit, picture, time_unit

if TYPE_CHECKING:
    from asyncmem.insight.pictures.marks import Marks, Moments, Spans

GREW, TRIMMED, WAITED, REFUSED = "grew", "gave back", "waited", "out of memory"


def draw_marks(shown: Marks, above: figure, seconds: float) -> figure:
    """Draw marks below a timeline.

    Args:
        shown: The marks.
        above: The timeline, whose time it shares.
        seconds: How long was recorded.
    """
    unit = time_unit(seconds)
    made = picture("marks", height=150, x_range=above.x_range, y_range=[REFUSED, WAITED, TRIMMED, GREW])
    made.toolbar_location = None  # that above is for both
    made.xaxis.axis_label = unit.name
    made.ygrid.grid_line_color = None
    _moments(made, shown.grew, GREW, "triangle", colours.GREW, unit)
    _moments(made, shown.trimmed, TRIMMED, "inverted_triangle", colours.TRIMMED, unit)
    _spans(made, shown.waits, unit)
    _moments(made, shown.out_of_memory, REFUSED, "x", colours.REFUSED, unit)
    return made


def _moments(made: figure, shown: Moments, row: str, marker: str, colour: str, unit: TimeUnit) -> None:
    source = ColumnDataSource(
        {
            "time": shown.times * unit.factor,
            "row": [row] * len(shown.times),
            "count": shown.counts,
            "nbytes": shown.nbytes,
            "largest": shown.largest,
        }
    )
    drawn = made.scatter(
        "time", "row", source=source, marker=marker, size=11, fill_color=colour, line_color=colour,
        line_width=3 if marker == "x" else 1, name=row,
    )  # fmt: skip
    tips = [
        ("after", f"@time{unit.tip}"),
        (row, f"@count times, @nbytes{{{SIZE}}}"),
        ("the largest", f"@largest{{{SIZE}}}"),
    ]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))


def _spans(made: figure, shown: Spans, unit: TimeUnit) -> None:
    source = ColumnDataSource(
        {
            "start": shown.starts * unit.factor,
            "end": shown.ends * unit.factor,
            "row": [WAITED] * len(shown.starts),
            "count": shown.counts,
            "longest": shown.longest * unit.factor,
        }
    )
    # The border keeps short ones from being too thin to be seen.
    drawn = made.hbar(
        y="row", left="start", right="end", height=0.5, source=source, fill_color=colours.WAITED,
        line_color=colours.WAITED, line_width=2, name=WAITED,
    )  # fmt: skip
    tips = [
        ("from", f"@start{unit.tip}"),
        ("until", f"@end{unit.tip}"),
        ("waits", "@count"),
        ("the longest", f"@longest{unit.tip}"),
    ]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
