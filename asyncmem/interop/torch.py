"""PyTorch's CUDA memory from a pool, a budget or a lease.

    async with pool.lease("6 GiB", tag="request") as lease:  # awaited, by priority and deadline
        with asyncmem.interop.torch.use(lease):
            y = model(x)  # allocates inside of the lease, without waiting

torch's own caching allocator goes on inside, over segments from the pool, so its statistics, snapshots and
`record_stream` work. After `install(pool)` the pool is the process's allocator instead. torch 2.11 or later, for CUDA.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from asyncmem.core import PROCESS_CALLS, ROUTE_CALLS, Route, route_failure
from asyncmem.errors import BackendUnavailable, InvalidRequest
from asyncmem.interop.routing import device_of, need_no_blocking, needs, until_suspended
from asyncmem.pool.share import Share

with needs("torch>=2.11"):
    import torch

__all__ = ["give_back", "install", "use"]

# A tensor's memory may be freed, and with it its segment, with torch's lock held; and any thread may wait for that
# lock while it holds the interpreter's. Allocations must not hold it when they come here, since some of them take the
# interpreter's lock.
_SETTING: Final = "release_lock_on_cudamalloc:True"

_C: Any = torch._C


@contextmanager
def use(share: Share, *, tag: str = "torch", timeout: float | str | None = None) -> Iterator[None]:
    """Have torch allocate all CUDA memory of this thread from a pool, a budget or a lease, until the block ends.

    Backward passes run on this thread too. What torch has cached goes back at the end of the block; a tensor that
    outlives it keeps its segment. Memory goes back behind all work that any stream was given until then.
    `asyncmem.interop` says more.
    """
    device = device_of(share)
    need_no_blocking(share)
    block = (_EachTensor if _installed else _EachSegment)(share, device, tag, timeout)
    try:
        with until_suspended(share, block.enter, block.leave):
            yield
    finally:
        block.end()


def give_back() -> None:
    """Give the pools back what tensors that outlived their blocks have left, as each block does at its end.

    Pools do so, too, four times a second, while requests wait.
    """
    if not _installed:
        _prepared().give_back()


def install(*shares: Share, tag: str = "torch", timeout: float | str | None = None) -> None:
    """Be torch's allocator in this process, before it starts CUDA: every tensor is a block of a pool or a budget.

    Memory goes back behind the work of its own stream, or, after `record_stream`, of all. `memory_stats`,
    `max_memory_allocated` and the like, and `memory_summary` tell what torch has of it. A loop's thread never waits for
    memory. `use(lease)` works as before, and its block costs less.

    A full pool raises `RuntimeError`, with all facts after "CUDA out of memory.": torch takes no other error from an
    allocator that is not its own. Graphs cannot be captured, and there are no snapshots.

    Args:
        shares: One for each device that torch may use.
        tag: A name under which statistics and errors count it.
        timeout: Seconds to wait for memory at most; None does not wait.

    Raises:
        BackendUnavailable: torch has used CUDA already, or has another allocator, and changes it no more.
        InvalidRequest: No pool of CUDA memory, or a lease; or two for one device.
    """
    devices = [device_of(share) for share in shares]
    if not shares or len(set(devices)) < len(devices) or any(share._has_range for share in shares):
        raise InvalidRequest("shares", shares, "a pool or a budget for each device")
    _need_cuda()
    if torch.cuda.is_initialized() or _installed:
        raise BackendUnavailable("torch", tried=["its allocator, after CUDA had started"], install="Call this before.")
    allocate, free, name_stream = PROCESS_CALLS
    allocator = _C._cuda_customAllocator(allocate, free)
    allocator.set_record_stream_fn(name_stream)
    _C._cuda_changeCurrentAllocator(allocator)
    for share, device in zip(shares, devices, strict=True):
        route = _route(share, device, tag, timeout, names_streams=True)
        route.install()
        _installed[device] = _Figures(route, share)
    _C._cuda_memoryStats = lambda device: _installed[device].stats()
    _C._cuda_resetPeakMemoryStats = lambda device: _installed[device].reset_peaks()
    _C._cuda_resetAccumulatedMemoryStats = lambda device: _installed[device].reset_totals()


def _route(share: Share, device: int, tag: str, timeout: float | str | None, *, names_streams: bool = False) -> Route:
    return Route(
        share, device, lambda handle: _stream_of(device, handle), tag=tag, timeout=timeout, names_streams=names_streams
    )


class _Figures:
    """What torch asks its allocator for, of the memory that it has by one route."""

    def __init__(self, route: Route, share: Share) -> None:
        self._route, self._share = route, share
        self._before = [(0, 0), (0, 0)]

    def stats(self) -> dict[str, Any]:
        """Return torch's nested statistics; what a pool has no word for is 0."""
        share = self._share.stats()
        counted = [
            _figure(live, peak, taken - before[0], freed - before[1])
            for (live, peak, taken, freed), before in zip(self._route.counts(), self._before, strict=True)
        ]
        found: dict[str, Any] = {name: _by_size(_figure()) for name in _UNKNOWN}
        found |= {name: _by_size(counted[0]) for name in ("allocated_bytes", "active_bytes", "requested_bytes")}
        found |= {name: _by_size(counted[1]) for name in ("allocation", "active")}
        found["reserved_bytes"] = _by_size(_figure(share.reserved_bytes, share.peak_reserved))
        found["segment"] = _by_size(_figure(share.segments))
        return found | {name: _figure() for name in ("oversize_allocations", "oversize_segments")} | _NEVER

    def reset_peaks(self) -> None:
        """Start the peaks again from what there is now."""
        self._route.reset_peaks()

    def reset_totals(self) -> None:
        """Start the totals again: what was allocated and freed altogether."""
        self._before = [(taken, freed) for _, _, taken, freed in self._route.counts()]


