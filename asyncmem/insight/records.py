"""`Records`: what happened in pools, in its order, as columns and as a sequence of `Record`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind, Level
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_duration
from asyncmem.insight.groups import Group, grouped
from asyncmem.insight.names import Names, Origin, Site
from asyncmem.insight.rows import NO_NUMBER, OUTCOMES, change_of, identity_of
from asyncmem.text import encodable

_UNKNOWN: Final = Origin()
_LATEST: Final = 1e9
"""Seconds: 30 years after the beginning."""


class Record(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: What it was.
        time: Seconds since recording began.
        nbytes: Bytes asked for, freed, waited for, refused, grown or trimmed; of pressure, those live.
        address: Where on the device; 0 where that is no one place.
        stream: Number of the stream in its pool: the home stream of an allocation, the last user's of a free.
        duration: Seconds that it took: of an allocation from request to grant, 0 if it was served at once or is a free.
        lifetime: Of a free: for how many seconds the buffer was held.
        number: Which allocation it is about, in the order of its pool; -1 for none.
        level: What served an allocation; None for all else and for what was there before.
        outcome: How a wait ended, or the level of pressure; else empty.
        tag: The tag of the allocation, of a free too.
        task: The name of the task that asked.
        frames: The lines that led to the request, innermost first: as many as are recorded.
        thread: The thread that asked, or that freed.
        pool: Name of the pool.
        priority: Of a wait: the priority of its request.
    """

    kind: Kind
    time: float
    nbytes: int
    address: int
    stream: int
    duration: float
    lifetime: float
    number: int
    level: Level | None
    outcome: str
    tag: str | None
    task: str | None
    frames: tuple[Site, ...]
    thread: str | None
    pool: str
    priority: int = 0

    @property
    def site(self) -> Site | None:
        """The line that made the request, None where that is not known."""
        return self.frames[0] if self.frames else None


class Peak(NamedTuple):
    """When the most was live: `nbytes`, as they were asked for, and `time` in seconds since recording began."""

    nbytes: int
    time: float


