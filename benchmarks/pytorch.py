"""PyTorch's caching allocator, and PyTorch's tensors in the memory of asyncmem's pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.arrays import dtype_size
from asyncmem.devices import Device, Stream
from benchmarks.allocators import Allocator, AsyncmemPool, Calls, Crossing, index_of

RECORDED = "the block stays on its own stream: record_stream defers its reuse until the host sees the other one done"


class _Torch(Allocator):
    def __init__(self, device: str, configuration: str) -> None:
        self.torch: ModuleType = import_module("torch")
        self.index = index_of(device)
        self.torch.cuda.set_device(self.index)
        self.torch.cuda.init()
        self.name = f"{type(self).name} {configuration}".strip()
        # What it reports is a kind of RuntimeError, but not a MemoryError.
        self.out_of_memory = self.torch.cuda.OutOfMemoryError  # type: ignore[misc] # known once torch is there

    def way(self) -> Calls:
        raise NotImplementedError

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Calls]:
        """Return its calls with an empty cache, under a limit on what it may take from the device."""
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.empty_cache()
        total = cuda.get_device_properties(self.index).total_memory
        if limit is not None:
            cuda.set_per_process_memory_fraction(limit / total, self.index)
        try:
            yield self.way()
        finally:
            if limit is not None:
                cuda.set_per_process_memory_fraction(1.0, self.index)
            cuda.synchronize()
            cuda.empty_cache()


class TorchEmpty(_Torch):
    """What users write: a tensor of bytes, and its last reference."""

    name = "torch.empty"
    unlike: ClassVar = {
        "batch": "a hundred single calls: there is no call for many",
        "await_hit": "nothing to await",
        "cross_stream": RECORDED,
    }

    def way(self) -> Calls:
        """Return `torch.empty` of bytes on the device."""
        torch = self.torch
        names = {"empty": torch.empty, "kind": torch.uint8, "device": torch.device("cuda", self.index)}
        return Calls(names=names, allocate="empty({size}, dtype=kind, device=device)")

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Return `record_stream`, its only way to free behind another stream."""
        torch = self.torch
        producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
        names = {
            **self.way().names,
            "producer": producer,
            "consumer": consumer,
            "fence": torch.cuda.Event(),
        }
        ordering = "fence.record(producer)\nconsumer.wait_event(fence)"
        made = f"block = {self.way().allocate}\n{ordering}\nblock.record_stream(consumer)\ndel block"
        with torch.cuda.stream(producer):
            yield Crossing(names=names, statement=made)
        torch.cuda.synchronize()


class TorchRaw(_Torch):
    """The fastest calls that its extension module has: an address for a size and a stream."""

    name = "torch raw"
    unlike: ClassVar = {"batch": TorchEmpty.unlike["batch"], "await_hit": "nothing to await"}

    def way(self) -> Calls:
        """Return the pair of calls behind `MemPool` and the pluggable allocators."""
        part = self.torch._C
        names = {
            "allocate": part._cuda_cudaCachingAllocator_raw_alloc,
            "delete": part._cuda_cudaCachingAllocator_raw_delete,
        }
        return Calls(names=names, allocate="allocate({size}, 0)", release="delete({block})")


class TorchCachingAlloc(_Torch):
    """The documented calls for other libraries, which choose device and stream in Python."""

    name = "torch.cuda.caching_allocator_alloc"
    rows = ("hit",)
    unlike: ClassVar = TorchRaw.unlike

    def way(self) -> Calls:
        """Return `caching_allocator_alloc` and `caching_allocator_delete`."""
        cuda = self.torch.cuda
        names = {"allocate": cuda.caching_allocator_alloc, "delete": cuda.caching_allocator_delete}
        return Calls(names=names, allocate="allocate({size})", release="delete({block})")


# -- tensors in the memory of asyncmem's pool -------------------------------------------------------------------------


@dataclass(slots=True)
class PooledTensor:
    """A tensor and the buffer below it; dropping the piece drops both."""

    tensor: Any  # a torch tensor, which has no type where torch is not installed
    buffer: Buffer


class Tensors:
    """Makes tensors in a pool's memory.

    Args:
        torch: The module.
        pool: Where the memory comes from.
        dtype: What the tensors hold, by its name in NumPy and torch alike.
    """

    def __init__(self, torch: ModuleType, pool: AsyncMemoryPool, dtype: str = "float32") -> None:
        self._torch = torch
        self._pool = pool
        self._dtype = dtype
        self._itemsize = dtype_size(dtype)

    def empty(self, shape: tuple[int, int], stream: Stream) -> PooledTensor:
        """Allocate for a stream, which has to be torch's current one."""
        rows, columns = shape
        buffer = self._pool.allocate(rows * columns * self._itemsize, stream=stream)
        return PooledTensor(self._torch.from_dlpack(buffer.view(self._dtype, shape)), buffer)


class AsyncmemAndTorch(AsyncmemPool):
    """asyncmem and torch in one process."""

    def __init__(self, spec: str | Device) -> None:
        super().__init__(spec)
        self.torch = import_module("torch")
        self.torch.cuda.set_device(index_of(str(spec) if isinstance(spec, str) else spec.name))
        self.torch.cuda.init()
