"""Reserved ranges of addresses, and memory that is mapped and moves under them (`paging.hpp`).

The host unmaps an address when it has seen all work there done, so new memory may be used by every stream at once. What
moves is mapped at both addresses until then. Access is set for several pieces by one call, which other threads feel
when it is for very many of them.

The calls of a remap are made in one go without the interpreter's lock. One by one in Python, each had the lock change
hands twice, which other threads felt more than the calls themselves.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Remapped
from asyncmem.devices.gpu.driver import OUT_OF_MEMORY
from asyncmem.errors import AsyncmemError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.base import Move, Span
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
