"""Addresses of a simulated device: where segments without memory lie, and what is mapped in reserved ranges."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Remapped
from asyncmem.devices.host_memory import Pages, bytes_at
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.lazy import np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from asyncmem.devices.base import Move, Span
    from asyncmem.devices.simulated.calls import CallLog
    from asyncmem.devices.simulated.timeline import Timeline

# High enough to be no address of this process's heap, so that touching one by mistake fails at once.
_FIRST: Final = 0x2000_0000_0000
_APART: Final = 0x0100_0000_0000
# Reserved ranges are several times as large as their device.
_FIRST_RANGE: Final = 0x0001_0000_0000_0000
_RANGES_APART: Final = 0x4000_0000_0000


class InventedAddresses:
    """Addresses with nothing behind them. A range given back is the first to be used again, as drivers do it."""

    def __init__(self, gap: int, number: int = 0, *, reserved: bool = False) -> None:
        """Leave `gap` bytes between ranges, so that running over the end of one is noticed.

        Devices of one machine have different numbers, and no address in common; nor have segments and reserved ranges.
        """
        self._gap = gap
        self._next = _FIRST_RANGE + number * _RANGES_APART if reserved else _FIRST + number * _APART
        self._sizes: dict[int, int] = {}
        self._returned: dict[int, list[int]] = defaultdict(list)

    def take(self, nbytes: int) -> int:
        """Return an address."""
        if self._returned[nbytes]:
            return self._returned[nbytes].pop()
        address = self._next
        self._next += nbytes + self._gap
        self._sizes[address] = nbytes
        return address

    def give_back(self, address: int) -> None:
        """Keep the range for the next one of its size."""
        self._returned[self._sizes[address]].append(address)


@dataclass(eq=False, slots=True)
class _Memory:
    """What is mapped as one span, perhaps at several addresses, of which new work uses the latest alone."""

    address: int
    mappings: int = 1


@dataclass(eq=False)
class Paging:
    """The reserved ranges of one device, and the memory behind parts of them.

    Attributes:
        page: Bytes of the unit of spans and ranges.
        addresses: Where ranges come from.
        timeline: Hears what is mapped, and checks that what is unmapped is not in use.
        log: The device's calls.
        account: Told how many bytes are got from the device, or given back where negative; may refuse.
    """

    page: int
    addresses: InventedAddresses | Pages
    timeline: Timeline
    log: CallLog
    account: Callable[[int], None]
    _ranges: dict[int, int] = field(default_factory=dict)
    _mapped: dict[Span, _Memory] = field(default_factory=dict)
    _pages: set[int] = field(default_factory=set)  # by number, where something is mapped
    # By size; empty between remaps, unless the device took one not back.
    _spare: Counter[int] = field(default_factory=Counter)
    # Over whole operations, with their calls' time. Re-entrant for finalizers.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def reserve(self, nbytes: int) -> int:
        """Keep a range of addresses."""
        if nbytes <= 0 or nbytes % self.page:
            raise InvalidRequest("nbytes", nbytes, f"whole pages of {self.page} bytes")
        self.log.enter("reserve", nbytes)
        with self._lock:
            address = self.addresses.take(nbytes)
            self._ranges[address] = nbytes
            return address

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range back."""
        with self._lock:
            used = any(address <= one < address + nbytes for one, _ in self._mapped)
            if self._ranges.get(address) != nbytes or used:
                raise InvalidRequest("range", (hex(address), nbytes), "a reserved range where nothing is mapped")
            self.log.enter("unreserve", nbytes)
            del self._ranges[address]
            self.addresses.give_back(address)

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move]) -> Remapped:
        """Change what lies where.

        Raises:
            InvalidRequest: A span is not mapped as one, or is no free part of a range; nothing is done then.
            StreamOrderError: The host has not seen all work on what is unmapped done.
        """
        with self._lock:
            self._check(out, into, moves)
            moved = unmapped = mapped = 0
            error: DeviceError | OutOfMemoryError | None = None
            sources = {(to, nbytes): (address, nbytes) for (address, nbytes), to in moves}
            try:
                for stretch in _stretches(sources):
                    self._show(stretch)
                    for span in stretch:
                        self._share(sources[span], span)
                    moved += len(stretch)
                for span in out:
                    self._unmap(span)
                    unmapped += 1
                for stretch in _stretches(into):
                    self._map(stretch)
                    mapped += len(stretch)
            except (DeviceError, OutOfMemoryError) as failed:
                error = failed.with_traceback(None)  # or it would keep this frame, and so itself
            try:
                self._release_spare()
            except DeviceError as failed:
                error = error or failed.with_traceback(None)
            return Remapped(moved, unmapped, mapped, error)

    def holds(self, address: int) -> bool:
        """Return whether there is memory behind an address."""
        return self.page > 0 and address // self.page in self._pages

    def _check(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move]) -> None:
        moved = [span for span, _ in moves]
        for name, spans in (("out", out), ("moves", moved)):
            if len({*spans} & self._mapped.keys()) < len(spans):
                raise InvalidRequest(name, spans, "spans that were mapped as such, each once")
        if any(self._mapped[span].address != span[0] for span in moved):
            raise InvalidRequest("moves", moves, "the latest address of each memory")
        gone = set[int]().union(*(self._numbers(*span) for span in out))
        for (_, nbytes), to in moves:
            self._check_bare("moves", to, nbytes, set())
        for address, nbytes in into:
            self._check_bare("into", address, nbytes, gone)

    def _check_bare(self, name: str, address: int, nbytes: int, gone: set[int]) -> None:
        inside = any(start <= address and address + nbytes <= start + size for start, size in self._ranges.items())
        taken = self._pages.intersection(self._numbers(address, nbytes)) - gone
        if not inside or taken or nbytes <= 0 or (address | nbytes) % self.page:
            raise InvalidRequest(name, (hex(address), nbytes), "whole pages of a reserved range, not mapped yet")

    def _unmap(self, span: Span) -> None:
        self.log.enter("unmap", span[1])
        with self.timeline.lock:
            self.timeline.checker.unmap(*span)
        memory = self._mapped.pop(span)
        memory.mappings -= 1
        self._pages.difference_update(self._numbers(*span))
        self._spare[span[1]] += memory.mappings == 0

    def _share(self, span: Span, place: Span) -> None:
        memory = self._mapped[place] = self._mapped[span]
        memory.address = place[0]
        memory.mappings += 1
        self._pages.update(self._numbers(*place))
        if isinstance(self.addresses, Pages):  # work on real bytes is done as it is submitted
            np.copyto(bytes_at(*place), bytes_at(*span))
        with self.timeline.lock:
            self.timeline.checker.move(*span, place[0])

    def _show(self, stretch: Sequence[Span]) -> None:
        for _, nbytes in stretch:
            self.log.enter("map", nbytes)
        self.log.enter("set_access", sum(nbytes for _, nbytes in stretch))

    def _map(self, stretch: Sequence[Span]) -> None:
        lacking = Counter(nbytes for _, nbytes in stretch) - self._spare
        for nbytes in lacking.elements():
            self.log.enter("create", nbytes)
            self.account(nbytes)
            self._spare[nbytes] += 1
        self._show(stretch)
        for span in stretch:
            self._spare[span[1]] -= 1
            self._mapped[span] = _Memory(span[0])
            self._pages.update(self._numbers(*span))
            with self.timeline.lock:
                self.timeline.checker.map(*span, None)

    def _numbers(self, address: int, nbytes: int) -> range:
        return range(address // self.page, (address + nbytes) // self.page)

    def _release_spare(self) -> None:
        for nbytes in list(self._spare.elements()):
            self.log.enter("release", nbytes)
            self.account(-nbytes)
            self._spare[nbytes] -= 1


def _stretches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    stretch: list[Span] = []
    for span in spans:
        if stretch and sum(stretch[-1]) != span[0]:
            yield stretch
            stretch = []
        stretch.append(span)
    if stretch:
        yield stretch
