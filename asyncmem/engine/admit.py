"""Who is served next: a fair queue with priorities and a bound on overtaking.

Order is first come, first served within a priority. A waiter that does not fit may be overtaken by later ones that do,
until the bytes that overtook it reach the bypass budget; then nobody passes it. The same budget ages priorities: a
waiter of low priority that has been overtaken by that much goes first.

The bound holds for every waiter, not only for the head. One running total counts each grant that was made while an
older waiter stood in the queue; a waiter notes the total when it joins. What overtook it is at most the difference.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Waiter:
    """One request's place in a queue: how much it asks for, and how urgent it is.

    Attributes:
        nbytes: Bytes asked for, of all the parts of a batch together.
        priority: Larger is sooner.
        seq: Place in the order of arrival, given by the queue.
        mark: The queue's overtaking total when it joined.
        queue: Where it stands now, if it waits.
    """

    priority = 0
    seq = 0
    mark = 0
    queue: object = None

    def __init__(self, nbytes: int, priority: int = 0) -> None:
        self.nbytes = nbytes
        self.priority = priority


W = TypeVar("W", bound=Waiter)

_ANY = 1 << 63


class Queue(Generic[W]):
    """Waiters in order, grouped by size so that choosing one looks at each size once, however many ask for it.

    Leaving is a mark on the waiter, not a search: a storm of cancellations costs the same for each. Not thread-safe;
    its owner holds the pool's turn.

    Args:
        bypass: The most bytes that may overtake any one waiter.

    Attributes:
        bytes: What the waiters ask for together.
        overtaken: Bytes granted so far past an older waiter.
        empty: Whether nobody stands here.
    """

    def __init__(self, bypass: int) -> None:
        self.bypass = bypass
        self.bytes = 0
        self.overtaken = 0
        self.empty = True
        self._count = 0
        self._urgent = 0
        self._places = 0
        self._joined = 0
        self._arrivals: deque[W] = deque()
        self._by_size: dict[int, list[tuple[int, int, W]]] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[W]:
        """Go through the waiters in the order of arrival."""
        return (waiter for waiter in self._arrivals if waiter.queue is self)

    def join(self, waiter: W) -> None:
        """Put a waiter at the end of its priority."""
        self._joined += 1
        waiter.seq = self._joined
        waiter.mark = self.overtaken
        waiter.queue = self
        self._arrivals.append(waiter)
        group = self._by_size.get(waiter.nbytes)
        if group is None:
            group = self._by_size[waiter.nbytes] = []
        heapq.heappush(group, (-waiter.priority, waiter.seq, waiter))
        self._urgent += waiter.priority != 0
        self._places += 1
        self._count += 1
        self.empty = False
        self.bytes += waiter.nbytes

    def leave(self, waiter: W) -> None:
        """Take a waiter out, wherever it stands; one that has left already is left alone."""
        if waiter.queue is not self:
            return
        waiter.queue = None
        self._urgent -= waiter.priority != 0
        self._count -= 1
        self.bytes -= waiter.nbytes
        if self._count == 0:
            self.empty = True
            self._places = 0
            self._arrivals.clear()
            self._by_size.clear()
        elif self._places > 2 * self._count + 64:
            self._sweep()

    def head(self) -> W | None:
        """Answer who must be served first: the most urgent, or the oldest once its budget forbids that."""
        if not self._urgent:
            return self.oldest()
        urgent = min(self._fronts(_ANY))[2]
        return urgent if self.may_overtake(urgent) else self.oldest()

    def first_in_line(self) -> W | None:
        """Answer the head when that takes no thought, because all priorities are 0; else None."""
        return None if self._urgent else self.oldest()

    def oldest(self) -> W | None:
        """Answer the waiter that has stood here longest."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].queue is not self:
            arrivals.popleft()
        return arrivals[0] if arrivals else None

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

    def may_overtake(self, waiter: W) -> bool:
        """Say whether a waiter may be granted before the oldest one."""
        oldest = self.oldest()
        if oldest is None or oldest is waiter:
            return True
        return self.overtaken - oldest.mark + waiter.nbytes <= self.bypass

    def _granted(self, waiter: W) -> W:
        if self.oldest() is not waiter:
            self.overtaken += waiter.nbytes
        self.leave(waiter)
        return waiter

    def _fronts(self, below: int) -> Iterator[tuple[int, int, W]]:
        for size in [size for size in self._by_size if size < below]:
            group = self._by_size[size]
            while group and group[0][2].queue is not self:
                heapq.heappop(group)
                self._places -= 1
            if group:
                yield group[0]
            else:
                del self._by_size[size]

    def _sweep(self) -> None:
        self._arrivals = deque(waiter for waiter in self._arrivals if waiter.queue is self)
        groups = {size: [place for place in group if place[2].queue is self] for size, group in self._by_size.items()}
        self._by_size = {size: group for size, group in groups.items() if group}
        self._places = self._count
        for group in self._by_size.values():
            heapq.heapify(group)
