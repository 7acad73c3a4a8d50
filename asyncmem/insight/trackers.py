"""Recordings that answer questions about a block: `Profile`, `MemoryTracker`, `AllocationTracker`, `Watch`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TextIO, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind, log_time_ns
from asyncmem.errors import LeakWarning
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.insight.groups import Group, grouped
from asyncmem.insight.names import Names, Site
from asyncmem.insight.recording import KEEP, Recording, Source, records_of
from asyncmem.insight.records import Record
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.rows import ROW, identity_of
from asyncmem.pool.alarm import alarm
from asyncmem.pool.snapshot import counters, since
from asyncmem.stats import PoolStats
from asyncmem.text import printable, quoted

if TYPE_CHECKING:
    from asyncmem.pool import AsyncMemoryPool

_SHOWN: Final = 10
_KEEP: Final = 1 << 21
"""Records that are kept to know the peak of a test."""


@final
class MemoryTracker(Recording):
    """Records memory while entered by ``with`` or ``async with``, and prints afterwards where it went: `print_summary`.

    Args:
        pools: Which; all of the process for none, those that open later as well.
        frames: How many lines of the call are kept of each request.
        keep: So many of the newest records are kept for each pool, 56 bytes each.
    """

    def __init__(self, *pools: AsyncMemoryPool, frames: int = 1, keep: int = KEEP) -> None:
        super().__init__(*pools, frames=frames, keep=keep)

    def summary(self) -> str:
        """Return what has happened as text for one screen."""
        return summarize(self.records())

    def print_summary(self, file: TextIO | None = None) -> None:
        """Print `summary` to a file, to standard output without one."""
        print(self.summary(), file=file or sys.stdout)


def profile_memory(pool: AsyncMemoryPool, *, frames: int = 1, keep: int = KEEP) -> Profile:
    """Look at what a block does with a pool's memory, entered by ``with`` or ``async with``.

    Profiles may be nested, and used beside recordings. While one is entered, an allocation and a free cost some tenths
    of a microsecond more.

    Args:
        pool: What to look at; the block opens it if it is not open yet.
        frames: How many lines of the call are kept of each request.
        keep: So many of the newest records are kept, 56 bytes each.
    """
    return Profile(pool, frames=frames, keep=keep)


@final
class Profile(Recording):
    """What a block has done with a pool's memory, or is doing. Made by `profile_memory`; any thread may read it."""

    def __init__(self, pool: AsyncMemoryPool, *, frames: int, keep: int) -> None:
        super().__init__(pool, frames=frames, keep=keep)
        self._pool = pool
        self._before: PoolStats | None = None
        self._after: PoolStats | None = None

    def __enter__(self) -> Self:
        """Begin, as a `Recording` does."""
        if self._before is None:
            self._before = self._pool.stats()  # an interrupt here finds no recording that would go on
        return super().__enter__()

    def _end(self, error: object) -> None:
        try:
            self._after = self._pool.stats()
        finally:
            super()._end(error)

    @property
    def stats(self) -> PoolStats:
        """The pool's figures at the end of the block, or now; counters count from its beginning.

        Raises:
            InvalidRequest: It has not begun.
        """
        self._need_begun()
        assert self._before is not None
        return since(self._after or self._pool.stats(), counters(self._before))

    def peak_memory(self) -> int:
        """Return the most bytes that were live at once in the block, as they were asked for.

        Where more has happened than was kept, what came before is not looked at.
        """
        return self.records().peak().nbytes

    def memory_summary(self) -> str:
        """Return what has happened as text for one screen: the peak and whose it was, hits, growth and waits."""
        return summarize(self.records())


class LiveBuffer(NamedTuple):
    """A buffer that has not been freed.

    Attributes:
        id: Its number: the same for as long as it lives, and no other's while its pool is tracked.
        nbytes: Bytes as they were asked for.
        age: Seconds since it was allocated, or since tracking began if it is older.
        tag: What it was allocated under.
        task: The task that allocated it.
        thread: The thread that did.
        frames: The lines that led to the allocation, innermost first; empty for what is older than tracking.
        address: Where it is on the device.
    """

    id: int
    nbytes: int
    age: float
    tag: str | None
    task: str | None
    thread: str | None
    frames: tuple[Site, ...]
    address: int

    @property
    def site(self) -> Site | None:
        """The line that asked for it, None where that is not known."""
        return self.frames[0] if self.frames else None

    def __str__(self) -> str:
        """Return one line about it."""
        tag = f" tagged {quoted(self.tag)}" if self.tag else ""
        task = f" in task {quoted(self.task)}" if self.task else ""
        place = f", made at {self.site}" if self.site else ""
        return f"#{self.id}: {format_size(self.nbytes)}{tag}{task}, {format_duration(self.age)} old{place}"


