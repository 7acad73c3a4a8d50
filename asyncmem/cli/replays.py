"""Figures of replays, on the model and on a device: a table, an object each, and a page that draws them."""

from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, log10
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

from asyncmem.cli.tables import Cell, show_table, table_of
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.insight.names import PoolName
from asyncmem.replay import Advice, LiveReplay, Replay, Trace
from asyncmem.replay.model import arguments_of
from asyncmem.replay.run import Outcome
from asyncmem.text import printable

_NAMES: Final = ("program", "device", "policy")
_ADVISED: Final = ("reserved", "ratio", "driver calls", "their time", "waits", "waited")


class Recorded(NamedTuple):
    """A program that was read from a file."""

    file: str
    trace: Trace
    pool: PoolName | None = None
    """The pool that `asyncmem run` recorded; None for other files."""

    @property
    def limit(self) -> int | None:
        """What the recorded pool might reserve; None where that is not known."""
        return None if self.pool is None else self.pool.limit

    @property
    def device(self) -> str:
        """The name of the recorded device; other files tell its number alone."""
        return f"cuda:{self.trace.device}" if self.pool is None else self.pool.device

    def arguments(self) -> dict[str, object]:
        """Return what the recorded pool was told, as far as that is known.

        A recording does not say who has set the limit. Programs name whole MiB; without, it is the device's odd size.
        """
        if self.pool is None:
            return {}
        mib, rest = divmod(self.pool.limit, 1 << 20)
        return arguments_of(self.pool.options) | ({} if rest else {"limit": f"{mib} MiB"})

    def about(self) -> dict[str, object]:
        """Return what is missing in the recording, and the pool that was recorded."""
        pool = {} if self.pool is None else {"recorded": self.pool._asdict()}
        return {"note": self.trace.note, **pool}


class Entry(NamedTuple):
    """One replay, a line of the table."""

    program: Recorded
    policy: str
    """The policy or the options, as they were written."""
    replay: Replay | LiveReplay
    """The result."""
    fitted: int | None = None
    """The smallest limit that completes, if that was asked for."""


_SAME: Final = (
    "limit", "completed", "peak_requested", "peak_active", "peak_reserved", "reserved_over_requested", "waits",
    "ns_per_op",
)  # fmt: skip
"""Figures of every replay that are printed by their names."""


def figures_of(entry: Entry) -> dict[str, object]:
    """Return the figures of one replay by their names."""
    one = entry.replay
    found: dict[str, object] = {"file": entry.program.file, "policy": entry.policy}
    found |= {name: getattr(one, name) for name in _SAME}
    found |= {"wait_ms": one.wait_seconds * 1e3, "recorded_ms": one.duration * 1e3}
    if isinstance(one, LiveReplay):
        return found | {"device": one.device, "driver_calls": one.driver_calls}
    if entry.fitted is not None:
        found["fit_over_requested"] = _over(entry.fitted, one)
    return found | {
        "driver_calls": sum(one.driver_calls.values()),
        "driver_calls_by_name": dict(one.driver_calls),
        "driver_ms": one.driver_seconds * 1e3,
        "largest_hole": one.largest_hole,
        "stranded_by_stream": list(one.stranded),
        "fragmentation": one.fragmentation,
    }


def advice_as_json(program: Recorded, advice: Advice) -> dict[str, object]:
    """Return what was tried with its figures, all that helps together, and the lines to paste."""

    def figures(one: Replay) -> dict[str, object]:
        return figures_of(Entry(program, str(one.policy), one))

    return {
        "file": program.file,
        "before": figures(advice.before),
        "suggestions": [
            {
                "arguments": dict(one.arguments),
                "advised": one.helps,
                "against": one.against,
                "before": figures(one.before),
                "after": figures(one.after),
            }
            for one in advice.suggestions
        ],
        "after": figures(advice.after),
        "arguments": advice.arguments(),
        "code": advice.code(given=program.arguments()),
    }


def show_replays(entries: list[Entry], console: Console) -> None:
    """Print the table, and below it the requests that could not be served."""
    waited = any(one.replay.waits or isinstance(one.replay, LiveReplay) for one in entries)
    rows = [_cells(entry, waited=waited) for entry in entries]
    show_table(table_of(list(rows[0]), [list(row.values()) for row in rows], left=_NAMES), console)
    for one in (entry.replay for entry in entries):
        if not one.completed:
            wanted = f"row {one.failed_row:,} asks for {format_size(one.failed_bytes)}"
            limit = format_size(one.limit or 0)
            console.print(f"{printable(one.name)}: out of memory under {limit}: {wanted}", soft_wrap=True)


def show_advice(program: Recorded, advice: Advice, console: Console) -> None:
    """Print what was tried in a table, and below it the lines to paste."""
    before = advice.before
    first = f"{printable(before.name)}: {format_size(before.peak_requested)} requested"
    lines = [(f"as it is, {before.policy}", "", before)]
    lines += [(f"  {one}", "yes" if one.helps else f"no: {one.against}", one.after) for one in advice.suggestions]
    lines.append(("all that is advised", "", advice.after))
    rows = []
    for tried, advised, one in lines:
        cells = _cells(Entry(program, "", one), waited=True)
        rows.append((tried, advised, *(cells[heading] for heading in _ADVISED)))
    show_table(table_of((first, "advised", *_ADVISED), rows, left=("advised",), whole=(first,)), console)
    console.print()
    console.print(advice.code(given=program.arguments()), soft_wrap=True, end="")


