"""`LifetimeAnalyzer`: when buffers are in use, which could share memory, and where each would lie."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.arrays import Array, ArrayBatch
from asyncmem.core import GRANULE, Buffer, Kind
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_size
from asyncmem.insight.plans import packed
from asyncmem.insight.recording import Source, records_of
from asyncmem.insight.records import Records
from asyncmem.insight.rows import find, identity_of
from asyncmem.pool.placement import PlannedPlace, ReusePlan, most_live
from asyncmem.readers import factor, positive_size
from asyncmem.text import printable, quoted
from asyncmem.units import parse_size

_TOLERANCE: Final = 0.01
_WASTEFUL: Final = 1e3
"""More tolerance than any plan makes use of."""
_ALLOCATE, _FREE = int(Kind.ALLOCATED), int(Kind.FREED)  # a trace calls them so, too
_SHOWN: Final = 5


class TraceLike(Protocol):
    """What is read of a `asyncmem.replay.Trace`: its columns, one row an event."""

    @property
    def op(self) -> NDArray[np.uint8]:
        """What happened: 0 an allocation, 1 a free."""

    @property
    def id(self) -> NDArray[np.int32]:
        """Which allocation it is about."""

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """How many bytes."""

    @property
    def time_us(self) -> NDArray[np.int64]:
        """When, in microseconds."""


class Lifetime(NamedTuple):
    """A buffer, and when it is in use.

    Attributes:
        key: What it is called: a name, a tag, a line of the program; None for nothing.
        nbytes: Its size.
        start: When it is allocated or first used, in steps or in allocations and frees.
        end: When it is free again: behind its last use.
    """

    key: str | None
    nbytes: int
    start: int
    end: int


class SharedBuffer(NamedTuple):
    """Buffers of which no two are live at the same time, so that one could serve as all of them.

    Attributes:
        nbytes: The size of that one: the largest's.
        buffers: How many they are.
        saved: Bytes that the others need no more.
        keys: What they are called, and how many of each, the most first; those without a key are left out.
    """

    nbytes: int
    buffers: int
    saved: int
    keys: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """Return one line about it."""
        names = ", ".join(
            f"{printable(key)} ({count:,})" if count > 1 else printable(key) for key, count in self.keys[:_SHOWN]
        )
        more = f" and {len(self.keys) - _SHOWN:,} other names" if len(self.keys) > _SHOWN else ""
        who = f": {names}{more}" if names else ""
        return f"one of {format_size(self.nbytes)} for {format_count(self.buffers, 'buffer')}{who}"


@final
@dataclass(frozen=True, kw_only=True)
class ReuseSuggestions:
    """What could be saved if buffers shared memory, and which could.

    Attributes:
        buffers: How many there are.
        total_bytes: Bytes if each has memory of its own.
        most_live: The most bytes that are live at once: what no sharing can go below.
        shared: Buffers that could be one, what saves the most first; those that cannot share are left out.
    """

    buffers: int
    total_bytes: int
    most_live: int
    shared: tuple[SharedBuffer, ...]

    @property
    def reusable_bytes(self) -> int:
        """Bytes that `shared` saves. A plan saves more, because it shares parts of buffers too."""
        return sum(one.saved for one in self.shared)

    def __str__(self) -> str:
        """Return it as text for one screen."""
        heading = (
            f"{format_count(self.buffers, 'buffer')} of {format_size(self.total_bytes)}, of which "
            f"{format_size(self.reusable_bytes)} can be reused; {format_size(self.most_live)} are live at most"
        )
        lines = [heading]
        lines += [f"  {format_size(one.saved):>11}  {one}" for one in self.shared[: 2 * _SHOWN]]
        if len(self.shared) > 2 * _SHOWN:
            lines.append(f"  and {len(self.shared) - 2 * _SHOWN:,} more")
        return "\n".join(lines)


@dataclass
class _Use:
    """A buffer, and the first and the last step that used it so far."""

    key: str | None
    first: int
    last: int
    nbytes: int = 0


@final
class LifetimeAnalyzer:
    """Learns when buffers are in use, and says which could share memory, and how little would do for all.

    Either the program tells, step by step, what it uses (`record_usage`), or a recording does (`from_records`,
    `from_trace`). A step is whatever the program counts: a layer, an operator. What is used in one step is all live at
    once, and a buffer is live from its first step to its last.

    The order of streams is not looked at: where a plan is applied, a stream that takes memory over waits for the one
    that used it last.
    """

    def __init__(self) -> None:
        self._named: dict[str, _Use] = {}
        self._alive: dict[int, tuple[weakref.ref[object], _Use]] = {}
        self._nameless: list[_Use] = []
        self._given: tuple[Lifetime, ...] = ()

    def __repr__(self) -> str:
        found = self.lifetimes()
        nbytes = format_size(sum(one.nbytes for one in found))
        return f"<asyncmem.insight.LifetimeAnalyzer: {format_count(len(found), 'buffer')} of {nbytes}>"

    @classmethod
    def from_records(cls, source: Source | None = None, *, since: float = 0.0, until: float | None = None) -> Self:
        """Take the lifetimes of what was allocated while a pool was recorded; keys are tags, else lines.

        What was live before is left out, and what is never freed is live to the end.

        Args:
            source: A recording, a profile, a tracker or records, of one pool; what `set_memory_debug` records without
                one.
            since: Take what was allocated from here on, in seconds since recording began,
            until: and before this. One step of a program, say, whose plan is to be applied step by step.

        Raises:
            InvalidRequest: There is no source, or it has records of several pools.
        """
        records = records_of(source)
        rows = records.rows[records.rows["kind"] <= Kind.HELD]
        if len(np.unique(rows["pool"])) > 1:
            names = ", ".join(quoted(pool.name) for pool in records.names.pools)
            raise InvalidRequest("source", records, f"records of one pool: records.in_pool(...) of {names}")
        times = (rows["time_ns"] - records.began) / 1e9
        found = cls()
        found._take(rows["kind"], identity_of(rows), rows["nbytes"], _window(times, since, until), _keys(records, rows))
        return found

    @classmethod
    def from_trace(cls, trace: TraceLike, *, since: float = 0.0, until: float | None = None) -> Self:
        """Take the lifetimes of what a recorded program allocated; see `asyncmem.replay.Trace`. There are no keys.

        Args:
            trace: The recording.
            since: Take what was allocated from here on, in seconds since recording began,
            until: and before this; what is still live then is live to the end.
        """
        kept = trace.op <= _FREE
        window = _window(trace.time_us[kept] / 1e6, since, until)
        found = cls()
        found._take(trace.op[kept], trace.id[kept], trace.nbytes[kept], window, lambda _: None)
        return found

    def _take(
        self, op: NDArray[Any], numbers: NDArray[Any], nbytes: NDArray[Any], window: slice,
        key_of: Callable[[int], str | None],
    ) -> None:  # fmt: skip
        """Take what is allocated in a window of rows, until it is freed or the window ends."""
        starts, frees = np.flatnonzero(op[window] == _ALLOCATE) + window.start, np.flatnonzero(op == _FREE)
        at, freed = find(numbers[starts], numbers[frees])
        ends = np.full(len(starts), window.stop)
        ends[freed] = np.minimum(frees[at[freed]], window.stop)
        rows = zip(starts.tolist(), nbytes[starts].tolist(), ends.tolist(), strict=True)
        self._given = tuple(Lifetime(key_of(start), size, start, end) for start, size, end in rows if size)

    def record_usage(self, step: int, buffers: Iterable[object] | Mapping[str, object]) -> None:
        """Note which buffers a step uses.

        None of them is kept alive. One that is used again in a later step must be the same object, or have its name.

        Args:
            step: Its number; steps may come in any order.
            buffers: Buffers and arrays of ours, or other objects with an `nbytes`; or such by their names, where a
                mere size does as well. The names are the keys by which a plan's memory can be asked for; without one
                that is the tag.

        Raises:
            InvalidRequest: The step is no number, or one of the buffers has no size, or cannot be told apart later.
        """
        step = _whole(step)
        named = buffers.items() if isinstance(buffers, Mapping) else ((None, one) for one in buffers)
        for name, one in named:
            new = _Use(name, step, step)
            use = self._use_of(one, new) if name is None else self._named.setdefault(name, new)
            use.first, use.last, use.nbytes = min(use.first, step), max(use.last, step), max(use.nbytes, _size(one))

    def _use_of(self, one: object, new: _Use) -> _Use:
        whose = one.buffer if isinstance(one, Array | ArrayBatch) else one
        known = self._alive.get(id(whose))
        if known is not None and known[0]() is whose:
            return known[1]
        try:
            reference = weakref.ref(whose)
        except TypeError:
            expected = 'buffers or arrays, or sizes by their names: {"hidden": "64 MiB"}'
            raise InvalidRequest("buffers", one, expected) from None
        new.key = whose.tag if isinstance(whose, Buffer) else None
        self._nameless.append(new)
        self._alive[id(whose)] = reference, new
        return new

    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Return what is known, in the order of allocation; buffers without bytes are left out."""
        used = [*self._named.values(), *self._nameless]
        found = (Lifetime(use.key, use.nbytes, use.first, use.last + 1) for use in used if use.nbytes)
        return tuple(sorted((*self._given, *found), key=lambda one: one.start))

    def get_optimization_suggestions(self) -> ReuseSuggestions:
        """Return what could be saved if buffers that are never live together were one, and which those are."""
        found = self.lifetimes()
        starts, ends, sizes = _columns(found)
        return ReuseSuggestions(
            buffers=len(found),
            total_bytes=int(sizes.sum()),
            most_live=most_live(starts, ends, sizes),
            shared=shared_buffers(found),
        )

    def compute_reuse_plan(self, *, align: int = GRANULE, tolerance: float = _TOLERANCE) -> ReusePlan:
        """Return a place for each buffer, in a range little longer than what is live at most.

        Of thousands of buffers it takes a second, of a hundred thousand a minute or two; blocks meanwhile.

        Args:
            align: Each place begins at a multiple of so many bytes.
            tolerance: No more is tried once the range is longer than what is live at most by no more than this share.
        """
        align, tolerance = positive_size(align, "align"), min(factor(tolerance, "tolerance"), _WASTEFUL)
        found = self.lifetimes()
        starts, ends, sizes = _columns(found)
        offsets = packed(starts, ends, -(-sizes // align) * align, tolerance=tolerance)
        places = zip(found, offsets.tolist(), strict=True)
        return ReusePlan(tuple(PlannedPlace(*one, offset=offset) for one, offset in places), align)


def _whole(step: object) -> int:
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    raise InvalidRequest("step", step, "a whole number")


def _size(one: object) -> int:
    if isinstance(one, int | str):
        return parse_size(one)
    if isinstance(one, Array | ArrayBatch):
        return one.buffer.nbytes
    nbytes = getattr(one, "nbytes", None)
    if not isinstance(nbytes, int):
        raise InvalidRequest("buffers", one, "something that has an nbytes, or a size")
    return nbytes


def _columns(found: tuple[Lifetime, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    rows = np.array([(one.start, one.end, one.nbytes) for one in found], np.int64).reshape(-1, 3)
    starts, ends, sizes = np.ascontiguousarray(rows.T)
    return starts, ends, sizes


def _window(times: NDArray[np.float64], since: float, until: float | None) -> slice:
    stop = len(times) if until is None else int(times.searchsorted(until))
    return slice(int(times.searchsorted(since)), stop)


def _keys(records: Records, rows: NDArray[np.void]) -> Callable[[int], str | None]:
    """Return how a row is called: by its tag, else by its line."""
    names, tags, sites = records.names, rows["tag"].tolist(), rows["site"].tolist()

    @cache
    def spelled(tag: int, site: int) -> str | None:
        line = names.site(site)
        return names.tag(tag) or (None if line is None else str(line))

    return lambda row: spelled(tags[row], sites[row])


def shared_buffers(lifetimes: Iterable[Lifetime]) -> tuple[SharedBuffer, ...]:
    """Return who could be one buffer: each takes over the smallest free one that is large enough, else the largest."""
    members: list[list[Lifetime]] = []
    free: list[tuple[int, int]] = []  # size and number of unused buffers, smallest first
    busy: list[tuple[int, int, int]] = []  # when it is free again, its size and its number
    for one in sorted(lifetimes, key=lambda one: (one.start, -one.nbytes)):
        while busy and busy[0][0] <= one.start:
            insort(free, heappop(busy)[1:])
        if free:
            size, number = free.pop(min(bisect_left(free, (one.nbytes, 0)), len(free) - 1))
        else:
            size, number = 0, len(members)
            members.append([])
        members[number].append(one)
        heappush(busy, (one.end, max(size, one.nbytes), number))
    found = (_together(group) for group in members if len(group) > 1)
    return tuple(sorted(found, key=lambda one: (-one.saved, -one.nbytes)))


def _together(group: Sequence[Lifetime]) -> SharedBuffer:
    nbytes = max(one.nbytes for one in group)
    keys = Counter(one.key for one in group if one.key is not None)
    return SharedBuffer(nbytes, len(group), sum(one.nbytes for one in group) - nbytes, tuple(keys.most_common()))
