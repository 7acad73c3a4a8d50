"""Runs a trace through a heap of its own, over a model of the device; finds the smallest memory that it fits into."""

import math
from typing import Final

import numpy as np

from asyncmem.core import ReplayTally, replay_steps
from asyncmem.pool.policy import heap_settings
from asyncmem.replay.columns import Op
from asyncmem.replay.model import CALLS, Model
from asyncmem.replay.policy import Policy
from asyncmem.replay.result import Replay
from asyncmem.replay.trace import Trace

PAGE: Final = 2 << 20
"""What memory of a GPU comes in."""

PRECISION: Final = 1000
"""A limit is found to this part of what was needed."""

_TIMED: Final = 3  # runs whose fastest counts: one alone says more of its neighbours on the machine


class Runner:
    """A trace made ready to be run again and again with one policy on one model.

    Args:
        trace: What the program did.
        policy: How its memory is had.
        model: What it is had from.
    """

    def __init__(self, trace: Trace, policy: Policy, model: Model) -> None:
        self.trace = trace
        self.policy = policy
        self.model = model
        self._steps = trace.steps()

    def run(self, *, limit: int | None = None, sample_us: float = 0, survey_at: int = 0) -> ReplayTally:
        """Run it once.

        Args:
            limit: The most that may be reserved; memory comes in whole pages.
            sample_us: Program time from one sample to the next; 0 for none.
            survey_at: Look at what is in no use when so much is reserved for the first time.
        """
        limit = None if limit is None else limit - limit % PAGE
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
            "limit": limit, "limited": limit is not None, "paged": policy.segments == "virtual",
            "direct": policy.segments == "direct", "granularity": PAGE, "page": PAGE,
            "segment_size": policy.options.segment_size, "take_back": policy.take_back,
            "patience": policy.patience.seconds, "patience_share": policy.patience.share, "adaptive": False,
        }  # fmt: skip

    def row(self, step: int) -> int:
        """Answer the trace's row of a step."""
        return int(np.flatnonzero(self.trace.op <= Op.FREE)[step])


def replay(
    trace: Trace,
    policy: Policy | None = None,
    model: Model | None = None,
    *,
    limit: int | None = None,
    samples: int = 0,
) -> Replay:
    """Replay a program: answer what a pool would have reserved for it, and what that would have cost.

    The same arguments answer the same figures, but for `ns_per_op`. It takes well under a second for a hundred
    thousand allocations, whatever time they took.

    Args:
        trace: What the program did.
        policy: How its memory is had; None by pages below reserved addresses.
        model: What it is had from; None for an H200 that is never late.
        limit: The most that may be reserved, in bytes. Memory that is still in use is waited for; where that would not
            do, the replay ends.
        samples: How many moments to look at, about, for a plot.
    """
    runner = Runner(trace, policy or Policy(), model or Model())
    timed = [runner.run(limit=limit) for _ in range(_TIMED)]
    gap = timed[0].end_us / samples if samples else 0.0
    # The peak is known now, so this time it is noticed when it comes.
    found = runner.run(limit=limit, sample_us=gap, survey_at=timed[0].peak_reserved)
    return _result(runner, limit, found, min(one.loop_ns - one.empty_loop_ns for one in timed))


def _result(runner: Runner, limit: int | None, tally: ReplayTally, spent_ns: float) -> Replay:
    steps = tally.takes + tally.frees
    return Replay(
        name=runner.trace.name,
        policy=runner.policy,
        model=runner.model,
        limit=limit,
        completed=tally.completed,
        failed_row=None if tally.completed else runner.row(tally.failed_step),
        failed_bytes=tally.failed_bytes,
        duration=runner.trace.duration * runner.model.pace,
        peak_requested=runner.trace.peak_requested,
        peak_active=tally.peak_live,
        peak_reserved=tally.peak_reserved,
        takes=tally.takes,
        frees=tally.frees,
        misses=tally.misses,
        foreign=tally.foreign,
        driver_calls={call: number for call, number in zip(CALLS, tally.calls, strict=True) if number},
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
    """Answer the smallest limit, in bytes, under which the replay of a program completes.

    It is found by halving, to a thousandth of the most that was requested. A slightly larger limit may fail all the
    same: where things lie changes with it. The one that is answered has been tried.

    Args:
        trace: What the program did.
        policy: How its memory is had; None by pages below reserved addresses.
        model: What it is had from; None for an H200 that is never late.
        waiting: The share of its time that the program may wait for memory that is in use, all waits together.
    """
    model = model or Model()
    runner = Runner(trace, policy or Policy(), model)
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
