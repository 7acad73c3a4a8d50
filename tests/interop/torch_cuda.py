"""torch's CUDA memory, as far as `asyncmem.interop.torch` uses it, for a build of torch that has none.

It keeps the rules of torch's `c10/cuda/CUDACachingAllocator.cpp`: which pool serves a thread, which segments go back
when, what is called with the lock held, and which calls end the process. A pool's segments come from its own allocator,
by the calls in C that torch makes, without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

MIB = 1 << 20
SMALL = 1 * MIB
"""The largest tensor that shares a segment of 2 MiB; others, below 10 MiB, share one of 20 MiB."""

Number = tuple[int, int]
DEFAULT: Number = (0, 0)

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_ALLOCATE = ctypes.CFUNCTYPE(_pointer, _size, ctypes.c_int, _pointer)
_FREE = ctypes.CFUNCTYPE(None, _pointer, _size, ctypes.c_int, _pointer)
_NAME_STREAM = ctypes.CFUNCTYPE(None, _pointer, _pointer)


class EndsProcessError(AssertionError):
    """What torch finds impossible: it ends the process then."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise EndsProcessError(what)


class Allocator:
    """`torch._C._cuda_customAllocator`: of addresses."""

    def __init__(self, allocate: int, free: int) -> None:
        self.address, self.allocate, self.free = allocate, _ALLOCATE(allocate), _FREE(free)

    def set_record_stream_fn(self, call: int) -> None:
        self.name_stream = _NAME_STREAM(call)


class Driver:
    """Where torch's own memory comes from: addresses that are nobody else's."""

    def __init__(self) -> None:
        self._next = itertools.count(1 << 50, 1 << 40)

    def allocate(self, nbytes: int, device: int, stream: int) -> int:
        del nbytes, device, stream
        return next(self._next)

    def free(self, address: int, nbytes: int, device: int, stream: int) -> None: ...


@dataclass
class Stream:
    """`torch.cuda.Stream`; torch keeps those for good whose number is odd."""

    cuda_stream: int
    stream_id: int = 0
    keeps: object = None

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


@dataclass(eq=False)
class Segment:
    """What an allocator gave: cached for its stream, until it goes back."""

    address: int
    nbytes: int
    stream: int
    small: bool
    live: dict[int, int] = field(default_factory=dict)

    def place(self, nbytes: int) -> int | None:
        """Return the address of a free part, which is taken then."""
        at = 0
        for begin in sorted(self.live):
            if begin - at >= nbytes:
                break
            at = begin + self.live[begin]
        if at + nbytes > self.nbytes:
            return None
        self.live[at] = nbytes
        return self.address + at


@dataclass(eq=False)
class Pool:
    """A pool of torch's; its segments may go back once it has no users."""

    allocator: Allocator | Driver
    users: int = 1
    segments: list[Segment] = field(default_factory=list)


class Tensor:
    """A tensor's memory, until nobody has it any more."""

    def __init__(self, cuda: TorchCuda, address: int, nbytes: int, segment: Segment | None) -> None:
        self._cuda, self._address, self.nbytes, self.segment = cuda, address, nbytes, segment
        self.stream = cuda.stream.cuda_stream
        self.recorded = False

    def data_ptr(self) -> int:
        return self._address

    def record_stream(self, stream: object) -> None:
        if self.segment is None:
            self._cuda.whole.name_stream(self._address, stream.__cuda_stream__()[1])
        self.recorded = True

    def __getitem__(self, _index: int) -> Tensor:
        return self

    def __del__(self) -> None:
        self._cuda.free(self)


