"""Who holds the memory that others wait for, and at which level it is short: for errors, and the warning of a stall."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncmem.core import LOG_ROW
from asyncmem.errors import LeakWarning, StallWarning
from asyncmem.facts import OwnerInfo, owner_table
from asyncmem.figures import format_size
from asyncmem.pool.alarm import alarm, waiting_site
from asyncmem.pool.owners import held_by, label, name_of
from asyncmem.text import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncmem.core import Core, Request
    from asyncmem.pool.ports import AnyShare, Opened

TOP = 5
"""Tags and lines that errors and warnings name."""


def waiting_owner(
    opened: Opened, number: int, request: Request[Any] | None, *, held: int, waiting: int, age: float
) -> OwnerInfo:
    """Return an owner that waits, with its name and the line of the program where it does."""
    owner = opened.core.named(number)
    site = getattr(request, "_site", None) or (waiting_site(owner) if owner is not None else None)
    return OwnerInfo(owner=name_of(opened.core, number), held=held, waiting=waiting, age=age, site=site or "")


def short_of(opened: Opened, share: AnyShare, nbytes: int) -> AnyShare:
    """Return the innermost level that has no room for a request in a share: itself, or one around it, or the pool."""
    core = opened.core
    for one in share._lineage():
        full = opened.shares.get(one._account) is one and nbytes > one._own_limit() - core.account(one._account).live
        if full or one._is_lease:  # nothing around a lease bounds what lies in it
            return one
    return opened.pool


def held_beside(opened: Opened, share: AnyShare, waiting: Collection[int] = ()) -> dict[str, int]:
    """Return the bytes of a share's live buffers by what holds them, besides the waiting owners."""
    core = opened.core
    accounts = _accounts(opened, share, whole=False)
    held = held_by(core, accounts)
    rows = {label(core.named(owner)): nbytes for owner, nbytes in held.items() if owner and owner not in waiting}
    known = sum(nbytes for owner, nbytes in held.items() if owner)
    others = "held in no block, or granted and never awaited"
    if share is opened.pool:
        figures = {
            "pinned": opened.pinned_bytes,
            "kept for captured graphs": opened.captures.nbytes,
            "spillable, and in no use": opened.spilling.resting_bytes(),
        }
        rows |= figures
        known += sum(figures.values()) + core.exported_bytes
    else:
        others += ", or pinned, exported or spillable"
    rows[others] = core.account(share._account).live - known
    return {what: nbytes for what, nbytes in rows.items() if nbytes > 0}


def tags_of(opened: Opened, share: AnyShare, most: int = TOP) -> list[tuple[str, int]]:
    """Return the tags that hold most of a share, with their bytes, largest first."""
    accounts = None if share is opened.pool else _accounts(opened, share, whole=True)
    return list(opened.core.tag_bytes(accounts).items())[:most]


def top_tags(opened: Opened, share: AnyShare, most: int = TOP) -> list[tuple[str, int]]:
    """Return the same, of a pool that is recorded from its records."""
    recorded = held_by_tag(opened.core, most) if share is opened.pool else []
    return recorded or tags_of(opened, share, most)


def shortage(opened: Opened, share: AnyShare, waiting: Collection[int]) -> str:
    """Return lines: a share is full, and what holds its memory besides the waiting owners."""
    live = opened.core.account(share._account).live
    tags = ", ".join(f"{quoted(tag)} {format_size(nbytes)}" for tag, nbytes in tags_of(opened, share))
    head = f"{share._level}: limit {format_size(share._own_limit())}, live {format_size(live)}"
    head += f" ({tags})" if tags else ""
    rows = held_beside(opened, share, waiting)
    if share is opened.pool:
        rows["freed while exported"] = opened.core.exported_bytes
        rows["more, spilled to the host"] = opened.spilling.nbytes
    return "\n".join([head, *(f"  {format_size(nbytes)} {printable(what)}" for what, nbytes in rows.items() if nbytes)])


