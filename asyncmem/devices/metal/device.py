"""One device of Metal: shared buffers as segments, command queues as streams, values of shared events as fences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncmem.devices.base import Addressed, Device, Stream
from asyncmem.devices.host import HostQueue
from asyncmem.devices.host_memory import Bytes, bytes_at
from asyncmem.devices.metal.driver import Driver, find_physical
from asyncmem.devices.metal.stream import Commands, MetalFence, MetalStream
from asyncmem.devices.queues import DriverDevice
from asyncmem.errors import InvalidRequest
from asyncmem.lazy import np

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices.metal.api import MTLBlitCommandEncoder, MTLBuffer, MTLCommandBuffer

DEPTH: Final = 1024
"""How many command buffers a queue takes before submitting blocks. Metal's default is 64, which a pool exceeds."""

WORD: Final = 4
"""On macOS Metal copies and fills whole words alone."""


class Metal(DriverDevice[MetalStream, MetalFence]):
    """A GPU of a Mac, through PyObjC. **It has never run on one**: its tests run over a stand-in for Metal.

    Its memory is shared with the host, so the host reads and writes it directly, and does what Metal's own copies
    cannot: a thread of the stream's copies from and to other memory of the host, and what is no whole words, in the
    order of the stream. Any number of these may exist for one device. A forked child may not use the device.

    Attributes:
        mtl_device: For libraries and pipelines of your own: `MTLDevice`, of PyObjC, which has no types.
        has_unified_memory: Whether it has no memory of its own, as on Apple silicon. Where it has, this is slow.
    """

    kind = "metal"
    stream_kind = MetalStream
    segment_kinds = ("shared", "direct")
    host_readable = True
    dlpack_device = (1, 0)  # kDLCPU: its addresses are the host's, and for kDLMetal they would have to be objects

    def __init__(self, index: int = 0) -> None:
        """Find the device (blocks).

        Args:
            index: Which of the system's devices, of which its own first choice is the first.

        Raises:
            InvalidRequest: `index` is negative.
            BackendUnavailable: There is no PyObjC, or no such device.
            DeviceError: Metal fails.
        """
        super().__init__(index)
        self.driver: Driver = Driver(self.name)
        self.physical = self.space = find_physical(self.driver, index)
        self.mtl_device: Any = self.physical.gpu
        self.has_unified_memory = self.physical.unified
        self.capacity = self.physical.total
        self._meeting = self._open_queue("all")  # where all others are waited for
        self.default_stream: MetalStream = self._new_stream("default", 0)

    def __repr__(self) -> str:
        return f"<Metal {self.name}: {'closed' if self._closed else self.mtl_device.name()}>"

    def as_buffer(self, part: Addressed) -> tuple[MTLBuffer, int]:
        """Return the `MTLBuffer` in which a buffer, or an array over one, lies, and how many bytes before it.

        These are the first arguments of `setBuffer_offset_atIndex_`. The `MTLBuffer` lives for as long as it is kept,
        also when the segment has been given back.

        Raises:
            InvalidRequest: It is no memory of this device.
        """
        return self.physical.buffer_of(part.address, part.nbytes)

    def stream_of(self, source: object) -> MetalStream:
        """Return the stream meant by `source`.

        Args:
            source: None for the default stream, a stream of this device, its handle, an object with `__cuda_stream__`,
                or a `MTLCommandQueue` of this device, which is kept with its stream.

        Raises:
            InvalidRequest: It is something else, or of another device.
        """
        objc = self.driver.objc
        if not isinstance(source, objc.objc_object):
            return self.book.find(source)
        return self.book.adopt(objc.pyobjc_id(source), lambda: self._new_stream(queue=source))

    def record_all(self) -> MetalFence:
        """Return a fence behind everything submitted to every stream of this object, also to those that are gone."""
        self._meeting.hold(*self.book.record_each())
        return self._meeting.record()

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes to `value` (0 to 255) in the order of `stream`."""
        if not nbytes:
            return
        buffer, offset = self.physical.buffer_of(address, nbytes)
        if not _whole_words(offset, nbytes):
            self._on_host(stream, partial(bytes_at(address, nbytes).fill, value))
            return
        # PyObjC takes the byte for a signed one.
        signed = value - 256 if value > 127 else value
        self._blit(
            stream, lambda blit: self.driver.call(blit.fillBuffer_range_value_, buffer, (offset, nbytes), signed)
        )

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy in the order of `stream`."""
        if not nbytes:
            return
        to, there = self.physical.buffer_of(target, nbytes)
        from_, here = self.physical.buffer_of(source, nbytes)
        if not _whole_words(there, here, nbytes):
            super().copy(target, source, nbytes, stream)
            return

        def copy(blit: MTLBlitCommandEncoder) -> None:
            call = blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_
            self.driver.call(call, from_, here, to, there, nbytes)

        self._blit(stream, copy)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy host bytes on the stream's thread; `source` is kept until then."""
        self._check(address, source)
        super().copy_in(address, source, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy to host bytes on the stream's thread; `target` is kept until then."""
        self._check(address, target)
        super().copy_out(target, address, stream)

    def pinned(self) -> Metal:
        """Return the device itself: its memory is the host's."""
        return self

    def shares_memory_with(self, peer: Device) -> bool:
        """Return whether it is of the same GPU."""
        return isinstance(peer, Metal) and peer.physical is self.physical

    def _blit(self, stream: Stream, encode: Callable[[MTLBlitCommandEncoder], None]) -> None:
        self.check_open()

        def write(work: MTLCommandBuffer) -> None:
            blit = self.driver.get(work.blitCommandEncoder)
            try:
                encode(blit)
            finally:
                blit.endEncoding()

        self.stream_of(stream).work.submit(write)

    def _check(self, address: int, host: memoryview) -> None:
        if host.nbytes:
            self.physical.buffer_of(address, host.nbytes)

    def _copy(self, target: Bytes, source: Bytes, stream: Stream) -> None:
        self._on_host(stream, partial(np.copyto, target, source))

    def _on_host(self, stream: Stream, work: Callable[[], None]) -> None:
        self.check_open()
        self.stream_of(stream).run_on_host(work)

    def _open_queue(self, name: str, queue: Any = None) -> Commands:  # noqa: ANN401 - any object of Objective-C
        driver, gpu = self.driver, self.physical.gpu
        with driver.pool():
            if queue is None:
                queue = driver.make(gpu.newCommandQueueWithMaxCommandBufferCount_, DEPTH)
            elif (
                not queue.respondsToSelector_("commandBuffer")
                or driver.call(queue.device).registryID() != gpu.registryID()
            ):
                raise InvalidRequest("stream", queue, f"a command queue of {self.name!r}")
            host_queue = HostQueue(f"asyncmem {self.name} {name} copies")
            return Commands(driver, self.physical, self._poller, queue, host_queue)


def _whole_words(*numbers: int) -> bool:
    return not any(number % WORD for number in numbers)
