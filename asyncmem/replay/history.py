"""From what PyTorch's allocator wrote down to a trace without contradictions.

What it wrote down may lack its beginning, its times, and single kinds of events. An allocation is known by its address
alone, which is soon another's. Whatever is missing is put in or left out, and counted, so that a note can say so.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import BadTrace
from asyncmem.figures import format_count, format_size
from asyncmem.replay.columns import Columns, Op
from asyncmem.units import MAX_SIZE

EVENT_US: Final = 20
"""What an event counts for where no times were recorded; real programs come to 14 to 130."""


class Block(NamedTuple):
    """One allocation. Those made before the recording are numbered from -1 downwards until all of them are known."""

    number: int
    nbytes: int
    stream: int


class History:
    """The events of one device, told in their order: each by its address, bytes, and the handle of its stream.

    Attributes:
        repairs: How often something was missing, by the name of the sentence that says so.
    """

    def __init__(self, *, requests: bool) -> None:
        """Begin; `requests` says whether requests to free are among the events, or only their completion."""
        self.repairs: Counter[str] = Counter()
        self._requests = requests
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._allocations = 0
        self._before: dict[int, Block] = {}  # live before the recording, by address
        self._live: dict[int, Block] = {}
        self._leaving: dict[int, Block] = {}  # their free was asked for and is not complete
        self._known: set[int] = set()  # addresses of which there was any event
        self._streams = {0: 0}  # raw handles; the default stream's is 0
        self._now = 0
        self._reserved = 0
        self._reserved_before = 0

    def at(self, time_us: int) -> None:
        """Hear when the next events are, in microseconds since the recording began."""
        if time_us < self._now:
            self.repairs["back"] += 1
        else:
            self._now = time_us

    def pass_time(self) -> None:
        """Take the usual time for the next event, whose own is not known."""
        self.repairs["untimed"] += 1
        self._now += EVENT_US

    # -- what the program did --------------------------------------------------------------------------------------

    def alloc(self, address: int, nbytes: int, stream: int) -> None:
        """Note an allocation. Whatever was at its address is gone, whether or not its free was recorded."""
        lost = self._live.get(address)
        if lost is not None:
            self.repairs["free"] += 1
            self.free_requested(address, lost.nbytes, stream)
        if address in self._leaving:
            self.free_completed(address, nbytes, stream)
        block = Block(self._allocations, nbytes, self._stream(stream))
        self._allocations += 1
        self._known.add(address)
        self._live[address] = block
        self._write(Op.ALLOCATE, block)

    def free_requested(self, address: int, nbytes: int, stream: int) -> None:
        """Note that the program freed what is at an address."""
        block = self._live.pop(address, None) or self._allocated_before(address, nbytes, stream)
        if block is None:
            self.repairs["allocation"] += 1
        else:
            self._leaving[address] = block
            self._write(Op.FREE, block)

    def free_completed(self, address: int, nbytes: int, stream: int) -> None:
        """Note that the streams were seen done with what was freed; where nobody asked for the free, it is both."""
        if address not in self._leaving:
            self._miss_request(address, nbytes, stream)
        block = self._leaving.pop(address, None)
        if block is not None:
            self._write(Op.DONE, block)

    # -- what the allocator did ------------------------------------------------------------------------------------

    def grow(self, address: int, nbytes: int, stream: int) -> None:
        """Note that it took memory from the driver."""
        del address  # what matters is how much
        self._reserved += nbytes
        self._rows.append((Op.GROW, self._stream(stream), -1, nbytes, self._now))

    def shrink(self, address: int, nbytes: int, stream: int) -> None:
        """Note that it gave memory back to the driver."""
        del address
        self._reserved -= nbytes
        self._rows.append((Op.SHRINK, self._stream(stream), -1, nbytes, self._now))

    # -- how it ended ----------------------------------------------------------------------------------------------

    def end(self, live: Iterable[tuple[int, int, int]], reserved: int) -> None:
        """Compare with what the allocator had when the recording ended: what nobody had allocated was there before.

        Args:
            live: Address, bytes and stream of each allocation.
            reserved: Bytes from the driver.

        Raises:
            BadTrace: More must have been reserved at the beginning than any device has.
        """
        found = set()
        for address, nbytes, stream in live:
            found.add(address)
            if address not in self._live and self._allocated_before(address, nbytes, stream) is None:
                self.repairs["allocation"] += 1
        self.repairs["end"] += len(self._live.keys() - found)
        self._reserved_before = max(0, reserved - self._reserved)
        if self._reserved_before >= MAX_SIZE:
            raise BadTrace(format_size(self._reserved_before), f"less than {format_size(MAX_SIZE)} reserved before it")

    def columns(self) -> Columns:
        """Answer the whole history: first what was there before, in the order of addresses, then the events."""
        before = [block for _, block in sorted(self._before.items())]
        rows = [(Op.GROW, 0, -1, self._reserved_before, 0)] if self._reserved_before else []
        rows += [(Op.ALLOCATE, block.stream, block.number, block.nbytes, 0) for block in before]
        table: NDArray[Any] = np.array([*rows, *self._rows], np.int64).reshape(-1, len(Columns._fields))
        op, stream, number, nbytes, time = table.T
        places = np.empty(len(before), np.int64)
        places[[-1 - block.number for block in before]] = np.arange(len(before))
        blocks = op <= Op.DONE
        early = blocks & (number < 0)
        number[blocks] += len(before)
        number[early] = places[len(before) - 1 - number[early]]
        return Columns(op, stream, number, nbytes, time)

    def sentences(self) -> Iterator[str]:
        """Say what was missing."""
        if self._before:
            nbytes = format_size(sum(block.nbytes for block in self._before.values()))
            yield f"{format_count(len(self._before), 'allocation')} ({nbytes}) had been made before it began"
        for name, (noun, sentence) in _REPAIRS.items():
            if self.repairs[name]:
                yield f"{format_count(self.repairs[name], noun)} {sentence}"

    def _miss_request(self, address: int, nbytes: int, stream: int) -> None:
        if address in self._live or not self._requests:
            self.repairs["request"] += self._requests
            self.free_requested(address, nbytes, stream)
        elif address not in self._known:
            self._known.add(address)
            self.repairs["leaving"] += 1

    def _allocated_before(self, address: int, nbytes: int, stream: int) -> Block | None:
        # An address of which there was no event yet has belonged to one allocation since before the recording began.
        if address in self._known:
            return None
        self._known.add(address)
        block = self._before[address] = Block(-1 - len(self._before), nbytes, self._stream(stream))
        return block

    def _stream(self, handle: int) -> int:
        return self._streams.setdefault(handle, len(self._streams))

    def _write(self, op: Op, block: Block) -> None:
        self._rows.append((op, block.stream, block.number, block.nbytes, self._now))


_REPAIRS: Final = {
    "free": ("free", "missing, put in where the address was allocated again"),
    "request": ("free", "known by its completion alone"),
    "allocation": ("allocation", "missing, left out with their frees"),
    "leaving": ("free", "under way when it began, left out"),
    "end": ("allocation", "live to its end, though the allocator had freed them by then"),
    "refused": ("allocation", "that the device had no memory for, left out"),
    "synthetic": ("event", "of the allocator's own, left out"),
    "untimed": ("event", f"without a time, taken to be {EVENT_US} µs after the one before"),
    "back": ("time", "before the last one, which was taken instead"),
}
