"""Segments as rows, with what lay in them; what is left blank is a hole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, PlainText
from bokeh.plotting import figure

from asyncmem.figures import format_duration, format_size
from asyncmem.insight.pictures.drawn import colours
from asyncmem.insight.pictures.drawn.scales import SIZE, in_bytes, picture
from asyncmem.insight.pictures.timeline import NO_TAG

if TYPE_CHECKING:
    from asyncmem.insight.pictures.drawn.colours import TagColours
    from asyncmem.insight.pictures.memory_map import MemoryMap

_ROW: Final = 26  # pixels


def draw_memory_map(name: str, shown: MemoryMap, colour: TagColours) -> figure:
    """Draw what lay where.

    Args:
        name: The figure's.
        shown: What lay where.
        colour: The colours of tags.
    """
    longest = max(one.nbytes for one in shown.rows)
    made = picture(
        name, height=80 + _ROW * len(shown.rows), x_range=(0, longest * 1.01),
        y_range=(len(shown.rows) - 0.4, -0.6), x_axis_label="bytes from the segment's beginning",
    )  # fmt: skip
    in_bytes(made.xaxis)
    made.ygrid.grid_line_color = None
    made.yaxis.ticker = FixedTicker(ticks=list(range(len(shown.rows))))
    # As plain text: Bokeh would take a name with dollars for a formula.
    made.yaxis.major_label_overrides = {
        at: PlainText(text=f"{one.pool} {format_size(one.nbytes)}") for at, one in enumerate(shown.rows)
    }
    _segments(made, shown)
    _blocks(made, shown, colour)
    return made


def _segments(made: figure, shown: MemoryMap) -> None:
    source = ColumnDataSource(
        {
            "row": list(range(len(shown.rows))),
            "size": [one.nbytes for one in shown.rows],
            "pool": [one.pool for one in shown.rows],
            "address": [f"{one.address:#x}" for one in shown.rows],
            "since": [format_duration(one.since) for one in shown.rows],
            "held": [one.live for one in shown.rows],
            "hole": [one.largest_hole for one in shown.rows],
        }
    )
    drawn = made.hbar(
        y="row", left=0, right="size", height=0.8, source=source, fill_color=colours.SEGMENT,
        line_color=colours.BORDER, name="segments",
    )  # fmt: skip
    tips = [
        ("segment", f"@size{{{SIZE}}} of pool @pool"),
        ("address", "@address"),
        ("there since", "@since"),
        ("held", f"@held{{{SIZE}}}"),
        ("largest hole", f"@hole{{{SIZE}}}"),
    ]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=tips, attachment="below"))


def _blocks(made: figure, shown: MemoryMap, colour: TagColours) -> None:
    longest = max(one.nbytes for one in shown.rows)
    fills = [colour.of(one.tag) for one in shown.blocks]
    shares = [(one.right - one.left) / longest for one in shown.blocks]
    source = ColumnDataSource(
        {
            "row": [one.row for one in shown.blocks],
            "left": [one.left for one in shown.blocks],
            "right": [one.right for one in shown.blocks],
            "tag": [NO_TAG if one.tag is None else one.tag for one in shown.blocks],
            "colour": fills,
            "border": [colours.border_of(*one) for one in zip(fills, shares, strict=True)],
            "buffers": [one.buffers for one in shown.blocks],
            "nbytes": [one.nbytes for one in shown.blocks],
        }
    )
    drawn = made.hbar(
        y="row", left="left", right="right", height=0.7, source=source, fill_color="colour", line_color="border",
        line_width=0.5, name="blocks",
    )  # fmt: skip
    tips = [("tag", "@tag"), ("bytes", f"@nbytes{{{SIZE}}} in @buffers"), ("from", f"@left{{{SIZE}}}")]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=tips, attachment="above"))
