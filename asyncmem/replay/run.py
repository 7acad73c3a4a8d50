"""Runs a trace through a heap of its own, over a model of the device; finds the smallest memory that it fits into."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from asyncmem.core import DRIVER_CALLS, ReplaySample, ReplayTally, replay_steps
from asyncmem.errors import BadTrace, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pool.opening import heap_settings
from asyncmem.replay.model import Model, Policy
from asyncmem.replay.trace import Trace
from asyncmem.text import quoted
from asyncmem.units import parse_size


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcome(ABC):
    """What every replay returns. Sizes are bytes, times seconds.

    Attributes:
        name: The trace's.
        limit: The most that might be reserved, or None.
        failed_row: The trace's row of the first request that was not served, which ends the replay; or None,
        failed_bytes: and how much was asked for.
        duration: The time that was recorded, at the pace of the replay.
        peak_requested: The most that was live at once, as it was asked for: no allocator can reserve less.
        peak_active: The most that was live at once, as it was rounded.
        peak_reserved: The most that was reserved at once.
        takes: Allocations that were served.
        frees: How many of them were freed.
        waits: How often the program waited for memory, mostly because it was still in use,
        wait_seconds: and how long in all.
        ns_per_op: What an allocation or a free took here, in nanoseconds, without what a loop takes that does neither.
    """

    name: str
    limit: int | None
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
    def completed(self) -> bool:
        """Whether every request was served."""
        return self.failed_row is None

    @property
    def reserved_over_requested(self) -> float:
        """What was reserved for a byte that was needed, at the peaks of both; 1 where nothing was needed."""
        return self.peak_reserved / self.peak_requested if self.peak_requested else 1.0

    def __repr__(self) -> str:
        end = "" if self.completed else f", out of memory in row {self.failed_row}"
        return (
            f"<asyncmem.replay.{type(self).__name__} {quoted(self.name)} {self._by}: {format_size(self.peak_reserved)} "
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
        policy: How it got memory.
        model: The device.
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


PAGE: Final = 2 << 20
"""What memory of a GPU comes in."""

_MOST_STREAMS: Final = 1 << 12
"""Each may hold memory that all others are searched for."""
_MOST_PAGES: Final = 1 << 21
"""Of a program that needs more of them than any device has, pages are larger: they are gone through one by one."""

PRECISION: Final = 1000
"""A limit is found to this part of what was needed."""

_TIMED: Final = 3  # runs whose fastest counts: one alone says more of its neighbours on the machine


class Runner:
    """A trace made ready to be run again and again with one policy on one model.

    Args:
        trace: What the program did.
        policy: How it gets memory.
        model: The device.

    Raises:
        BadTrace: The program has more streams than can be replayed.
    """

    def __init__(self, trace: Trace, policy: Policy, model: Model) -> None:
        self.trace = trace
        self.policy = policy
        self.model = model
        if not isinstance(trace, Trace):
            raise InvalidRequest("trace", trace, "a Trace, as `asyncmem.replay.read(path)` returns")
        if not isinstance(policy, Policy):
            raise InvalidRequest("policy", policy, 'a Policy, such as Policy.parse("paged")')
        if not isinstance(model, Model):
            raise InvalidRequest("model", model, "a Model")
        self._steps = trace.steps()
        if trace.streams > _MOST_STREAMS:
            raise BadTrace(f"{trace.streams:,} streams", f"at most {_MOST_STREAMS:,} to replay")
        self._page = PAGE
        while self._page * _MOST_PAGES < trace.peak_requested:
            self._page *= 2

    def run(self, *, limit: int | None = None, sample_us: float = 0, survey_at: int = 0) -> ReplayTally:
        """Run it once.

        Args:
            limit: The most that may be reserved; memory comes in whole pages.
            sample_us: Program time from one sample to the next; 0 for none.
            survey_at: Look at what is in no use when so much is reserved for the first time.
        """
        limit = None if limit is None else limit - limit % self._page
        return replay_steps(
            self._steps,
            slots=self.trace.allocations,
            streams=max(1, self.trace.streams),
            costs=self.model.curves(),
            policy=self._settings(limit),
            lag_us=self.model.lag * 1e6,
            pace=self.model.pace,
            sample_us=sample_us,
            survey_at=survey_at,
        )

    def _settings(self, limit: int | None) -> dict[str, object]:
        policy = self.policy
        options = policy.options.replace(segments="direct") if policy.segments == "direct" else policy.options
        return {
            **heap_settings(options),
            "limit": limit, "limited": limit is not None, "paged": policy.segments == "paged",
            "joins": policy.segments == "stream_ordered",
            "direct": policy.segments == "direct", "granularity": self._page, "page": self._page,
            "segment_size": policy.options.segment_size, "take_back": policy.take_back,
            "patience": policy.patience.seconds, "patience_share": policy.patience.share, "adaptive": False,
        }  # fmt: skip


def replay(
    trace: Trace,
    policy: Policy | None = None,
    model: Model | None = None,
    *,
    limit: int | None = None,
    samples: int = 0,
) -> Replay:
    """Replay a program: return what a pool would have reserved for it, and what that would have cost.

    The same arguments return the same figures, but for `ns_per_op`. It takes well under a second for a hundred
    thousand allocations, whatever time they took.

    Args:
        trace: What the program did.
        policy: How it gets memory; None by pages below reserved addresses.
        model: The device; None for an H200 that is never late.
        limit: The most that may be reserved, in bytes. Memory that is still in use is waited for; where that would not
            do, the replay ends.
        samples: How many moments to look at, about, for a plot.

    Raises:
        BadTrace: The program has more than 4,096 streams.
    """
    runner = Runner(trace, policy or Policy(), model or Model())
    limit = None if limit is None else parse_size(limit, what="limit")
    timed = [runner.run(limit=limit) for _ in range(_TIMED)]
    gap = timed[0].end_us / samples if samples else 0.0
    # The peak is known now, so this time it is noticed when it comes.
    tally = runner.run(limit=limit, sample_us=gap, survey_at=timed[0].peak_reserved)
    spent_ns = min(one.loop_ns - one.empty_loop_ns for one in timed)
    steps = tally.takes + tally.frees
    return Replay(
        name=trace.name,
        policy=runner.policy,
        model=runner.model,
        limit=limit,
        failed_row=None if tally.completed else trace.row_of(tally.failed_step),
        failed_bytes=tally.failed_bytes,
        duration=trace.duration * runner.model.pace,
        peak_requested=trace.peak_requested,
        peak_active=tally.peak_live,
        peak_reserved=tally.peak_reserved,
        takes=tally.takes,
        frees=tally.frees,
        misses=tally.misses,
        foreign=tally.foreign,
        driver_calls={call: number for call, number in zip(DRIVER_CALLS, tally.calls, strict=True) if number},
        driver_seconds=tally.driver_us / 1e6,
        waits=tally.waits,
        wait_seconds=tally.wait_us / 1e6,
        largest_hole=tally.waste.largest,
        idle=tally.waste.nbytes,
        stranded=tally.waste.stranded,
        fragmentation=tally.waste.squares / max(1, tally.peak_reserved) ** 2,
        ns_per_op=max(0.0, spent_ns) / steps if steps else 0.0,
        samples=tally.samples,
    )


def fit(trace: Trace, policy: Policy | None = None, model: Model | None = None, *, waiting: float = math.inf) -> int:
    """Return the smallest limit, in bytes, under which the replay of a program completes.

    It is found by halving, to a thousandth of the most that was requested. A slightly larger limit may fail all the
    same: where things lie changes with it. The one that is answered has been tried.

    Args:
        trace: What the program did.
        policy: How it gets memory; None by pages below reserved addresses.
        model: The device; None for an H200 that is never late.
        waiting: The share of its time that the program may wait for memory that is in use, all waits together.
    """
    model = model or Model()
    runner = Runner(trace, policy or Policy(), model)
    if not waiting >= 0:
        raise InvalidRequest("waiting", waiting, "a share from 0")
    most_us = waiting * trace.duration * model.pace * 1e6 if waiting < math.inf else math.inf

    def fits(limit: int) -> bool:
        found = runner.run(limit=limit)
        return found.completed and found.wait_us <= most_us

    need = trace.peak_requested
    if fits(need):
        return need
    low, high = need, runner.run().peak_reserved
    while not fits(high):
        low, high = high, high + need
    while high - low > max(need / PRECISION, 1):
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
