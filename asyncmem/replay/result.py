"""What became of a program that was replayed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from asyncmem.core import ReplaySample
from asyncmem.figures import format_size
from asyncmem.replay.model import Model
from asyncmem.replay.policy import Policy


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Replay:
    """What became of a program that was replayed. Sizes are bytes, times seconds.

    Attributes:
        name: The trace's.
        policy: How memory was had.
        model: What it was had from.
        limit: The most that might be reserved, or None.
        completed: Whether every request was served. The first that was not ends the replay.
        failed_row: The trace's row of that request, or None,
        failed_bytes: and how much was asked for.
        duration: The time that was recorded, at the model's pace.
        peak_requested: The most that was live at once, as it was asked for: no allocator can reserve less.
        peak_active: The most that was live at once, as it was rounded.
        peak_reserved: The most that was had from the driver at once.
        takes: Allocations of at least a byte that were served.
        frees: How many of them were freed.
        misses: How many of them found nothing ready.
        foreign: How many made a stream wait for another.
        driver_calls: How often each call of the driver was made that was made at all.
        driver_seconds: What they cost, by the model.
        waits: How often the program waited for memory that was still in use,
        wait_seconds: and how long in all.
        largest_hole: When the most was reserved, the largest stretch of it that was in no use,
        idle: all that was in no use,
        stranded: by stream, what only that stream could have taken then without waiting,
        fragmentation: and the sum of the squares of all stretches over the square of what was reserved, as PyTorch's
            viewer defines it.
        ns_per_op: What an allocation or a free took here, in nanoseconds, without what an empty loop takes.
        samples: What it looked like over time; empty unless they were asked for.
    """

    name: str
    policy: Policy
    model: Model
    limit: int | None
    completed: bool
    failed_row: int | None
    failed_bytes: int
    duration: float
    peak_requested: int
    peak_active: int
    peak_reserved: int
    takes: int
    frees: int
    misses: int
    foreign: int
    driver_calls: Mapping[str, int]
    driver_seconds: float
    waits: int
    wait_seconds: float
    largest_hole: int
    idle: int
    stranded: tuple[int, ...]
    fragmentation: float
    ns_per_op: float
    samples: tuple[ReplaySample, ...]

    @property
    def reserved_over_requested(self) -> float:
        """What was reserved for a byte that was needed, at the peaks of both; 1 where nothing was needed."""
        return self.peak_reserved / self.peak_requested if self.peak_requested else 1.0

    def __repr__(self) -> str:
        end = "" if self.completed else f", out of memory in row {self.failed_row}"
        return (
            f"<asyncmem.replay.Replay {self.name!r} with {self.policy}: {format_size(self.peak_reserved)} reserved "
            f"for {format_size(self.peak_requested)}{end}>"
        )
