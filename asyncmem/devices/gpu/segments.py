"""The segments that a device has given out: each from a source of its kind, and each a use of the context."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Protocol

from asyncmem.devices.base import Segment
from asyncmem.devices.gpu.interface import ENDED
from asyncmem.errors import AsyncmemWarning, DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from asyncmem.devices.gpu._calls import Context


class Source(Protocol):
    """One way to get memory. It is called with the context current."""

    def take(self, nbytes: int, stream: int) -> tuple[int, object]:
        """Get memory, usable in the order of a stream; return its address and what is needed to give it back."""
        ...

    def give_back(self, address: int, token: object) -> None:
        """Give memory back, which nothing uses any more; a try that failed may be repeated."""
        ...

    def close(self) -> None:
        """Give back what is kept besides segments, of which there are none any more."""
        ...


class Segments:
    """Takes segments and gives them back. A source is made when its kind is first asked for."""

    def __init__(
        self, device: str, context: Context, makers: Mapping[str, Callable[[], Source]], *, granularity: int, most: int
    ) -> None:
        """Serve the device of that name.

        Args:
            device: For messages.
            context: What segments are uses of.
            makers: A source's maker for each kind; "auto" means the first.
            granularity: The unit of sizes, in bytes.
            most: A size that cannot be had in any case.
        """
        self._device = device
        self._context = context
        self._makers = makers
        self._granularity = granularity
        self._most = most
        self._sources: dict[str, Source] = {}
        self._out: dict[int, Segment] = {}
        self._under_way = 0  # calls that take a segment, or give one back
        self._closed = False
        # Re-entrant: a finalizer may give a segment back on a thread that is taking one.
        self._lock = threading.RLock()

    def take(self, nbytes: int, kind: str, stream: int) -> Segment:
        """Take a segment of a kind (blocks).

        Raises:
            InvalidRequest: There is no such kind, or no such size.
            OutOfMemoryError: The driver has too little.
            DeviceError: It fails; nothing is left of the try.
        """
        kind = next(iter(self._makers)) if kind == "auto" else kind
        if kind not in self._makers:
            raise InvalidRequest("kind", kind, f"one of {('auto', *self._makers)}")
        if nbytes <= 0:
            raise InvalidRequest("nbytes", nbytes, "a positive number of bytes")
        nbytes = -(-nbytes // self._granularity) * self._granularity
        if nbytes > self._most:
            raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self._device))
        with self._moving():
            with self._context.entered():
                address, token = self._source(kind).take(nbytes, stream)
            segment = Segment(address, nbytes, kind, token)
            self._context.use()
            with self._lock:
                self._out[id(segment)] = segment
        return segment

    def give_back(self, segment: Segment) -> None:
        """Give a segment back (blocks). Where the driver fails, it is still out and may be given back again.

        Raises:
            InvalidRequest: It is not out.
            DeviceError: The driver fails.
        """
        with self._moving():
            with self._lock:
                if self._out.get(id(segment)) is not segment:
                    expected = f"a segment of {self._device!r} that is not given back yet"
                    raise InvalidRequest("segment", segment, expected)
                # Not out while it goes, so that a second thread is refused; the address is nobody else's until then.
                del self._out[id(segment)]
            try:
                with self._context.entered():
                    self._sources[segment.kind].give_back(segment.address, segment.token)
            except BaseException:
                with self._lock:
                    self._out[id(segment)] = segment
                raise
            self._context.end_use()

    def forget(self, segment: Segment) -> None:
        """Take a segment for given back without a call, in a process that may make none."""
        with self._lock:
            self._out.pop(id(segment), None)

    def opened(self, kind: str) -> Source | None:
        """Return the source of a kind, if there has been a segment of it."""
        return self._sources.get(kind)

    def close(self) -> None:
        """Close the sources, now or with the last segment (blocks)."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_if_over()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Keep the context and the sources until a call is over, whoever closes the device meanwhile."""
        self._context.use()
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._close_if_over()
            self._context.end_use()

    def _close_if_over(self) -> None:
        if self._closed and not self._out and not self._under_way:
            self._close_sources()

    def _source(self, kind: str) -> Source:
        with self._lock:
            source = self._sources.get(kind)
            if source is None:
                source = self._sources[kind] = self._makers[kind]()
            return source

    def _close_sources(self) -> None:
        while self._sources:
            _, source = self._sources.popitem()
            try:
                with self._context.entered():
                    source.close()
            except DeviceError as error:
                # A lost device keeps nothing; and any other has its memory back, of which this is only the frame.
                if error.code not in ENDED:
                    warnings.warn(f"closing {self._device}: {error}", AsyncmemWarning, stacklevel=3)
