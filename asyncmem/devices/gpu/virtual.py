"""Segments by mapping: physical handles under a reserved range of addresses.

A segment is made of as few handles as can be, of up to 2 GiB. To get a GiB and to give it back took, on an H200 with
driver 580 (`tests/gpu/probe.cu`), 0.12 + 0.37 ms as one handle, 0.21 + 0.52 ms as four of 256 MiB, 0.6 + 0.85 ms as 16
of 64 MiB, and 18 + 15 ms as 512 of 2 MiB. Sizes need not be round: 1384 MiB took 0.14 ms as one handle, and 0.29 as
five that were powers of two; 142 MiB took 0.04 as one and 0.18 as four. The device's own work is held up by the handle,
too: taking back 256 MiB every few milliseconds made a training step beside it 2.5 % longer in handles of 64 MiB, and
1.6 % in one of 256 MiB; 2 GiB made it 2.3 % longer in those of 256 MiB, and 1.8 % in one. The longest call is a
release, up to 1.0 ms for 1.4 GiB and 2 ms for 2.3. No call held up other threads' launches by more than 40 us, up to a
GiB, except setting the access of 512 handles at once: 230 us.

The calls of a segment are made in one go without the interpreter's lock (`mapping.hpp`). One by one in Python, each
had the lock change hands twice, which other threads felt more than the calls themselves.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncmem.devices.gpu.interface import OUT_OF_MEMORY
from asyncmem.devices.gpu.space import Space
from asyncmem.errors import AsyncmemError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncmem.devices.gpu._calls import Context, Mapping
    from asyncmem.devices.gpu.driver import Driver

MIB: Final = 1 << 20

LARGEST: Final = 2048 * MIB
"""Bytes of the largest handle: the longest call, its release, may take some 2 ms."""
ACCESS_STEP: Final = 2048 * MIB
"""Bytes whose access is set by one call: few handles, of which 512 at once were felt by other threads."""


def handle_sizes(nbytes: int) -> Iterator[int]:
    """Cut a segment into as few handles as there can be."""
    while nbytes:
        size = min(LARGEST, nbytes)
        yield size
        nbytes -= size


@dataclass(frozen=True, slots=True)
class Mapped:
    """A segment: its addresses, and what is mapped there."""

    address: int
    nbytes: int
    memory: Mapping


class VirtualSegments:
    """Maps segments of one device. The caller makes the context current."""

    def __init__(self, driver: Driver, context: Context, capacity: int, granularity: int) -> None:
        """Reserve nothing yet."""
        self._driver = driver
        self._context = context
        self._step = ACCESS_STEP if driver.joins_mappings else 0
        # Twice what there is, so that holes between segments never stand in the way.
        self._range = -(-2 * capacity // granularity) * granularity
        self._granularity = granularity
        self._space = Space()
        self._ranges: list[tuple[int, int]] = []
        self._peers: list[int] = []
        self._mappings: dict[int, Mapped] = {}
        self._remains: list[Mapped] = []  # of takes that failed, and could not be undone either: tried again
        # Over whole operations: a peer that is granted access must miss no segment. Re-entrant for finalizers.
        self._lock = threading.RLock()

    def take(self, nbytes: int, stream: int) -> tuple[int, Mapped]:
        """Map memory and return its address and what is needed to give it back; usable by every stream at once."""
        del stream
        with self._lock:
            self._clear_remains()
            address = self._reserve(nbytes)
            mapped = Mapped(address, nbytes, self._context.mapping(address))
            try:
                mapped.memory.map(handle_sizes(nbytes), [self._context.device, *self._peers], self._step)
            except BaseException as error:
                self._undo(mapped, error)
                if isinstance(error, DeviceError) and error.code == OUT_OF_MEMORY:
                    raise self._driver.out_of_memory(nbytes) from error  # what is free without the part that was taken
                raise
            self._mappings[mapped.address] = mapped
            return mapped.address, mapped

    def give_back(self, address: int, token: object) -> None:
        """Unmap a segment; where that fails half way, the rest is left for the next try."""
        del address
        assert isinstance(token, Mapped)
        with self._lock:
            token.memory.unmap()
            self._mappings.pop(token.address, None)
            self._space.add(token.address, token.nbytes)

    def grant(self, peers: Sequence[int]) -> None:
        """Let other devices use all segments, later ones too; all of them or none."""
        with self._lock:
            allowed: list[Mapped] = []
            try:
                for mapped in self._mappings.values():
                    allowed.append(mapped)
                    self._allow(mapped, peers)
            except BaseException:
                self._forbid(allowed, peers)
                raise
            self._peers += peers

    def revoke(self, peers: Sequence[int]) -> None:
        """Take a grant back that somebody else could not carry out."""
        with self._lock:
            self._peers = [peer for peer in self._peers if peer not in peers]
            self._forbid(self._mappings.values(), peers)

    def close(self) -> None:
        """Give the addresses back; there is no segment any more."""
        with self._lock:
            self._clear_remains()
            while self._ranges:
                self._driver.call("cuMemAddressFree", *self._ranges[-1])
                self._ranges.pop()
            self._space = Space()

    def _reserve(self, nbytes: int) -> int:
        address = self._space.take(nbytes)
        if address is None:
            length = max(self._range, nbytes)
            start = int(self._driver.call("cuMemAddressReserve", length, 0, 0, 0, asked=nbytes))
            self._ranges.append((start, length))
            self._space.add(start, length)
            address = self._space.take(nbytes)
        assert address is not None
        return address

    def _allow(self, mapped: Mapped, devices: Sequence[int], *, allowed: bool = True) -> None:
        mapped.memory.allow(devices, allowed, self._step)

    def _forbid(self, mappings: Iterable[Mapped], peers: Sequence[int]) -> None:
        for mapped in mappings:
            with contextlib.suppress(AsyncmemError):
                self._allow(mapped, peers, allowed=False)

    def _undo(self, mapped: Mapped, error: BaseException) -> None:
        try:
            mapped.memory.unmap()
        except DeviceError as another:
            # The addresses stay taken: something is still mapped there.
            self._remains.append(mapped)
            error.add_note(f"and what had been mapped so far could not be undone yet: {another}")
        else:
            self._space.add(mapped.address, mapped.nbytes)

    def _clear_remains(self) -> None:
        kept = []
        for mapped in self._remains:
            try:
                mapped.memory.unmap()
            except DeviceError:
                kept.append(mapped)
            else:
                self._space.add(mapped.address, mapped.nbytes)
        self._remains = kept
