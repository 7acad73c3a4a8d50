"""One device of OpenCL: shared virtual memory as segments, queues as streams, events as fences."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Addressed, Device, Fence, Segment, Stream
from asyncmem.devices.fences import FencePoller, PolledFence
from asyncmem.devices.host_memory import Bytes, HostMemory, bytes_at, bytes_of
from asyncmem.devices.opencl.driver import Driver, PhysicalDevice, SharedMemory, failure, find_physical
from asyncmem.devices.queues import DriverDevice
from asyncmem.devices.streams import QueueStream, WorkQueue
from asyncmem.errors import InvalidRequest
from asyncmem.lazy import np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyopencl as cl


_COMPLETE: Final = 0


@dataclass(eq=False)
class Commands(WorkQueue["OpenCLFence"]):
    """A queue that runs its commands in order, of the device or of other code."""

    driver: Driver
    physical: PhysicalDevice
    poller: FencePoller
    queue: cl.CommandQueue

    def __post_init__(self) -> None:
        """Take the address of the driver's object as the handle."""
        self.key = self.queue.int_ptr

    def record(self, *, behind: list[cl.Event] | None = None) -> OpenCLFence:
        """Return a fence behind everything in the queue so far, and behind these events."""
        event = self.driver.call(self.driver.cl.enqueue_marker, self.queue, wait_for=behind)
        # Others may wait for the event, which counts only once it is on its way.
        self.driver.call(self.queue.flush)
        return OpenCLFence(self, event)


class OpenCLFence(PolledFence):
    """The event of a marker in a queue.

    Attributes:
        event: For other libraries: `pyopencl.Event`.
    """

    def __init__(self, commands: Commands, event: cl.Event) -> None:
        """Use `OpenCLStream.record` instead."""
        super().__init__(commands.poller)
        self.event = event
        self.physical = commands.physical
        self._driver = commands.driver
        self._reached = False

    def __repr__(self) -> str:
        return f"<OpenCLFence of {self._driver.device}>"

    def done(self) -> bool:
        """Ask the driver whether the queue has come this far.

        Raises:
            DeviceError: Work before the fence has failed, or the device is lost.
        """
        if not self._reached:
            status = int(self._driver.call(getattr, self.event, "command_execution_status"))
            if status < _COMPLETE:
                raise failure("clGetEventInfo", status, self._driver.device)
            if status == _COMPLETE:
                # Asking makes nothing visible to others, by the standard; waiting does, and is over at once.
                self._driver.call(self.event.wait)
                self._reached = True
        return self._reached


class OpenCLStream(QueueStream[OpenCLFence]):
    """A command queue. Work that was queued still runs when this object goes."""

    device: OpenCL
    work: Commands

    @property
    def queue(self) -> cl.CommandQueue:
        """For kernels: `pyopencl.CommandQueue`."""
        return self.work.queue

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, OpenCLFence) or fence.physical is not self.device.physical:
            raise InvalidRequest("fence", fence, f"a fence of {self.device.name!r}")
        driver = self.device.driver
        driver.call(driver.cl.enqueue_barrier, self.queue, wait_for=[fence.event])