def _cells(entry: Entry, *, waited: bool) -> dict[str, Cell]:
    one = entry.replay
    cells: dict[str, Cell] = {"program": one.name}
    if isinstance(one, LiveReplay):
        cells["device"] = one.device
    cells |= {
        "policy": entry.policy,
        "requested": format_size(one.peak_requested),
        "reserved": format_size(one.peak_reserved),
        "ratio": f"{one.reserved_over_requested:.4f}" if one.completed else Text("fails", style="red"),
    }
    if entry.fitted is not None:
        cells["fits"] = f"{_over(entry.fitted, one):.4f}"
    if isinstance(one, LiveReplay):
        cells["driver calls"] = one.driver_calls
    else:
        cells |= {"driver calls": sum(one.driver_calls.values()), "their time": _of_time(one.driver_seconds, one)}
    if waited:
        cells |= {"waits": one.waits, "waited": _of_time(one.wait_seconds, one)}
    if isinstance(one, LiveReplay):
        cells["an operation"] = f"{one.ns_per_op:,.0f} ns"
    return cells


def _over(nbytes: int, one: Outcome) -> float:
    return nbytes / one.peak_requested if one.peak_requested else 1.0


def _of_time(seconds: float, one: Outcome) -> str:
    share = f" ({format_share(seconds / one.duration)})" if one.duration else ""
    return format_duration(seconds) + share


# -- a page that draws them, without scripts ---------------------------------------------------------------------------

_LINES: Final = {"reserved": "reserved", "live": "live", "hole": "largest_hole"}
"""The classes of a figure's lines, and what of a sample each shows."""

_STYLE: Final = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: #1b1f24;
  background: #fff }
svg { width: 100%; height: auto } text { font-size: 12px; fill: #57606a } .grid { stroke: #d0d7de }
polyline { fill: none; stroke: currentColor; stroke-width: 1.5; vector-effect: non-scaling-stroke }
.key { display: inline-block; width: 2em; border-top: 2px solid; margin: 0 .4em .3em 1.2em }
.reserved { color: #c2410c } .live { color: #1d4ed8 } .hole { color: #6b7280; stroke-dasharray: 3 2 }
.key.hole { border-top-style: dashed }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } text { fill: #8b949e }
  .grid { stroke: #30363d } .reserved { color: #fb923c } .live { color: #60a5fa } }
"""


def page(replays: Iterable[Replay]) -> str:
    """Return the page as HTML, one figure a replay; each must have been run with `samples`."""
    figures = "\n".join("\n".join(_figure(one)) for one in replays)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>asyncmem replay</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>asyncmem replay</h1>\n"
        f'<p><span class="key reserved"></span>reserved<span class="key live"></span>live, as rounded'
        f'<span class="key hole"></span>largest hole</p>\n{figures}\n</body>\n</html>\n'
    )


def _figure(one: Replay) -> Iterator[str]:
    end = max((sample.time_us for sample in one.samples), default=0.0) or 1.0
    most = max((sample.reserved for sample in one.samples), default=0) or 1

    def x(time_us: float) -> str:
        return f"{80 + 900 * time_us / end:.1f}"

    def y(nbytes: int, below: int = 0) -> str:
        return f"{290 - 280 * nbytes / most + below:.1f}"

    limit = "" if one.limit is None else f" under a limit of {format_size(one.limit)}"
    yield f"<h2>{escape(printable(one.name))}: {escape(printable(str(one.policy)))}</h2>"
    yield f"<p>{format_size(one.peak_reserved)} reserved for {format_size(one.peak_requested)} requested"
    yield f" ({one.reserved_over_requested:.3f}){limit}.</p>"
    yield '<svg viewBox="0 0 1000 320" role="img">'
    for nbytes in _ticks(most, 1 << max(0, most.bit_length() - 3)):
        yield f'<line class="grid" x1="80" x2="980" y1="{y(nbytes)}" y2="{y(nbytes)}"/>'
        yield f'<text x="72" y="{y(nbytes, 4)}" text-anchor="end">{format_size(nbytes)}</text>'
    for time_us in _ticks(ceil(end), 10 ** max(0, int(log10(end / 2)))):
        yield f'<text x="{x(time_us)}" y="312" text-anchor="middle">{format_duration(time_us / 1e6)}</text>'
    for name, field in _LINES.items():
        points = " ".join(f"{x(sample.time_us)},{y(getattr(sample, field))}" for sample in one.samples)
        yield f'<polyline class="{name}" points="{points}"/>'
    yield "</svg>"


def _ticks(most: int, step: int) -> range:
    return range(0, most + 1, step * max(1, most // step // 10))
