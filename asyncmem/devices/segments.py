"""The segments of one device that are out: what may be asked for, what may be given back, and whose an address is."""

from __future__ import annotations

import bisect
import threading

from asyncmem.devices.base import Segment
from asyncmem.devices.pages import PAGE
from asyncmem.errors import InvalidRequest


class SegmentBook:
    """Knows segments of whole pages of host memory by their addresses."""

    def __init__(self, device: str, kinds: tuple[str, ...]) -> None:
        """Serve the device of that name, which has these kinds of segments."""
        self.device = device
        self._kinds = kinds
        self._starts: list[int] = []
        self._segments: list[Segment] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and give back.
        self._lock = threading.RLock()

    def order(self, nbytes: int, kind: str) -> tuple[int, str]:
        """Return the whole pages and the kind that a request means.

        Raises:
            InvalidRequest: It has no bytes, or the kind is unknown.
        """
        if nbytes <= 0:
            raise InvalidRequest("nbytes", nbytes, "a positive number of bytes")
        if kind not in ("auto", *self._kinds):
            raise InvalidRequest("kind", kind, f"one of {('auto', *self._kinds)}")
        return -(-nbytes // PAGE) * PAGE, self._kinds[0] if kind == "auto" else kind

    def enlist(self, segment: Segment) -> None:
        """Note a segment that is out."""
        with self._lock:
            at = bisect.bisect_left(self._starts, segment.address)
            self._starts.insert(at, segment.address)
            self._segments.insert(at, segment)

    def withdraw(self, segment: Segment) -> None:
        """Strike a segment off, before its address can be somebody else's.

        Raises:
            InvalidRequest: It is not out.
        """
        with self._lock:
            at = bisect.bisect_left(self._starts, segment.address)
            if self._segments[at : at + 1] != [segment]:
                raise InvalidRequest("segment", segment, f"a segment of {self.device!r} that is not given back yet")
            del self._starts[at], self._segments[at]

    def find(self, address: int, nbytes: int) -> Segment | None:
        """Return the segment in which a range lies as a whole, if there is one."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            one = self._segments[at] if at >= 0 else None
            return one if one is not None and address + nbytes <= one.address + one.nbytes else None
