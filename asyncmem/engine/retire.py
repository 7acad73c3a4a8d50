"""Stream order: which freed memory waits for which fence, and who has to wait for it.

Freed memory carries entries, {stream: epoch}: uses that are not yet known to be done. An epoch is the frees on a
stream between two of its fences. This module closes epochs, records their fences, makes a taking stream wait for
them, and asks which are done. It makes only device calls that do not block, so it serves any thread, also a finalizer
that interrupts another call of it; the one call that waits says so.

What protects what: the heap has its own lock and is never called under another. A stream's queue of fences is only
appended to, by any thread, except by whoever holds `_polling`, which is tried and never waited for.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from asyncmem.devices.base import Device, Fence, Stream
from asyncmem.errors import DeviceError, InvalidRequest

Entry: TypeAlias = tuple[int, int]
"""A stream's index in the heap and one of its epochs."""

DONE: Final = 2

# A stream whose fences nobody polls would keep them all; from here on each new one has the oldest looked at.
_WINDOW: Final = 64


class Heap(Protocol):
    """The part of the core that knows epochs."""

    def add_stream(self) -> int:
        """Return the index of a new stream."""
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

    def free(self, block: int, entries: Sequence[Entry] = ()) -> int:
        """Take a block back with the uses of streams other than its home; return flags."""
        ...

    def home(self, block: int) -> int:
        """Return the stream on which a live block was allocated or to which it was handed over."""
        ...

    def set_home(self, block: int, stream: int) -> None:
        """Change it."""
        ...


class RetireCounts(NamedTuple):
    """What ordering has cost so far, in driver calls and fences."""

    records: int
    """Fences recorded."""
    waits: int
    """Times that a stream was made to wait for a fence."""
    queries: int
    """Times that a fence was asked whether it is done."""
    late_fences: int
    """Fences recorded only when another stream took the memory; they cover later work too."""
    failed_records: int
    """Fences that could not be recorded at a free; polling tries again."""
    open_fences: int
    """Fences not yet seen done."""


