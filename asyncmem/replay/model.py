"""The device that a program is replayed on: how late it is, how fast the program goes, and what its driver charges."""

import math
from dataclasses import dataclass, field

from asyncmem.errors import InvalidRequest
from asyncmem.replay.costs import CALLS, H200, Costs


@dataclass(frozen=True, kw_only=True)
class Model:
    """A device that does its work a fixed time after it was given it.

    Attributes:
        lag: How late it is, in seconds: the memory that a program frees is in use for so long.
        pace: What the recorded times are multiplied by; 0 replays by the order of events alone.
        costs: What each driver call costs. It is counted, and not added to the program's time.

    Raises:
        InvalidRequest: A number is negative or not finite.
    """

    lag: float = 0.0
    pace: float = 1.0
    costs: Costs = field(default_factory=lambda: H200)

    def __post_init__(self) -> None:
        for name, value in (("lag", self.lag), ("pace", self.pace)):
            if not 0 <= value < math.inf:
                raise InvalidRequest(name, value, "a number from 0")

    def curves(self) -> list[list[tuple[int, float]]]:
        """Answer the costs as the core takes them: in microseconds, in the order of `CALLS`."""
        return [[(nbytes, ns / 1000) for nbytes, ns in self.costs.get(call, ())] for call in CALLS]
