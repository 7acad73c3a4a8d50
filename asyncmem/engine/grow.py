"""How much to ask the device for, and how much to keep ready ahead of need.

Small requests have segments of their own, which start small and grow with what is there already, so that a program of
few small buffers stays small and one of many asks the device seldom. How far the worker keeps ahead follows from what
was seen: bytes taken per second, times how long the device needs to give more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL, LARGE = 0, 1
_SMALLEST_SEGMENTS = 2  # the first segment for small requests holds two of the largest of them
_LEAD = 4.0  # keep ahead by this many times what is taken while one growth runs
_KEEP = 0.5  # weight of the newest sample in the averages


class Room(NamedTuple):
    """What stands against growth, in bytes.

    Attributes:
        limit: The most the pool may have reserved, or None.
        reserved: What it has now.
        coming: What has been asked of the device and not yet come.
    """

    limit: int | None
    reserved: int
    coming: int

    def left(self) -> int | None:
        """Answer how much more may be asked for, or None where nothing bounds it."""
        return None if self.limit is None else max(0, self.limit - self.reserved - self.coming)


class Growth:
    """Sizes of the next segments, and the demand they follow from.

    Args:
        segment_size: Bytes of an ordinary segment.
        small_limit: Requests below this many bytes live in segments of their own.
        granularity: Every segment is a multiple of this many bytes.
        exact: Ask for what is needed and no more, as a pool without caching does.
    """

    def __init__(self, segment_size: int, small_limit: int, granularity: int, *, exact: bool = False) -> None:
        self.segment_size = segment_size
        self.small_limit = small_limit
        self._granularity = granularity
        self._exact = exact
        self._rate = 0.0
        self._duration = 0.0
        self._seen: tuple[float, int] | None = None

    def is_of_one_class(self, sizes: Sequence[int]) -> bool:
        """Say whether all of these sizes belong in one arena; what has no bytes belongs in any."""
        return self.arena(min(filter(None, sizes), default=0)) == self.arena(max(sizes))

    def arena(self, nbytes: int) -> int:
        """Answer which arena a request of this many bytes grows."""
        return SMALL if nbytes < self.small_limit and not self._exact else LARGE

    def plan(self, need: int, arena: int, in_arena: int, room: Room, most: int | None = None) -> int | None:
        """Answer how large the next segment should be, or None where it may not be had.

        Args:
            need: Bytes that must fit in one piece.
            arena: Which arena grows.
            in_arena: Bytes that this arena has reserved already.
            room: What stands against it.
            most: Bytes that it should not exceed, unless the need does.
        """
        rounded = self._round(need)
        usual = self._round(self._usual(arena, in_arena))
        if most is not None:
            usual = min(usual, most - most % self._granularity)
        wish = rounded if self._exact else max(rounded, usual)
        left = room.left()
        if left is None or wish <= left:
            return wish
        whole = left - left % self._granularity
        if rounded <= whole:
            return rounded if self._exact else whole
        return left if need <= left else None  # the rest of an odd limit: the device rounds it up by itself

    def observe(self, now: float, taken: int, seconds: float) -> None:
        """Note a finished growth.

        Args:
            now: The time, in seconds of any steady clock.
            taken: Bytes that have been handed out since the pool began.
            seconds: How long the device took.
        """
        self._duration += _KEEP * (seconds - self._duration)
        if self._seen is not None and now > self._seen[0]:
            rate = (taken - self._seen[1]) / (now - self._seen[0])
            self._rate += _KEEP * (rate - self._rate)
        self._seen = now, taken

    def headroom(self) -> int:
        """Answer how many free bytes to keep mapped ahead of need, for the demand seen so far."""
        return 0 if self._exact else min(self.segment_size, int(self._rate * self._duration * _LEAD))

    def _usual(self, arena: int, in_arena: int) -> int:
        if arena == LARGE:
            return self.segment_size
        return min(self.segment_size, max(_SMALLEST_SEGMENTS * self.small_limit, in_arena // 2))

    def _round(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity) * self._granularity
