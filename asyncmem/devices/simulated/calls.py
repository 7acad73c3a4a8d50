"""Driver calls of the simulated device: how long they take, the log of them, and its injected faults."""

import bisect
import threading
from collections import Counter, deque
from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any, Final, TypeAlias

from asyncmem.devices.simulated.timeline import Clock
from asyncmem.errors import DeviceError, InvalidRequest

MIB: Final = 1 << 20

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs of bytes and seconds, in order of size. Between them lies a straight line; above, time grows with size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that each driver call takes. Calls that block have a curve over the size."""

    allocate_stream_ordered: Curve = ((2 * MIB, 34e-6), (64 * MIB, 57e-6), (256 * MIB, 186e-6), (1024 * MIB, 737e-6))
    """A new segment from a memory pool that has to grow."""
    allocate_direct: Curve = ((2 * MIB, 26e-6), (64 * MIB, 29e-6), (256 * MIB, 33e-6), (1024 * MIB, 70e-6))
    """A new segment by itself."""
    free: Curve = ((2 * MIB, 23e-6), (64 * MIB, 36e-6), (256 * MIB, 74e-6), (1024 * MIB, 231e-6))
    """Giving a segment back."""
    memory: Curve = ((0, 20e-6),)
    """Asking how much memory there is. Not measured: the bound between calls that block and those that do not."""
    create: Curve = ((2 * MIB, 7e-6), (20 * MIB, 10e-6), (256 * MIB, 10e-6), (1024 * MIB, 15e-6))
    """Getting memory to map."""
    set_access: Curve = ((2 * MIB, 18e-6), (20 * MIB, 18e-6), (256 * MIB, 37e-6), (1024 * MIB, 59e-6))
    """Making a stretch of mapped memory usable."""
    unmap: Curve = ((2 * MIB, 10e-6), (1024 * MIB, 10e-6))
    """Taking memory away from its addresses. With the release it was 19, 73 and 233 us for 2, 256 and 1024 MiB."""
    release: Curve = ((2 * MIB, 9e-6), (256 * MIB, 63e-6), (1024 * MIB, 223e-6))
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
        curves: dict[str, Any] = {one.name: same for one in fields(cls) if isinstance(one.default, tuple)}
        return replace(cls(), **curves)

    def of(self, call: str, nbytes: int = 0) -> float:
        """Return the seconds that a call takes; unknown calls take none."""
        cost: Curve | float = getattr(self, call) if call in self.__slots__ else 0.0
        return _on_curve(cost, nbytes) if isinstance(cost, tuple) else cost


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

CALLS: Final = (
    "allocate_segment", "block", "close", "copy", "copy_in", "copy_out", "create", "create_stream", "fill",
    "free_segment", "grant_access", "launch", "launch_graph", "map", "memory", "peer_copy", "query", "record",
    "record_all", "release", "reserve", "set_access", "unmap", "unreserve", "wait",
)  # fmt: skip
"""The names of all calls."""

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
        """Make the `nth` call of that name from now on raise, and the `times` - 1 after it."""
        if name not in (*CALLS, ANY):
            raise InvalidRequest("name", name, f"one of {', '.join(CALLS)}, or {ANY!r} for any")
        try:
            right = min(index(nth), index(times)) >= 1
        except TypeError:
            right = False
        if not right:
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
