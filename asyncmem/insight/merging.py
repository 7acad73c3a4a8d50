"""`merge`: the records of several processes as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import InvalidRequest
from asyncmem.insight.names import Names, Origin, PoolName
from asyncmem.insight.records import Records
from asyncmem.insight.rows import ROW

T = TypeVar("T")

_COLUMNS: Final = {"site": "calls", "task": "names of tasks", "tag": "tags", "thread": "threads", "pool": "pools"}


def merge(*records: Records) -> Records:
    """Return the records of several processes as one, with the pools of all of them.

    Times are put together by the calendars of the machines: those of one host fit to a millisecond, those of several as
    well as their clocks do. A pool whose name another process has, too, is named after its process.

    Args:
        *records: What `read` or `Recording.records` returned, in any order.

    Raises:
        InvalidRequest: There are none, or together they have more tags, threads or pools than a record can name.
    """
    for one in records:
        if not isinstance(one, Records):
            raise InvalidRequest("records", one, "Records: what read(path) or recording.records() returns")
    if not records:
        raise InvalidRequest("records", records, "one recording or more")
    first, *others = sorted(records, key=lambda one: one.wall or np.inf)
    if not others:
        return first
    names = Names(places=[None], sites=[(0, 0)], tasks=[""], tags=[""], threads=[None], pools=[])
    known = _Known(names)
    counts = Counter(pool.name for one in records for pool in one.names.pools)
    parts, ends = [], []
    for one in (first, *others):
        # Steady clocks begin anew on each machine.
        later = round((one.wall - first.wall) * 1e9) if one.wall else 0
        shift = first.began - one.began + later
        rows = one.rows.copy()
        rows["time_ns"] += shift
        for column, numbers in known.add(one, counts).items():
            if len(numbers) and int(numbers.max()) > np.iinfo(ROW[column]).max:
                raise InvalidRequest("records", len(records), f"fewer {_COLUMNS[column]}, all together")
            rows[column] = numbers[rows[column]]
        parts.append(rows)
        ends.append(one.ended + shift)
    together = np.concatenate(parts)
    return Records(
        together[np.argsort(together["time_ns"], kind="stable")], names,
        began=first.began, wall=first.wall, ended=max(ends), lost=sum(one.lost for one in records),
        note=" ".join(dict.fromkeys(one.note for one in records if one.note)),
        origin=_origin(records), end_known=all(one.end_known for one in records),
    )  # fmt: skip


class _Known:
    """The names of all processes, and their numbers."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._places: dict[object, int] = {None: 0}
        self._sites: dict[tuple[int, int], int] = {(0, 0): 0}
        self._tasks: dict[str, int] = {"": 0}
        self._tags: dict[str, int] = {"": 0}

    def add(self, records: Records, counts: Counter[str]) -> dict[str, NDArray[Any]]:
        """Add the names of a process; return for each column what its numbers are from now on."""
        mine, theirs = self._names, records.names
        places = _added(mine.places, self._places, theirs.places)
        sites: list[int] = []
        for place, caller in theirs.sites:
            sites += _added(mine.sites, self._sites, [(places[place], sites[caller] if sites else 0)])
        threads = max(len(theirs.threads), int(records.rows["thread"].max(initial=0)) + 1)
        first_thread, first_pool = len(mine.threads) - 1, len(mine.pools)
        mine.threads.extend([*theirs.threads, *[None] * (threads - len(theirs.threads))][1:])
        mine.pools.extend(_named(pool, records.origin, counts) for pool in theirs.pools)
        return {
            "site": np.array(sites),
            "task": np.array(_added(mine.tasks, self._tasks, theirs.tasks)),
            "tag": np.array(_added(mine.tags, self._tags, theirs.tags)),
            "thread": np.array([0, *range(first_thread + 1, first_thread + threads)]),
            "pool": np.arange(first_pool, first_pool + len(theirs.pools)),
        }


def _added(mine: list[T], known: dict[Any, int], theirs: Iterable[T]) -> list[int]:
    """Add to the names that there are those that are new; return the numbers of all of them."""
    numbers = []
    for one in theirs:
        number = known.setdefault(one, len(mine))
        if number == len(mine):
            mine.append(one)
        numbers.append(number)
    return numbers


def _named(pool: PoolName, origin: Origin, counts: Counter[str]) -> PoolName:
    if counts[pool.name] == 1:
        return pool
    return pool._replace(name=f"{pool.name} ({origin.host or '?'}:{origin.process})")


def _origin(records: Iterable[Records]) -> Origin:
    """Return what the processes have in common; of what differs, all of it, as far as it is text."""
    found = list(dict.fromkeys(one.origin for one in records))
    hosts, pythons, versions = (
        ", ".join(dict.fromkeys(filter(None, texts)))
        for texts in zip(*((one.host, one.python, one.asyncmem) for one in found), strict=True)
    )
    programs = dict.fromkeys(one.program for one in found)
    program = next(iter(programs)) if len(programs) == 1 else ()
    return Origin(program, found[0].process if len(found) == 1 else 0, hosts, pythons, versions)
