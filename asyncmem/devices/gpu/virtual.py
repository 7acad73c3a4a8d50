"""Reserved ranges of addresses, memory that moves under them (`paging.hpp`), and segments that are mapped there.

The host unmaps an address when it has seen all work there done, so new memory may be used by every stream at once. What
moves is mapped at both addresses until then. Access is set for several pieces by one call, which other threads feel
when it is for very many of them.

A segment is made of as few handles as can be, of up to 2 GiB. To get a GiB and to give it back took, on an H200 with
driver 580 (`tests/gpu/probe.cu`), 0.12 + 0.37 ms as one handle, 0.21 + 0.52 ms as four of 256 MiB, 0.6 + 0.85 ms as 16
of 64 MiB, and 18 + 15 ms as 512 of 2 MiB. Sizes need not be round: 1384 MiB took 0.14 ms as one handle, and 0.29 as
five that were powers of two; 142 MiB took 0.04 as one and 0.18 as four. The device's own work is held up by the handle,
too: taking back 256 MiB every few milliseconds made a training step beside it 2.5 % longer in handles of 64 MiB, and
1.6 % in one of 256 MiB; 2 GiB made it 2.3 % longer in those of 256 MiB, and 1.8 % in one. The longest call is a
release, up to 1.0 ms for 1.4 GiB and 2 ms for 2.3. No call held up other threads' launches by more than 40 us, up to a
GiB, except setting the access of 512 handles at once: 230 us.

The calls of a segment are made in one go without the interpreter's lock. One by one in Python, each had the lock change
hands twice, which other threads felt more than the calls themselves.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Remapped
from asyncmem.devices.gpu.driver import OUT_OF_MEMORY
from asyncmem.devices.gpu.segments import Source
from asyncmem.devices.ranges import Ranges
from asyncmem.errors import AsyncmemError, InvalidRequest, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncmem.devices.base import Move, Segment, Span
    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.driver import Driver

STEP: Final = 256 << 20
"""Bytes that one call unmaps, or sets the access of: other threads felt it when that was for hundreds of pieces."""


class PagedMemory:
    """The ranges of one device."""

    def __init__(self, device: str, driver: Driver, context: Context, page: int, peers: Sequence[int]) -> None:
        """Serve the device of that name, and its peers; `page` is the unit of sizes in bytes."""
        self._device = device
        self._driver = driver
        self._context = context
        self.page = page
        self._step = STEP if driver.joins_mappings else 0
        self._paging = context.paging()
        self._ranges: dict[int, int] = {}
        self._peers = list(peers)
        # Over whole operations: a peer that is granted access must miss no memory. Re-entrant for finalizers.
        self._lock = threading.RLock()

    def reserve(self, nbytes: int) -> int:
        """Keep a range of addresses."""
        if nbytes <= 0 or nbytes % self.page:
            raise InvalidRequest("nbytes", nbytes, f"whole pages of {self.page} bytes")
        with self._lock, self._context.entered():
            address = int(self._driver.call("cuMemAddressReserve", nbytes, self.page, 0, 0, asked=nbytes))
            self._ranges[address] = nbytes
            return address

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range back; where the driver fails, it is still reserved and may be given back again."""
        with self._lock:
            if self._ranges.get(address) != nbytes:
                raise InvalidRequest("range", (hex(address), nbytes), f"a range that {self._device!r} has reserved")
            if not self._driver.gone():
                with self._context.entered():
                    if not self._paging.bare(address, nbytes):
                        raise InvalidRequest("range", (hex(address), nbytes), "a range where nothing is mapped")
                    self._driver.call("cuMemAddressFree", address, nbytes)
            del self._ranges[address]

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        """Change what lies where."""
        with self._lock:
            for address, nbytes in (*into, *((to, nbytes) for (_, nbytes), to in moves)):
                self._check(address, nbytes)
            if self._driver.gone() and not into and not moves:
                self._paging.forget()
                return Remapped(0, len(out), 0)
            with self._context.entered():
                users = [self._context.device, *self._peers]
                moved, unmapped, mapped, failed = self._paging.remap(moves, out, into, users, self._step)
                error: AsyncmemError | None = failed
                # Who only gives back cannot be out of memory.
                if failed is not None and failed.code == OUT_OF_MEMORY and (into or moves):
                    error = self._driver.out_of_memory(sum(nbytes for _, nbytes in into[mapped:]))
                    error.__cause__ = failed
                return Remapped(moved, unmapped, mapped, error)

    def _check(self, address: int, nbytes: int) -> None:
        inside = any(start <= address and address + nbytes <= start + size for start, size in self._ranges.items())
        if not inside or nbytes <= 0 or (address | nbytes) % self.page:
            raise InvalidRequest("into", (hex(address), nbytes), "whole pages of a reserved range")

    def grant(self, peers: Sequence[int]) -> None:
        """Let other devices use all that is mapped, now and later; all of them or none."""
        with self._lock:
            try:
                self._paging.allow(peers, True, self._step)
            except BaseException:
                self._forbid(peers)
                raise
            self._peers += peers

    def revoke(self, peers: Sequence[int]) -> None:
        """Take a grant back that another device could not carry out."""
        with self._lock:
            self._peers = [peer for peer in self._peers if peer not in peers]
            self._forbid(peers)

    def _forbid(self, peers: Sequence[int]) -> None:
        with contextlib.suppress(AsyncmemError):
            self._paging.allow(peers, False, self._step)


