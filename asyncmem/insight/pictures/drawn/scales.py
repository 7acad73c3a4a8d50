"""Axes whose ticks are round in the unit that stands beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bokeh.models import AdaptiveTicker, NumeralTickFormatter
from bokeh.plotting import figure

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE: Final = "0.[00] b"
"""How the browser prints bytes: "1.5 MiB"."""

_UNITS: Final = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36e3, 1 / 60, "min"))


class TimeUnit(NamedTuple):
    """The unit of an axis of time."""

    factor: float
    """So many are a second."""
    name: str
    """What it is called."""

    @property
    def tip(self) -> str:
        """How the browser prints a time in it: digits, and the unit."""
        return f"{{0.[000]}} {self.name}"


def time_unit(seconds: float) -> TimeUnit:
    """Answer the unit in which so long a time is read best."""
    for below, factor, name in _UNITS:
        if seconds < below:
            return TimeUnit(factor, name)
    return TimeUnit(1 / 3600, "h")


def picture(name: str, **options: Any) -> figure:  # noqa: ANN401 -- Bokeh's own, passed on
    """Make a figure as wide as its page, that is zoomed with the wheel and moved by hand."""
    made = figure(
        name=name,
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save",
        toolbar_location="above",
        active_scroll=None,
        active_drag="box_zoom",
        background_fill_color="#ffffff",
        output_backend="canvas",
        **options,
    )
    made.toolbar.logo = None
    made.outline_line_color = None
    made.xgrid.grid_line_alpha = made.ygrid.grid_line_alpha = 0.5
    return made


def in_bytes(axes: Sequence[Any]) -> None:
    """Have axes show bytes, with ticks at whole KiB, MiB or GiB."""
    for axis in axes:
        axis.ticker = AdaptiveTicker(
            base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512], desired_num_ticks=6, num_minor_ticks=4
        )
        axis.formatter = NumeralTickFormatter(format=SIZE)
