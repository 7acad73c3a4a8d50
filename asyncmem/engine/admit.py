"""Who is served next: a fair queue with priorities and a bound on overtaking.

Order is first come, first served within a priority. A waiter that does not fit may be overtaken by later ones that do,
until the bytes that overtook it reach the bypass budget; then nobody passes it. The same budget ages priorities: a
waiter of low priority that has been overtaken by that much goes first.

The bound holds for every waiter, not only for the head. One running total counts each grant that was made while an
older waiter stood in the queue; a waiter notes the total when it joins. What overtook it is at most the difference.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncmem.core import Line, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

W = TypeVar("W", bound=Waiter)

_ANY = 1 << 63


class Queue(Line[W], Generic[W]):
    """Waiters in order, grouped by size so that choosing one looks at each size once, however many ask for it.

    The groups are made when somebody has to be chosen: while the oldest is served each time, nobody is filed by size.
    Not thread-safe; its owner holds the pool's turn.

    Args:
        bypass: The most bytes that may overtake any one waiter.
    """

    def __init__(self, bypass: int) -> None:
        self.bypass = bypass

    def head(self) -> W | None:
        """Answer who must be served first: the most urgent, or the oldest once its budget forbids that."""
        if not self.urgent:
            return self.oldest()
        urgent = min(self._fronts(_ANY))[2]
        return urgent if self.may_overtake(urgent) else self.oldest()

    def serve(self, grant: Callable[[W], bool], room: Callable[[], int]) -> list[W]:
        """Grant to everybody who fits, in order, as far as the overtaking budget allows.

        Args:
            grant: Tries to serve one waiter and says whether it did; when it did, what it gives is booked already.
            room: Answers the bytes that are free; who asks for more is not tried.

        Returns:
            Who was served and has left, in that order.
        """
        served: list[W] = []
        while (next_one := self._serve_one(grant, room)) is not None:
            served.append(next_one)
        return served

    def _serve_one(self, grant: Callable[[W], bool], room: Callable[[], int]) -> W | None:
        head = self.head()
        if head is None:
            return None
        free = room()
        if head.nbytes <= free and grant(head):
            return self._granted(head)
        # What failed once is not tried again in as large a size, so the tries are few however many wait.
        smallest = min(head.nbytes, free + 1)
        for _, _, waiter in sorted(self._fronts(smallest)):
            if waiter.nbytes < smallest and self.may_overtake(waiter):
                if grant(waiter):
                    return self._granted(waiter)
                smallest = waiter.nbytes
        return None

    def behind(self, head: W, room: int) -> Iterator[W]:
        """Go through those who may be served before `head` and want no more than `room` bytes, one of each size."""
        for _, _, waiter in sorted(self._fronts(room + 1)):
            if waiter is not head and self.may_overtake(waiter):
                yield waiter

    def may_overtake(self, waiter: W) -> bool:
        """Say whether a waiter may be granted before the oldest one."""
        oldest = self.oldest()
        return oldest is None or oldest is waiter or waiter.nbytes <= self.left_for_others(oldest)

    def left_for_others(self, waiter: W) -> int:
        """Answer how many bytes may still overtake a waiter."""
        return max(0, self.bypass - (self.overtaken - waiter.mark))

    def _granted(self, waiter: W) -> W:
        if self.oldest() is not waiter:
            self.overtaken += waiter.nbytes
        self.leave(waiter)
        return waiter

    def _fronts(self, below: int) -> Iterator[tuple[int, int, W]]:
        self._file()
        for size in [size for size in self.by_size if size < below]:
            group = self.by_size[size]
            while group and group[0][2].queue is not self:
                heapq.heappop(group)
                self.filed -= 1
            if group:
                yield group[0]
            else:
                del self.by_size[size]

    def _file(self) -> None:
        for waiter in self.unfiled():
            group = self.by_size.setdefault(waiter.nbytes, [])
            heapq.heappush(group, (-waiter.priority, waiter.seq, waiter))
            self.filed += 1

    def _sweep(self) -> None:
        groups = {size: [place for place in group if place[2].queue is self] for size, group in self.by_size.items()}
        self.by_size = {size: group for size, group in groups.items() if group}
        self.filed = sum(map(len, self.by_size.values()))
        for group in self.by_size.values():
            heapq.heapify(group)
