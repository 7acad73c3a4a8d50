"""Credit in bytes for each edge between two stages, and the order of items: decisions alone, without I/O.

A receiver has a window for each of its edges. A sender takes from the credit what an item costs before it sends it, and
the receiver returns as much once the item's memory is free. So what is under way on an edge, sockets included, is never
more than the window.

Items have consecutive numbers, and go round the workers of a stage in turn. Each worker takes its items in the order
of their numbers, whichever edge they come by. So the oldest item is first in line wherever it is, and no memory that it
needs is held by an item behind it: no window is ever waited for in a circle.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncmem.pipeline.stage import granules
from asyncmem.share.items import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")


def cost(sizes: Iterable[int]) -> int:
    """Return what parts of so many bytes take of a window, each in units of 512 bytes."""
    return sum(map(granules, sizes))


class Credit:
    """What a sender may still send on an edge.

    Attributes:
        window: The window of the receiver.
        free: What of it is left.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.free = window

    def take(self, nbytes: int) -> bool:
        """Take the credit for an item, or return False: the item waits."""
        if nbytes > self.free:
            return False
        self.free -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Have more, once the receiver says so.

        Raises:
            ProtocolError: It returns more than it got.
        """
        if not 0 <= nbytes <= self.window - self.free:
            raise ProtocolError(f"{nbytes} bytes of credit come back, of {self.window - self.free}")
        self.free += nbytes


class Window(Credit):
    """What a receiver still expects on an edge: the same account, on the other side."""

    def arrive(self, nbytes: int) -> None:
        """Take an item in, before any memory is taken for it.

        Raises:
            ProtocolError: The sender has no credit for it.
        """
        if not self.take(nbytes):
            raise ProtocolError(f"an item of {nbytes} bytes comes, with credit for {self.free}")


def route(number: int, edges: Sequence[T]) -> T:
    """Return the edge that an item takes: those to the workers of a stage in turn."""
    return edges[number % len(edges)]


class Inbox(Generic[T]):
    """The items that wait for a worker of a stage, in the order of their numbers.

    Args:
        first: Which of the stage's workers it is, from 0, and so the number of its first item.
        step: How many workers the stage has.
        edges: How many edges it has, numbered from 0.
    """

    def __init__(self, first: int, step: int, edges: int) -> None:
        self._next = first
        self._step = step
        self._queues: list[deque[tuple[int, T]]] = [deque() for _ in range(edges)]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def put(self, edge: int, number: int, item: T) -> None:
        """Take an item in.

        Raises:
            ProtocolError: It is another worker's, or not the next of its edge.
        """
        queue = self._queues[edge]
        last = queue[-1][0] if queue else self._next - self._step
        if number % self._step != self._next % self._step or number <= last:
            raise ProtocolError(f"item {number} comes after item {last}")
        queue.append((number, item))

    def clear(self) -> None:
        """Drop what waits."""
        for queue in self._queues:
            queue.clear()

    def get(self) -> T | None:
        """Return the next item, or None while it is not here."""
        for queue in self._queues:
            if queue and queue[0][0] == self._next:
                self._next += self._step
                return queue.popleft()[1]
        return None
