"""What `Retire` needs of a heap: the compiled one, its twin in Python, and broken copies of both."""

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from asyncmem.core.report import BlockInfo

Entry: TypeAlias = tuple[int, int]
"""A stream's number in the heap and one of its epochs."""

DONE: Final = 2
"""What `Heap.entry_state` returns for an epoch that is done."""


class Heap(Protocol):
    """The part of a heap that `Retire` needs."""

    def add_stream(self) -> int:
        """Return the number of a new stream."""
        ...

    def open_epoch(self, stream: int) -> int:
        """Return the epoch that frees on the stream join now."""
        ...

    def close_epoch(self, stream: int) -> int:
        """Close the open epoch and return its number; later frees join the next."""
        ...

    def publish(self, stream: int, epoch: int) -> None:
        """Learn that a recorded fence covers all epochs up to this one."""
        ...

    def mark_done(self, stream: int, epoch: int) -> None:
        """Learn that all epochs up to this one are done."""
        ...

    def entry_state(self, stream: int, epoch: int) -> int:
        """Return 0 while no recorded fence covers the epoch, 1 when one does, 2 when it is done."""
        ...

    def take_foreign(
        self, nbytes: int, stream: int, account: int = 0, arena: int = -1, anywhere: bool = False, late: bool = False
    ) -> tuple[int, tuple[Entry, ...]] | None:
        """Take memory that other streams have used; return the block and the entries to discharge first."""
        ...

    def free(self, block: int, entries: Sequence[Entry] = ()) -> int:
        """Take a block back with the uses of streams other than its home; return flags."""
        ...

    def info(self, block: int) -> BlockInfo:
        """Return what there is to know of a live block: its `stream` is its home."""
        ...

    def set_home(self, block: int, stream: int) -> None:
        """Change it."""
        ...
