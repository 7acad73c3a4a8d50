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

    from rich.console import RenderableType
    from rich.table import Table

    from asyncmem.insight.live.look import Holder, PoolLook, ProcessLook, WaiterLook

_BAR: Final = 20
_SHOWN: Final = 8
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
    yield _pools(now, before)
    waiting = [(pool, one) for pool in now["pools"] for one in pool["waiters"]]
    if waiting:
        yield Text()
        yield _waiters(sorted(waiting, key=lambda pair: -pair[1]["age"])[:_SHOWN])
    for title, key in (("held by tag", "tags"), ("held by line", "sites")):
        if held := _most(now, key):
            yield Text()
            yield _holders(title, held)


def _pools(now: ProcessLook, before: ProcessLook | None) -> Table:
    headings = ("pool", "device", "live", "reserved", "limit", "of the limit", "waiting", "hits", "per second")
    table = columns(*headings, left=("pool", "device", "of the limit"))
    earlier = {_name(pool): pool["stats"] for pool in before["pools"]} if before else {}
    for pool in now["pools"]:
        stats: dict[str, Any] = pool["stats"]
        table.add_row(
            Text(_name(pool) + (" (closed)" if pool["closed"] else "")),
            Text(str(stats["device"])),
            format_size(stats["allocated_bytes"]),
            format_size(stats["reserved_bytes"]),
            format_size(stats["limit"]),
            _bar(stats),
            _waiting(stats),
            format_share(stats["cache_hit_rate"]),
            _pace(stats, earlier.get(_name(pool)), now["time"] - before["time"] if before else 0),
        )
    return table


def _waiters(waiting: list[tuple[PoolLook, WaiterLook]]) -> Table:
    table = columns("waiting", "wants", "who", "pool", left=("who", "pool"))
    for pool, one in waiting:
        add(table, format_duration(one["age"]), format_size(one["nbytes"]), plain(one["owner"]), _name(pool))
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
    return f"{stats['waiting']:,} for {format_size(stats['waiting_bytes'])}" if stats["waiting"] else "-"


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
