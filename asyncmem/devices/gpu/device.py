"""One GPU as a device, of CUDA or ROCm: pages, segments in two ways, the driver's streams, events as fences."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Device, MemoryInfo, Remapped, Segment, Stream, numbered
from asyncmem.devices.gpu.driver import INVALID_CONTEXT, INVALID_VALUE
from asyncmem.devices.gpu.fence import FenceCallbacks, GpuFence
from asyncmem.devices.gpu.pages import PagedMemory
from asyncmem.devices.gpu.segments import GpuPinned, OrderedSegments, Segments, SingleCalls, open_to, page_locked
from asyncmem.devices.gpu.stream import GpuStream, GpuStreams
from asyncmem.devices.host_memory import bytes_of
from asyncmem.devices.memory_checker import attached_checker
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncmem.devices.base import Move, Span
    from asyncmem.devices.gpu import _calls
    from asyncmem.devices.gpu.driver import Driver
    from asyncmem.devices.gpu.segments import Source

ORDERED: Final = "stream_ordered"
DIRECT: Final = "direct"
_TRIES: Final = 8  # to give back a segment; a device that is lost keeps nothing

_HOST_MEMORY: Final = 1  # CU_MEMORYTYPE_HOST and hipMemoryTypeHost, which mean page-locked


class Gpu(Device):
    """A GPU, through its driver alone. What a vendor's class of it adds is named here.

    What all of them promise to users stands there too, in the vendor's words.

    Attributes:
        gives_notices: Whether the driver tells when this process has more of the memory than it should.
    """

    host_readable = False

    interface: type[Driver]
    """The vendor's driver."""
    dlpack_type: int
    """The number that DLPack has for its memory."""
    dlpack_pinned_type: int
    """The number that DLPack has for page-locked memory of the host."""
    taken_at_once: int = 0
    """Bytes that the driver takes with the call, whatever host memory they are in."""

    def __init__(self, index: int = 0, *, segments: str = "auto") -> None:
        """Start the driver and retain the context (blocks, for up to some seconds where it is the first call).

        Args:
            index: Which of the devices that this process may see (`CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`).
            segments: How segments are got: "stream_ordered" uses a memory pool of the driver's, "direct" is cuMemAlloc
                or hipMalloc. "auto" takes the first of these that the device has; pools then hold pages instead, where
                it can map memory.

        Raises:
            InvalidRequest: `index` is negative, or there is no such kind of segments on this device.
            BackendUnavailable: There is no driver or no package for it, no such GPU, or the driver is too old.
            DeviceError: The driver fails, or the context was lost before.
        """
        self.name = name = numbered(self.kind, index)
        self.index = index
        self.dlpack_device = (self.dlpack_type, index)
        interface = self.interface
        interface.start(name)
        interface.check_index(name, index)
        self.driver = interface(name)
        from asyncmem.devices.gpu import _calls

        # Errors are made without the device, so that nothing it makes need keep it.
        self.context = _calls.Context(interface.library, index, lambda call, code: interface.error_of(call, code, name))
        self._pinned: weakref.WeakValueDictionary[int, GpuPinned] = weakref.WeakValueDictionary()
        try:
            self._set_up(segments)
        except BaseException:
            self.context.close()
            raise

    @classmethod
    def index_of(cls, address: int) -> int:
        """Return the index of the GPU that has the memory at `address` (blocks where the driver is not started yet).

        Raises:
            BackendUnavailable: Such GPUs cannot be used here.
            DeviceError: The driver knows of no such memory.
        """
        cls.interface.start(cls.kind)
        driver = cls.interface(cls.kind)
        try:
            return driver.known_attribute("DEVICE_ORDINAL", address)
        except DeviceError as error:
            if error.code != INVALID_CONTEXT:
                raise
        # Nothing of CUDA is current on this thread; any GPU's context will do.
        with contextlib.closing(cls()) as any_device, any_device.context.entered():
            return driver.known_attribute("DEVICE_ORDINAL", address)

    @classmethod
    def total_memory(cls, index: int) -> int:
        """Ask the started driver how many bytes a device has, without opening it; 0 where it does not say."""
        try:
            return int(cls.interface(f"{cls.kind}:{index}").call("cuDeviceTotalMem", index))
        except DeviceError:
            return 0

    def _set_up(self, segments: str) -> None:
        from asyncmem.devices.gpu import _calls

        driver, context, device = self.driver, self.context, self.context.device
        self.capacity = int(driver.call("cuDeviceTotalMem", device))
        self.checker = attached_checker() if driver.has_checkers else None
        self._peers: list[Gpu] = []
        pages = bool(driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", device))
        ordered = bool(driver.attribute("MEMORY_POOLS_SUPPORTED", device))
        kinds = [ORDERED] * ordered + [DIRECT]
        if segments not in ("auto", *kinds):
            raise InvalidRequest("segments", segments, f"one of {('auto', *kinds)} on {self.name!r}")
        self.segment_kinds = tuple(dict.fromkeys((kinds[0] if segments == "auto" else segments, *kinds)))
        self.granularity = driver.granularity(device) if pages else 2 << 20
        self.page = self.granularity if pages and self.checker is None else 0
        self.prefers_pages = bool(self.page) and segments == "auto"
        if self.checker is not None:
            self.joins_segments = False  # each comes by a cuMemAlloc of its own then
        self._paged = PagedMemory(self.name, driver, context, self.page, ()) if self.page else None
        self._segments = Segments(
            self.name, driver, context, self.segment_kinds, self._make_source, unit=self.granularity, most=self.capacity
        )
        self.locked = page_locked(f"{self.kind}_pinned:{self.index}", driver, context)
        # A lost context fails here and not only when memory is needed.
        self.memory()
        self.fence_calls = self.context.fence_calls
        self.streams = GpuStreams(self, self.context)
        self.default_stream: GpuStream = GpuStream(self, "default", self.interface.library.legacy)
        self.watcher = _calls.Watcher(self.context)
        self.new_sink: Callable[[], _calls.Sink] = _calls.Sink
        self.callbacks = FenceCallbacks(f"asyncmem {self.name} fences", _calls.Sink(), self.watcher)
        self._over_budget_before = self.context.over_budget
        self.gives_notices = self.context.listen()
        # A device that is forgotten without being closed leaves no thread either.
        weakref.finalize(self, self.callbacks.stop).atexit = False
        self._rehearse()

    def _rehearse(self) -> None:
        # The first memory costs half a millisecond more than what comes later, for what the driver puts off until then.
        # Paid here, where the caller blocks anyway, it is felt by no loop that runs beside the first growth.
        with contextlib.suppress(OutOfMemoryError, DeviceError):  # a later request for memory gets the error
            if self.prefers_pages:
                self._rehearse_page()
            else:
                self._rehearse_segment()

    def _rehearse_page(self) -> None:
        paged = self._need_pages()
        page = paged.reserve(self.page), self.page
        mapped: list[Span] = []
        with contextlib.suppress(DeviceError):
            mapped = [page][: paged.remap((), [page]).mapped]
        for _ in range(_TRIES):
            # Where the driver fails, what is left is tried again.
            with contextlib.suppress(InvalidRequest, DeviceError):
                done = paged.remap(mapped, ())
                del mapped[: done.unmapped]
                if done.error is None:
                    paged.unreserve(*page)
                    break

    def _rehearse_segment(self) -> None:
        # What is there in the order of a stream may go back only then; on the default one that is behind others' work.
        ordered = self.segment_kinds[0] == ORDERED
        stream = self.create_stream("rehearsal") if ordered else self.default_stream
        segment = self._segments.take(self.granularity, "auto", stream.handle)
        for _ in range(_TRIES):
            with contextlib.suppress(DeviceError):
                if ordered:
                    stream.synchronize_blocking()
                self._segments.give_back(segment)  # goes on from where it failed
                break

    def __repr__(self) -> str:
        state = "closed" if self._closed else "paged" if self.prefers_pages else self.segment_kinds[0]
        return f"<{type(self).__name__} {self.name}: {state}>"

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver there have been, those for fences by other objects of the same GPU included."""
        return self.driver.calls + self.context.call_count

    @property
    def over_budget(self) -> int:  # type: ignore[override]  # the contract's is an attribute, here it is asked for
        """How often the driver has said since that this process has more of the device's memory than it should.

        It stays 0 where the driver gives no such notices.
        """
        return self.context.over_budget - self._over_budget_before

    def memory(self) -> MemoryInfo:
        """Ask the driver how much memory there is (blocks)."""
        with self.context.entered():
            free, total = self.driver.call("cuMemGetInfo")
        return MemoryInfo(free=int(free), total=int(total))

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get memory from the driver (blocks); one that is "stream_ordered" is there in the order of `stream`.

        It takes one call, of most of a millisecond for a gibibyte.
        """
        self.check_open()
        home = self.stream_of(stream)
        # Another thread's default stream is behind the legacy one, which can be named here.
        handle = self.default_stream.handle if home.of_one_thread else home.handle
        return self._segments.take(nbytes, kind, handle)

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back to the driver (blocks); what the driver's own pool holds of it too.

        Where the driver fails, the segment is still out and may be given back again.
        """
        self._segments.give_back(segment)

    def free_segment_behind(self, segment: Segment, stream: Stream) -> None:
        """Give a segment back behind a stream's work; for one that is "stream_ordered" no work is waited for."""
        self._segments.give_back(segment, self.stream_of(stream).handle)

    def reserve(self, nbytes: int) -> int:
        """Keep a range of addresses with no memory behind it."""
        self.check_open()
        address = self._need_pages().reserve(nbytes)
        self.context.use()
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range of addresses back, in which nothing is mapped."""
        self._need_pages().unreserve(address, nbytes)
        self.context.end_use()

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        """Change what lies behind reserved addresses (blocks), without the interpreter's lock.

        Raises:
            InvalidRequest: Memory is to be mapped where nothing is reserved, or on a device that is closed.
        """
        if into or moves:
            self.check_open()
        return self._need_pages().remap(out, into, moves)

    def _need_pages(self) -> PagedMemory:
        if self._paged is None:
            raise InvalidRequest("device", self, "a device with pages")
        return self._paged

    def create_stream(self, name: str | None = None) -> GpuStream:
        """Make a stream that does not wait for the default stream."""
        self.check_open()
        return self.streams.create(name)

    def stream_of(self, source: object) -> GpuStream:
        """Return the stream meant by `source`.

        Args:
            source: None, 0 or 1 for the legacy default stream, 2 for this thread's default stream, a stream of this
                device, or an object of another library: with `__cuda_stream__`, or torch's, CuPy's or numba's. Such an
                object is kept alive with the stream. An integer is a handle without a reference: the stream must exist
                for as long as it is used, and is not `lasting`.

        Raises:
            InvalidRequest: It is something else, or a stream of another device or context.
        """
        return self.streams.find(source)

    def record_all(self) -> GpuFence:
        """Return a fence behind everything submitted to every stream of the context, by whichever library.

        CUDA's drivers before 12.5, and ROCm, know no such fence. There a thread waits for the whole device, and a
        stream that is made to wait for it blocks the caller.

        Raises:
            DeviceError: Among others when a graph is being captured on one of the streams, or may be: the driver allows
                no such fence then, so try again when the capture has ended.
        """
        return GpuFence(self, self.context.record_all())

    def begin_captures(self) -> None:
        """Note that streams may be captured that this device does not know: `record_all` refuses meanwhile."""
        self.context.begin_captures()

    def end_captures(self) -> None:
        """End that."""
        self.context.end_captures()

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes to `value` (0 to 255) in the order of `stream`."""
        if nbytes:
            self._submit(stream, "cuMemsetD8Async", address, value, nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy in the order of `stream`; page-locked memory has addresses of the device too."""
        if nbytes:
            self._submit(stream, "cuMemcpyDtoDAsync", target, source, nbytes)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy host bytes to the device in the order of `stream`.

        From page-locked memory (`pinned`) this returns at once. From any other the driver first copies to a buffer of
        its own, for which it may wait for the stream's work: that **blocks**; `copy_holds_up` tells. The caller keeps
        `source`, unchanged, until a later fence is reached.
        """
        origin = bytes_of(source)
        if origin.size:
            self._submit(stream, "cuMemcpyHtoDAsync", address, int(origin.ctypes.data), origin.size)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy to host bytes in the order of `stream`.

        To page-locked memory this returns at once; to any other it **blocks** until the bytes are there.
        """
        goal = bytes_of(target, writable=True)
        if goal.size:
            self._submit(stream, "cuMemcpyDtoHAsync", int(goal.ctypes.data), address, goal.size)

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        """Return whether a copy **blocks**: not for page-locked memory, nor for a small one in."""
        data = bytes_of(host)
        if into and data.size <= self.taken_at_once:
            return False
        return bool(data.size) and not (
            self._page_locked(int(data.ctypes.data)) and self._page_locked(int(data.ctypes.data) + data.size - 1)
        )

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another GPU's memory to this one's in the order of `stream`, which is of either.

        The link between them is used where there is one, else the host; access need not have been granted.

        Raises:
            InvalidRequest: The other device is another vendor's, or none.
        """
        other = source_device.owner if isinstance(source_device, GpuPinned) else source_device
        if not isinstance(other, Gpu) or other.interface is not self.interface:
            raise InvalidRequest("source_device", source_device, f"a {self.interface.name} device")
        runner = other if isinstance(stream, GpuStream) and stream.device is other else self
        home = self.driver.home
        places = (target, home(self.context), source, home(other.context))
        if nbytes:
            runner._submit(stream, "cuMemcpyPeerAsync", *places, nbytes)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Let other GPUs read and write all segments of this device, later ones too (blocks); all of them or none.

        Raises:
            InvalidRequest: One of them is no GPU, or has no link to this one.
            DeviceError: The driver fails; what had been granted by then is taken back.
        """
        added = [peer for peer in self.gpu_peers(peers) if peer.index not in {one.index for one in self._peers}]
        for peer in added:
            if not self.driver.call("cuDeviceCanAccessPeer", peer.context.device, self.context.device):
                raise InvalidRequest("peers", peer, f"devices that can reach memory of {self.name!r}")
        if not added:
            return
        with self.context.entered(), contextlib.ExitStack() as undo:
            numbers = [peer.context.device for peer in added]
            for memory in (self._paged, self._segments.opened(ORDERED)):
                if memory is not None:
                    memory.grant(numbers)
                    undo.callback(memory.revoke, numbers)
            if any(isinstance(self._segments.opened(kind), SingleCalls) for kind in self.segment_kinds):
                open_to(self.driver, self.context, [peer.context for peer in added])
            self._peers += added
            undo.pop_all()

    def pinned(self) -> GpuPinned:
        """Return page-locked host memory as a device with the streams and fences of this one.

        A pool may be opened over it: ``AsyncMemoryPool(gpu.pinned())``.
        """
        return self._pinned.get(0) or self._pinned.setdefault(0, GpuPinned(self))

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code of the driver's, with its name and what to do."""
        return self.interface.error_of(call, code, self.name)

    def close(self) -> None:
        """End the device's threads once the fences that they wait for are reached (blocks); twice is fine.

        Segments, streams and fences stay as they are; the context is released with the last of them.
        """
        if self._closed:
            return
        self._closed = True
        if self.driver.gone():
            return
        self.callbacks.stop()
        self.callbacks.join()
        self.watcher.stop()
        if self.gives_notices:
            self.context.stop_listening()
        self._segments.close()
        self.locked.close()
        self.context.close()

    def gpu_peers(self, peers: Sequence[Device]) -> list[Gpu]:
        """Return those of `peers` that are other GPUs.

        Raises:
            InvalidRequest: One is no GPU of this vendor.
        """
        found: dict[int, Gpu] = {}
        for peer in peers:
            if not isinstance(peer, Gpu) or peer.interface is not self.interface:
                raise InvalidRequest("peers", peer, f"{self.interface.name} devices")
            if peer.index != self.index:
                found[peer.index] = peer
        return list(found.values())

    def _make_source(self, kind: str) -> Source:
        """Make what segments of a kind are got from, open to the peers that there are."""
        driver, context, peers = self.driver, self.context, [peer.context for peer in self._peers]
        # compute-sanitizer (2025.3) refuses reports of blocks in any memory but that of cuMemAlloc.
        if kind == DIRECT or self.checker is not None:
            open_to(driver, context, peers)
            return SingleCalls(driver, "cuMemAlloc", "cuMemFree")
        return OrderedSegments(driver, context, [peer.device for peer in peers])

    def _submit(self, stream: Stream, function: str, *arguments: object) -> None:
        home = self.stream_of(stream)
        if home.is_another_threads():
            raise InvalidRequest("stream", stream, "this thread's default stream, or another stream")
        with self.context.entered():
            self.driver.call(function, *arguments, home.handle)

    def _page_locked(self, address: int) -> bool:
        try:
            with self.context.entered():
                return self.driver.known_attribute("MEMORY_TYPE", address) == _HOST_MEMORY
        except DeviceError as error:
            if error.code != INVALID_VALUE:  # the driver knows nothing of that memory
                raise
            return False
