"""The parts of the page in their order: each a picture, with a sentence about how it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from bokeh.layouts import column

from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.pictures.drawn.colours import TagColours
from asyncmem.insight.pictures.drawn.icicle import draw_bytes, draw_seconds
from asyncmem.insight.pictures.drawn.marks import draw_marks
from asyncmem.insight.pictures.drawn.memory_map import draw_memory_map
from asyncmem.insight.pictures.drawn.timeline import draw_timeline
from asyncmem.insight.pictures.icicle import at_the_peak, leaked, waited
from asyncmem.insight.pictures.marks import marks
from asyncmem.insight.pictures.memory_map import memory_map
from asyncmem.insight.pictures.timeline import LiveByTag, live_by_tag

if TYPE_CHECKING:
    from bokeh.models.ui import UIElement

    from asyncmem.insight.pictures.icicle import Icicle
    from asyncmem.insight.pictures.memory_map import MemoryMap
    from asyncmem.insight.records import Records


class Part(NamedTuple):
    """A part of the page."""

    name: str
    """Its anchor."""
    heading: str
    """What it is about."""
    reading: str
    """How the picture is read,"""
    said: str
    """and what it comes to."""
    drawn: UIElement | None
    """The picture, None where there is nothing to show,"""
    nothing: str
    """which is said so."""


def all_parts(records: Records, parts: int) -> tuple[Part, ...]:
    """Draw all there is to draw.

    Args:
        records: What happened.
        parts: In how many parts a timeline cuts the time.
    """
    over_time = live_by_tag(records, parts)
    colour = TagColours(over_time.bands)
    return (
        _timeline(records, over_time, colour, parts),
        _map("peak-segments", "at the peak", records, None, colour),
        _map("end-segments", "at the end", records, records.duration, colour),
        _peak(at_the_peak(records)),
        _leaks(leaked(records)),
        _waits(waited(records)),
    )


def _timeline(records: Records, shown: LiveByTag, colour: TagColours, parts: int) -> Part:
    drawn = None
    if len(records):
        above = draw_timeline(shown, colour)
        below = draw_marks(marks(records, parts), above, shown.seconds)
        drawn = column(above, below, sizing_mode="stretch_width")
    reading = (
        "Bands are tags. Draw a box to look closer; click on a name to hide it. Where more has happened than a screen "
        "can show, the highest and lowest of each moment are drawn, so that no peak is lost."
    )
    return Part("time", "Live bytes over time", reading, _said_of_time(shown), drawn, "Nothing was recorded.")


def _map(name: str, when: str, records: Records, time: float | None, colour: TagColours) -> Part:
    shown = memory_map(records, time)
    drawn = draw_memory_map(name, shown, colour) if shown.rows else None
    reading = (
        "Rows are what was had from the device, coloured by tag as above. What is pale is held in part, what is blank "
        "is a hole."
    )
    return Part(
        name,
        f"Segments {when}",
        reading,
        _said_of_map(shown),
        drawn,
        "There were none then. Memory by pages never has any.",
    )


def _peak(shown: Icicle) -> Part:
    drawn = draw_bytes("peak", shown) if shown.total else None
    reading = "Each line lies below the one that called it, as wide as the bytes that it asked for."
    return Part(
        "peak", "Whose memory it was at the peak", reading, _said_of_bytes(shown, "live"), drawn, "Nothing was live."
    )


def _leaks(shown: Icicle) -> Part:
    drawn = draw_bytes("leaks", shown) if shown.total else None
    reading = "What was allocated while it was recorded and was still live at the end, by the lines that asked for it."
    return Part(
        "leaks",
        "What was never freed",
        reading,
        _said_of_bytes(shown, "never freed"),
        drawn,
        "All that was allocated was freed.",
    )


def _waits(shown: Icicle) -> Part:
    said = f"{format_duration(shown.total)} in {format_count(shown.requests, 'wait')}"
    drawn = draw_seconds("waits", shown) if shown.total else None
    reading = "Each line is as wide as the time that its requests waited for others to free memory."
    return Part("waits", "Seconds spent waiting for memory", reading, said, drawn, "Nobody waited.")


def _said_of_time(shown: LiveByTag) -> str:
    at = int(np.argmax(shown.live))
    peak, most = format_size(int(shown.live[at])), format_size(int(shown.reserved.max()))
    return f"{peak} live at the peak, after {format_duration(float(shown.times[at]))}; {most} reserved at most"


def _said_of_map(shown: MemoryMap) -> str:
    nbytes, live = sum(one.nbytes for one in shown.rows), sum(one.live for one in shown.rows)
    hole = max((one.largest_hole for one in shown.rows), default=0)
    said = (
        f"After {format_duration(shown.time)}: {format_size(live)} of {format_size(nbytes)} held"
        f" ({format_share(live / max(nbytes, 1))}), the largest hole {format_size(hole)}"
    )
    if shown.left_out:
        said += f"; {format_count(shown.left_out, 'more segment')} of {format_size(shown.left_out_bytes)} left out"
    return said


def _said_of_bytes(shown: Icicle, what: str) -> str:
    return f"{format_size(round(shown.total))} in {format_count(shown.requests, 'buffer')} {what}"
