"""Segments as rows, with what lay in them; what is left blank is a hole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, PlainText
from bokeh.plotting import figure

from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.insight.pictures.drawn import colours
from asyncmem.insight.pictures.drawn.scales import SIZE, in_bytes, picture
from asyncmem.insight.pictures.timeline import NO_TAG

if TYPE_CHECKING:
    from asyncmem.insight.pictures.drawn.colours import TagColours
    from asyncmem.insight.pictures.memory_map import Block, MemoryMap

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
            "row": np.array([one.row for one in shown.blocks]),
            "left": np.array([one.left for one in shown.blocks]),
            "right": np.array([one.right for one in shown.blocks]),
            "tag": [_tags(one) for one in shown.blocks],
            "colour": fills,
            "border": [colours.border_of(*one) for one in zip(fills, shares, strict=True)],
            "opacity": np.array([_opacity(one) for one in shown.blocks]),
            "buffers": np.array([one.buffers for one in shown.blocks]),
            "nbytes": np.array([one.nbytes for one in shown.blocks]),
        }
    )
    drawn = made.hbar(
        y="row", left="left", right="right", height=0.7, source=source, fill_color="colour", fill_alpha="opacity",
        line_color="border", line_alpha="opacity", line_width=0.5, name="blocks",
    )  # fmt: skip
    tips = [("tag", "@tag"), ("bytes", f"@nbytes{{{SIZE}}} in @buffers{{0,0}}"), ("from", f"@left{{{SIZE}}}")]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=tips, attachment="above"))


def _opacity(block: Block) -> float:
    """Answer how much of a block is held; what is held to a quarter can just be told from a hole."""
    return max(block.nbytes / max(block.right - block.left, 1), 0.25)


def _tags(block: Block) -> str:
    name = NO_TAG if block.tag is None else block.tag
    return name if block.tags == 1 else f"{name} and {format_count(block.tags - 1, 'other')}"
