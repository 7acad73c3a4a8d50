"""The segments that a device has given out, each from a source of its kind; the two sources; page-locked memory.

`OrderedSegments` are in stream order, `SingleCalls` take one call each way.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Segment, whole_segment
from asyncmem.devices.gpu.driver import ENDED, PEER_ACCESS_ALREADY_ENABLED
from asyncmem.devices.host_memory import PAGE, HostMemory, total_memory
from asyncmem.errors import AsyncmemError, AsyncmemWarning, DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncmem.devices.base import Device, Stream
    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.device import Gpu
    from asyncmem.devices.gpu.driver import Driver


class Source(ABC):
    """One way to get memory. It is called with the context current."""

    @abstractmethod
    def take(self, nbytes: int, stream: int) -> tuple[int, object]:
        """Get memory, usable in the order of a stream; return its address and what is needed to give it back."""

    @abstractmethod
    def give_back(self, segment: Segment) -> None:
        """Give memory back, which nothing uses any more; a try that failed may be repeated."""

    def give_back_behind(self, segment: Segment, stream: int) -> None:
        """Give memory back behind the work of a stream, in whose order other memory may come to lie there."""
        del stream
        self.give_back(segment)

    def grant(self, peers: Sequence[int]) -> None:  # noqa: B027  # some are open to all
        """Let other devices use all segments, later ones too; all of them or none."""

    def revoke(self, peers: Sequence[int]) -> None:  # noqa: B027
        """Take a grant back that could not be carried out elsewhere."""

    def close(self) -> None:  # noqa: B027  # most keep nothing
        """Give back what is kept besides segments, of which there are none any more."""


@dataclass(slots=True)
class _Progress:
    freed: bool = False


class OrderedSegments(Source):
    """Takes segments from one pool of the driver's. The caller makes the context current."""

    def __init__(self, driver: Driver, context: Context, peers: Sequence[int]) -> None:
        """Make the pool and a stream for frees.

        The pool keeps what is free until it is trimmed: otherwise the driver would give memory back whenever a caller
        synchronizes, and take it again at the next growth.
        """
        self._driver = driver
        self._context = context
        self._pool = driver.create_pool(context.device)
        self._lock = threading.RLock()
        try:
            if peers:
                self.grant(peers)
            self._frees = context.create_stream()
        except BaseException:
            driver.call("cuMemPoolDestroy", self._pool)
            raise

    def take(self, nbytes: int, stream: int) -> tuple[int, _Progress]:
        """Take memory that is usable in the order of `stream`. One call, however long a large one takes."""
        address = self._driver.call("cuMemAllocFromPoolAsync", nbytes, self._pool, stream, asked=nbytes)
        return int(address), _Progress()

    def give_back(self, segment: Segment) -> None:
        """Free a segment and have the pool give back what it does not use; what was done of it is not done again."""
        progress = segment.token
        assert isinstance(progress, _Progress)
        with self._lock:
            if not progress.freed:
                self._driver.call("cuMemFreeAsync", segment.address, self._frees)
                progress.freed = True
            # The stream has nothing but frees, so this is short; only then does the pool know the memory to be free.
            self._driver.call("cuStreamSynchronize", self._frees)
            self._driver.call("cuMemPoolTrimTo", self._pool, 0)

    def give_back_behind(self, segment: Segment, stream: int) -> None:
        """Free a segment in the order of a stream; the pool keeps its memory, for what is asked for behind that."""
        self._driver.call("cuMemFreeAsync", segment.address, stream)

    def grant(self, peers: Sequence[int]) -> None:
        """Let other devices use all segments, later ones too."""
        self._driver.open_pool(self._pool, peers)

    def revoke(self, peers: Sequence[int]) -> None:
        """Revoke an access that could not be granted completely."""
        self._driver.open_pool(self._pool, peers, allowed=False)

    def close(self) -> None:
        """Destroy the pool; there is no segment any more."""
        self._driver.call("cuMemPoolDestroy", self._pool)
        self._context.destroy_stream(self._frees)


class SingleCalls(Source):
    """Takes each segment by a call of its own, usable by every stream at once."""

    def __init__(self, driver: Driver, take: str, give_back: str, *options: int) -> None:
        """Make nothing. The first call takes bytes and these options, the second the address."""
        self._driver = driver
        self._names = take, give_back
        self._options = options

    def take(self, nbytes: int, stream: int) -> tuple[int, None]:
        """Take memory."""
        del stream
        return int(self._driver.call(self._names[0], nbytes, *self._options, asked=nbytes)), None

    def give_back(self, segment: Segment) -> None:
        """Free a segment; for `cuMemFree` the driver waits for the whole device first."""
        self._driver.call(self._names[1], segment.address)


def open_to(driver: Driver, owner: Context, peers: Sequence[Context]) -> None:
    """Let other devices use what `cuMemAlloc` gives in `owner`; the driver grants that for a whole context at once."""
    opened: list[Context] = []
    try:
        for peer in peers:
            with peer.entered():
                if _enable(driver, owner):
                    opened.append(peer)
    except BaseException:
        for peer in opened:
            with peer.entered():
                driver.call("cuCtxDisablePeerAccess", driver.home(owner))
        raise


def _enable(driver: Driver, owner: Context) -> bool:
    try:
        driver.call("cuCtxEnablePeerAccess", driver.home(owner), 0)
    except DeviceError as error:
        if error.code != PEER_ACCESS_ALREADY_ENABLED:
            raise
        return False
    return True


