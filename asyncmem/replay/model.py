"""The device that a program is replayed on: how late it is, how fast the program goes, and what its driver charges."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

from asyncmem.errors import InvalidRequest

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Points of rising size: bytes, and nanoseconds for one call. Between them the cost is a straight line."""

Costs: TypeAlias = Mapping[str, Curve]
"""A curve for each of the calls; a call that has none is free."""

CALLS: Final = (
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemAlloc",
    "cuMemFree",
    "cuEventRecord",
    "cuStreamWaitEvent",
)
"""The calls that a pool makes, in the order of `Call` in core/costs.hpp."""

_MIB: Final = 1 << 20

H200: Final[Costs] = {
    "cuMemCreate": ((2 * _MIB, 7_000), (20 * _MIB, 10_000), (256 * _MIB, 8_000), (1024 * _MIB, 15_000)),
    "cuMemMap": ((2 * _MIB, 600),),
    # Neighbours share a call that sets access or unmaps, but each handle costs as if it were alone.
    "cuMemSetAccess": ((2 * _MIB, 18_000), (20 * _MIB, 18_000), (256 * _MIB, 37_000), (1024 * _MIB, 59_000)),
    # Unmapping and releasing were measured together; how they share it is an assumption.
    "cuMemUnmap": ((2 * _MIB, 10_200), (1024 * _MIB, 112_400)),
    "cuMemRelease": ((2 * _MIB, 8_800), (256 * _MIB, 37_400), (1024 * _MIB, 120_600)),
    "cuMemAllocAsync": ((2 * _MIB, 34_000), (64 * _MIB, 57_000), (256 * _MIB, 186_000), (1024 * _MIB, 737_000)),
    # Freeing what is then trimmed out of the driver's pool was not measured; it is taken to be as dear as cuMemFree.
    "cuMemFreeAsync": ((2 * _MIB, 23_000), (64 * _MIB, 36_000), (256 * _MIB, 74_000), (1024 * _MIB, 231_000)),
    "cuMemAlloc": ((2 * _MIB, 26_000), (64 * _MIB, 29_000), (256 * _MIB, 33_000), (1024 * _MIB, 70_000)),
    "cuMemFree": ((2 * _MIB, 23_000), (64 * _MIB, 36_000), (256 * _MIB, 74_000), (1024 * _MIB, 231_000)),
    "cuEventRecord": ((0, 136),),
    "cuStreamWaitEvent": ((0, 116),),
}
"""NVIDIA H200, driver 580.159, CUDA 13.0, called from C."""


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


_EXPECTED: Final = 'an object such as {"cuMemMap": [[2097152, 600]]}: points of rising bytes and nanoseconds by call'


def read_costs(path: str | PathLike[str]) -> Costs:
    """Read costs from a file of JSON: points of bytes and nanoseconds by the call's name; others are an H200's.

    Raises:
        InvalidRequest: The file is no such object, or names another call.
        OSError: The file cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("costs", str(path), _EXPECTED) from error
    if not isinstance(found, dict):
        raise InvalidRequest("costs", str(path), _EXPECTED)
    return {**H200, **{call: _curve(call, points) for call, points in found.items()}}


def _curve(call: str, points: object) -> Curve:
    if call not in CALLS:
        raise InvalidRequest("costs", call, f"one of {', '.join(CALLS)}")
    if not isinstance(points, Sequence) or not points or not all(map(_is_point, points)):
        raise InvalidRequest(f"costs of {call}", points, "points such as [[2097152, 600]]")
    curve = tuple((nbytes, float(ns)) for nbytes, ns in points)
    if any(one[0] >= next_one[0] for one, next_one in pairwise(curve)):
        raise InvalidRequest(f"costs of {call}", points, "points of rising bytes")
    return curve


def _is_point(point: object) -> bool:
    match point:
        case [int(nbytes), int(ns) | float(ns)]:
            return 0 <= nbytes < 1 << 62 and 0 <= ns < math.inf and not isinstance(ns, bool)
    return False