class TorchCuda:
    """torch's allocator of one device."""

    def __init__(self, native: Any) -> None:
        self.lock = threading.RLock()
        self.pools = {DEFAULT: Pool(Driver())}
        self.settings = ""
        self.backend = "native"
        self.observers: list[Callable[..., object]] = []
        self.stream = Stream(0)
        self.started = False
        self.whole: Any = None
        self._native = native
        self.underway: list[tuple[Number, int]] = []  # captures_underway: pools, and the threads that they serve
        self._recorded: list[tuple[Segment, int]] = []  # that wait for the streams that were recorded
        self._raw: dict[int, Tensor] = {}
        self.workspaces: dict[tuple[int, int], Tensor] = {}
        self._numbers = itertools.count(1)

    # Which pool.

    def make(self, number: Number, allocator: Allocator | Driver) -> None:
        """Make a pool, or count one more user."""
        with self.lock:
            if number in self.pools:
                demand(self.pools[number].users > 0, "the pool is live")
                self.pools[number].users += 1
            else:
                self.pools[number] = Pool(allocator)

    def begin(self, _device: int, number: Number) -> None:
        with self.lock:
            self.make(number, self.pools[DEFAULT].allocator)
            demand(all(number != other for other, _ in self.underway), "already recording to this pool")
            self.underway.append((number, threading.get_ident()))

    def end(self, _device: int, number: Number) -> None:
        with self.lock:
            found = [one for one in self.underway if one[0] == number]
            demand(bool(found), "not recording to this pool")
            self.underway.remove(found[0])

    def release(self, _device: int, number: Number) -> None:
        with self.lock:
            demand(number in self.pools, "the pool is there")
            self.pools[number].users -= 1
            demand(self.pools[number].users >= 0, "the pool has had users")

    def _pool_here(self) -> Pool:
        me = threading.get_ident()  # the innermost of this thread
        return self.pools[next((number for number, thread in reversed(self.underway) if thread == me), DEFAULT)]

    # Memory.

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory for the stream that is current, as `torch.empty(nbytes, device="cuda")` does."""
        if self.whole is not None:
            return self._allocate_whole(nbytes)
        with self.lock:
            if not self.underway:
                self._look_at_events()
            rounded = -(-nbytes // 512) * 512
            pool, small = self._pool_here(), rounded <= SMALL
            for segment in pool.segments:
                if (segment.stream, segment.small) == (self.stream.cuda_stream, small):
                    address = segment.place(rounded)
                    if address is not None:
                        return Tensor(self, address, nbytes, segment)
            segment_size = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            made = self._grow(pool, segment_size, small)
            if made is None and not self.underway:
                self.empty_cache()
                made = self._grow(pool, segment_size, small)
            if made is not None:
                return Tensor(self, made.place(rounded) or 0, nbytes, made)
        raise self.fail(segment_size)

    def fail(self, nbytes: int) -> torch.OutOfMemoryError:
        """Tell observers that there is no such memory, and return the error unless one has raised."""
        for observer in self.observers:
            observer(0, nbytes, 1 << 30, 0)
        return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB.")

    def _grow(self, pool: Pool, nbytes: int, small: bool) -> Segment | None:
        stream = self.stream.cuda_stream
        unlocked = "release_lock_on_cudamalloc:True" in self.settings
        if unlocked:
            self.lock.release()
        try:
            address = pool.allocator.allocate(nbytes, 0, stream)
        finally:
            if unlocked:
                self.lock.acquire()
        if address is None:
            return None
        made = Segment(address, nbytes, stream, small)
        pool.segments.append(made)
        return made

    def _allocate_whole(self, nbytes: int) -> Tensor:
        """Allocate from another allocator, which throws where it has nothing."""
        text = ctypes.create_string_buffer(2000)
        call = self._native.take_or_note
        call.argtypes = [_pointer, _size, ctypes.c_int, _pointer, ctypes.c_char_p, _size]
        call.restype = _pointer
        address = call(self.whole.address, nbytes, 0, self.stream.cuda_stream, text, len(text))
        if text.value:
            raise RuntimeError(text.value.decode())
        return Tensor(self, address, nbytes, None)

    def free(self, tensor: Tensor) -> None:
        """Cache memory again; after `record_stream` once an allocation finds that the streams are done."""
        if tensor.segment is None:
            self.whole.free(tensor.data_ptr(), tensor.nbytes, 0, tensor.stream)
            return
        with self.lock:
            at = tensor.data_ptr() - tensor.segment.address
            if tensor.recorded:
                self._recorded.append((tensor.segment, at))
            else:
                del tensor.segment.live[at]

    def _look_at_events(self) -> None:
        while self._recorded:
            segment, at = self._recorded.pop()
            del segment.live[at]

    def empty_cache(self, number: Number = DEFAULT) -> None:
        """Give free segments back: all, or a pool's; while any thread is in a pool, those of pools without users."""
        with self.lock:
            if number == DEFAULT and not self.underway:
                self._look_at_events()
                self._give_back(self.pools[DEFAULT])
            for which, pool in [one for one in self.pools.items() if one[1].users == 0]:
                if number not in {DEFAULT, which}:
                    continue
                if number == which:
                    demand(not self.underway, "no thread allocates to a pool where one dies")
                    self._look_at_events()
                self._give_back(pool)
                if not pool.segments:
                    del self.pools[which]

    def _give_back(self, pool: Pool) -> None:
        for segment in [one for one in pool.segments if not one.live]:
            pool.segments.remove(segment)
            pool.allocator.free(segment.address, segment.nbytes, 0, segment.stream)

    # In torch's place.

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def put(self, put: Callable[..., object] = setattr, **how: Any) -> None:
        """Put all this in torch's place."""
        cuda = self

        class MemPool:
            """`torch.cuda.MemPool`: a user of its pool, until it dies."""

            def __init__(self, allocator: Allocator | None = None) -> None:
                self.id: Number = (0, next(cuda._numbers))
                cuda.make(self.id, allocator or cuda.pools[DEFAULT].allocator)

            def __del__(self) -> None:
                cuda.release(0, self.id)
                cuda.empty_cache(self.id)

        class CUDAGraph:
            """`torch.cuda.CUDAGraph`."""

            def capture_begin(self, fails: bool = False) -> None:
                if fails:
                    raise RuntimeError("cannot capture")

            def capture_end(self) -> None: ...

        calls = {
            "_cuda_customAllocator": Allocator,
            "_cuda_beginAllocateCurrentThreadToPool": self.begin,
            "_cuda_endAllocateToPool": self.end,
            "_cuda_releasePool": self.release,
            "_cuda_emptyCache": self.empty_cache,
            "_cuda_attach_out_of_memory_observer": self.observers.append,
            "_cuda_changeCurrentAllocator": lambda one: setattr(self, "whole", one),
            "_cuda_cudaCachingAllocator_raw_alloc": self._raw_alloc,
            "_cuda_cudaCachingAllocator_raw_delete": self._raw.__delitem__,
            "_cuda_memorySnapshot": lambda _: {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.settings}},
            "_accelerator_setAllocatorSettings": lambda settings: setattr(self, "settings", settings),
        }
        for name, call in calls.items():
            put(torch._C, name, call, **how)
        functions = {
            "is_available": lambda: True,
            "is_initialized": lambda: self.started,
            "init": lambda: setattr(self, "started", True),
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_allocator_backend": lambda: self.backend,
            "current_stream": lambda _device=None: self.stream,
            "is_current_stream_capturing": lambda: False,
            "graph_pool_handle": lambda: (next(self._numbers), 0),
            "_exchange_device": lambda _device: 0,
            "_maybe_exchange_device": lambda _device: 0,
            "MemPool": MemPool,
            "CUDAGraph": CUDAGraph,
        }
        for name, function in functions.items():
            put(torch.cuda, name, function, **how)
        put(torch.cuda.memory, "is_initialized", functions["is_initialized"], **how)
        put(torch, "zeros", lambda *shape, **_: self.allocate(4 * shape[0] * shape[-1]), **how)
        for name in ("mm", "addmm"):
            put(torch, name, self._multiply, **how)

    def _raw_alloc(self, nbytes: int, _stream: int) -> int:
        tensor = self.allocate(nbytes)
        self._raw[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def _multiply(self, *_tensors: Tensor) -> None:
        """Make a workspace for this thread and stream, which stays."""
        key = (threading.get_ident(), self.stream.cuda_stream)
        if key not in self.workspaces:
            self.workspaces[key] = self.allocate(8 * MIB)