class Retire:
    """Keeps one pool's streams in order, by their indices in its heap."""

    def __init__(
        self,
        heap: Heap,
        device: Device,
        *,
        late_fences: bool = True,
        ids: dict[Stream, int] | None = None,
        streams: list[Stream | None] | None = None,
    ) -> None:
        """Register the device's default stream as 0.

        Args:
            heap: The core, whose stream 0 exists already.
            device: Where the streams run.
            late_fences: Allow recording a fence at the time when another stream takes the memory.
            ids: The core's own table of registered streams, shared and extended here; `streams` likewise by index.
            streams: See `ids`. None stands for the context-wide user.
        """
        self.late_fences = late_fences
        self.ids = {device.default_stream: 0} if ids is None else ids
        self.streams: list[Stream | None] = [device.default_stream] if streams is None else streams
        self._heap = heap
        self._device = device
        self._fences: dict[int, deque[tuple[int, Fence]]] = {}
        self._owed: set[int] = set()
        self._everywhere: int | None = None
        self._polling = threading.Lock()
        self._registering = threading.Lock()
        self._records = self._waits = self._queries = self._late = self._failed = 0

    def register(self, stream: Stream) -> int:
        """Return the heap's index of a stream, a new one at first sight, and keep the stream alive from then on."""
        index = self.ids.get(stream)
        if index is not None:
            return index
        with self._registering:
            if stream not in self.ids:
                self.streams.append(stream)
                self.ids[stream] = self._heap.add_stream()
            return self.ids[stream]

    def everywhere(self) -> int:
        """Return the index of the user that stands for all streams, for consumers that name none."""
        with self._registering:
            if self._everywhere is None:
                self.streams.append(None)
                self._everywhere = self._heap.add_stream()
            return self._everywhere

    def fence(self, index: int) -> int:
        """Close the open epoch of a stream, record a fence behind it and publish it; return the epoch.

        Raises:
            DeviceError: Nothing was published; the closed epoch is covered by the stream's next fence.
        """
        epoch = self._heap.close_epoch(index)
        self._record(index, epoch)
        return epoch

    def discharge(self, taker: int, entries: Iterable[Entry]) -> None:
        """Order `taker` behind the uses of memory that it is about to take from other streams.

        Raises:
            DeviceError: A fence could not be recorded or waited for. The caller puts the block back with its entries;
                waits that were made already do no harm.
            InvalidRequest: An entry has no fence and `late_fences` is off.
        """
        for stream, epoch in entries:
            if stream == taker or self._heap.entry_state(stream, epoch) == DONE:
                continue
            # A fence that covers this very epoch: one recorded before the last use would order nothing (rmm #2489).
            fence = self._covering(stream, epoch) or self._late_fence(stream, epoch)
            if fence is not None:
                self._wait(taker, fence)

    def free(self, block: int, users: Iterable[int] = ()) -> int:
        """Give a block back to the heap behind the uses of home and of `users`; return the heap's flags."""
        return self._heap.free(block, self.entries_for(users))

    def entries_for(self, users: Iterable[int]) -> list[Entry]:
        """Record a fence for each user other than home, now: a fence from before the free would not cover its last use.

        Never raises for a device that refuses: a release cannot fail. The entry then stays without a fence, and the
        memory out of other streams' reach, until `poll` or a later use of that stream has recorded one.
        """
        entries = []
        for user in dict.fromkeys(users):
            epoch = self._heap.close_epoch(user)
            try:
                self._record(user, epoch)
            except DeviceError:
                self._failed += 1
                self._owed.add(user)
            entries.append((user, epoch))
        return entries

    def use_on(self, home: int, other: int) -> None:
        """Make `other` wait for all that `home` has submitted so far; the context-wide user cannot wait."""
        if home != other and self._stream(other) is not None:
            self._wait(other, self._record(home, self._heap.close_epoch(home)))

    def hand_over(self, block: int, other: int) -> None:
        """Make `other` the home of a live block, ordered behind all that the old home has submitted so far.

        The old home promises to submit no more work on it. A failure changes nothing.
        """
        self.use_on(self._heap.home(block), other)
        self._heap.set_home(block, other)

    def poll(self) -> int:
        """Ask the recorded fences in order and tell the heap what is done; return how many fences that were.

        Returns 0 at once when another thread, or the very caller that a finalizer has interrupted, is at it already.

        Raises:
            DeviceError: The device is lost.
        """
        # Every hand-over asks, and on one stream there is never anything to poll.
        idle = not self._owed and not any(self._fences.values())
        if idle or not self._polling.acquire(blocking=False):
            return 0
        try:
            self._record_owed()
            return sum(self._advance(index, queue) for index, queue in list(self._fences.items()))
        finally:
            self._polling.release()

    def pending(self, entries: Iterable[Entry]) -> list[Fence]:
        """Return the fences that the host must still see done before memory with `entries` leaves the pool.

        Records those that are missing: here a late one only costs time, because no stream is made to wait for it.

        Raises:
            DeviceError: The device is lost, or a fence could not be recorded.
        """
        self.poll()
        return [fence for _, _, fence in self._unsettled(entries)]

    def settle(self, entries: Iterable[Entry], timeout: float | None = None) -> bool:
        """Wait on this thread (**blocks**) until the host has seen all `entries` done.

        Returns:
            False when `timeout` seconds passed first.

        Raises:
            DeviceError: As `pending`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for index, epoch, fence in self._unsettled(entries):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not fence.block(left):
                return False
            self._heap.mark_done(index, epoch)
        self.poll()
        return True

    def counts(self) -> RetireCounts:
        """Return what ordering has cost so far."""
        return RetireCounts(
            records=self._records,
            waits=self._waits,
            queries=self._queries,
            late_fences=self._late,
            failed_records=self._failed,
            open_fences=sum(map(len, list(self._fences.values()))),
        )

    def _stream(self, index: int) -> Stream | None:
        return self.streams[index]

    def _record(self, index: int, epoch: int) -> Fence:
        stream = self._stream(index)
        if stream is not None and stream.capturing():  # the fence would become a part of the graph
            raise DeviceError("record", code=0, code_name="the stream is being captured", device=self._device.name)
        fence = self._device.record_all() if stream is None else stream.record()
        self._records += 1
        queue = self._fences.setdefault(index, deque())
        # Findable before it is published: whoever learns that there is a fence must be able to wait for it.
        queue.append((epoch, fence))
        self._heap.publish(index, epoch)
        if len(queue) > _WINDOW:
            self.poll()
        return fence

    def _wait(self, taker: int, fence: Fence) -> None:
        stream = self._stream(taker)
        if stream is None:
            raise InvalidRequest("taker", taker, "a stream: the context-wide user takes no memory")
        stream.wait(fence)
        self._waits += 1

    def _covering(self, index: int, epoch: int) -> Fence | None:
        fences = [fence for closed, fence in list(self._fences.get(index, ())) if closed >= epoch]
        return fences[0] if fences else None

    def _late_fence(self, index: int, epoch: int) -> Fence | None:
        if self._heap.entry_state(index, epoch) == DONE:
            return None  # polled by somebody else since the caller looked
        if not self.late_fences:
            raise InvalidRequest("entries", (index, epoch), "recorded ones, because late_fences is off")
        self._late += 1
        return self._record(index, self._heap.close_epoch(index))

    def _unsettled(self, entries: Iterable[Entry]) -> list[tuple[int, int, Fence]]:
        found = []
        for index, epoch in entries:
            if self._heap.entry_state(index, epoch) == DONE:
                continue
            fence = self._covering(index, epoch) or self._record(index, self._heap.close_epoch(index))
            found.append((index, epoch, fence))
        return found

    def _advance(self, index: int, queue: deque[tuple[int, Fence]]) -> int:
        seen = 0
        while queue:
            epoch, fence = queue[0]
            self._queries += 1
            if not fence.done():
                break
            # Told before it is dropped: until then, whoever is told otherwise finds the fence in the queue.
            self._heap.mark_done(index, epoch)
            queue.popleft()
            seen += 1
        return seen

    def _record_owed(self) -> None:
        for index in list(self._owed):
            self._owed.discard(index)
            try:
                self.fence(index)
            except DeviceError:
                self._owed.add(index)
