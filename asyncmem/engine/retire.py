"""Stream order: which freed memory waits for which fence, and who has to wait for it.

Freed memory carries entries, {stream: epoch}: uses that are not yet known to be done. An epoch is the frees on a
stream between two of its fences. `Retire` closes epochs, records their fences, makes a taking stream wait for them, and
asks which are done. It is a part of the compiled core, whose doors go straight to it; what it keeps are these rules:

* **Nothing to do** where memory is taken again by its home and nobody else has used it.
* **A taker is ordered** behind every entry of another stream: its fence is done, or the taker is made to wait for one
  that covers this very epoch. A fence recorded before the last use orders nothing, however new it is.
* **Closed, recorded, published**, in this order: a fence covers the frees of epochs that were closed before it was
  recorded. A record that failed publishes nothing, and the next one of that stream makes up for it.
* **Users other than home** are fenced at the free, not when they are named: what they do comes in between. With
  `fence_every` several frees of little memory share a fence, at the price of covering what the stream is given to do
  until then.
* **Large frees at home** have a fence of their own for a while after a stream has waited for another one: later takers
  wait for the work before the free, and not for what the stream is given to do after it.
* **A late fence**, recorded when another stream takes the memory, covers later work too, and hangs where that work
  waits for the taker. It comes last, is counted, and may be forbidden.
* **A stream that nobody keeps alive** (a raw number) has its fences recorded at the free itself, the home's own too.
  Whatever is recorded for it later is recorded behind all streams: its number may be another stream's by then.
* **A stream that is being captured** records nothing: till the capture ends, its memory is out of others' reach.
* **Giving memory back** needs its fences seen done by the host; making streams wait does not help there.

It makes only device calls that do not block, so it serves any thread, also a finalizer that interrupts another call of
it; the one call that waits says so. Drivers without a fence behind all streams are the exception: there, whoever takes
memory that waits for such a fence waits with it. Streams that say so (`native`) are served by the device's table of C
functions, all others by their methods. After a fork, and when the interpreter ends, it makes no call at all.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from asyncmem.core import Retire, RetireCounts

__all__ = ["DONE", "Entry", "Heap", "Retire", "RetireCounts"]

Entry: TypeAlias = tuple[int, int]
"""A stream's number in the heap and one of its epochs."""

DONE: Final = 2
"""What `Heap.entry_state` answers for an epoch that is done."""


class Heap(Protocol):
    """The part of a heap that `Retire` needs, where it is not the compiled one."""

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

    def take_at(
        self, address: int, nbytes: int, stream: int, account: int, arena: int, late: bool = False
    ) -> tuple[int, tuple[Entry, ...]] | None:
        """Take just these bytes of a lease's inside; return the same."""
        ...

    def put_back(self, block: int, entries: Sequence[Entry]) -> int:
        """Undo a take whose discharge failed; return flags."""
        ...

    def free(self, block: int, entries: Sequence[Entry] = ()) -> int:
        """Take a block back with the uses of streams other than its home; return flags."""
        ...

    def home(self, block: int) -> int:
        """Return the stream on which a live block was allocated or to which it was handed over."""
        ...

    def set_home(self, block: int, stream: int) -> None:
        """Change it."""
        ...
