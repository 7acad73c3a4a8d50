"""The facts of errors that have many: out of memory, deadlocks, and devices without room."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.text import printable, quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryFacts:
    """Everything known when a request is about to be refused.

    The same record goes to `on_oom` and, when that does not help, into `OutOfMemoryError`. All sizes are bytes.
    """

    asked: int
    """The size of the request; for a batch the sum."""
    device: str
    """Name of the device, such as "cuda:0"."""
    level: str = ""
    """What has no room: the pool, a budget or a lease, by name; empty where the device itself refused."""
    limit: int | None = None
    """The most the pool, budget or lease may have, or None where only the device bounds it."""
    reserved: int = 0
    """What the pool has from the driver."""
    live: int = 0
    """What buffers hold, rounded up to the core's granule."""
    free: int = 0
    """What the pool has from the driver and no buffer holds."""
    largest_hole: int = 0
    """The largest request that the free memory can serve in one piece."""
    pending_fence_bytes: int = 0
    """The part of `free` that must not be reused yet: a stream may still be working on it."""
    device_free: int | None = None
    """What the device itself still has free, or None where that was not asked."""
    waiting: int = 0
    """Requests in the queue."""
    waiting_bytes: int = 0
    """What they ask for together."""
    holders: tuple[tuple[str, int], ...] = ()
    """The tags that hold most, with their bytes, largest first."""
    sites: tuple[tuple[str, int], ...] = ()
    """The lines ("file:line") that hold most, with their bytes, largest first; while the pool is recorded."""
    cause: str = ""
    """Why there is no such memory, if known: "size" (more than the limit), "limit" (other owners hold too much),
    "fragmentation" (enough is free, but in pieces), "growth" (memory is being made for other requests, and an event
    loop's thread cannot wait) or "device" (it has no more)."""
    remedies: Mapping[str, int] = field(default_factory=dict)
    """What the pool has done against a lack of memory so far: how often each means was used, by name."""
    advice: tuple[str, ...] = ()
    """What to try, most promising first."""

    def describe(self) -> str:
        """Return the facts in one sentence, and what to try in a second."""
        cause = f" ({_CAUSES[self.cause]})" if self.cause else ""
        where = f" from {self.level}" if self.level else ""
        clauses = [f"asked for {format_size(self.asked)}{where}{cause}", *self._amounts(), *self._demand()]
        advice = f". Try: {'; '.join(self.advice)}" if self.advice else ""
        return "; ".join(clauses) + advice

    def _amounts(self) -> Iterable[str]:
        limit = "no limit" if self.limit is None else f"limit {format_size(self.limit)}"
        yield f"{limit}, reserved {format_size(self.reserved)}, live {format_size(self.live)}"
        pending = f", {format_size(self.pending_fence_bytes)} behind fences" if self.pending_fence_bytes else ""
        yield f"free {format_size(self.free)} (largest hole {format_size(self.largest_hole)}{pending})"
        if self.device_free is not None:
            yield f"device has {format_size(self.device_free)} free"

    def _demand(self) -> Iterable[str]:
        if self.waiting:
            yield f"{format_count(self.waiting, 'request')} waiting for {format_size(self.waiting_bytes)}"
        if self.holders:
            yield "held by " + ", ".join(f"{quoted(tag)} {format_size(nbytes)}" for tag, nbytes in self.holders)
        if self.sites:
            yield "made at " + ", ".join(f"{printable(site)} {format_size(nbytes)}" for site, nbytes in self.sites)
        if self.remedies:
            tried = (f"{remedy} {format_count(times, 'time')}" for remedy, times in self.remedies.items())
            yield "tried " + ", ".join(tried)


_CAUSES: Final = {
    "size": "more than there may ever be",
    "limit": "too much is held below the limit",
    "fragmentation": "so much is free, but in pieces",
    "device": "the device has no more to give",
    "growth": "memory is being made for other requests, and an event loop's thread cannot wait for it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why one device has no room. Sizes are bytes."""

    device: str
    """Its name."""
    room: int = 0
    """What a pool could have there."""
    lacking: int = 0
    """What is missing."""
    reason: str | None = None
    """Why it cannot be used at all, or None where it merely has too little."""

    def describe(self) -> str:
        """Return it in a few words."""
        device = printable(self.device)
        if self.reason is not None:
            return f"{device} cannot be used: {printable(self.reason)}"
        return f"{device} has room for {format_size(self.room)} and lacks {format_size(self.lacking)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerInfo:
    """One owner (a task, or what `pool.owner(name)` named) that waits for memory. Sizes are bytes."""

    owner: str
    """Its name."""
    held: int
    """What it holds by `with`, `async with`, a lease or `pool.owner(...)`; buffers merely kept do not count."""
    waiting: int
    """What it waits for."""
    age: float
    """Seconds since its oldest waiting request was made."""
    site: str = ""
    """The line ("file:line") where it waits, where that is known."""


def owner_table(owners: Iterable[OwnerInfo]) -> str:
    """Lay the owners out as a table with a heading, one line each, for an error or a warning."""
    rows = [("owner", "holds", "waits for", "since", "at")]
    rows += [
        (
            printable(one.owner),
            format_size(one.held),
            format_size(one.waiting),
            format_duration(one.age),
            printable(one.site),
        )
        for one in owners
    ]
    if not any(row[-1] for row in rows[1:]):
        rows = [(*row[:-1], "") for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
