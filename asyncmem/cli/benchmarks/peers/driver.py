"""The driver's own stream-ordered allocator, by its bare calls and by `cuda.core`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from asyncmem.cli.benchmarks.peers.cupy_ import ALONE
from asyncmem.cli.benchmarks.peers.peer import Crossing, Peer
from asyncmem.cli.benchmarks.peers.way import Way

KEEP_ALL = (1 << 64) - 1
ORDERING = "record(fence, first)\nwait(second, fence, 0)\n"
"""Makes the second of `Driver.two_streams` wait for the first."""


class Driver:
    """`cuda.bindings` with its answers checked, and one device's primary context current on this thread."""

    def __init__(self, index: int) -> None:
        self.calls: Any = import_module("cuda.bindings.driver")
        self.checked(self.calls.cuInit(0))
        self.device = self.checked(self.calls.cuDeviceGet(index))
        self._before = self.checked(self.calls.cuCtxGetCurrent())
        context = self.checked(self.calls.cuDevicePrimaryCtxRetain(self.device))
        self.checked(self.calls.cuCtxSetCurrent(context))

    def checked(self, answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - cuda-python says no types
        """Take one answer, which is (code, values...), and raise a code that is not success."""
        code, *values = answer
        if int(code) != 0:
            raise RuntimeError(f"the driver refused: {code.name} ({int(code)})")
        return values[0] if values else None

    def synchronize(self) -> None:
        """Wait until the device has done everything (blocks)."""
        self.checked(self.calls.cuCtxSynchronize())

    def close(self) -> None:
        """Leave the context, for whatever was current before."""
        self.checked(self.calls.cuCtxSetCurrent(self._before))
        self.checked(self.calls.cuDevicePrimaryCtxRelease(self.device))

    @contextmanager
    def two_streams(self) -> Iterator[dict[str, Any]]:
        """Make two streams and a fence, by the names that the rows' statements use."""
        calls = self.calls
        first, second = (self.checked(calls.cuStreamCreate(1)) for _ in range(2))
        fence = self.checked(calls.cuEventCreate(2))
        try:
            yield {
                "first": first,
                "second": second,
                "fence": fence,
                "record": calls.cuEventRecord,
                "wait": calls.cuStreamWaitEvent,
            }
        finally:
            self.synchronize()
            self.checked(calls.cuEventDestroy(fence))
            for stream in (first, second):
                self.checked(calls.cuStreamDestroy(stream))


class MemAllocAsync(Peer):
    """`cuMemAllocAsync` and `cuMemFreeAsync` by cuda.bindings, on the device's default pool, which keeps its memory."""

    name = "cuMemAllocAsync"
    unlike: ClassVar[Mapping[str, str]] = ALONE

    def __init__(self, index: int) -> None:
        self.driver = Driver(index)
        calls = self.driver.calls
        self.pool = self.driver.checked(calls.cuDeviceGetDefaultMemPool(self.driver.device))
        threshold = calls.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.driver.checked(calls.cuMemPoolSetAttribute(self.pool, threshold, calls.cuuint64_t(KEEP_ALL)))

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Way]:
        """Answer the calls on the default stream, with a trimmed pool."""
        _ = limit
        driver, calls = self.driver, self.driver.calls
        driver.synchronize()
        driver.checked(calls.cuMemPoolTrimTo(self.pool, 0))
        names = {
            "allocate": calls.cuMemAllocAsync,
            "free": calls.cuMemFreeAsync,
            "stream": calls.CUstream(0),
        }
        yield Way(names=names, allocate="allocate({size}, stream)[1]", release="free({block}, stream)")
        driver.synchronize()
        driver.checked(calls.cuMemPoolTrimTo(self.pool, 0))

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Answer an allocation on one stream and a free on the other."""
        calls = self.driver.calls
        with self.driver.two_streams() as names:
            names |= {"allocate": calls.cuMemAllocAsync, "free": calls.cuMemFreeAsync}
            yield Crossing(
                names=names, statement=f"block = allocate({{size}}, first)[1]\n{ORDERING}free(block, second)"
            )

    def close(self) -> None:
        """Leave the device's context."""
        self.driver.close()


class CudaCore(Peer):
    """`cuda.core.DeviceMemoryResource` with a pool of its own."""

    name = "cuda.core"
    unlike: ClassVar[Mapping[str, str]] = ALONE

    def __init__(self, index: int) -> None:
        self.core: Any = import_module("cuda.core")
        self.device = self.core.Device(index)
        self.device.set_current()
        self.index = index

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Make a resource over a new pool, which keeps what was freed."""
        return self.core.DeviceMemoryResource(self.index, self.core.DeviceMemoryResourceOptions())

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Way]:
        """Answer `allocate` on the default stream and `close` of the buffer."""
        _ = limit
        resource = self.resource()
        names = {"allocate": resource.allocate, "stream": self.device.default_stream}
        yield Way(names=names, allocate="allocate({size}, stream=stream)", release="{block}.close()")
        self.device.sync()

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Answer a close that names the other stream."""
        resource = self.resource()
        producer = self.device.create_stream()
        names = {
            "allocate": resource.allocate,
            "producer": producer,
            "consumer": self.device.create_stream(),
            "fence": producer.record(),
        }
        ordering = "producer.record(fence)\nconsumer.wait(fence)"
        made = f"block = allocate({{size}}, stream=producer)\n{ordering}\nblock.close(consumer)"
        yield Crossing(names=names, statement=made)
        self.device.sync()
