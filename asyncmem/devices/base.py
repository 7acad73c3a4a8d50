"""The device contract: everything that asyncmem asks of something that owns memory and streams.

A pool sees a device only through these classes. Addresses and sizes are ints, sizes in bytes, times in seconds. For
every method:

* any thread may call it, at the same time as others, and also from a finalizer that interrupted another call;
* it takes below ~20 us, unless its docstring says that it **blocks**: such calls stay off an event loop's thread;
* `InvalidRequest` means a wrong argument, `DeviceError` that the device refuses; nothing has been done then.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from asyncmem.devices.awaiting import sleeper_here
from asyncmem.errors import AsyncmemError, DeviceError, InvalidRequest

if TYPE_CHECKING:
    from asyncmem.devices.memory_checker import Sanitizer

INSTEAD: Final = "Use 'host' for real memory on this machine, or 'simulated' to test GPU code without a GPU"
"""What helps where a GPU cannot be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A range of device memory as the driver gave it; two segments are equal only when they are the same one."""

    address: int
    nbytes: int
    kind: str
    token: object = field(default=None, repr=False)  # what the device needs to give the range back


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes that the driver could still hand out, and bytes that the device has at all."""

    free: int
    total: int


Span: TypeAlias = tuple[int, int]
Move: TypeAlias = tuple[Span, int]
"""An address and a number of bytes."""


class Addressed(Protocol):
    """A buffer, an array over one, or whatever else has a place in memory."""

    @property
    def address(self) -> int:
        """The first byte."""

    @property
    def nbytes(self) -> int:
        """How many there are."""


@dataclass(frozen=True, slots=True)
class Remapped:
    """How far `Device.remap` came: the first so many moves are made, spans unmapped, and spans mapped."""

    moved: int
    unmapped: int
    mapped: int
    error: AsyncmemError | None = None  # why not all of them


def whole_segment(nbytes: int, kind: str, kinds: Sequence[str], unit: int) -> tuple[int, str]:
    """Return the size, in whole units, and the kind of a segment that is asked for; "auto" means the first of `kinds`.

    Raises:
        InvalidRequest: It has no bytes, or the kind is unknown.
    """
    if nbytes <= 0:
        raise InvalidRequest("nbytes", nbytes, "a positive number of bytes")
    if kind not in ("auto", *kinds):
        raise InvalidRequest("kind", kind, f"one of {('auto', *kinds)}")
    return -(-nbytes // unit) * unit, kinds[0] if kind == "auto" else kind


def numbered(kind: str, index: int) -> str:
    """Return the name of one of several devices of a kind.

    Raises:
        InvalidRequest: `index` is negative.
    """
    if index < 0:
        raise InvalidRequest("index", index, "a device number from 0")
    return f"{kind}:{index}"


def names_of(kind: str, count: int) -> str:
    """Name all devices of a kind: "cuda:0 to cuda:3"."""
    return f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"{kind}:0" if count else "no device"


class Fence(ABC):
    """A point in a stream: reached once all work submitted before it is complete, and from then on for ever."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the point is reached. A lost device raises `DeviceError`: its fences are never reached."""

    @abstractmethod
    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (**blocks**); False when `timeout` seconds passed first."""

    @abstractmethod
    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` one time when it is reached, on any thread; it must not block, raise or call the device."""

    @abstractmethod
    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run yet, so that nothing keeps it alive."""

    def over(self) -> bool:
        """Return whether there is nothing left to wait for: the point is reached, or never will be."""
        try:
            return self.done()
        except DeviceError:
            return True

    def __await__(self) -> Generator[object, object, object]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        A fence that is reached already takes no loop iteration.

        Raises:
            InvalidRequest: No supported event loop runs this coroutine.
        """
        return _wait(self)


def _wait(fence: Fence) -> Generator[object, object, None]:
    if fence.done():
        return
    sleeper = sleeper_here(fence)

    def wake() -> None:
        sleeper.wake()

    fence.notify(wake)
    try:
        yield from sleeper.__await__()
    finally:
        fence.forget(wake)


class Stream(ABC):
    """An ordered queue of device work. It lives until its last reference goes; work already queued still runs then."""

    device: "Device"
    name: str
    handle: int  # the driver's number
    native: bool = False  # the device's `fence_calls` may be used with its handle, from any thread
    of_one_thread: bool = False  # whose default stream it is: no other thread can submit to it
    lasting: bool = True  # False for a raw handle, which nothing keeps alive

    def __init__(self, device: "Device", name: str, handle: int) -> None:
        """Belong to a device, which makes its streams itself: use its `create_stream` or `stream_of`."""
        self.device = device
        self.name = name
        self.handle = handle

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.device.name}>"

    @abstractmethod
    def record(self) -> Fence:
        """Return a fence behind everything submitted here so far. It may cover more, never less.

        Where nothing is left to do it is reached at once, or as soon as the driver has looked at it.
        """

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """Order all later work of this stream behind `fence`. Does not block."""

    def capturing(self) -> bool:
        """Return whether what is submitted here is captured for later replays and not run: fences then mean nothing."""
        return False

    def synchronize(self) -> Fence:
        """Return what to await until all work submitted so far is complete: ``await stream.synchronize()``."""
        return self.record()

    def synchronize_blocking(self) -> None:
        """Wait on this thread until all work submitted so far is complete (**blocks**)."""
        self.record().block()

    def for_any_thread(self) -> "Stream":
        """Return a stream that every thread may give work, behind everything submitted here so far: mostly this one."""
        return self


