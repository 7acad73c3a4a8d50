"""The smallest memory that a program fits into."""

from typing import Final

from asyncmem.replay.model import Model
from asyncmem.replay.policy import Policy
from asyncmem.replay.run import Runner
from asyncmem.replay.trace import Trace

PRECISION: Final = 1000
"""A limit is found to this part of what was needed."""


def fit(trace: Trace, policy: Policy | None = None, model: Model | None = None) -> int:
    """Answer the smallest limit, in bytes, under which the replay of a program completes.

    It is found by halving, to a thousandth of the most that was requested. A slightly larger limit may fail all the
    same: where things lie changes with it. The one that is answered has been tried.
    """
    runner = Runner(trace, policy or Policy(), model or Model())
    need = trace.peak_requested
    if runner.run(limit=need).completed:
        return need
    low, high = need, runner.run().peak_reserved
    while not runner.run(limit=high).completed:
        low, high = high, high + need
    while (high - low) * PRECISION > need:
        middle = (low + high) // 2
        if runner.run(limit=middle).completed:
            high = middle
        else:
            low = middle
    return high
