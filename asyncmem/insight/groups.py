"""Records grouped by a column: tag, line, task, thread, pool or size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import InvalidRequest
from asyncmem.insight.names import Names

T = TypeVar("T")

COLUMNS: Final = ("tag", "site", "task", "thread", "pool", "nbytes")


class Group(NamedTuple):
    """Allocations that have something in common.

    Attributes:
        name: A tag, a line, a task, a thread, a pool or a size; "?" where it is not known.
        nbytes: Their bytes together.
        allocations: How many they are.
    """

    name: str
    nbytes: int
    allocations: int


class Grouped(Generic[T]):
    """Rows grouped by what the numbers in a column stand for, and sums over each group.

    Attributes:
        keys: What the rows of each group have in common. Different numbers may stand for the same.
        places: For each row the number of its group.
    """

    def __init__(self, numbers: NDArray[Any], key_of: Callable[[int], T]) -> None:
        values, places = np.unique(numbers, return_inverse=True)
        found: dict[T, int] = {}
        groups = [found.setdefault(key_of(value), len(found)) for value in values.tolist()]
        self.keys = list(found)
        self.places = np.array(groups, np.intp)[places]

    def count(self, among: NDArray[np.bool_] | None = None) -> list[int]:
        """Count the rows of each group, or those that are marked."""
        places = self.places if among is None else self.places[among]
        counts: list[int] = np.bincount(places, minlength=len(self.keys)).tolist()
        return counts

    def sum(self, values: NDArray[Any]) -> list[int]:
        """Add up a whole number of each row."""
        sums: list[int] = np.bincount(self.places, values, len(self.keys)).astype(np.int64).tolist()
        return sums

    def most(self, values: NDArray[Any]) -> list[int]:
        """Return the largest value in each group, at least 0."""
        found = np.zeros(len(self.keys), np.int64)
        np.maximum.at(found, self.places, values.astype(np.int64))
        largest: list[int] = found.tolist()
        return largest

    def peaks(self, changes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the most that each group's changes add up to on the way through its rows."""
        if not self.keys:
            return np.empty(0, np.int64)
        order = np.argsort(self.places, kind="stable")
        starts = self.places[order].searchsorted(range(len(self.keys)))
        sums = np.cumsum(changes[order])
        before = np.append(np.int64(0), sums)[starts]
        found: NDArray[np.int64] = np.maximum.reduceat(sums, starts) - before
        return found

    def names(self, numbers: NDArray[Any], name_of: Callable[[int], str | None]) -> list[tuple[str, ...]]:
        """Return the names that the rows of each group have in another column, sorted."""
        found: list[set[str]] = [set() for _ in self.keys]
        for place, number in set(zip(self.places.tolist(), numbers.tolist(), strict=True)):
            if name := name_of(number):
                found[place].add(name)
        return [tuple(sorted(names)) for names in found]


def group_by(rows: NDArray[np.void], names: Names, column: str) -> Grouped[str]:
    """Group rows by the name of what they have in a column.

    Raises:
        InvalidRequest: There is no such column to group by.
    """
    if column not in COLUMNS:
        raise InvalidRequest("column", column, f"one of {', '.join(COLUMNS)}")
    name_of = str if column == "nbytes" else getattr(names, column)
    return Grouped(rows[column], lambda number: str(name_of(number) or "?"))


def grouped(rows: NDArray[np.void], names: Names, column: str) -> tuple[Group, ...]:
    """Add up rows that have the same in a column, largest first.

    Raises:
        InvalidRequest: There is no such column to group by.
    """
    by = group_by(rows, names, column)
    found = map(Group, by.keys, by.sum(rows["nbytes"]), by.count())
    return tuple(sorted(found, key=lambda one: (-one.nbytes, one.name)))


def classes(values: NDArray[Any], borders: NDArray[np.int64]) -> list[tuple[float, int, int]]:
    """Return how values spread over classes: the border that each lies below, how many there are, and their sum."""
    at = np.searchsorted(borders, values, side="right")
    counts, sums = np.bincount(at).tolist(), np.bincount(at, values).tolist()
    above = [*borders.tolist(), math.inf]
    return [(above[number], counts[number], int(sums[number])) for number in np.flatnonzero(counts).tolist()]


def parts(rows: NDArray[np.void], column: str) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Return each value of a column, smallest first, with the rows that have it, in their order."""
    rows = rows[np.argsort(rows[column], kind="stable")]
    values, starts = np.unique(rows[column], return_index=True)
    yield from zip(values.tolist(), np.split(rows, starts[1:]), strict=False)  # no values: one part, of no rows
