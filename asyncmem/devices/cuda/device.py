"""One NVIDIA GPU as a device: segments in three ways, CUDA streams, events as fences."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Device, MemoryInfo, Remapped, Segment, Stream
from asyncmem.devices.cuda.annotations import attached_checker
from asyncmem.devices.cuda.direct import DirectSegments, open_to
from asyncmem.devices.cuda.driver import INVALID_VALUE, Driver, check_index, error_of, start
from asyncmem.devices.cuda.fence import CudaFence
from asyncmem.devices.cuda.notices import Notices
from asyncmem.devices.cuda.ordered import OrderedSegments
from asyncmem.devices.cuda.paged import PagedMemory
from asyncmem.devices.cuda.pinned import CudaPinned
from asyncmem.devices.cuda.segments import Segments
from asyncmem.devices.cuda.stream import LEGACY, CudaStream, CudaStreams, ThreadStream
from asyncmem.devices.cuda.virtual import VirtualSegments
from asyncmem.devices.pages import bytes_of
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncmem.devices.base import Span
    from asyncmem.devices.cuda import _calls
    from asyncmem.devices.cuda.segments import Source

VIRTUAL: Final = "virtual"
ORDERED: Final = "stream_ordered"
DIRECT: Final = "direct"
_TRIES: Final = 8  # to give back a segment; a device that is lost keeps nothing

_AT_ONCE: Final = 64 << 10  # bytes that the driver takes with the call, whatever memory they are in
_HOST_MEMORY: Final = 1  # CU_MEMORYTYPE_HOST, which means page-locked


class Cuda(Device):
    """An NVIDIA GPU, through its driver alone: no toolkit is needed.

    It uses the device's primary context, as torch, CuPy and numba do, so memory and streams may be shared with them.
    Any number of these may exist for one GPU; they share the context, which is released once they are closed and the
    last of their segments, streams and fences is gone. Nothing is released at the interpreter's exit, and a forked
    child may not use the device.

    A device that is not closed keeps its context; a lost one raises `DeviceError` from every call, and its fences from
    every wait.

    Attributes:
        gives_notices: Whether the driver tells when this process has more of the memory than it should.
    """

    kind = "cuda"
    host_readable = False

    def __init__(self, index: int = 0, *, segments: str = "auto") -> None:
        """Start the driver and retain the context (blocks, for up to a second where nobody has done so before).

        Args:
            index: Which of the devices that this process may see (`CUDA_VISIBLE_DEVICES`).
            segments: How memory is got from the driver: "virtual" maps physical pieces, "stream_ordered" uses a memory
                pool of the driver's, "direct" is cuMemAlloc. "auto" takes the first of these that the device has.

        Raises:
            InvalidRequest: `index` is negative, or there is no such kind of segments on this device.
            BackendUnavailable: There is no driver, no such GPU, or the driver is older than CUDA 12.4.
            DeviceError: The driver fails, or the context was lost before.
        """
        if index < 0:
            raise InvalidRequest("index", index, "a device number from 0")
        self.index = index
        self.name = name = f"{self.kind}:{index}"
        self.dlpack_device = (2, index)  # kDLCUDA
        start(name)
        check_index(name, index)
        self.driver = Driver(name)
        from asyncmem.devices.cuda import _calls

        # Errors are made without the device, so that nothing it makes need keep it.
        self.context = _calls.Context(index, lambda call, code: error_of(call, code, name))
        self._closed = False
        self._pinned: weakref.ref[CudaPinned] | None = None
        try:
            self._set_up(segments)
        except BaseException:
            self.context.close()
            raise

    def _set_up(self, segments: str) -> None:
        from asyncmem.devices.cuda import _calls

        device = self.context.device
        self.capacity = int(self.driver.call("cuDeviceTotalMem", device))
        self.checker = attached_checker()
        makers = self._makers(device)
        if segments not in ("auto", *makers):
            raise InvalidRequest("segments", segments, f"one of {('auto', *makers)} on {self.name!r}")
        first = next(iter(makers)) if segments == "auto" else segments
        self.segment_kinds = (first, *(kind for kind in makers if kind != first))
        self.granularity = self.driver.granularity(device) if VIRTUAL in makers else 2 << 20
        makers = {kind: makers[kind] for kind in self.segment_kinds}
        self._segments = Segments(self.name, self.context, makers, granularity=self.granularity, most=self.capacity)
        self.page = self.granularity if VIRTUAL in makers and self.checker is None else 0
        self._paged = PagedMemory(self.name, self.driver, self.context, self.page) if self.page else None
        # A lost context fails here and not only when memory is needed.
        self.memory()
        self._peers: list[Cuda] = []
        self.fence_calls = self.context.fence_calls
        self.streams = CudaStreams(self, self.context)
        self.default_stream: CudaStream = CudaStream(self, "default", LEGACY)
        self.watcher = _calls.Watcher(self.context)
        self.new_sink: Callable[[], _calls.Sink] = _calls.Sink
        self.notices = Notices(f"asyncmem {self.name} fences", _calls.Sink(), self.watcher)
        self._over_budget_before = self.context.over_budget
        self.gives_notices = self.context.listen()
        # A device that is forgotten without being closed leaves no thread either.
        weakref.finalize(self, self.notices.stop).atexit = False
        self._rehearse()

    def _rehearse(self) -> None:
        # The first segment costs half a millisecond more than others, for addresses and what the driver puts off until
        # then. Paid here, where the caller blocks anyway, it is felt by no loop that runs beside the first growth.
        try:
            segment = self._segments.take(self.granularity, "auto", LEGACY)
        except (OutOfMemoryError, DeviceError):
            return  # nobody needs memory yet; who does will hear of it
        for _ in range(_TRIES):
            with contextlib.suppress(DeviceError):
                self._segments.give_back(segment)  # goes on from where it failed
                break

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.segment_kinds[0]
        return f"<Cuda {self.name}: {state}>"

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
        """Ask the driver how much memory there is, whoever has it (blocks)."""
        with self.context.entered():
            free, total = self.driver.call("cuMemGetInfo")
        return MemoryInfo(free=int(free), total=int(total))

    def suggest_capacity(self, nbytes: int) -> None:
        """Ignore it: a GPU has a size of its own."""

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get memory from the driver (blocks); one that is "stream_ordered" is there in the order of `stream`.

        A "virtual" segment is made by calls that are short each, so that other threads get at the driver in between;
        the other kinds take one call, of most of a millisecond for a gibibyte.
        """
        self.check_open()
        home = self.stream_of(stream)
        # Another thread's default stream is behind the legacy one, which can be named here.
        handle = LEGACY if isinstance(home, ThreadStream) else home.handle
        return self._segments.take(nbytes, kind, handle)

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back to the driver (blocks); what the driver's own pool holds of it too.

        Where the driver fails, the segment is still out and may be given back again.
        """
        self.give_back(self._segments, segment)

    def reserve(self, nbytes: int) -> int:
        """Keep a range of addresses with no memory behind it."""
        self.check_open()
        return self._need_pages().reserve(nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range of addresses back, in which nothing is mapped."""
        self._need_pages().unreserve(address, nbytes)

    def remap(self, out: Sequence[Span], into: Sequence[Span]) -> Remapped:
        """Change what lies behind reserved addresses (blocks), without the interpreter's lock.

        Raises:
            InvalidRequest: Memory is to be mapped where nothing is reserved, or on a device that is closed.
        """
        if into:
            self.check_open()
        return self._need_pages().remap(out, into)

    def _need_pages(self) -> PagedMemory:
        if self._paged is None:
            raise InvalidRequest("device", self, "a device with pages")
        return self._paged

    def create_stream(self, name: str | None = None) -> CudaStream:
        """Make a stream that does not wait for the default stream."""
        self.check_open()
        return self.streams.create(name)

    def stream_of(self, source: object) -> CudaStream:
        """Return the stream meant by `source`.

        Args:
            source: None, 0 or 1 for the legacy default stream, 2 for this thread's default stream, a stream of this
                device, or an object of another library: with `__cuda_stream__`, or torch's, CuPy's or numba's. Such an
                object is kept alive with the stream. An integer is a handle that nobody keeps: the stream must exist
                for as long as it is used, and is not `lasting`.

        Raises:
            InvalidRequest: It is something else, or a stream of another device or context.
        """
        return self.streams.find(source)

    def record_all(self) -> CudaFence:
        """Return a fence behind everything submitted to every stream of the context, by whichever library.

        Drivers before 12.5 know no such fence. There it covers the default streams, all streams that are not
        non-blocking, and of the others those that this device made or was shown.

        Raises:
            DeviceError: Among others when a graph is being captured on one of the streams: the driver allows no such
                fence then, so try again when the capture has ended.
        """
        return CudaFence(self, self.context.record_all())

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
        """Tell whether a copy **blocks**: not for page-locked memory, whoever locked it, nor for a small one in."""
        data = bytes_of(host)
        if into and data.size <= _AT_ONCE:
            return False
        return bool(data.size) and not (
            self._page_locked(int(data.ctypes.data)) and self._page_locked(int(data.ctypes.data) + data.size - 1)
        )

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another GPU's memory to this one's in the order of `stream`, which is of either.

        The link between them is used where there is one, else the host; access need not have been granted.

        Raises:
            InvalidRequest: The other device is none of CUDA's.
        """
        other = source_device.owner if isinstance(source_device, CudaPinned) else source_device
        if not isinstance(other, Cuda):
            raise InvalidRequest("source_device", source_device, "a CUDA device")
        runner = other if isinstance(stream, CudaStream) and stream.device is other else self
        places = (target, self.context.handle, source, other.context.handle)
        if nbytes:
            runner._submit(stream, "cuMemcpyPeerAsync", *places, nbytes)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Let other GPUs read and write all segments of this device, later ones too (blocks); all of them or none.

        Raises:
            InvalidRequest: One of them is no GPU, or has no link to this one.
            DeviceError: The driver fails; what had been granted by then is taken back.
        """
        added = [peer for peer in self.cuda_peers(peers) if peer.index not in {one.index for one in self._peers}]
        for peer in added:
            if not self.driver.call("cuDeviceCanAccessPeer", peer.context.device, self.context.device):
                raise InvalidRequest("peers", peer, f"devices that can reach memory of {self.name!r}")
        if not added:
            return
        with self.context.entered(), contextlib.ExitStack() as undo:
            for kind in (VIRTUAL, ORDERED):
                source = self._segments.opened(kind)
                if isinstance(source, VirtualSegments | OrderedSegments):
                    source.grant([peer.context.device for peer in added])
                    undo.callback(source.revoke, [peer.context.device for peer in added])
            if self._paged is not None:
                self._paged.grant([peer.context.device for peer in added])
                undo.callback(self._paged.revoke, [peer.context.device for peer in added])
            if any(isinstance(self._segments.opened(kind), DirectSegments) for kind in self.segment_kinds):
                open_to(self.driver, self.context, [peer.context for peer in added])
            self._peers += added
            undo.pop_all()

    def pinned(self) -> CudaPinned:
        """Return page-locked host memory as a device with the streams and fences of this one.

        A pool may be opened over it: ``AsyncMemoryPool(gpu.pinned())``.
        """
        found = self._pinned() if self._pinned is not None else None
        if found is None:
            found = CudaPinned(self)
            self._pinned = weakref.ref(found)
        return found

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code of the driver's, with its name and what to do."""
        return error_of(call, code, self.name)

    def close(self) -> None:
        """End the device's threads once the fences that they wait for are reached (blocks); twice is fine.

        Segments, streams and fences stay as they are; the context is released with the last of them.
        """
        if self._closed:
            return
        self._closed = True
        if self.driver.gone():
            return
        self.notices.stop()
        self.notices.join()
        self.watcher.stop()
        if self.gives_notices:
            self.context.stop_listening()
        self._segments.close()
        pinned = self._pinned() if self._pinned is not None else None
        if pinned is not None:
            pinned.close_segments()
        self.context.close()

    def check_open(self) -> None:
        """Raise `InvalidRequest` for a device that is closed."""
        if self._closed:
            raise InvalidRequest("device", self, "a device that is open")

    def give_back(self, segments: Segments, segment: Segment) -> None:
        """Give a segment back, where driver calls may be made."""
        if self.driver.gone():
            segments.forget(segment)
        else:
            segments.give_back(segment)

    def cuda_peers(self, peers: Sequence[Device]) -> list[Cuda]:
        """Return those of `peers` that are other GPUs.

        Raises:
            InvalidRequest: One is no CUDA device.
        """
        for peer in peers:
            if not isinstance(peer, Cuda):
                raise InvalidRequest("peers", peer, "CUDA devices")
        found = {peer.index: peer for peer in peers if isinstance(peer, Cuda) and peer.index != self.index}
        return list(found.values())

    def _makers(self, device: int) -> dict[str, Callable[[], Source]]:
        # The device must not be kept by what it keeps: a finalizer of it ends its threads.
        me = weakref.ref(self)
        makers: dict[str, Callable[[], Source]] = {}
        if self.driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", device):
            makers[VIRTUAL] = lambda: _owner(me)._make_virtual()
        if self.driver.attribute("MEMORY_POOLS_SUPPORTED", device):
            makers[ORDERED] = lambda: _owner(me)._make_ordered()
        makers[DIRECT] = lambda: _owner(me)._make_direct()
        if self.checker is not None:
            # compute-sanitizer (2025.3) refuses to hear of blocks in any memory but that of cuMemAlloc.
            return dict.fromkeys(makers, makers[DIRECT])
        return makers

    def _make_virtual(self) -> VirtualSegments:
        made = VirtualSegments(self.driver, self.context, self.capacity, self.granularity)
        made.grant([peer.context.device for peer in self._peers])
        return made

    def _make_ordered(self) -> OrderedSegments:
        return OrderedSegments(self.driver, self.context, [peer.context.device for peer in self._peers])

    def _make_direct(self) -> DirectSegments:
        open_to(self.driver, self.context, [peer.context for peer in self._peers])
        return DirectSegments(self.driver)

    def _submit(self, stream: Stream, function: str, *arguments: object) -> None:
        home = self.stream_of(stream)
        if isinstance(home, ThreadStream) and not self.streams.is_this_threads(home):
            raise InvalidRequest("stream", stream, "this thread's default stream, or another stream")
        with self.context.entered():
            self.driver.call(function, *arguments, home.handle)

    def _page_locked(self, address: int) -> bool:
        kind = self.driver.enumerator("CUpointer_attribute", "MEMORY_TYPE")
        try:
            with self.context.entered():
                return int(self.driver.call("cuPointerGetAttribute", kind, address)) == _HOST_MEMORY
        except DeviceError as error:
            if error.code != INVALID_VALUE:
                raise
            return False  # memory that the driver knows nothing of


def _owner(reference: weakref.ref[Cuda]) -> Cuda:
    device = reference()
    assert device is not None
    return device
