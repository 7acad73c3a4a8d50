"""Lines of a program below their callers, as wide as what they cost."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.insight.pictures.drawn import colours
from asyncmem.insight.pictures.drawn.scales import in_bytes, picture, time_unit

if TYPE_CHECKING:
    from asyncmem.insight.pictures.icicle import Cell, Icicle

_ROW: Final = 24  # pixels
_WIDE: Final = 1000  # about as many pixels as the whole has
_LETTER: Final = 6.8


def draw_bytes(name: str, shown: Icicle) -> figure:
    """Draw whose bytes they were."""
    made = _picture(name, shown, 1.0, "bytes")
    in_bytes(made.xaxis)
    _cells(made, shown, 1.0, [format_size(round(one.right - one.left)) for one in shown.cells], "buffers")
    return made


def draw_seconds(name: str, shown: Icicle) -> figure:
    """Draw whose seconds they were."""
    unit = time_unit(shown.total)
    made = _picture(name, shown, unit.factor, unit.name)
    _cells(made, shown, unit.factor, [format_duration(one.right - one.left) for one in shown.cells], "waits")
    return made


def _picture(name: str, shown: Icicle, factor: float, label: str) -> figure:
    rows = 1 + max(one.depth for one in shown.cells)
    made = picture(
        name, height=80 + _ROW * rows, x_range=(0, shown.total * factor), y_range=(rows, 0), x_axis_label=label
    )
    made.yaxis.visible = False
    made.ygrid.grid_line_color = None
    return made


def _cells(made: figure, shown: Icicle, factor: float, amounts: list[str], counted: str) -> None:
    fills = [colours.of_function(one.site) if one.site else colours.OTHERS for one in shown.cells]
    shares = [(one.right - one.left) / shown.total for one in shown.cells]
    source = ColumnDataSource(
        {
            "left": [one.left * factor for one in shown.cells],
            "right": [one.right * factor for one in shown.cells],
            "top": [one.depth for one in shown.cells],
            "bottom": [one.depth + 1 for one in shown.cells],
            "middle": [one.depth + 0.5 for one in shown.cells],
            "line": [one.name for one in shown.cells],
            "label": [_label(*one) for one in zip(shown.cells, shares, strict=True)],
            "colour": fills,
            "border": [colours.border_of(*one) for one in zip(fills, shares, strict=True)],
            "amount": amounts,
            "share": [format_share(share) for share in shares],
            "count": [one.requests for one in shown.cells],
        }
    )
    drawn = made.quad(
        left="left", right="right", top="top", bottom="bottom", source=source, fill_color="colour",
        line_color="border", name="cells",
    )  # fmt: skip
    made.text(
        x="left", y="middle", text="label", source=source, x_offset=5, text_baseline="middle", text_font_size="12px",
        text_color=colours.TEXT, name="labels",
    )  # fmt: skip
    tips = [("line", "@line"), ("", "@amount, @share"), (counted, "@count{0,0}")]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))


def _label(cell: Cell, share: float) -> str:
    """Answer as much of a line's name as fits into its cell."""
    site = cell.site
    name = f"{site.function}  {PurePath(site.file).name}:{site.line}" if site else cell.name
    letters = int((share * _WIDE - 10) / _LETTER)
    if len(name) <= letters:
        return name
    return f"{name[: letters - 1]}…" if letters >= 4 else ""
