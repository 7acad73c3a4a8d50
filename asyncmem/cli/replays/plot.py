"""A page that draws replays over time: what was reserved, what was live, and the largest hole. One file, no scripts."""

from collections.abc import Callable, Iterable, Iterator
from html import escape
from math import ceil, log10
from typing import Final

from asyncmem.core import ReplaySample
from asyncmem.figures import format_duration, format_size
from asyncmem.replay.result import Replay

_WIDTH: Final = 1000
_HEIGHT: Final = 320
_LEFT: Final = 80
_RIGHT: Final = 20
_TOP: Final = 10
_BOTTOM: Final = 30

_LINES: Final[dict[str, Callable[[ReplaySample], int]]] = {
    "reserved": lambda one: one.reserved,
    "live": lambda one: one.live,
    "largest hole": lambda one: one.largest_hole,
}

_STYLE: Final = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: #1b1f24;
  background: #fff }
svg { width: 100%; height: auto } text { font-size: 12px; fill: #57606a } .grid { stroke: #d0d7de }
polyline { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke }
.reserved { stroke: #c2410c } .live { stroke: #1d4ed8 } .hole { stroke: #6b7280; stroke-dasharray: 3 2 }
.key { display: inline-block; width: 2em; border-top: 2px solid; margin: 0 .4em .3em 1.2em }
.key.reserved { color: #c2410c } .key.live { color: #1d4ed8 } .key.hole { color: #6b7280; border-top-style: dashed }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } text { fill: #8b949e }
  .grid { stroke: #30363d } .reserved { stroke: #fb923c } .live { stroke: #60a5fa } .key.reserved { color: #fb923c }
  .key.live { color: #60a5fa } }
"""


def page(replays: Iterable[Replay]) -> str:
    """Answer the page as HTML, one figure a replay; each must have been run with `samples`."""
    figures = "\n".join(_figure(one) for one in replays)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>asyncmem replay</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>asyncmem replay</h1>\n"
        f'<p><span class="key reserved"></span>reserved<span class="key live"></span>live, as rounded'
        f'<span class="key hole"></span>largest hole</p>\n{figures}\n</body>\n</html>\n'
    )


def _figure(one: Replay) -> str:
    end = max((sample.time_us for sample in one.samples), default=0.0) or 1.0
    most = max((sample.reserved for sample in one.samples), default=0) or 1
    lines = "\n".join(
        f'<polyline class="{name.split()[-1]}" points="{_points(one.samples, look, end, most)}"/>'
        for name, look in _LINES.items()
    )
    limit = "" if one.limit is None else f" under a limit of {format_size(one.limit)}"
    return (
        f"<h2>{escape(one.name)}: {escape(str(one.policy))}</h2>\n"
        f"<p>{format_size(one.peak_reserved)} reserved for {format_size(one.peak_requested)} requested"
        f" ({one.reserved_over_requested:.3f}){limit}.</p>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">\n{"".join(_grid(end, most))}\n{lines}\n</svg>'
    )


def _points(samples: Iterable[ReplaySample], look: Callable[[ReplaySample], int], end: float, most: int) -> str:
    return " ".join(f"{_x(sample.time_us / end):.1f},{_y(look(sample) / most):.1f}" for sample in samples)


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(end_us: float, most: int) -> Iterator[str]:
    for nbytes in _ticks(most, 1 << max(0, most.bit_length() - 3)):
        y = _y(nbytes / most)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_size(nbytes)}</text>'
    for time_us in _ticks(ceil(end_us), 10 ** max(0, int(log10(end_us / 2)))):
        yield f'<text x="{_x(time_us / end_us):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
        yield f"{format_duration(time_us / 1e6)}</text>"


def _ticks(most: int, step: int) -> range:
    return range(0, most + 1, step * max(1, most // step // 10))
