"""Records grouped by a column: tag, line, task, thread, pool or size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.names import Names


COLUMNS: Final = ("tag", "site", "task", "thread", "pool", "nbytes")


class Group(NamedTuple):
    """Allocations that have something in common."""

    name: str
    """What: a tag, a line, a task, a thread, a pool or a size; "?" for those of which it is not known."""
    nbytes: int
    """Their bytes together."""
    allocations: int
    """How many they are."""


def naming(names: Names, column: str) -> Callable[[int], str | None]:
    """Return how the numbers in a column are spelled out."""
    spelled: dict[str, Callable[[int], object]] = {
        "tag": names.tag,
        "site": names.site,
        "task": names.task,
        "thread": names.thread,
        "pool": lambda number: names.pools[number].name,
    }
    spell = spelled.get(column, int)
    return lambda number: None if (found := spell(number)) is None else str(found)


def grouped(rows: NDArray[np.void], names: Names, column: str) -> tuple[Group, ...]:
    """Add up rows that have the same in a column, largest first.

    Raises:
        InvalidRequest: There is no such column to group by.
    """
    if column not in COLUMNS:
        raise InvalidRequest("column", column, f"one of {', '.join(COLUMNS)}")
    numbers, places = np.unique(rows[column], return_inverse=True)
    nbytes = np.bincount(places, rows["nbytes"], len(numbers)).astype(np.int64)
    counts = np.bincount(places, minlength=len(numbers))
    spell = naming(names, column)
    together: dict[str, tuple[int, int]] = {}
    for number, size, count in zip(numbers.tolist(), nbytes.tolist(), counts.tolist(), strict=True):
        name = spell(number) or "?"
        before = together.get(name, (0, 0))
        together[name] = before[0] + size, before[1] + count
    found = (Group(name, *sums) for name, sums in together.items())
    return tuple(sorted(found, key=lambda one: (-one.nbytes, one.name)))


def seconds_by(rows: NDArray[np.void], names: Names, column: str) -> dict[str, float]:
    """Add up the spans of rows that have the same in a column; "?" where that is not known."""
    numbers, places = np.unique(rows[column], return_inverse=True)
    spans = np.bincount(places, rows["span_ns"], len(numbers)) / 1e9
    spell = naming(names, column)
    found: dict[str, float] = {}
    for number, seconds in zip(numbers.tolist(), spans.tolist(), strict=True):
        name = spell(number) or "?"
        found[name] = found.get(name, 0.0) + seconds
    return found


def parts(rows: NDArray[np.void], column: str) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Return each value of a column, smallest first, with the rows that have it, in their order."""
    rows = rows[np.argsort(rows[column], kind="stable")]
    values, starts = np.unique(rows[column], return_index=True)
    yield from zip(values.tolist(), np.split(rows, starts[1:]), strict=False)  # no values: one part, of no rows
