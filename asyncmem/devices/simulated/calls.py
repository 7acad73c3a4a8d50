"""Driver calls of the simulated device: how long they take, the log of them, and the faults it was told to have."""

import bisect
import threading
from collections import Counter, deque
from dataclasses import dataclass, fields, replace
from typing import Final, TypeAlias

from asyncmem.devices.simulated.timeline import Clock
from asyncmem.errors import DeviceError, InvalidRequest

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


ANY: Final = "*"

_KEPT: Final = 65_536


@dataclass(frozen=True, slots=True)
class Call:
    """One driver call: its name, the `threading.get_ident()` of its caller, its bytes, and when it began (seconds)."""

    name: str
    thread: int
    nbytes: int
    at: float


@dataclass(slots=True)
class _Fault:
    name: str
    skip: int
    times: int
    error: Exception | None


class CallLog:
    """Counts and keeps calls, takes their time, and raises in those that are to fail."""

    def __init__(self, device: str, clock: Clock, latencies: Latencies) -> None:
        """Serve the device of that name."""
        self.recent: deque[Call] = deque(maxlen=_KEPT)
        self.counts: Counter[str] = Counter()
        self._device = device
        self._clock = clock
        self._latencies = latencies
        self._faults: list[_Fault] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and call the device.
        self._lock = threading.RLock()

    def enter(self, name: str, nbytes: int = 0, *, cost: str = "") -> None:
        """Note a call and take its time; `cost` names its latency, if that is not `name`.

        Raises:
            Exception: What `fail` was given. The device has not begun with the call then.
        """
        with self._lock:
            self.recent.append(Call(name, threading.get_ident(), nbytes, self._clock.now()))
            self.counts[name] += 1
            error = self._due_fault(name)
        self._clock.spend(self._latencies.of(cost or name, nbytes))
        try:
            if error is not None:
                raise error
        finally:
            del error  # which would keep the frame that keeps it

    def fail(self, name: str, nth: int, times: int, error: Exception | None) -> None:
        """Let the `nth` call from now on of that name, and the `times` - 1 after it, raise."""
        if nth < 1 or times < 1:
            raise InvalidRequest("nth, times", (nth, times), "numbers from 1")
        with self._lock:
            self._faults.append(_Fault(name, nth - 1, times, error))

    def _due_fault(self, name: str) -> Exception | None:
        due = None
        for fault in list(self._faults):
            if fault.name not in (name, ANY):
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            due = due or fault
        if due is None:
            return None
        due.times -= 1
        if due.times == 0:
            self._faults.remove(due)
        return due.error or DeviceError(name, code=999, code_name="SIMULATED_FAULT", device=self._device)