class OpenCLPinned(HostMemory):
    """Fine-grained shared memory, which host and device may touch at any time. Get it by `OpenCL.pinned()`."""

    kind = "opencl_pinned"
    segment_kinds = ("pinned", "direct")
    dlpack_device = (1, 0)  # kDLCPU
    owner: OpenCL

    def __init__(self, owner: OpenCL, segments: SharedMemory) -> None:
        """Use `OpenCL.pinned` instead."""
        super().__init__(owner, owner.index)
        self._segments = segments

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get memory (blocks), usable by the host and every stream at once."""
        self.owner.check_open()
        self.stream_of(stream)
        return self._segments.take(self, self.owner.driver, nbytes, kind)

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back (blocks)."""
        self._segments.give_back(self, self.owner.driver, segment)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for the owner and its like: they share the context."""
        self.owner.grant_access(peers)


class OpenCL(DriverDevice[OpenCLStream, OpenCLFence]):
    """A device of OpenCL 2.0 or later that has shared virtual memory, through pyopencl.

    Any number of these may exist for one device; they share its context, and what they have of its memory is counted
    together: no driver counts it, and some, such as PoCL, give out more than there is. What other processes have is
    not known, except where the memory is the host's. A forked child may not use the device.

    Attributes:
        context: For programs and queues of your own: `pyopencl.Context`.
        is_processor: Whether it is the host's own processor, with the host's memory.
    """

    kind = "opencl"
    stream_kind = OpenCLStream
    segment_kinds = ("svm", "direct")
    host_readable = False

    def __init__(self, index: int = 0) -> None:
        """Start the drivers and make the context (blocks, for up to a second if they were not started before).

        Args:
            index: Which of the devices of all drivers; processors are the last of them.

        Raises:
            InvalidRequest: `index` is negative.
            BackendUnavailable: There is no pyopencl, no driver, no such device, or it lacks shared virtual memory.
            DeviceError: The driver fails.
        """
        super().__init__(index)
        self.dlpack_device = (4, index)  # kDLOpenCL
        self.driver: Driver = Driver(self.name)
        self.physical = find_physical(self.driver, index)
        self.context: cl.Context = self.physical.context
        self.is_processor = self.physical.on_host
        self.space = self.physical.memory
        self.capacity = self.space.total
        self._pinned: weakref.WeakValueDictionary[int, OpenCLPinned] = weakref.WeakValueDictionary()
        self._meeting = self._open_queue("all")  # where all others are waited for
        self.default_stream: OpenCLStream = self._new_stream("default", 0)

    def __repr__(self) -> str:
        return f"<OpenCL {self.name}: {'closed' if self._closed else self.physical.device.name.strip()}>"

    def pointer(self, part: Addressed) -> cl.SVM[np.ndarray]:
        """Return a buffer, or an array over one, as an argument for kernels; it keeps nothing alive.

        Kernels take it for a `__global` pointer. For libraries that know buffers alone, its `as_buffer(context)` makes
        a `pyopencl.Buffer` of it.
        """
        return self._range(part.address, part.nbytes)

    def stream_of(self, source: object) -> OpenCLStream:
        """Return the stream meant by `source`.

        Args:
            source: None for the default stream, a stream of this device, its handle, an object with `__cuda_stream__`,
                or a `pyopencl.CommandQueue` in the device's `context` that runs its commands in order. The queue is
                kept with its stream.

        Raises:
            InvalidRequest: It is something else, or of another device or context.
        """
        if not isinstance(source, self.driver.cl.CommandQueue):
            return self.book.find(source)
        return self.book.adopt(source.int_ptr, lambda: self._new_stream(queue=source))

    def record_all(self) -> OpenCLFence:
        """Return a fence behind everything submitted to every stream of this object, also to those that are gone."""
        return self._meeting.record(behind=[fence.event for fence in self.book.record_each()])

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes to `value` (0 to 255) in the order of `stream`."""
        if nbytes:
            cl, queue = self.driver.cl, self._queue_of(stream)
            self.driver.call(cl.enqueue_svm_memfill, queue, self._range(address, nbytes), np.array([value], np.uint8))

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:  # noqa: ARG002  # both ways alike
        """Return whether a copy may **block**: not on a processor, nor for memory of `pinned`."""
        data, pinned = bytes_of(host), self.physical.pinned
        ours = pinned is not None and pinned.find(int(data.ctypes.data), data.size) is not None
        return bool(data.size) and not (self.is_processor or ours)

    def pinned(self) -> Device:
        """Return host memory that the device reads and writes directly, with the streams of this device.

        Raises:
            InvalidRequest: The device has no such memory (fine-grained buffers).
        """
        if self.physical.pinned is None:
            return super().pinned()
        return self._pinned.get(0) or self._pinned.setdefault(0, OpenCLPinned(self, self.physical.pinned))

    def shares_memory_with(self, peer: Device) -> bool:
        """Return whether it is of the same context."""
        own = peer.owner if isinstance(peer, OpenCLPinned) else peer
        return isinstance(own, OpenCL) and own.physical is self.physical

    def _copy(self, target: Bytes, source: Bytes, stream: Stream) -> None:
        queue, nbytes = self._queue_of(stream), target.size
        # By their addresses: pyopencl takes no array that cannot be written, be it only read.
        to, from_ = self._range(int(target.ctypes.data), nbytes), self._range(int(source.ctypes.data), nbytes)
        self.driver.call(self.driver.cl.enqueue_copy, queue, to, from_, byte_count=nbytes, is_blocking=False)

    def _range(self, address: int, nbytes: int) -> cl.SVM[np.ndarray]:
        found: cl.SVM[np.ndarray] = self.driver.cl.SVM(bytes_at(address, nbytes))
        return found

    def _queue_of(self, stream: Stream) -> cl.CommandQueue:
        self.check_open()
        return self.stream_of(stream).queue

    def _open_queue(self, name: str, queue: cl.CommandQueue | None = None) -> Commands:
        del name
        driver, physical = self.driver, self.physical
        if queue is None:
            queue = driver.call(driver.cl.CommandQueue, physical.context, physical.device)
        elif queue.context != physical.context or queue.device != physical.device:
            raise InvalidRequest("stream", queue, f"a queue in the context of {self.name!r}")
        elif queue.properties & driver.cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE:
            raise InvalidRequest("stream", queue, "a queue that runs its commands in order")
        return Commands(driver, physical, self._poller, queue)
