"""Live bytes in bands by tag, below the lines of what was reserved and what might be; marks below all of it."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from asyncmem.figures import format_size
from asyncmem.insight.pictures.drawn import colours
from asyncmem.insight.pictures.drawn.scales import SIZE, TimeUnit, in_bytes, picture, time_unit

if TYPE_CHECKING:
    from bokeh.models.renderers import GlyphRenderer

    from asyncmem.insight.pictures.drawn.colours import TagColours
    from asyncmem.insight.pictures.timeline import LiveByTag

    Renderer: TypeAlias = GlyphRenderer[Any]
    Entries: TypeAlias = list[tuple[str, Renderer]]  # of the legend, from below

_NEAR: Final = 2.5
"""A line is in the picture where it is at most so many times as high as what is below it, which must stay readable."""

_LONGEST_NAME: Final = 32
_MARGIN: Final = 0.01  # of the time, for marks at its ends


def draw_timeline(shown: LiveByTag, colour: TagColours) -> figure:
    """Draw what was live and reserved."""
    unit = time_unit(shown.seconds)
    end, top = max(shown.seconds, 1e-9) * unit.factor, _top(shown)
    made = picture("timeline", height=380, y_range=(0.0, top), x_range=(-end * _MARGIN, end * (1 + _MARGIN)))
    in_bytes(made.yaxis)
    source = _source(shown, unit)
    entries = _bands(made, shown, source, colour)
    live = made.step("time", "live", source=source, mode="after", color=colours.LIVE, line_width=1, name="live")
    entries += [("live", live), *_lines(made, shown, unit, end, top)]
    items = [LegendItem(label={"value": label}, renderers=[drawn]) for label, drawn in reversed(entries)]
    made.add_layout(Legend(items=items, click_policy="hide", label_text_font_size="12px"), "right")
    _add_tips(made, shown, unit, source)
    return made


def _bands(made: figure, shown: LiveByTag, source: ColumnDataSource, colour: TagColours) -> Entries:
    entries: Entries = []
    for at, band in enumerate(shown.bands):
        area = made.varea_step(
            "time", f"below{at}", f"above{at}", source=source, step_mode="after", name=f"band{at}",
            fill_color=colour.of_band(band), fill_alpha=0.85,
        )  # fmt: skip
        entries.append((_short(band.name), area))
    return entries


def _lines(made: figure, shown: LiveByTag, unit: TimeUnit, end: float, top: float) -> Entries:
    source = ColumnDataSource({"time": shown.reserved_times * unit.factor, "reserved": shown.reserved})
    reserved = made.step(
        "time", "reserved", source=source, mode="after", color=colours.RESERVED, line_width=2, name="reserved"
    )
    limit = made.line(
        [0, end], [shown.limit, shown.limit], color=colours.LIMIT, line_width=2, line_dash="dashed", name="limit"
    )
    return [
        (f"reserved{_where(int(shown.reserved.max()), top)}", reserved),
        (f"limit {format_size(shown.limit)}{_where(shown.limit, top)}", limit),
    ]


def _top(shown: LiveByTag) -> float:
    """Answer where the picture ends: above what was live, and above each line that is not far from that."""
    top = max(int(shown.live.max()), 1)
    for line in (int(shown.reserved.max()), shown.limit):
        if top < line <= top * _NEAR:
            top = line
    return top * 1.06


def _where(line: int, top: float) -> str:
    return "" if line <= top else " (above)"


def _source(shown: LiveByTag, unit: TimeUnit) -> ColumnDataSource:
    tops = list(accumulate(band.nbytes for band in shown.bands))
    columns = {"time": shown.times * unit.factor, "live": shown.live}
    for at, (band, above) in enumerate(zip(shown.bands, tops, strict=True)):
        columns |= {f"below{at}": above - band.nbytes, f"above{at}": above, f"band{at}": band.nbytes}
    return ColumnDataSource(columns)


def _add_tips(made: figure, shown: LiveByTag, unit: TimeUnit, source: ColumnDataSource) -> None:
    # Bokeh finds no point of a step, so the tips hang on a line that nobody sees.
    found = made.line("time", "live", source=source, line_alpha=0, name="tips")
    tips = [("after", f"@time{unit.tip}"), ("live", f"@live{{{SIZE}}}")]
    tips += [(_short(band.name), f"@band{at}{{{SIZE}}}") for at, band in reversed(list(enumerate(shown.bands)))]
    made.add_tools(HoverTool(renderers=[found], mode="vline", tooltips=tips, line_policy="prev"))


def _short(name: str) -> str:
    """Answer a name that fits beside the picture, with both its ends: names of modules differ at either."""
    head = _LONGEST_NAME * 2 // 3
    return name if len(name) <= _LONGEST_NAME else f"{name[:head]}…{name[head + 1 - _LONGEST_NAME :]}"