@final
class AllocationTracker(Recording):
    """Knows all that is live in a pool while entered by ``with`` or ``async with``: ``find_old(60)``.

    What the block allocated and has not freed by its end is in `leaks`, and named in a `LeakWarning`. A lease is one
    allocation of its whole range until it ends. What is live already when the block begins is known by its size alone,
    unless the pool is recorded. Any thread may ask.

    Args:
        pool: What to track; the block opens it if it is not open yet.
        frames: How many lines of the call are kept of each allocation.
        warn: Whether to warn of leaks at the end.
    """

    def __init__(self, pool: AsyncMemoryPool, *, frames: int = 1, warn: bool = True) -> None:
        super().__init__(pool, frames=frames, keep=1)  # what is live is known without records
        self._pool = pool
        self._warn = warn

    def _end(self, error: object) -> None:
        super()._end(error)
        if self._warn and self._witness is not None and (leaks := self.leaks):
            site = leaks[0].site
            alarm(self.report(), LeakWarning, None if site is None else f"{site.file}:{site.line}")

    def live(self) -> tuple[LiveBuffer, ...]:
        """Return what is live, oldest first; after the end, what was live then."""
        return self._spelled(self._held())

    @property
    def count(self) -> int:
        """How many buffers are live."""
        return len(self._held())

    @property
    def nbytes(self) -> int:
        """The bytes that they hold, as they were asked for."""
        return int(self._held()["nbytes"].sum())

    def find_old(self, seconds: float) -> tuple[LiveBuffer, ...]:
        """Return what has been live for at least so long, oldest first."""
        return tuple(one for one in self.live() if one.age >= seconds)

    def by(self, column: str) -> tuple[Group, ...]:
        """Add up what is live by what it has in common, largest first.

        Args:
            column: "tag", "site", "task", "thread", or "nbytes" for the size.
        """
        return grouped(self._held(), self._names(), column)

    @property
    def leaks(self) -> tuple[LiveBuffer, ...]:
        """What the block has allocated and not freed by now, or by its end, largest first."""
        self._need_begun()
        return tuple(sorted(self._spelled(self._recorded[0].kept_by_block()), key=lambda one: (-one.nbytes, one.id)))

    def report(self) -> str:
        """Return `leaks` as text: what there is in all, and a line for each of the largest."""
        leaks, name = self.leaks, quoted(self._pool.name)
        if not leaks:
            return f"pool {name}: nothing that was allocated is still held"
        nbytes = format_size(sum(one.nbytes for one in leaks))
        return _list_below(
            f"pool {name}: {format_count(len(leaks), 'buffer')} of {nbytes} still held", leaks, "and {:,} more"
        )

    def _held(self) -> NDArray[np.void]:
        self._need_begun()
        return self._recorded[0].held()

    def _names(self) -> Names:
        return Names.of(self._need_begun(), [one.name for one in self._recorded])

    def _spelled(self, rows: NDArray[np.void]) -> tuple[LiveBuffer, ...]:
        now, names = self._ended or log_time_ns(), self._names()
        return tuple(
            LiveBuffer(
                number, nbytes, max(now - time, 0) / 1e9, names.tag(tag), names.task(task), names.thread(thread),
                names.frames(site), address,
            )
            for time, nbytes, address, _, number, site, task, tag, thread, *_ in rows.tolist()
        )  # fmt: skip