_UNKNOWN: Final = ("inactive_split", "inactive_split_bytes")
_NEVER: Final = dict.fromkeys(("num_alloc_retries", "num_ooms", "num_sync_all_streams"), 0)


def _figure(current: int = 0, peak: int = 0, allocated: int = 0, freed: int = 0) -> dict[str, int]:
    return {"current": current, "peak": max(peak, current), "allocated": allocated, "freed": freed}


def _by_size(figure: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"all": figure, "small_pool": _figure(), "large_pool": _figure()}


_workspaces = threading.local()


def _make_workspaces(device: int) -> None:
    """Make torch's workspaces of matrix products for this thread and stream, outside the block, because they stay."""
    made: set[tuple[int, int]] = _workspaces.__dict__.setdefault("made", set())
    stream = (device, torch.cuda.current_stream().cuda_stream)
    if stream in made or torch.cuda.is_current_stream_capturing():
        return
    zeros = torch.zeros(16, 16, device="cuda")
    with torch.no_grad():
        torch.mm(zeros, zeros)  # cuBLAS, and with a bias cuBLASLt
        torch.addmm(zeros[0], zeros, zeros)
    made.add(stream)


def _use_once_more(device: int, number: tuple[int, int]) -> None:
    """Count one more user of a pool of torch's, until `_cuda_releasePool`."""
    _C._cuda_beginAllocateCurrentThreadToPool(device, number)
    _C._cuda_endAllocateToPool(device, number)


class _EachTensor:
    """One use of a share where torch asks us for each tensor."""

    def __init__(self, share: Share, device: int, tag: str, timeout: float | str | None) -> None:
        _captures.watch(share)
        self._route = _route(share, device, tag, timeout, names_streams=bool(_installed))
        self._backwards_elsewhere = True

    def enter(self) -> None:
        """Route this thread's allocations to the share."""
        self._backwards_elsewhere = _C._is_multithreading_enabled()
        _C._set_multithreading_enabled(False)
        self._route.enter()

    def leave(self) -> None:
        """End that."""
        self._route.leave()
        _C._set_multithreading_enabled(self._backwards_elsewhere)

    def end(self) -> None:
        """Give back what is free: all is."""


class _EachSegment(_EachTensor):
    """One use of a share: a pool of torch's that gets its segments from there."""

    def __init__(self, share: Share, device: int, tag: str, timeout: float | str | None) -> None:
        self._torch = _prepared()
        super().__init__(share, device, tag, timeout)
        share._opened.give_back_hooks.add(self._torch.give_back)
        with torch.cuda.device(device):
            _make_workspaces(device)
            self._pool: Any = torch.cuda.MemPool(self._torch.allocator)
            self._where: tuple[int, tuple[int, int]] = (device, self._pool.id)
        _use_once_more(*self._where)

    def enter(self) -> None:
        """Route this thread's allocations to the pool."""
        _C._cuda_beginAllocateCurrentThreadToPool(*self._where)
        super().enter()

    def leave(self) -> None:
        """End that."""
        super().leave()
        _C._cuda_endAllocateToPool(*self._where)
        _C._cuda_releasePool(*self._where)

    def end(self) -> None:
        """Give back what is free.

        A pool that dies unused looks for its cached segments, and must not while any thread is in a block like this:
        torch ends the process then. This one dies while it counts as used, and its segments go back after that.
        """
        del self._pool
        _C._cuda_releasePool(*self._where)
        self._torch.give_back()


