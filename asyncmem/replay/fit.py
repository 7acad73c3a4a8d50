"""The smallest memory that a program fits into."""

import math
from typing import Final

from asyncmem.replay.model import Model
from asyncmem.replay.policy import Policy
from asyncmem.replay.run import Runner
from asyncmem.replay.trace import Trace

PRECISION: Final = 1000
"""A limit is found to this part of what was needed."""


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