@final
class Watch(Recording):
    """Watches what is allocated while it is entered by ``with``. What was there before does not count.

    Args:
        limit: The most bytes that may be live at once; None for any.
        leaks: Whether all must be freed by the end.
    """

    def __init__(self, *, limit: int | None, leaks: bool) -> None:
        super().__init__(keep=1 if limit is None else _KEEP)  # what is live at the end is known without records
        self._limit = limit
        self._leaks = leaks
        self._collects = False
        self._at_the_end = np.empty(0, ROW)

    def __enter__(self) -> Self:
        """Begin; where leaks are looked for, the garbage collector rests until the end, so that it hides none."""
        self._collects = self._leaks and gc.isenabled()
        if self._collects:
            gc.collect()
            gc.disable()
        return super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End; what is live only until the garbage collector runs is known after it."""
        if self._leaks:
            self._at_the_end = self._live()
            if self._collects:
                gc.enable()
            gc.collect()
        super().__exit__(kind, error, trace)

    def complaint(self) -> str:
        """Return what is wrong, with the lines that did it; empty for nothing."""
        found = [self._exceeded(self._limit)] if self._limit is not None else []
        if self._leaks:
            kept, last = self._live(), self._at_the_end
            cycles = last[~np.isin(identity_of(last), identity_of(kept))]
            found.append(self._leaked(kept, "still live after the test that allocated them"))
            found.append(self._leaked(cycles, "in reference cycles, live until the garbage collector runs"))
        return "\n".join(filter(None, found))

    def _exceeded(self, limit: int) -> str:
        records = self.records()
        own = identity_of(records.of(Kind.ALLOCATED).rows)
        mine = records.with_rows(records.rows[np.isin(identity_of(records.rows), own)])
        peak = mine.peak()
        if peak.nbytes > limit:
            head = f"{format_size(peak.nbytes)} were live at once where {format_size(limit)} are allowed"
            return self._sites("asyncmem_limit", head, mine.live_at(peak.time).rows)
        if records.lost:
            return f"asyncmem_limit: the first {records.lost:,} records are not known, because only {_KEEP:,} are kept"
        return ""

    def _leaked(self, rows: NDArray[np.void], how: str) -> str:
        count = f"{format_count(len(rows), 'buffer')} of {format_size(int(rows['nbytes'].sum()))}"
        return self._sites("asyncmem_no_leaks", f"{count} {how}", rows) if len(rows) else ""

    def _live(self) -> NDArray[np.void]:
        return np.concatenate([np.empty(0, ROW), *(one.kept_by_block() for one in self._recorded)])

    def _sites(self, mark: str, head: str, rows: NDArray[np.void]) -> str:
        sites = grouped(rows, self.records().names, "site")
        lines = [
            f"{format_size(one.nbytes)} in {format_count(one.allocations, 'buffer')} at {printable(one.name)}"
            for one in sites
        ]
        return _list_below(f"{mark}: {head}:", lines, "and at {:,} more lines")


def _list_below(head: str, lines: Sequence[object], more: str) -> str:
    """Return the first lines below a heading, and how many more there are."""
    rest = [more.format(len(lines) - _SHOWN)] if len(lines) > _SHOWN else []
    return "\n".join([head, *(f"  {line}" for line in [*lines[:_SHOWN], *rest])])


def dump_allocation_trace(source: Source | None = None, *, last: int | None = 100, file: TextIO | None = None) -> None:
    """Print records, oldest first, a line each: when, what, how much, by which tag, task and line.

    Args:
        source: A recording, a profile, a tracker or records; what `set_memory_debug` records without one.
        last: At most so many, the newest; None for all.
        file: Where to; standard output without one.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    records = records_of(source)
    skipped = max(len(records) - last, 0) if last is not None else 0
    out = file or sys.stdout
    if skipped:
        out.write(f"{skipped:,} earlier records are left out\n")
    for record in islice(records, skipped, None):
        out.write(f"{line_of(record)}\n")


def line_of(record: Record) -> str:
    """Return a record as one line."""
    what = record.kind.name.lower().replace("_", " ")
    parts = [f"{record.time * 1e3:12.3f} ms", f"{what:<13}", f"{format_size(record.nbytes):>11}"]
    if record.number >= 0:
        parts.append(f"#{record.number}")
    parts += [f"{name} {printable(str(value))}" for name, value in _details(record)]
    return "  ".join(parts)


def _details(record: Record) -> list[tuple[str, object]]:
    details: list[tuple[str, object]] = [("pool", record.pool)]
    if record.address:
        details.append(("at", f"{record.address:#x}"))
    if record.level is not None:
        details.append(("by", record.level.name.lower()))
    if record.kind is Kind.FREED:
        details.append(("after", format_duration(record.lifetime)))
    elif record.duration:
        details.append(("took", format_duration(record.duration)))
    named = {"": record.outcome, "tag": record.tag, "task": record.task, "thread": record.thread, "in": record.site}
    return details + [(name, value) for name, value in named.items() if value]
