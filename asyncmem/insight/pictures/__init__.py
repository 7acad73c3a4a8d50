"""`page`: all pictures of records in one page for a browser. `page.js` draws what is put together here as data."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asyncmem.core import Kind
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.reports.lines import leaks, lines_of, waits
from asyncmem.insight.reports.segments import memory_map
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.reports.timeline import NO_TAG, PARTS, live_by_tag, marks
from asyncmem.text import printable, to_json

if TYPE_CHECKING:
    from asyncmem.insight.records import Records
    from asyncmem.insight.reports.lines import Leaks, Line, WaitingLine, Waits
    from asyncmem.insight.reports.timeline import LiveByTag, Marks

__all__ = ["mimebundle", "page"]

Data: TypeAlias = dict[str, Any]

SMALLEST: Final = 1 / 1000
"""The share of the whole from which a line is shown by itself; smaller ones of one caller are shown together."""

_FOLDER: Final = Path(__file__).parent
_PARTS_IN_NOTEBOOK: Final = 300
_HEIGHT_IN_NOTEBOOK: Final = 720
_UNTAGGED, _OTHER = "none", "other"  # colours, beside those of the tags that have a band


def page(records: Records, title: str = "asyncmem") -> str:
    """Return a page of HTML with all pictures of records.

    It needs nothing but a browser, and loads nothing. Where more has happened than a screen can show, the highest and
    lowest of every moment are there, so that no peak is lost.

    Args:
        records: What happened.
        title: The heading.
    """
    return _document(records, title, PARTS)


def mimebundle(records: Records) -> dict[str, str]:
    """Return what a notebook shows of records: the page in a frame of its own, or a summary where it shows text alone.

    The frame works without an extension of the notebook, and in one that is read elsewhere later.
    """
    inner = escape(_document(records, "asyncmem", _PARTS_IN_NOTEBOOK))
    frame = (
        f'<iframe srcdoc="{inner}" sandbox="allow-scripts" width="100%" height="{_HEIGHT_IN_NOTEBOOK}"'
        ' style="border: 1px solid #8884"></iframe>'
    )
    return {"text/plain": summarize(records), "text/html": frame}


def _document(records: Records, title: str, parts: int) -> str:
    title = escape(printable(title))
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    data = to_json(_data(records, parts)).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<main></main>\n"
        f"<details><summary>Summary as text</summary><pre>{escape(summarize(records))}</pre></details>\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>\n{script}</script>\n</body>\n</html>\n'
    )


def _data(records: Records, parts: int) -> Data:
    over_time = live_by_tag(records, parts)
    colours = _Colours(over_time)
    peak, leaked, waited = records.peak(), leaks(records), waits(records)
    at_peak, never_freed = records.live_at(peak.time), records.leaked()
    queued = records.of(Kind.WAITED)
    kinds = {"grew": records.grown(), "gave back": records.of(Kind.TRIMMED), "waited": queued}
    kinds["refused"] = records.of(Kind.OUT_OF_MEMORY)
    return {
        "facts": _facts(records),
        "note": records.note,
        "cards": _cards(records, leaked, waited),
        "timeline": _timeline(records, over_time, colours),
        "marks": [{"name": name, **_marks(marks(some, parts))} for name, some in kinds.items()],
        "maps": [
            {"name": name, **_map(records, time, colours)}
            for name, time in (("At the peak", peak.time), ("At the end", records.duration))
        ],
        "peak": _icicle(lines_of(at_peak, at_peak.rows["nbytes"]), records, colours),
        "leaked": _icicle(lines_of(never_freed, never_freed.rows["nbytes"]), records, colours),
        "waited": _icicle(lines_of(queued, queued.rows["span_ns"] / 1e9), records, colours),
        "leaks": _leaks(leaked, colours),
        "waits": {
            "tags": [[colours.of(None if one.name == "?" else one.name), *_wait(one)] for one in waited.tags],
            "priorities": [_wait(one) for one in waited.priorities],
            "classes": [tuple(one) for one in waited.classes],
        },
    }


class _Colours:
    """The colour of each tag, the same in all pictures: those that have a band have their own."""

    def __init__(self, shown: LiveByTag) -> None:
        tags = [band.tag for band in shown.bands if band.tag is not None]
        self._of: dict[str | None, str] = {None: _UNTAGGED, **{tag: f"tag{at}" for at, tag in enumerate(tags[:8])}}

    def of(self, tag: str | None) -> str:
        """Return the colour of a tag, None for what has none."""
        return self._of.get(tag, _OTHER)


def _facts(records: Records) -> list[tuple[str, str]]:
    """Return what stands in the header: names and texts."""
    origin = records.origin
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(records.wall)) if records.wall else ""
    facts = [
        ("Command", " ".join(origin.program)),
        ("Date", date),
        ("Duration", format_duration(records.duration)),
        ("Host", f"{origin.host}, process {origin.process}" if origin.host else ""),
        ("Versions", f"asyncmem {origin.asyncmem}, Python {origin.python}" if origin.python else ""),
    ]
    for pool in records.names.pools:
        options = f", options {pool.options}" if pool.options else ""
        facts.append(("Pool", f"{pool.name} on {pool.device}, limit {format_size(pool.limit)}{options}"))
    return [(name, printable(text)) for name, text in facts if text]


def _cards(records: Records, leaked: Leaks, waited: Waits) -> list[Data]:
    peak, limit = records.peak(), records.limit
    share = f"{format_share(peak.nbytes / limit)} of the limit, " if limit else ""
    longest = max((one.longest for one in waited.lines), default=0.0)
    outlived = f", {format_count(leaked.outlived, 'buffer')} outlived the pool" if leaked.outlived else ""
    refused, reserved = len(records.of(Kind.OUT_OF_MEMORY)), format_size(records.most_reserved())
    return [
        {
            "name": "Peak", "to": "memory", "value": format_size(peak.nbytes), "bad": False,
            "text": f"{share}after {format_duration(peak.time)}",
        },
        {
            "name": "Limit", "to": "timeline", "value": format_size(limit), "bad": bool(refused),
            "text": f"{reserved} reserved at most, {format_count(refused, 'request')} refused",
        },
        {
            "name": "Waited", "to": "waits", "value": format_duration(waited.seconds), "bad": False,
            "text": f"{format_count(waited.waits, 'wait')}, the longest {format_duration(longest)}",
        },
        {
            "name": "Leaked", "to": "leaks", "value": format_size(leaked.nbytes) if leaked.known else "not known",
            "bad": bool(leaked.buffers),
            "text": f"{format_count(leaked.buffers, 'buffer')} never freed{outlived}"
            if leaked.known else "the end of the records is missing",
        },
    ]  # fmt: skip


def _timeline(records: Records, shown: LiveByTag, colours: _Colours) -> Data:
    bands = []
    for band in shown.bands:
        colour = colours.of(band.tag) if band.tag is not None or band.name == NO_TAG else _OTHER
        bands.append({"name": printable(band.name), "colour": colour, "bytes": band.nbytes.tolist()})
    return {
        "seconds": shown.seconds, "records": len(records), "peak": records.peak().time, "limit": shown.limit,
        "times": shown.times.tolist(), "live": shown.live.tolist(), "bands": bands,
        "reservedTimes": shown.reserved_times.tolist(), "reserved": shown.reserved.tolist(),
    }  # fmt: skip


def _marks(found: Marks) -> Data:
    return {name: column.tolist() for name, column in found._asdict().items()}


def _map(records: Records, when: float, colours: _Colours) -> Data:
    found = memory_map(records, when)
    nbytes, live = sum(one.nbytes for one in found.rows), sum(one.live for one in found.rows)
    said = (
        f"After {format_duration(when)}: {format_size(live)} of {format_size(nbytes)} held"
        f" ({format_share(live / max(nbytes, 1))}), the largest hole"
        f" {format_size(max((one.largest_hole for one in found.rows), default=0))}."
    )
    if found.left_out:
        said += f" {format_count(found.left_out, 'smaller segment')} of {format_size(found.left_out_bytes)} left out."
    rows = [
        (printable(one.pool), f"{one.address:#x}", one.nbytes, one.since, one.live, one.largest_hole)
        for one in found.rows
    ]
    blocks = []
    for one in found.blocks:
        name = NO_TAG if one.tag is None else printable(one.tag)
        name += f" and {format_count(one.tags - 1, 'other')}" if one.tags > 1 else ""
        blocks.append((one.row, one.left, one.right, one.nbytes, one.buffers, name, colours.of(one.tag)))
    return {"said": said, "rows": rows, "blocks": blocks}


def _icicle(root: Line, records: Records, colours: _Colours) -> Data:
    """Return lines below their callers, each in the colour of the tag that has most of it."""

    def cell(line: Line) -> Data:
        number = max(line.tags, key=lambda one: (line.tags[one], -one)) if line.tags else 0
        site = line.site
        short = f"{printable(site.function)}  {printable(PurePath(site.file).name)}:{site.line}" if site else "?"
        return {
            "name": str(site or "?"), "short": short, "weight": line.weight, "requests": line.requests,
            "colour": colours.of(records.names.tag(number)), "calls": list(cells(line)),
        }  # fmt: skip

    def cells(line: Line) -> list[Data]:
        large = [one for one in line.largest_first() if one.weight >= root.weight * SMALLEST]
        small = [one for one in line.calls.values() if one.weight < root.weight * SMALLEST]
        found = [cell(one) for one in large]
        if weight := sum(one.weight for one in small):
            name, requests = format_count(len(small), "smaller line"), sum(one.requests for one in small)
            few = {"weight": weight, "requests": requests, "colour": _OTHER, "calls": []}
            found.append({"name": name, "short": name, **few})
        return found

    return {"weight": root.weight, "requests": root.requests, "calls": cells(root)}


def _leaks(found: Leaks, colours: _Colours) -> Data:
    rows = []
    for one in found.lines:
        line = f"{one.file}:{one.line} ({one.function})" if one.file else "?"
        tags = [(printable(tag), colours.of(tag)) for tag in one.tags]
        rows.append((one.nbytes, one.buffers, one.age, tags, one.outlived, printable(line)))
    return {"known": found.known, "rows": rows}


def _wait(one: WaitingLine) -> tuple[str, int, float, float, int]:
    name = NO_TAG if one.name == "?" else one.name
    return printable(name), one.waits, one.seconds, one.longest, one.given_up