@final
@dataclass(eq=False, repr=False)
class Records:
    """What happened, oldest first: a sequence of `Record`.

    What was live before the first of them comes before it, as `Kind.HELD`, also where the ring has lost when it was
    allocated. So bytes that are live at any time can be added up from the records alone.

    Attributes:
        rows: The same as columns, of one structured array that cannot be written to. Times are nanoseconds by `began`.
        names: What the numbers in them stand for.
        began: The time of the first by the machine's steady clock, in nanoseconds.
        wall: The same by the calendar, in seconds since 1970.
        ended: When recording ended, or when it was asked for what there is so far, by the steady clock.
        lost: Records that were dropped before these because the ring was full.
        note: What is missing besides, in sentences; empty for nothing.
        origin: The process that was recorded.
        end_known: Whether what is live at the end is known: not where a file is damaged and its end is missing.
    """

    rows: NDArray[np.void]
    names: Names
    _: KW_ONLY
    began: int
    wall: float
    ended: int
    lost: int = 0
    note: str = ""
    origin: Origin = _UNKNOWN
    end_known: bool = True

    def __post_init__(self) -> None:
        self.rows.flags.writeable = False

    def __repr__(self) -> str:
        lost = f", {self.lost:,} lost before them" if self.lost else ""
        return (
            f"<asyncmem.insight.Records: {format_count(len(self), 'record')} in {format_duration(self.duration)}{lost}>"
        )

    def _repr_mimebundle_(self, **_wanted: object) -> dict[str, str]:
        """Return what a notebook shows: the pictures, and a summary as text."""
        from asyncmem.insight.pictures import mimebundle

        return mimebundle(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Record]:
        return (self._record(row) for row in self.rows.tolist())

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> Record | Records:
        """Return one of them, or some, as a slice that goes forwards says."""
        if not isinstance(index, slice):
            return self._record(self.rows[operator.index(index)].item())
        if index.indices(len(self))[2] < 0:
            raise InvalidRequest("index", index, "a slice that goes forwards: records are in their order")
        return self.with_rows(self.rows[index])

    @property
    def duration(self) -> float:
        """Seconds for which was recorded."""
        return (self.ended - self.began) / 1e9

    @property
    def limit(self) -> int:
        """The most bytes that the pools might reserve together."""
        return sum(pool.limit for pool in self.names.pools)

    def of(self, *kinds: Kind) -> Records:
        """Return those of some kinds."""
        return self.with_rows(self.rows[np.isin(self.rows["kind"], kinds)])

    def grown(self) -> Records:
        """Return the growth that was recorded: it took some time. What was there before is `Kind.GREW` too, at once."""
        return self.with_rows(self.rows[(self.rows["kind"] == Kind.GREW) & (self.rows["span_ns"] > 0)])

    def in_pool(self, name: str) -> Records:
        """Return those of the pools of that name."""
        alike = {name, encodable(name)}  # as a file has it
        wanted = [number for number, pool in enumerate(self.names.pools) if pool.name in alike]
        return self.with_rows(self.rows[np.isin(self.rows["pool"], wanted)])

    def live(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what is live after each allocation and free: times in nanoseconds since `began`, and bytes."""
        rows = self.rows[self.rows["kind"] <= Kind.HELD]
        return rows["time_ns"] - self.began, np.cumsum(change_of(rows, Kind.FREED))

    def reserved(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what is reserved after each growth and trim: times likewise, and bytes."""
        rows = self.of(Kind.GREW, Kind.TRIMMED).rows
        return rows["time_ns"] - self.began, np.cumsum(change_of(rows, Kind.TRIMMED))

    def most_reserved(self) -> int:
        """Return the most bytes that were reserved at once."""
        return int(self.reserved()[1].max(initial=0))

    def hit_rate(self) -> float:
        """Return the share of allocations that were served at once from memory that the pool had; 1 without any."""
        levels = self.of(Kind.ALLOCATED).rows["level"]
        return float(np.mean(~np.isin(levels, (Level.MISS, Level.FOREIGN)))) if len(levels) else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of all of these together."""
        return int(self.rows["nbytes"].sum())

    @property
    def seconds(self) -> float:
        """Seconds that all of these took together."""
        return float(self.rows["span_ns"].sum(dtype=float)) / 1e9

    def served(self) -> dict[str, int]:
        """Return how many allocations each level served, by the names of `Level` in small letters."""
        counts = np.bincount(self.of(Kind.ALLOCATED).rows["level"], minlength=len(Level)).tolist()
        return {level.name.lower(): counts[level] for level in Level}

    def peak(self) -> Peak:
        """Return when the most was live; at the beginning where nothing ever was."""
        times, live = self.live()
        if not len(live):
            return Peak(0, 0.0)
        at = int(np.argmax(live))
        return Peak(int(live[at]), int(times[at]) / 1e9)

    def live_at(self, time: float | None = None) -> Records:
        """Return the allocations that are live at a time, in seconds since the beginning; at the end without one."""
        return self.with_rows(self.rows[self._is_live(time)])

    def _is_live(self, time: float | None = None) -> NDArray[np.bool_]:
        """Return for each row whether it is an allocation that `live_at` returns."""
        kinds = self.rows["kind"]
        if time is not None and not abs(time) < _LATEST:
            raise InvalidRequest("time", time, "seconds since the beginning")
        past = np.True_ if time is None else self.rows["time_ns"] <= self.began + round(time * 1e9)
        live: NDArray[np.bool_] = np.isin(kinds, (Kind.ALLOCATED, Kind.HELD)) & past
        ended = self.rows[(kinds == Kind.FREED) & past]
        live[live] = ~np.isin(identity_of(self.rows[live]), identity_of(ended))
        return live

    def leaked(self) -> Records:
        """Return what was allocated while it was recorded and never freed; nothing where the end is not known."""
        return self.live_at().of(Kind.ALLOCATED) if self.end_known else self.with_rows(self.rows[:0])

    def by(self, column: str) -> tuple[Group, ...]:
        """Add the records up by what they have in common, largest first.

        Where there are allocations among them, these alone count: a free is the other end of the same buffer.

        Args:
            column: "tag", "site", "task", "thread", "pool", or "nbytes" for the size.
        """
        born = np.isin(self.rows["kind"], (Kind.ALLOCATED, Kind.HELD))
        return grouped(self.rows[born] if born.any() else self.rows, self.names, column)

    def with_rows(self, rows: NDArray[np.void]) -> Records:
        """Return records of the same recording with other rows."""
        return replace(self, rows=rows)

    def _record(self, row: tuple[int, ...]) -> Record:
        time, nbytes, address, span, number, site, task, tag, thread, stream, kind, level, pool = row
        of, names = Kind(kind), self.names
        freed = of in {Kind.FREED, Kind.UNDONE}
        return Record(
            kind=of, time=(time - self.began) / 1e9, nbytes=nbytes,
            address=address if of is not Kind.WAITED else 0, stream=stream,
            duration=0.0 if freed else span / 1e9, lifetime=span / 1e9 if freed else 0.0,
            number=number if number != NO_NUMBER else -1, level=Level(level) if of is Kind.ALLOCATED else None,
            outcome=OUTCOMES[of][level] if of in OUTCOMES else "", tag=names.tag(tag), task=names.task(task),
            frames=names.frames(site), thread=names.thread(thread), pool=names.pool(pool),
            priority=address >> 1 ^ -(address & 1) if of is Kind.WAITED else 0,
        )  # fmt: skip
