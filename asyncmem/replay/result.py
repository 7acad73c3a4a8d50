"""What became of a program that was replayed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from asyncmem.core import ReplaySample
from asyncmem.figures import format_size
from asyncmem.options import PoolOptions
from asyncmem.replay.model import Model
from asyncmem.replay.policy import Policy


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcome(ABC):
    """What every replay answers. Sizes are bytes, times seconds.

    Attributes:
        name: The trace's.
        limit: The most that might be reserved, or None.
        completed: Whether every request was served. The first that was not ends the replay.
        failed_row: The trace's row of that request, or None,
        failed_bytes: and how much was asked for.
        duration: The time that was recorded, at the pace of the replay.
        peak_requested: The most that was live at once, as it was asked for: no allocator can reserve less.
        peak_active: The most that was live at once, as it was rounded.
        peak_reserved: The most that was had from the driver at once.
        takes: Allocations that were served.
        frees: How many of them were freed.
        waits: How often the program waited for memory, mostly because it was still in use,
        wait_seconds: and how long in all.
        ns_per_op: What an allocation or a free took here, in nanoseconds, without what a loop takes that does neither.
    """

    name: str
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
    waits: int
    wait_seconds: float
    ns_per_op: float

    @property
    def reserved_over_requested(self) -> float:
        """What was reserved for a byte that was needed, at the peaks of both; 1 where nothing was needed."""
        return self.peak_reserved / self.peak_requested if self.peak_requested else 1.0

    def __repr__(self) -> str:
        end = "" if self.completed else f", out of memory in row {self.failed_row}"
        return (
            f"<asyncmem.replay.{type(self).__name__} {self.name!r} {self._by}: {format_size(self.peak_reserved)} "
            f"reserved for {format_size(self.peak_requested)}{end}>"
        )

    @property
    @abstractmethod
    def _by(self) -> str:
        """What it was replayed with or on, for the repr."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Replay(Outcome):
    """What became of a program that was replayed on a model: `Outcome`, and what only a model shows.

    Allocations of no bytes are not counted.

    Attributes:
        policy: How memory was had.
        model: What it was had from.
        misses: How many allocations found nothing ready.
        foreign: How many made a stream wait for another.
        driver_calls: How often each call of the driver was made that was made at all.
        driver_seconds: What they cost, by the model.
        largest_hole: When the most was reserved, the largest stretch of it that was in no use,
        idle: all that was in no use,
        stranded: by stream, what only that stream could have taken then without waiting,
        fragmentation: and the sum of the squares of all stretches over the square of what was reserved, as PyTorch's
            viewer defines it.
        samples: What it looked like over time; empty unless they were asked for.
    """

    policy: Policy
    model: Model
    misses: int
    foreign: int
    driver_calls: Mapping[str, int]
    driver_seconds: float
    largest_hole: int
    idle: int
    stranded: tuple[int, ...]
    fragmentation: float
    samples: tuple[ReplaySample, ...]

    @property
    def _by(self) -> str:
        return f"with {self.policy}"


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LiveReplay(Outcome):
    """What became of a program that was replayed by a real pool: `Outcome`, and where that was.

    A wait is an allocation that took longer than a millisecond, where the device is late; `ns_per_op` is that of the
    others, growth included.

    Attributes:
        device: The name of the pool's device.
        options: The pool's.
        lag: How late the device was kept.
        driver_calls: Calls to the device's driver.
    """

    device: str
    options: PoolOptions
    lag: float
    driver_calls: int

    @property
    def _by(self) -> str:
        return f"on {self.device}"
