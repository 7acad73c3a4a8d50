"""What the simulated device writes down of each driver call, and the faults it was told to have."""

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from asyncmem.devices.clock import Clock
from asyncmem.devices.latencies import Latencies
from asyncmem.errors import DeviceError, InvalidRequest

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
        if error is not None:
            raise error

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