MIB: Final = 1 << 20

LARGEST: Final = 2048 * MIB
"""Bytes of the largest handle: the longest call, its release, may take some 2 ms."""


def handles(address: int, nbytes: int) -> Iterator[Span]:
    """Cut a segment into as few handles as there can be."""
    for begin in range(0, nbytes, LARGEST):
        yield address + begin, min(LARGEST, nbytes - begin)


class VirtualSegments(PagedMemory, Source):
    """Maps segments of one device in ranges of its own. The caller makes the context current."""

    def __init__(
        self, device: str, driver: Driver, context: Context, page: int, peers: Sequence[int], *, capacity: int
    ) -> None:
        """Reserve nothing yet. Ranges have twice what there is: holes between segments never stand in the way."""
        super().__init__(device, driver, context, page, peers)
        self._range_bytes = -(-2 * capacity // page) * page
        self._space = Ranges()
        # Of takes that failed, and could not be undone either: their addresses, and what is mapped there.
        self._remains: list[tuple[int, int, list[Span]]] = []

    def take(self, nbytes: int, stream: int) -> tuple[int, list[Span]]:
        """Map memory and return its address and what is mapped there; usable by every stream at once."""
        del stream
        with self._lock:
            self._clear_remains()
            address = self._reserve(nbytes)
            spans = list(handles(address, nbytes))
            done = self.remap((), spans)
            if done.error is None:
                return address, spans
            self._remains.append((address, nbytes, spans[: done.mapped]))
            self._clear_remains()
            if isinstance(done.error, OutOfMemoryError):
                raise self._driver.out_of_memory(nbytes) from done.error  # what is free without the part that was taken
            raise done.error

    def give_back(self, segment: Segment) -> None:
        """Unmap a segment; where that fails half way, the rest is left for the next try."""
        spans = segment.token
        assert isinstance(spans, list)
        with self._lock:
            self._unmap(spans)
            self._space.give_back(segment.address, segment.nbytes)

    def close(self) -> None:
        """Give the addresses back; there is no segment any more."""
        with self._lock:
            self._clear_remains()
            for address, nbytes in list(self._ranges.items()):
                self.unreserve(address, nbytes)
            self._space = Ranges()

    def _reserve(self, nbytes: int) -> int:
        address = self._space.take(nbytes)
        if address is None:
            length = max(self._range_bytes, nbytes)
            self._space.give_back(self.reserve(length), length)
            address = self._space.take(nbytes)
        assert address is not None
        return address

    def _unmap(self, spans: list[Span]) -> None:
        done = self.remap(spans, ())
        del spans[: done.unmapped]
        if done.error is not None:
            raise done.error

    def _clear_remains(self) -> None:
        remains, self._remains = self._remains, []
        for address, nbytes, spans in remains:
            with contextlib.suppress(AsyncmemError):
                self._unmap(spans)
            if self._paging.bare(address, nbytes):
                self._space.give_back(address, nbytes)
            else:
                self._remains.append((address, nbytes, spans))
