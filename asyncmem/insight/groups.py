"""What belongs together: allocations by tag, by site, by whatever they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Answer how the numbers in a column are spelled out."""
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
