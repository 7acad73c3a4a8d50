"""A process's pools as a screenful: a line a pool, who waits, who holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from asyncmem.cli.tables import add, columns
from asyncmem.figures import format_count, format_duration, format_share, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

    from asyncmem.insight.live.look import Holder, PoolLook, ProcessLook, WaiterLook

_BAR: Final = 20
_SHOWN: Final = 8
_WORDS: Final = ("pool", "device", "of the limit")
_SPARE: Final = ("of the limit", "device", "per second", "hits", "limit")
"""Columns that a narrow screen does without, that which is missed least first."""
_COLOURS: Final = {"LOW": "green", "MEDIUM": "cyan", "HIGH": "yellow", "CRITICAL": "red"}


def picture(now: ProcessLook, before: ProcessLook | None = None, *, hint: str = "") -> Group:
    """Lay out what a process said.

    Args:
        now: That.
        before: What it said before, for what happens in a second.
        hint: Stands in the first line, before the program, which may be longer than that.
    """
    return Group(*_parts(now, before, hint))


def _parts(now: ProcessLook, before: ProcessLook | None, hint: str) -> Iterator[RenderableType]:
    moment = time.strftime("%H:%M:%S", time.localtime(now["time"]))
    head = (moment, f"process {now['process']}", hint, plain(" ".join(now["program"])))
    yield Text("  ".join(filter(None, head)), style="bold", no_wrap=True, overflow="ellipsis")
    yield Text()
    if not now["pools"]:
        yield Text("No pool is open.")
        return
    yield _Pools(now, before)
    waiting = [(pool, one) for pool in now["pools"] for one in pool["waiters"]]
    if waiting:
        yield Text()
        yield _waiters(sorted(waiting, key=lambda pair: -pair[1]["age"])[:_SHOWN])
    for title, key in (("held by tag", "tags"), ("held by line", "sites")):
        if held := _most(now, key):
            yield Text()
            yield _holders(title, held)


class _Pools:
    """The table of pools, with as many of its columns as the screen has room for."""

    def __init__(self, now: ProcessLook, before: ProcessLook | None) -> None:
        earlier = {_name(pool): pool["stats"] for pool in before["pools"]} if before else {}
        seconds = now["time"] - before["time"] if before else 0
        self._rows = [_cells(pool, earlier.get(_name(pool)), seconds) for pool in now["pools"]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        headings = list(self._rows[0])
        for heading in _SPARE:
            if console.measure(self._table(headings), options=options.update(max_width=1 << 20)).maximum <= (
                options.max_width
            ):
                break
            headings.remove(heading)
        yield self._table(headings)

    def _table(self, headings: list[str]) -> Table:
        table = columns(*headings, left=_WORDS)
        for row in self._rows:
            table.add_row(*(row[heading] for heading in headings))
        return table


def _cells(pool: PoolLook, earlier: dict[str, Any] | None, seconds: float) -> dict[str, Text]:
    stats: dict[str, Any] = pool["stats"]
    return {
        "pool": Text(_name(pool) + (" (closed)" if pool["closed"] else "")),
        "device": Text(str(stats["device"])),
        "live": Text(format_size(stats["allocated_bytes"])),
        "reserved": Text(format_size(stats["reserved_bytes"])),
        "limit": Text(format_size(stats["limit"])),
        "of the limit": _bar(stats),
        "waiting": Text(_waiting(stats)),
        "hits": Text(format_share(stats["cache_hit_rate"])),
        "per second": Text(_pace(stats, earlier, seconds)),
    }


def _waiters(waiting: list[tuple[PoolLook, WaiterLook]]) -> Table:
    table = columns("waiting", "wants", "who", "pool", left=("who", "pool"))
    for pool, one in waiting:
        who = plain(one["owner"]) + (" (the pool grows)" if one["growing"] else "")
        add(table, format_duration(one["age"]), format_size(one["nbytes"]), who, _name(pool))
    return table


def _holders(title: str, held: list[tuple[str, int]]) -> Table:
    table = columns("bytes", title, left=(title,))
    for name, nbytes in held:
        add(table, format_size(nbytes), plain(name))
    return table


def _bar(stats: dict[str, Any]) -> Text:
    limit = max(stats["limit"], 1)
    live = min(round(_BAR * stats["allocated_bytes"] / limit), _BAR)
    reserved = min(round(_BAR * stats["reserved_bytes"] / limit), _BAR)
    colour = _COLOURS.get(stats["pressure"], "")
    return Text.assemble(
        ("█" * live, colour), ("▒" * max(reserved - live, 0), colour), "·" * (_BAR - max(live, reserved))
    )


def _waiting(stats: dict[str, Any]) -> str:
    found = [f"{stats['waiting']:,} for {format_size(stats['waiting_bytes'])}"] if stats["waiting"] else []
    found += [f"{stats['growing']:,} growing"] if stats["growing"] else []
    return ", ".join(found) or "-"


def _pace(stats: dict[str, Any], earlier: dict[str, Any] | None, seconds: float) -> str:
    if earlier is None or seconds <= 0 or stats["num_allocations"] < earlier["num_allocations"]:
        return "-"
    return f"{(stats['num_allocations'] - earlier['num_allocations']) / seconds:,.0f}"


def _most(now: ProcessLook, key: str) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for pool in now["pools"]:
        holders: list[Holder] = pool[key]  # type: ignore[literal-required]  # one of the two lists of holders
        for one in holders:
            sums[one["name"]] = sums.get(one["name"], 0) + one["nbytes"]
    return sorted(sums.items(), key=lambda pair: -pair[1])[:_SHOWN]


def _name(pool: PoolLook) -> str:
    return plain(str(pool["stats"]["name"]))


def plain(text: str) -> str:
    """Leave out what would steer the terminal: names are whatever a program has made up."""
    return "".join(one if one.isprintable() else "?" for one in text)


def ended(now: ProcessLook) -> str:
    """Say that a process is gone."""
    return f"process {now['process']} has ended, or shows its pools no more ({format_count(len(now['pools']), 'pool')})"
