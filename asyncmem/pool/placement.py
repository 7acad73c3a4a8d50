"""`ReusePlan`: where each buffer lies in one range, so that those that are never live together share bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

from asyncmem.core import GRANULE
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_share, format_size
from asyncmem.lazy import np


class PlannedPlace(NamedTuple):
    """A buffer, when it is live, and where it lies meanwhile."""

    key: str | None
    """What the program calls it; None for nothing."""
    nbytes: int
    """Its size."""
    start: int
    """When it is allocated, in any unit that all places share."""
    end: int
    """When it is freed, and its bytes may be another's."""
    offset: int
    """Its distance from the beginning of the range, in bytes."""


@final
@dataclass(frozen=True, repr=False)
class ReusePlan:
    """Where each buffer lies. Made by `LifetimeAnalyzer.compute_reuse_plan`, applied by `pool.apply_plan`.

    It is checked when it is made: no two places that are live at one time share a byte.

    Attributes:
        places: One for each buffer, in the order in which they are allocated.
        align: Each begins at a multiple of so many bytes, and is rounded up to one.

    Raises:
        InvalidRequest: Two places are in each other's way, or one of them cannot be right; it says which.
    """

    places: tuple[PlannedPlace, ...]
    align: int = GRANULE

    def __post_init__(self) -> None:
        self.check()

    def __repr__(self) -> str:
        return f"<asyncmem.pool.ReusePlan: {self}>"

    def __str__(self) -> str:
        """Return one line about it."""
        if not self.peak:
            return "nothing to place"
        return (
            f"{format_count(len(self.places), 'buffer')} of {format_size(self.total)} in {format_size(self.peak)}, "
            f"{format_share(self.peak / self.lower_bound - 1)} above the {format_size(self.lower_bound)} that are live "
            "at most"
        )

    @cached_property
    def peak(self) -> int:
        """Bytes of the range."""
        return max((place.offset + self.rounded(place.nbytes) for place in self.places if place.nbytes), default=0)

    @cached_property
    def total(self) -> int:
        """Bytes if each buffer had memory of its own."""
        return sum(self.rounded(place.nbytes) for place in self.places)

    @cached_property
    def lower_bound(self) -> int:
        """The most bytes that are live at once: no placement needs fewer."""
        sizes = np.array([self.rounded(place.nbytes) for place in self.places], np.int64)
        starts = np.array([place.start for place in self.places], np.int64)
        ends = np.array([place.end for place in self.places], np.int64)
        return most_live(starts, ends, sizes)

    def rounded(self, nbytes: int) -> int:
        """Return a size as it is placed: a multiple of `align`."""
        return -(-nbytes // self.align) * self.align

    def check(self) -> None:
        """Walk all places in the order of time.

        Raises:
            InvalidRequest: Two that are live at one time share bytes, or one of them cannot be right.
        """
        if self.align < GRANULE or self.align % GRANULE:
            raise InvalidRequest("align", self.align, f"a multiple of {GRANULE} bytes")
        turns: list[tuple[int, bool, int]] = []
        for index, place in enumerate(self.places):
            if place.offset < 0 or place.offset % self.align or place.nbytes < 0 or place.end <= place.start:
                expected = f"a place that ends after it starts, at a multiple of {self.align} bytes"
                raise InvalidRequest("places", place, expected)
            if place.nbytes:
                turns += [(place.start, True, index), (place.end, False, index)]
        live: list[tuple[int, int]] = []  # offset and index, in the order of offsets
        for _, begins, index in sorted(turns):  # what ends makes way for what begins at the same time
            entry = self.places[index].offset, index
            if not begins:
                del live[bisect_left(live, entry)]
                continue
            at = bisect_left(live, entry)
            for _, other in live[max(at - 1, 0) : at + 1]:
                self._keep_apart(self.places[other], self.places[index])
            insort(live, entry)

    def _keep_apart(self, one: PlannedPlace, other: PlannedPlace) -> None:
        if one.offset < other.offset + self.rounded(other.nbytes) and other.offset < one.offset + self.rounded(
            one.nbytes
        ):
            raise InvalidRequest("places", (one, other), "places that share no byte while both are live")


def most_live(starts: np.ndarray, ends: np.ndarray, sizes: np.ndarray) -> int:
    """Return the most bytes that are live at one time; what ends makes way for what begins at the same time."""
    times = np.concatenate((ends, starts))
    changes = np.concatenate((-sizes, sizes))
    return int(np.cumsum(changes[np.argsort(times, kind="stable")]).max(initial=0))
