"""A page with the pools of all workers in Dask's dashboard, at /asyncmem. Needs bokeh, as the dashboard does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

from distributed import Scheduler

from asyncmem.distributed.looks import cluster_look
from asyncmem.figures import format_count, format_size
from asyncmem.insight.live.client import PoolLook
from asyncmem.text import printable

try:
    from bokeh.document import Document
    from bokeh.models import BasicTicker, ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d
    from bokeh.models.annotations import Title
    from bokeh.plotting import figure
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard.core import BokehApplication
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name}, which Dask's dashboard needs, is missing: pip install bokeh", name=missing.name
    ) from missing

PATH: Final = "/asyncmem"

_INTERVAL: Final = 1000
"""Milliseconds; heartbeats come twice a second at most."""
_COLOURS: Final = {"LOW": "#4c78a8", "MEDIUM": "#e3a72f", "HIGH": "#e4702e", "CRITICAL": "#c8323c"}
"""By the pressure in the pool."""
_TOOLTIPS: Final = [
    ("pool", "@pool on @device"), ("live", "@live_text"), ("reserved", "@reserved_text"), ("limit", "@limit_text"),
    ("waiting", "@waiting"), ("worker", "@worker"),
]  # fmt: skip

_COLUMNS: Final = (
    "pool", "device", "worker", "live", "reserved", "limit", "label_at", "label", "waiting", "colour",
    "live_text", "reserved_text", "limit_text",
)  # fmt: skip

_there: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def add_page(dask_scheduler: Scheduler) -> str:
    """Add the page to the dashboard of a scheduler, once; return its path.

    ``client.run_on_scheduler(add_page)`` does so in a cluster that runs, and ``dask scheduler --preload
    asyncmem.distributed.preload`` from its start.
    """
    pages = dask_scheduler.http_application
    prefix: str = next((one.prefix for one in pages.applications if isinstance(one, BokehTornado)), "")
    if dask_scheduler not in _there:
        application = BokehApplication({PATH: _document}, dask_scheduler, prefix)
        pages.add_application(application)
        application.initialize(dask_scheduler.loop)
        application.start()
        _there.add(dask_scheduler)
    return prefix + PATH


def _document(scheduler: Scheduler, extra: dict[str, object], document: Document) -> None:
    del extra  # what Dask's own templates are given
    source, names, scale, heading = ColumnDataSource(), FactorRange(), Range1d(start=0, end=1), Title()
    options: dict[str, Any] = {"tools": "", "toolbar_location": None, "sizing_mode": "stretch_both"}
    drawing = figure(y_range=names, x_range=scale, title=heading, **options)
    bars: dict[str, Any] = {"height": 0.7, "source": source}
    drawing.hbar("pool", right="limit", fill_alpha=0, line_color="#999999", legend_label="limit", **bars)
    drawing.hbar("pool", right="reserved", color="colour", alpha=0.35, legend_label="reserved", **bars)
    drawing.hbar("pool", right="live", color="colour", legend_label="live", **bars)
    drawing.text("label_at", "pool", "label", source=source, text_baseline="middle", text_font_size="13px")
    drawing.add_tools(HoverTool(tooltips=_TOOLTIPS))
    drawing.xaxis.ticker = BasicTicker(base=1024, mantissas=[2**power for power in range(10)])
    drawing.xaxis.formatter = NumeralTickFormatter(format="0 ib")
    drawing.ygrid.visible = False

    def update() -> None:
        look = cluster_look(scheduler.address, {ws.address: ws.metrics for ws in scheduler.workers.values()})
        found = columns(look["pools"])
        source.data, heading.text = found, title(look["pools"], len(look["silent"]))
        names.factors = found["pool"][::-1]
        scale.end = max(found["label_at"], default=1) * 1.25

    update()
    document.title = "Dask: asyncmem"
    document.add_root(drawing)
    document.add_periodic_callback(update, _INTERVAL)


def title(pools: Iterable[PoolLook], silent: int) -> str:
    """Return the sums of all pools, and how many workers have none."""
    stats: list[dict[str, Any]] = [pool["stats"] for pool in pools]
    live, reserved, limit = (
        format_size(sum(one[name] for one in stats)) for name in ("allocated_bytes", "reserved_bytes", "limit")
    )
    found = f"{format_count(len(stats), 'pool')}: {live} live, {reserved} reserved, limit {limit}"
    return found + (f"; {format_count(silent, 'worker')} without a PoolPlugin" if silent else "")


def columns(pools: Iterable[PoolLook]) -> dict[str, list[Any]]:
    """Return what is drawn of each pool, in columns."""
    found: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for pool in pools:
        stats: dict[str, Any] = pool["stats"]
        limit, live, reserved = stats["limit"], stats["allocated_bytes"], stats["reserved_bytes"]
        waiting = f"{stats['waiting']:,} for {format_size(stats['waiting_bytes'])}" if stats["waiting"] else ""
        sizes = {"live_text": live, "reserved_text": reserved, "limit_text": limit}
        texts = {name: format_size(nbytes) for name, nbytes in sizes.items()}
        row = {
            "pool": printable(str(stats["name"])), "device": printable(str(stats["device"])), "worker": pool["worker"],
            "live": live, "reserved": reserved, "limit": limit, "label_at": max(limit, reserved),
            "label": f"  {texts['live_text']}" + (f", {waiting} waiting" if waiting else ""),
            "waiting": waiting or "nothing", "colour": _COLOURS.get(stats["pressure"], "#4c78a8"), **texts,
        }  # fmt: skip
        for name, value in row.items():
            found[name].append(value)
    return found
