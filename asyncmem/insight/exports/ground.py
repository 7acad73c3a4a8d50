"""`Ground`: segments with blocks in them, and the history that a viewer takes back step by step.

A viewer begins with what is there at the end, and undoes the history from its last entry on. Each block must then lie
in a segment at every step, whereas records of several threads may say so a moment later: the segment after the first
block in it, or the old segment's end after the new one's beginning at the same place. Such are put right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from asyncmem.core import GRANULE

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL: Final = 2 << 20
"""Segments up to so many bytes are called small."""


Entry: TypeAlias = dict[str, Any]
What: TypeAlias = dict[str, Any]
"""What is said alike of every entry about a block."""

UNKNOWN: Final[What] = {"stream": 0, "frames": [], "compile_context": "N/A", "user_metadata": ""}


class Place(NamedTuple):
    """A range of addresses."""

    address: int
    nbytes: int
    pool: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class Block(NamedTuple):
    """What is live."""

    place: Place
    segment: int
    """Where the segment begins that it lies in."""
    what: What
    """What is said of it."""


class Ground:
    """One device, or one pool that lies apart.

    Attributes:
        number: The device's number in the snapshot.
        known: All segments that each pool ever has, in their order.
        fixed: Whether those are there all the time, whatever comes and goes.
        now: When the next entry happens, in microseconds since 1970.
        entries: The history.
    """

    def __init__(self, number: int, *, fixed: bool = False) -> None:
        self.number = number
        self.known: dict[int, list[Place]] = {}
        self.fixed = fixed
        self.now = 0
        self.entries: list[Entry] = []
        self._come: Counter[int] = Counter()  # how many of those known have come, by pool
        self._addresses: list[int] = []  # of the segments that there are, in order
        self._segments: dict[int, Place] = {}
        self._inside: dict[int, list[int]] = {}  # where blocks begin, in order, by segments
        self._blocks: dict[int, Block] = {}

    def begin_with(self, place: Place) -> None:
        """Have a segment that was there from the beginning."""
        self._come[place.pool] += 1
        if self._segments.get(place.address) != place:
            self._add(place)

    def grow(self, place: Place) -> None:
        """Have a segment come; it may be there already."""
        self._come[place.pool] += 1
        if not self.fixed and self._segments.get(place.address) != place:
            self._add(place)
            self._note("segment_alloc", place, UNKNOWN)

    def trim(self, place: Place) -> None:
        """Have a segment go; one with blocks in it has come again."""
        if not self.fixed and self._segments.get(place.address) == place and not self._inside[place.address]:
            self._addresses.remove(place.address)
            del self._segments[place.address]
            self._note("segment_free", place, UNKNOWN)

    def take(self, place: Place, what: What, *, before: bool = False) -> None:
        """Have a block taken, or be there from the beginning. What lay there is gone, whether or not that was told."""
        segment = self._segment_at(place.address) or self._make_ground_for(place, before=before)
        inside = self._inside[segment.address]
        for gone in self._blocks_over(place, inside):
            if before:
                self._forget(gone)
            else:
                self.free(gone.place)
        insort(inside, place.address)
        self._blocks[place.address] = Block(place, segment.address, what)
        if not before:
            self._note("alloc", place, what)

    def free(self, place: Place) -> None:
        """Have a block freed. What is said of it is what was said when it was taken."""
        block = self._blocks.get(place.address)
        if block is not None:
            self._forget(block)
            self._note("free_requested", block.place, block.what)
            self._note("free_completed", block.place, block.what)

    def refuse(self, nbytes: int, free: int, what: What) -> None:
        """Have a request refused for which there was no memory."""
        self.entries.append({"action": "oom", "device_free": free, "size": nbytes, "time_us": self.now, **what})

    def segments(self) -> Iterator[Entry]:
        """Answer what there is now."""
        for start in self._addresses:
            segment = self._segments[start]
            held = [self._blocks[one] for one in self._inside[start]]
            blocks = list(tiles(segment, held))
            live = sum(one["size"] for one in blocks if one["state"] != "inactive")
            yield {
                "device": self.number, "address": start, "total_size": segment.nbytes, "allocated_size": live,
                "active_size": live, "requested_size": sum(one["requested_size"] for one in blocks), "stream": 0,
                "segment_type": "small" if segment.nbytes <= _SMALL else "large",
                "segment_pool_id": (0, segment.pool), "is_expandable": False, "frames": [], "blocks": blocks,
            }  # fmt: skip

    def _note(self, action: str, place: Place, what: What) -> None:
        entry = {"action": action, "addr": place.address, "size": place.nbytes, "time_us": self.now}
        self.entries.append(entry | what)

    def _add(self, place: Place) -> None:
        for old in list(self._overlapping(place)):
            for address in tuple(self._inside[old.address]):
                self.free(self._blocks[address].place)
            self.trim(old)
        insort(self._addresses, place.address)
        self._inside[place.address] = []
        self._segments[place.address] = place

    def _forget(self, block: Block) -> None:
        inside = self._inside[block.segment]
        del inside[bisect_left(inside, block.place.address)]
        del self._blocks[block.place.address]

    def _blocks_over(self, place: Place, inside: list[int]) -> list[Block]:
        first, last = bisect_left(inside, place.address), bisect_left(inside, place.end)
        found = [self._blocks[one] for one in inside[max(first - 1, 0) : last]]
        return [one for one in found if one.place.end > place.address]

    def _segment_at(self, address: int) -> Place | None:
        at = bisect_right(self._addresses, address)
        found = self._segments[self._addresses[at - 1]] if at else None
        return found if found is not None and address < found.end else None

    def _overlapping(self, place: Place) -> Iterator[Place]:
        first = max(bisect_right(self._addresses, place.address) - 1, 0)
        last = bisect_right(self._addresses, place.end - 1)
        there = (self._segments[address] for address in self._addresses[first:last])
        return (one for one in there if one.end > place.address)

    def _make_ground_for(self, place: Place, *, before: bool) -> Place:
        # The segment that comes next there, or else the one that was there last.
        known, come = self.known[place.pool], self._come[place.pool]
        segment = next(
            one for one in [*known[come:], *reversed(known[:come])] if one.address <= place.address < one.end
        )
        self._add(segment)
        if not before:
            self._note("segment_alloc", segment, UNKNOWN)
        return segment


def tiles(segment: Place, held: list[Block]) -> Iterator[Entry]:
    """Lay blocks and what is free between them side by side, from end to end."""
    at = segment.address
    limits = [one.place.address for one in held] + [segment.end]
    for (place, _, what), limit in zip(held, limits[1:], strict=True):
        if place.address > at:
            yield _tile(at, place.address - at)
        nbytes = min(-(-place.nbytes // GRANULE) * GRANULE, limit - place.address)
        asked = min(place.nbytes, nbytes)
        yield _tile(place.address, nbytes) | {
            "requested_size": asked, "state": "active_allocated", "frames": what["frames"],
        }  # fmt: skip
        at = place.address + nbytes
    if at < segment.end:
        yield _tile(at, segment.end - at)


def _tile(address: int, nbytes: int) -> Entry:
    return {"address": address, "size": nbytes, "requested_size": 0, "state": "inactive", "frames": []}
