"""What a benchmark asks of an allocator, ours or another's."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from asyncmem.cli.benchmarks.peers.way import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One block's way from the stream that allocates it to the stream that frees it."""

    names: Mapping[str, object]
    statement: str
    counts: Callable[[], Mapping[str, int]] = dict
    """Answers running counts of what the allocator asked of its driver, where it tells."""


class Peer(ABC):
    """One allocator in one way of using it. Made in the process that measures it."""

    name: str
    """Its ID in every row."""
    unlike: ClassVar[Mapping[str, str]] = {}
    """Rows in which it does not do the same work as asyncmem, each with what is different."""
    beside: "Peer | None" = None
    """asyncmem's pool, to be measured in turn with it in the same process."""
    rows: ClassVar[tuple[str, ...]] = ()
    """The only rows it is measured in, where that is not all of its family's."""
    awaits: ClassVar[bool] = False
    """Whether it is asyncmem's pool, whose allocations can be awaited."""

    @abstractmethod
    def opened(self, limit: int | None = None) -> AbstractContextManager[Way]:
        """Answer its calls, from having no memory of the device until giving all of it back.

        Args:
            limit: The most bytes that it may take from the device; only asyncmem's and torch's heed it.
        """

    out_of_memory: ClassVar[type[BaseException] | tuple[type[BaseException], ...]] = MemoryError
    """What it raises when it has no memory."""

    def crossing(self) -> AbstractContextManager[Crossing] | None:
        """Answer how a block goes from stream A to B, which waits for A, and is freed there; None where it cannot."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds besides memory."""
