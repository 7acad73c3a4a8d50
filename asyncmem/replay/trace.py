"""`Trace`: what a program allocated and freed, in its order."""

from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.files import naming
from asyncmem.replay.columns import Columns, Op, checked, live_bytes, read_npz, reserved_bytes, write_npz
from asyncmem.text import quoted


class Steps(NamedTuple):
    """What a replay does, in order: contiguous columns of one length for a compiled loop."""

    slot: NDArray[np.int32]
    """Where the loop keeps the block: the number of the allocation, below `Trace.allocations`."""
    nbytes: NDArray[np.int64]
    """What to allocate, -1 to free."""
    stream: NDArray[np.int32]
    """The stream that asks, numbered without gaps: below `Trace.streams`."""
    time_us: NDArray[np.int64]
    """When the program did it, in microseconds since it began."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """A recording of one device's allocations, checked when it is made.

    One row is one event, one column one property of it; the arrays are contiguous and cannot be written to. Every free
    follows its allocation and comes once, allocations are numbered from 0 in their order, times never decrease.

    Attributes:
        op: What happened, an `Op`; a replay repeats allocations (0) and frees (1), and leaves out the others.
        stream: Number of the stream; 0 is the default stream.
        id: Number of the allocation; -1 where the recorded allocator dealt with the driver.
        nbytes: Bytes as they were asked for; of a free those of its allocation.
        time_us: Microseconds since the recording began.
        name: What tables call it.
        device: Number of the device.
        note: What had to be repaired or is missing, in sentences; empty for a whole recording.

    Raises:
        BadTrace: The rows contradict each other; it names the first that does.
    """

    op: NDArray[np.uint8]
    stream: NDArray[np.uint16]
    id: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    time_us: NDArray[np.int64]
    _: KW_ONLY
    name: str = ""
    device: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        for name, column in checked(self.columns)._asdict().items():
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        """Count the events."""
        return self.op.size

    def __repr__(self) -> str:
        name = f" {quoted(self.name)}" if self.name else ""
        return (
            f"<asyncmem.replay.Trace{name}: {format_count(self.allocations, 'allocation')} on "
            f"{format_count(self.streams, 'stream')}, at most {format_size(self.peak_requested)} live, "
            f"{format_duration(self.duration)}>"
        )

    @property
    def columns(self) -> Columns:
        """The five columns."""
        return Columns(self.op, self.stream, self.id, self.nbytes, self.time_us)

    @property
    def allocations(self) -> int:
        """How many there are."""
        return int(np.count_nonzero(self.op == Op.ALLOCATE))

    @property
    def streams(self) -> int:
        """How many there are, the default stream among them; their numbers may have gaps."""
        return int(self._places()[-1]) + 1 if len(self) else 0

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the last event."""
        return int(self.time_us[-1]) / 1e6 if len(self) else 0.0

    @property
    def peak_requested(self) -> int:
        """The most bytes that were live at once, as they were asked for: no allocator can reserve less."""
        return int(live_bytes(self.columns).max(initial=0))

    @property
    def peak_recorded(self) -> int:
        """The most bytes that the recorded allocator had from the driver; 0 where that was not recorded."""
        return int(reserved_bytes(self.columns).max(initial=0))

    def steps(self) -> Steps:
        """Return the allocations and frees alone, made for a compiled loop."""
        kept = self.op <= Op.FREE
        nbytes = np.where(self.op == Op.FREE, -1, self.nbytes)
        return Steps(self.id[kept], nbytes[kept], self._places()[self.stream[kept]], self.time_us[kept])

    def _places(self) -> NDArray[np.int32]:
        """Return for each number of a stream which it would be if there were no gaps."""
        there = np.bincount(self.stream, minlength=1) > 0
        there[0] = True
        return np.cumsum(there, dtype=np.int32) - np.int32(1)

    def warmup(self, most: int = 32) -> tuple[tuple[int, int], ...]:
        """Return what was live when the most was: pairs of size and count, for the `warmup` of a pool.

        Args:
            most: How many pairs to return; those that come to the most bytes are, the largest first.
        """
        if not self.allocations:
            return ()
        at = int(live_bytes(self.columns).argmax()) + 1
        op, numbers = self.op[:at], self.id[:at]
        taken = numbers[op == Op.ALLOCATE]
        held = np.isin(taken, numbers[op == Op.FREE], invert=True)
        sizes, counts = np.unique(self.nbytes[:at][op == Op.ALLOCATE][held], return_counts=True)
        largest = sorted(zip(sizes.tolist(), counts.tolist(), strict=True), key=lambda one: -one[0] * one[1])
        return tuple((size, count) for size, count in largest[:most] if size)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, compressed; what was there is replaced. `load` and numpy read it.

        Raises:
            OSError: The file cannot be written.
        """
        write_npz(path, self.columns, name=self.name, device=self.device, note=self.note)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a recording that `save` wrote, or other columns of the same form; `read` knows further kinds of files.

        Raises:
            BadTrace: The file is no recording, is cut off, or contradicts itself.
            OSError: The file cannot be read.
        """
        with naming(path):
            columns, about = read_npz(path)
            return cls(*columns, **about)
