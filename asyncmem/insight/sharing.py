"""Which buffers could be one: those that are never live at the same time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple, final

from asyncmem.figures import format_count, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHOWN: Final = 5


class Lifetime(NamedTuple):
    """A buffer, and when it is in use."""

    key: str | None
    """What it is called: a name, a tag, a line of the program; None for nothing."""
    nbytes: int
    """Its size."""
    start: int
    """When it is allocated or first used, in steps or in allocations and frees."""
    end: int
    """When it is free again: behind its last use."""


class SharedBuffer(NamedTuple):
    """Buffers of which no two are live at the same time, so that one could serve as all of them."""

    nbytes: int
    """The size of that one: the largest's."""
    buffers: int
    """How many they are."""
    saved: int
    """Bytes that the others need no more."""
    keys: tuple[tuple[str, int], ...]
    """What they are called, and how many of each, the most first; those without a key are left out."""

    def __str__(self) -> str:
        """Answer one line about it."""
        names = ", ".join(f"{key} ({count:,})" if count > 1 else key for key, count in self.keys[:_SHOWN])
        more = f" and {len(self.keys) - _SHOWN:,} other names" if len(self.keys) > _SHOWN else ""
        who = f": {names}{more}" if names else ""
        return f"one of {format_size(self.nbytes)} for {format_count(self.buffers, 'buffer')}{who}"


@final
@dataclass(frozen=True, kw_only=True)
class ReuseSuggestions:
    """What could be saved if buffers shared memory, and which could."""

    buffers: int
    """How many there are."""
    total_bytes: int
    """Bytes if each has memory of its own."""
    most_live: int
    """The most bytes that are live at once: what no sharing can go below."""
    shared: tuple[SharedBuffer, ...]
    """Who could be one buffer, what saves the most first; those that nobody can share with are left out."""

    @property
    def reusable_bytes(self) -> int:
        """Bytes that `shared` saves. A plan saves more, because it shares parts of buffers too."""
        return sum(one.saved for one in self.shared)

    def __str__(self) -> str:
        """Answer it as text for one screen."""
        heading = (
            f"{format_count(self.buffers, 'buffer')} of {format_size(self.total_bytes)}, of which "
            f"{format_size(self.reusable_bytes)} can be reused; {format_size(self.most_live)} are live at most"
        )
        lines = [heading]
        lines += [f"  {format_size(one.saved):>11}  {one}" for one in self.shared[: 2 * _SHOWN]]
        if len(self.shared) > 2 * _SHOWN:
            lines.append(f"  and {len(self.shared) - 2 * _SHOWN:,} more")
        return "\n".join(lines)


def shared_buffers(lifetimes: Iterable[Lifetime]) -> tuple[SharedBuffer, ...]:
    """Answer who could be one buffer: each takes over the smallest free one that is large enough, else the largest."""
    members: list[list[Lifetime]] = []
    free: list[tuple[int, int]] = []  # size and number of buffers that nobody uses, smallest first
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