class _Captures:
    """Captures of graphs by torch, on any thread: a fence behind all streams would end them, so none is recorded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices = weakref.WeakSet[Any]()  # that a pool serves torch from
        self._begun: list[Any] = []  # devices, for as long as there are captures
        self._count = 0
        begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
        ends = weakref.WeakKeyDictionary[Any, Any]()

        def capture_begin(graph: Any, *how: Any, **named: Any) -> None:  # noqa: ANN401  # torch's
            self._begin()
            ends[graph] = weakref.finalize(graph, self._end)
            try:
                begin(graph, *how, **named)
            except BaseException:
                ends.pop(graph)()
                raise

        def capture_end(graph: Any) -> None:  # noqa: ANN401  # torch's
            try:
                end(graph)
            finally:
                ends.pop(graph, int)()

        torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end = capture_begin, capture_end

    def watch(self, share: Share) -> None:
        """Count captures for the device of a share, from now on."""
        device = share._opened.device
        with self._lock:
            if device not in self._devices:
                self._devices.add(device)
                if self._count:
                    self._begin_captures(device)

    def _begin_captures(self, device: Any) -> None:  # noqa: ANN401  # of CUDA's
        self._begun.append(device)
        device.begin_captures()

    def _begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                for device in list(self._devices):
                    self._begin_captures(device)

    def _end(self) -> None:
        with self._lock:
            self._count -= 1
            while self._begun and not self._count:
                self._begun.pop().end_captures()


class _Torch:
    """What is made ready in torch, once in a process."""

    def __init__(self) -> None:
        _set_up()
        self.allocator = _C._cuda_customAllocator(*ROUTE_CALLS)
        self._lock = threading.Lock()
        self._guards = [(device, torch.cuda.graph_pool_handle()) for device in range(torch.cuda.device_count())]
        for guard in self._guards:  # they exist from now on
            _use_once_more(*guard)

    def give_back(self) -> None:
        """Release the free segments of pools that are gone. Other memory that torch has cached stays where it is.

        That is what it does while any thread allocates to a pool, so one does. What was freed after `record_stream`
        becomes free at the first allocation when none does, unless that comes from here.
        """
        with self._lock:
            with suppress(torch.OutOfMemoryError):
                _C._cuda_cudaCachingAllocator_raw_delete(_C._cuda_cudaCachingAllocator_raw_alloc(1, 0))
            for guard in self._guards:
                _C._cuda_beginAllocateCurrentThreadToPool(*guard)
            try:
                _C._cuda_emptyCache()
            finally:
                for guard in self._guards:
                    _C._cuda_endAllocateToPool(*guard)
                    _C._cuda_releasePool(*guard)


_captures = _Captures()
_making = threading.Lock()
_made: list[_Torch] = []
_installed: dict[int, _Figures] = {}  # of whole devices
_observers: list[Any] = []  # of the program, for torch's errors of this kind


def _prepared() -> _Torch:
    with _making:
        if not _made:
            _made.append(_Torch())
        return _made[0]


def _set_up() -> None:
    """Make torch allocate without its lock, and explain a failed allocation."""
    _need_cuda()
    torch.cuda.init()
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        install = "Name no backend in PYTORCH_ALLOC_CONF."
        raise BackendUnavailable("torch", tried=[f"its allocator {backend!r}"], install=install)
    known = torch.cuda.memory._snapshot()["allocator_settings"].get("PYTORCH_CUDA_ALLOC_CONF", "")
    _C._accelerator_setAllocatorSettings(f"{known},{_SETTING}" if known else _SETTING)
    _C._cuda_attach_out_of_memory_observer(_explain)
    _C._cuda_attach_out_of_memory_observer = _observers.append  # torch calls none after one that raises


def _need_cuda() -> None:
    if not torch.cuda.is_available() or not hasattr(_C, "_cuda_customAllocator"):
        raise BackendUnavailable("torch", tried=["its CUDA"], install="Install a build for CUDA, torch 2.11 or later.")


def _explain(device: int, asked: int, total: int, free: int) -> None:
    """Raise torch's error with our facts where memory of ours was missing. torch calls it before it raises its own."""
    for observer in _observers:
        observer(device, asked, total, free)
    failure = route_failure()
    try:
        if isinstance(failure, Exception):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {_size(asked)}. GPU {device} has a total capacity of "
                f"{_size(total)} of which {_size(free)} is free. {failure}"
            ) from failure
        if failure is not None:  # an interrupt
            raise failure
    finally:
        del failure  # which keeps this frame by its traceback


def _size(nbytes: int) -> str:
    """Return a size as torch writes it in this error, which programs look for."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def _stream_of(device: int, handle: int) -> object:
    """Return what tells a pool the stream of this thread: torch's object, where torch keeps the stream for good."""
    stream = torch.cuda.current_stream(device)
    is_torchs = stream.cuda_stream == handle and stream.stream_id & 1
    return stream if is_torchs else handle
