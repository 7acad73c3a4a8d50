"""What devices over queues of a driver do alike, whichever driver that is."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from asyncmem.devices.base import Device, Stream
from asyncmem.devices.pages import PAGE
from asyncmem.devices.polled import PolledFence
from asyncmem.devices.watcher import Watcher
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.queues import QueueStreams

S = TypeVar("S", bound=Stream)
F = TypeVar("F", bound=PolledFence)


class Counting(Protocol):
    """The part of a driver that every device has."""

    calls: int
    """How many there have been."""


class Addressed(Protocol):
    """A buffer, or an array over one."""

    @property
    def address(self) -> int:
        """Where its first byte is."""

    @property
    def nbytes(self) -> int:
        """How many there are."""


class QueueDevice(Device, Generic[S, F]):
    """A device whose streams are queues, and of which several objects share one place."""

    granularity = PAGE
    driver: Counting
    streams: QueueStreams[S, Any, F]

    def __init__(self, index: int) -> None:
        """Begin with a name, and with nobody who waits.

        Raises:
            InvalidRequest: `index` is negative.
        """
        if index < 0:
            raise InvalidRequest("index", index, "a device number from 0")
        self.index = index
        self.name = f"{self.kind}:{index}"
        self._closed = False
        self._watcher = Watcher(f"asyncmem {self.name} fences")
        # A device that is forgotten without being closed leaves no thread either.
        weakref.finalize(self, self._watcher.stop).atexit = False

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver this object has made."""
        return self.driver.calls

    def suggest_capacity(self, nbytes: int) -> None:
        """Ignore it: the device has a size of its own."""

    def create_stream(self, name: str | None = None) -> S:
        """Make a stream with a queue of its own."""
        self.check_open()
        return self.streams.create(name)

    def record_all(self) -> F:
        """Return a fence behind everything submitted to every stream of this object, also to those that are gone.

        Queues that it was not shown are not covered.
        """
        return self.streams.record_all()

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another object for the same device, or from its page-locked memory.

        Raises:
            InvalidRequest: It is another device.
        """
        self._check_peers("source_device", [source_device])
        self.copy(target, source, nbytes, stream)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for other objects of the same device: their memory is the same.

        Raises:
            InvalidRequest: One of `peers` is another device.
        """
        self._check_peers("peers", peers)

    def close(self) -> None:
        """Wait for all work, then end the threads (blocks); twice is fine. Segments stay as they are."""
        if not self._closed:
            with contextlib.suppress(DeviceError):  # a lost device runs nothing any more
                self.record_all().block()
            self._closed = True
        self.streams.end_threads()
        self._watcher.stop()
        self._watcher.join()

    def check_open(self) -> None:
        """Refuse what needs an open device."""
        if self._closed:
            raise InvalidRequest("device", self, "a device that is open")

    @abstractmethod
    def shares_memory_with(self, peer: Device) -> bool:
        """Tell whether addresses of the other mean the same here."""

    def _check_peers(self, what: str, peers: Sequence[Device]) -> None:
        for peer in peers:
            if not self.shares_memory_with(peer):
                raise InvalidRequest(what, peer, f"another object for {self.name!r}: its memory is its own")