def _accounts(opened: Opened, share: AnyShare, *, whole: bool) -> set[int]:
    """Return the accounts of a share and its parts; those inside of a lease only for itself, or where `whole`."""
    return {
        account
        for account, one in list(opened.shares.items())
        if share in one._lineage() and (whole or share._has_range or not one._has_range)
    }


def held_by_tag(core: Core, most: int) -> list[tuple[str, int]]:
    """Return the tags that hold most and their bytes, as far as that is recorded."""
    witness = core.witness
    if witness is None:
        return []
    return [(witness.tags[number], nbytes) for number, nbytes in _largest(core, "tag", most)]


def held_by_site(core: Core, most: int) -> list[tuple[str, int]]:
    """Return the lines that hold most ("file:line") and their bytes, as far as that is recorded."""
    witness = core.witness
    if witness is None:
        return []
    lines: dict[str, int] = {}
    for site, nbytes in _largest(core, "site", None):
        file, line, _ = witness.places[witness.sites[site][0]]
        lines[f"{file}:{line}"] = lines.get(f"{file}:{line}", 0) + nbytes
    return sorted(lines.items(), key=lambda one: -one[1])[:most]


def _largest(core: Core, column: str, most: int | None) -> list[tuple[int, int]]:
    rows = np.frombuffer(core.held(), LOG_ROW)
    numbers, places = np.unique(rows[column], return_inverse=True)
    sums = np.bincount(places, rows["nbytes"], len(numbers))
    known = [(int(number), int(nbytes)) for number, nbytes in zip(numbers, sums, strict=True) if number]
    return sorted(known, key=lambda one: -one[1])[:most]


def warn_of_leaks(opened: Opened) -> None:
    """Name the buffers still held as a pool is closed; freed ones that are still exported are not held."""
    core = opened.core
    held = core.account(0).requested - core.exported_bytes
    if held <= 0:
        return
    tags = ", ".join(f"{quoted(tag)} {format_size(nbytes)}" for tag, nbytes in tags_of(opened, opened.pool))
    lines = held_by_site(core, TOP)
    sites = ", ".join(f"{format_size(nbytes)} at {printable(site)}" for site, nbytes in lines)
    rows = held_beside(opened, opened.pool)
    alarm(
        f"pool {quoted(opened.name)} was closed while buffers of {format_size(held)} were held"
        + (f" ({tags})" if tags else "")
        + (f", made {sites}" if sites else "")
        + f": {', '.join(f'{format_size(nbytes)} {printable(what)}' for what, nbytes in rows.items())}"
        + "; they stay valid until they are freed",
        LeakWarning,
        lines[0][0] if lines else None,
    )


class StallWatch:
    """Warns when nothing has been granted for `stall_after` seconds while requests wait; once for each stall."""

    def __init__(self, opened: Opened) -> None:
        self._pool = opened
        self._seen = -1
        self._since: float | None = None

    def look(self) -> None:
        """Look, a few times a second."""
        opened = self._pool
        gauges = opened.core.scheduler.gauges()
        now = time.monotonic()
        after = opened.options.stall_after
        if not gauges["waiting"] or gauges["progress"] != self._seen or self._since is None:
            self._seen, self._since = gauges["progress"], now
        elif after is not None and now - self._since >= after:
            self._since = None
            self._warn(after)

    def _warn(self, after: float) -> None:
        opened = self._pool
        held = held_by(opened.core)
        requests = [one for one in opened.core.requests() if not one["growing"]]
        owners = [
            waiting_owner(
                opened, one["owner"], one["request"], held=held.pop(one["owner"], 0) if one["owner"] else 0,
                waiting=one["nbytes"], age=one["age"],
            )
            for one in requests
        ]  # fmt: skip
        waiting = {one["owner"] for one in requests}
        short = (short_of(opened, opened.shares.get(one["account"], opened.pool), one["nbytes"]) for one in requests)
        text = f"pool {quoted(opened.name)}: nothing was granted for {after:g} s, and nothing proves a deadlock\n"
        text += "\n".join([owner_table(owners), *(shortage(opened, one, waiting) for one in dict.fromkeys(short))])
        alarm(text, StallWarning, next((one.site for one in owners if one.site), None))
