"""`page`: all pictures of records in one page for a browser. `page.js` draws what is put together here as data."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from pathlib import Path, PurePath
from typing import Any, Final, TypeAlias

from asyncmem.core import Kind
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.records import Records
from asyncmem.insight.reports.lines import Leaks, Line, WaitingLine, Waits, leaks, lines_of, waits
from asyncmem.insight.reports.segments import memory_map
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.reports.timeline import NO_TAG, PARTS, LiveByTag, live_by_tag, marks
from asyncmem.text import printable, to_json

__all__ = ["mimebundle", "page"]

Data: TypeAlias = dict[str, Any]
ColourOf: TypeAlias = Callable[[str | None], str]
"""The colour of a tag, the same in all pictures."""

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
        ' style="border: 1px solid #8884; box-sizing: border-box"></iframe>'
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
    tags = [band.tag for band in over_time.bands if band.tag is not None][:8]
    colours: dict[str | None, str] = {None: _UNTAGGED, **{tag: f"tag{at}" for at, tag in enumerate(tags)}}

    def colour_of(tag: str | None) -> str:
        return colours.get(tag, _OTHER)

    peak, leaked, waited = records.peak(), leaks(records), waits(records)
    at_peak, never_freed, queued = records.live_at(peak.time), records.leaked(), records.of(Kind.WAITED)
    kinds = {
        "grew": records.grown(), "gave back": records.of(Kind.TRIMMED), "waited": queued,
        "refused": records.of(Kind.OUT_OF_MEMORY),
    }  # fmt: skip
    return {
        "facts": _facts(records),
        "note": records.note,
        "cards": _cards(records, leaked, waited),
        "timeline": _timeline(records, over_time, colour_of),
        "marks": [
            {"name": name, **{field: column.tolist() for field, column in marks(some, parts)._asdict().items()}}
            for name, some in kinds.items()
        ],
        "maps": [
            {"name": name, **_map(records, when, colour_of)}
            for name, when in (("At the peak", peak.time), ("At the end", records.duration))
        ],
        "peak": _icicle(lines_of(at_peak, at_peak.rows["nbytes"]), records, colour_of),
        "leaked": _icicle(lines_of(never_freed, never_freed.rows["nbytes"]), records, colour_of),
        "waited": _icicle(lines_of(queued, queued.rows["span_ns"] / 1e9), records, colour_of),
        "leaks": _leaks(leaked, colour_of),
        "waits": {
            "tags": [(colour_of(None if one.name == "?" else one.name), *_wait(one)) for one in waited.tags],
            "priorities": [_wait(one) for one in waited.priorities],
            "classes": waited.classes,
        },
    }


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
    peak, limit, reserved = records.peak(), records.limit, format_size(records.most_reserved())
    share = f"{format_share(peak.nbytes / limit)} of the limit, " if limit else ""
    longest = format_duration(max((one.longest for one in waited.lines), default=0.0))
    outlived = f", {format_count(leaked.outlived, 'buffer')} outlived the pool" if leaked.outlived else ""
    kept = f"{format_count(leaked.buffers, 'buffer')} never freed{outlived}"
    known, refused = leaked.known, len(records.of(Kind.OUT_OF_MEMORY))
    told = f"{reserved} reserved at most, {format_count(refused, 'request')} refused"
    cards = [
        ("Peak", "memory", format_size(peak.nbytes), f"{share}after {format_duration(peak.time)}", False),
        ("Limit", "timeline", format_size(limit), told, refused > 0),
        ("Waited", "waits", format_duration(waited.seconds),
         f"{format_count(waited.waits, 'wait')}, the longest {longest}", False),
        ("Leaked", "leaks", format_size(leaked.nbytes) if known else "not known",
         kept if known else "the end of the records is missing", leaked.buffers > 0),
    ]  # fmt: skip
    return [dict(zip(("name", "to", "value", "text", "bad"), card, strict=True)) for card in cards]


def _timeline(records: Records, shown: LiveByTag, colour_of: ColourOf) -> Data:
    bands = []
    for band in shown.bands:
        colour = colour_of(band.tag) if band.tag is not None or band.name == NO_TAG else _OTHER
        bands.append({"name": printable(band.name), "colour": colour, "bytes": band.nbytes.tolist()})
    return {
        "seconds": shown.seconds, "records": len(records), "peak": records.peak().time, "limit": shown.limit,
        "times": shown.times.tolist(), "live": shown.live.tolist(), "bands": bands,
        "reservedTimes": shown.reserved_times.tolist(), "reserved": shown.reserved.tolist(),
    }  # fmt: skip


def _map(records: Records, when: float, colour_of: ColourOf) -> Data:
    found = memory_map(records, when)
    nbytes, live = sum(one.nbytes for one in found.rows), sum(one.live for one in found.rows)
    said = (
        f"After {format_duration(when)}: {format_size(live)} of {format_size(nbytes)} held"
        f" ({format_share(live / max(nbytes, 1))}), the largest hole"
        f" {format_size(max((one.largest_hole for one in found.rows), default=0))}."
    )
    if found.left_out:
        said += f" {format_count(found.left_out, 'smaller segment')} of {format_size(found.left_out_bytes)} left out."
    blocks = []
    for one in found.blocks:
        name = NO_TAG if one.tag is None else printable(one.tag)
        name += f" and {format_count(one.tags - 1, 'other')}" if one.tags > 1 else ""
        blocks.append((one.row, one.left, one.right, one.nbytes, one.buffers, name, colour_of(one.tag)))
    rows = [(printable(one.pool), f"{one.address:#x}", *one[2:6]) for one in found.rows]
    return {"said": said, "rows": rows, "blocks": blocks}


def _icicle(root: Line, records: Records, colour_of: ColourOf) -> Data:
    """Return lines below their callers, each in the colour of the tag that has most of it."""

    def cells(line: Line) -> list[Data]:
        large = [one for one in line.largest_first() if one.weight >= root.weight * SMALLEST]
        small = [one for one in line.calls.values() if one.weight < root.weight * SMALLEST]
        found = []
        for one in large:
            number = max(one.tags, key=lambda tag: (one.tags[tag], -tag))
            site, colour = one.site, colour_of(records.names.tag(number))
            short = f"{printable(site.function)}  {printable(PurePath(site.file).name)}:{site.line}" if site else "?"
            found.append(_cell(str(site or "?"), short, one.weight, one.requests, colour, cells(one)))
        if weight := sum(one.weight for one in small):
            name = format_count(len(small), "smaller line")
            found.append(_cell(name, name, weight, sum(one.requests for one in small), _OTHER, []))
        return found

    return {"weight": root.weight, "requests": root.requests, "calls": cells(root)}


def _cell(name: str, short: str, weight: float, requests: int, colour: str, calls: list[Data]) -> Data:
    return {"name": name, "short": short, "weight": weight, "requests": requests, "colour": colour, "calls": calls}


def _leaks(found: Leaks, colour_of: ColourOf) -> Data:
    rows = []
    for one in found.lines:
        line = f"{one.file}:{one.line} ({one.function})" if one.file else "?"
        tags = [(printable(tag), colour_of(tag)) for tag in one.tags]
        rows.append((one.nbytes, one.buffers, one.age, tags, one.outlived, printable(line)))
    return {"known": found.known, "rows": rows}


def _wait(one: WaitingLine) -> tuple[str, int, float, float, int]:
    name = NO_TAG if one.name == "?" else one.name
    return printable(name), one.waits, one.seconds, one.longest, one.given_up