@dataclass(eq=False)
class Segments:
    """Takes segments and gives them back. A source is made when its kind is first asked for.

    Attributes:
        device: For messages.
        driver: Whether calls may be made.
        context: What segments are uses of.
        kinds: What may be asked for; "auto" means the first.
        make: Makes the source of a kind.
        unit: The unit of sizes, in bytes.
        most: The largest size; more is refused without a call.
    """

    device: str
    driver: Driver
    context: Context
    kinds: tuple[str, ...]
    make: Callable[[str], Source]
    unit: int
    most: int
    _sources: dict[str, Source] = field(default_factory=dict)
    _out: dict[int, Segment] = field(default_factory=dict)
    _under_way: int = 0  # calls that take a segment, or give one back
    _closed: bool = False
    # Re-entrant: a finalizer may give a segment back on a thread that is taking one.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(self, nbytes: int, kind: str, stream: int) -> Segment:
        """Take a segment of a kind (blocks).

        Raises:
            InvalidRequest: There is no such kind, or no such size.
            OutOfMemoryError: The driver has too little.
            DeviceError: It fails; nothing is left of the try.
        """
        nbytes, kind = whole_segment(nbytes, kind, self.kinds, self.unit)
        if nbytes > self.most:
            raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self.device))
        with self._moving():
            with self.context.entered():
                address, token = self._source(kind).take(nbytes, stream)
            segment = Segment(address, nbytes, kind, token)
            self.context.use()
            self._out[id(segment)] = segment
        return segment

    def give_back(self, segment: Segment, behind: int | None = None) -> None:
        """Give a segment back (blocks). Where the driver fails, it is still out and may be given back again.

        In a process that may make no call any more it is only forgotten.

        Args:
            segment: What `take` returned.
            behind: The stream that alone may still use it; None where the host has seen all uses done.

        Raises:
            InvalidRequest: It is not out.
            DeviceError: The driver fails.
        """
        if self.driver.gone():
            self._out.pop(id(segment), None)
            return
        with self._moving():
            # Not out while it goes, so that a second thread is refused; the address is not given again until then.
            if self._out.pop(id(segment), None) is None:
                expected = f"a segment of {self.device!r} that is not given back yet"
                raise InvalidRequest("segment", segment, expected)
            try:
                with self.context.entered():
                    source = self._sources[segment.kind]
                    source.give_back(segment) if behind is None else source.give_back_behind(segment, behind)
            except BaseException:
                self._out[id(segment)] = segment
                raise
            self.context.end_use()

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
        """Keep the context and the sources until a call is over, even if the device is closed meanwhile."""
        self.context.use()
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._close_if_over()
            self.context.end_use()

    def _close_if_over(self) -> None:
        if self._closed and not self._out and not self._under_way:
            self._close_sources()

    def _source(self, kind: str) -> Source:
        with self._lock:
            source = self._sources.get(kind)
            if source is None:
                source = self._sources[kind] = self.make(kind)
            return source

    def _close_sources(self) -> None:
        while self._sources:
            _, source = self._sources.popitem()
            try:
                with self.context.entered():
                    source.close()
            except AsyncmemError as error:
                # A lost device keeps nothing; and any other has its memory back, of which this is only the frame.
                if not isinstance(error, DeviceError) or error.code not in ENDED:
                    warnings.warn(printable(f"closing {self.device}: {error}"), AsyncmemWarning, stacklevel=3)


_PORTABLE_AND_MAPPED: Final = 3  # on ROCm that is coherent, too: behind a fence the host sees what was written


def page_locked(name: str, driver: Driver, context: Context) -> Segments:
    """Return the segments of a GPU's page-locked memory, of which there are none yet."""

    def make(_kind: str) -> Source:
        return SingleCalls(driver, "cuMemHostAlloc", "cuMemFreeHost", _PORTABLE_AND_MAPPED)

    return Segments(name, driver, context, GpuPinned.segment_kinds, make, unit=PAGE, most=total_memory())


class GpuPinned(HostMemory):
    """Page-locked memory of the host. Get it by the GPU's `pinned()`.

    The GPU's copies in both directions need no detour here and never block; kernels may use its addresses too, at the
    speed of the bus.
    """

    segment_kinds = ("pinned", "direct")
    owner: Gpu

    def __init__(self, owner: Gpu) -> None:
        """Use the GPU's `pinned` instead."""
        self.kind = f"{owner.kind}_pinned"
        self.dlpack_device = (owner.dlpack_pinned_type, 0)
        super().__init__(owner, owner.index)
        self.fence_calls = owner.fence_calls

    @property
    def over_budget(self) -> int:  # type: ignore[override]  # the contract's is an attribute, here it is asked for
        """How often the driver has said that less memory is left for this process than it has."""
        return self.owner.over_budget

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Lock fresh pages (blocks, for about a tenth of a millisecond a megabyte); usable by every stream at once."""
        self.owner.check_open()
        return self.owner.locked.take(nbytes, kind, self.owner.stream_of(stream).handle)

    def free_segment(self, segment: Segment) -> None:
        """Give the pages back (blocks)."""
        self.owner.locked.give_back(segment)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for other devices of the vendor's: page-locked memory is there for all of them.

        Raises:
            InvalidRequest: One of `peers` is another kind of device.
        """
        self.owner.gpu_peers(peers)

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code of the driver's."""
        return self.owner.fence_error(call, code)