class Device(ABC):
    """Something that owns memory and streams."""

    kind: str  # "host", "simulated", "cuda", "rocm", "metal", "opencl"
    name: str  # the kind, with an index where there may be several: "cuda:0"
    segment_kinds: tuple[str, ...]  # the first is what "auto" means; "direct" is always there
    prefers_pages = False  # "auto" means pages for a pool, and the first kind for a segment alone
    granularity: int  # a segment's size is rounded up to a multiple of this
    page: int = 0  # the unit in which memory can be mapped under reserved addresses; 0: it cannot be
    capacity: int  # bytes it has at all, known without asking the driver
    host_readable: bool  # its addresses can be read and written by this process
    dlpack_device: tuple[int, int]
    default_stream: Stream
    fence_calls: int = 0  # address of an AsyncmemFenceCalls (core/fence_calls.h) that lives as long as this; 0: none
    checker: "Sanitizer | None" = None
    """The memory checker that each block is reported to; None costs nothing."""
    joins_segments: bool = False  # "stream_ordered" ones that lie side by side can become one: `free_segment_behind`
    over_budget: int = 0  # how often the driver has said that less memory is left for this process than it has
    _closed = False

    @property
    def now(self) -> float:
        """Seconds on the clock that its work goes by: the host's, except where time is pretended."""
        return time.perf_counter()

    @property
    def identity(self) -> str:
        """What all processes of this machine know it by: its name, where that is not each process's own."""
        return self.name

    @property
    @abstractmethod
    def driver_calls(self) -> int:
        """How many calls of the driver there have been."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Ask the driver how much memory there is (**blocks**)."""

    def suggest_capacity(self, nbytes: int) -> None:  # noqa: B027  # most devices have a size of their own
        """Suggest the pool's limit, before the first segment. Only a device without a size of its own takes it."""

    @abstractmethod
    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get memory from the driver (**blocks**); usable in the order of `stream` (None: the default stream).

        Raises `OutOfMemoryError` when the driver has too little: nothing is changed then, and a later try may succeed.
        """

    @abstractmethod
    def free_segment(self, segment: Segment) -> None:
        """Give a segment back, once (**blocks**). The host has seen every use of it done."""

    def free_segment_behind(self, segment: Segment, stream: Stream) -> None:
        """Give a segment back behind all work of `stream`, which alone may still use it.

        Where the device `joins_segments`, the next one in that stream's order may have this memory, with what was given
        back in the same way right before and behind it: at once, and without more of the driver.
        """
        raise InvalidRequest(
            "segment", (segment, stream), f"a device that joins segments, which {self.name!r} does not"
        )

    def reserve(self, nbytes: int) -> int:
        """Keep a range of addresses, whole pages, with no memory behind it."""
        raise InvalidRequest("reserve()", nbytes, f"a device with pages, which {self.name!r} has not")

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range of addresses back, once. Nothing is mapped there."""
        raise InvalidRequest("unreserve()", (address, nbytes), f"a device with pages, which {self.name!r} has not")

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        """Make `moves`, then unmap the spans of `out`, then put memory behind those of `into` (**blocks**).

        A move is a span and an address. Its memory is mapped there as well: work that was submitted before goes on at
        the span, all later work uses the address, and both are the same bytes to the order of streams. The span is
        unmapped like any other, some day. What was mapped as one span is moved and unmapped as one.

        The memory of a span that was its last address serves a later one of its size; what serves none goes back to the
        driver, and what is lacking is got from it. Each list is carried out in order, up to the first call that fails:
        what had been half done is undone, or put right with the next remap. The host has seen done every use of what
        is unmapped; what is mapped is for every stream, and for all peers.
        """
        raise InvalidRequest("remap()", (out, into, moves), f"a device with pages, which {self.name!r} has not")

    @abstractmethod
    def create_stream(self, name: str | None = None) -> Stream:
        """Make a stream that runs beside all others."""

    @abstractmethod
    def stream_of(self, source: object) -> Stream:
        """Return the stream meant by None (the default), a stream of this device, a handle, or `__cuda_stream__`."""

    @abstractmethod
    def record_all(self) -> Fence:
        """Return a fence behind everything submitted so far to every stream of the device."""

    def begin_captures(self) -> None:  # noqa: B027  # most devices have none
        """Note that streams may be captured from here on, until `end_captures` has been called as often.

        What would end a capture it was not told of, as `record_all` may, is a `DeviceError` for so long.
        """

    def end_captures(self) -> None:  # noqa: B027
        """End what `begin_captures` began."""

    @abstractmethod
    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes to `value` (0 to 255) in the order of `stream`."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between two addresses of this device in the order of `stream`; the ranges do not overlap."""

    @abstractmethod
    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy host bytes to `address`. The caller leaves `source` unchanged until a later fence is reached."""

    @abstractmethod
    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy from `address` into host bytes, which hold the data once a later fence is reached."""

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:  # noqa: ARG002  # none does
        """Return whether `copy_in` (`into`) or `copy_out` **blocks** for this memory, as if it is not page-locked."""
        return False

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: "Device", stream: Stream) -> None:  # noqa: ARG002  # nothing to do with them here
        """Copy from an address of another device to one of this, in the order of `stream`, which is of either.

        Raises:
            InvalidRequest: There is no way between the two.
        """
        raise InvalidRequest("source_device", source_device, f"a device that {self.name!r} can copy from")

    def grant_access(self, peers: "Sequence[Device]") -> None:
        """Let the streams of other devices use all segments of this one, also those to come (**blocks**).

        Raises:
            InvalidRequest: One of them cannot.
        """
        if peers:
            raise InvalidRequest("peers", list(peers), f"none: memory of {self.name!r} is its own")

    def pinned(self) -> "Device":
        """Return the device whose segments are host memory that copies of this one read and write directly.

        It shares the streams of this one. Where host memory needs no preparation, it is the host itself.
        """
        raise InvalidRequest("device", self, "a device with page-locked host memory")

    def shareable(self) -> "Device":
        """Return the device whose memory is this one's too, and can be opened by other processes.

        Raises:
            InvalidRequest: There is no such memory.
            BackendUnavailable: Something for it is missing on this machine.
        """
        raise InvalidRequest("device", self, "a device whose memory other processes can open: the host, or CUDA")

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code that one of `fence_calls` answered."""
        return DeviceError(call, code=code, code_name="UNKNOWN", device=self.name)

    @abstractmethod
    def close(self) -> None:
        """End the device's threads after their queued work (**blocks**); twice is fine. Segments stay as they are."""

    def check_open(self) -> None:
        """Raise `InvalidRequest` for a device that is closed."""
        if self._closed:
            raise InvalidRequest("device", self, "a device that is open")


if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with defaults, which `typing` has from 3.13

    DeviceT_co = TypeVar("DeviceT_co", bound=Device, default=Device, covariant=True)
    StreamT_co = TypeVar("StreamT_co", bound=Stream, default=Stream, covariant=True)
    OptionalStreamT_co = TypeVar("OptionalStreamT_co", bound=Stream | None, default=Stream | None, covariant=True)
else:
    from typing import TypeVar

    DeviceT_co = TypeVar("DeviceT_co", covariant=True)
    StreamT_co = TypeVar("StreamT_co", covariant=True)
    OptionalStreamT_co = TypeVar("OptionalStreamT_co", covariant=True)
