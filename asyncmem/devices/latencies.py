"""How long the driver takes: figures measured on an H200 (driver 580, CUDA 13.0), in seconds."""

import bisect
from dataclasses import dataclass, fields, replace
from typing import Final, TypeAlias

MIB: Final = 1 << 20

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs of bytes and seconds, in order of size. Between them lies a straight line; above, time grows with size."""


def _microseconds(*points: tuple[int, float]) -> Curve:
    return tuple((mib * MIB, microseconds * 1e-6) for mib, microseconds in points)


_GROW: Final = _microseconds((2, 34), (64, 57), (256, 186), (1024, 737))
_ALLOCATE: Final = _microseconds((2, 26), (64, 29), (256, 33), (1024, 70))
_CREATE: Final = _microseconds((2, 7), (20, 10), (256, 10), (1024, 15))
_ACCESS: Final = _microseconds((2, 18), (20, 18), (256, 37), (1024, 59))
# Measured together: 19, 73 and 233 us for 2, 256 and 1024 MiB. The longer part is the release.
_UNMAP: Final = _microseconds((2, 10), (1024, 10))
_RELEASE: Final = _microseconds((2, 9), (256, 63), (1024, 223))
_FREE: Final = _microseconds((2, 23), (64, 36), (256, 74), (1024, 231))
# Not measured: the bound between calls that block and those that do not.
_MEMORY: Final = _microseconds((0, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that each driver call takes. Calls that block have a curve over the size."""

    allocate_stream_ordered: Curve = _GROW
    """A new segment from a memory pool that has to grow."""
    allocate_virtual: Curve = _ALLOCATE
    """A new segment that is mapped."""
    allocate_direct: Curve = _ALLOCATE
    """A new segment by itself."""
    free: Curve = _FREE
    """Giving a segment back."""
    memory: Curve = _MEMORY
    """Asking how much memory there is."""
    create: Curve = _CREATE
    """Getting memory to map."""
    set_access: Curve = _ACCESS
    """Making a stretch of mapped memory usable."""
    unmap: Curve = _UNMAP
    """Taking memory away from its addresses."""
    release: Curve = _RELEASE
    """Giving memory back that is mapped nowhere."""
    map: float = 0.6e-6
    """Putting memory behind addresses."""
    record: float = 136e-9
    """Recording a fence."""
    query: float = 96e-9
    """Asking whether a fence is done."""
    wait: float = 116e-9
    """Making a stream wait for a fence."""

    @classmethod
    def zero(cls) -> "Latencies":
        """Calls that take no time at all, so that only work moves the clock."""
        return replace(cls.blocking(0.0), map=0.0, record=0.0, query=0.0, wait=0.0)

    @classmethod
    def blocking(cls, seconds: float) -> "Latencies":
        """Each blocking call takes `seconds`, whatever the size; the others as measured."""
        same: Curve = ((0, seconds),)
        return cls(
            allocate_stream_ordered=same, allocate_virtual=same, allocate_direct=same, free=same, memory=same,
            create=same, set_access=same, unmap=same, release=same,
        )  # fmt: skip

    def of(self, call: str, nbytes: int = 0) -> float:
        """Return the seconds that a call takes; unknown calls take none."""
        if call not in _NAMES:
            return 0.0
        cost: Curve | float = getattr(self, call)
        return _on_curve(cost, nbytes) if isinstance(cost, tuple) else cost


_NAMES: Final = frozenset(one.name for one in fields(Latencies))


def _on_curve(curve: Curve, nbytes: int) -> float:
    at = bisect.bisect_left(curve, (nbytes, 0.0))
    if at == 0:
        return curve[0][1]
    low_size, low = curve[at - 1]
    if at == len(curve):
        return low * nbytes / low_size if low_size else low
    high_size, high = curve[at]
    return low + (high - low) * (nbytes - low_size) / (high_size - low_size)
