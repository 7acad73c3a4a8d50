"""The driver's own calls, by `cuda.bindings`: its stream-ordered allocator, and a kernel that does nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar, Final

from asyncmem.cli.machine import checked
from benchmarks.allocators import SINGLE_CALLS, Allocator, Calls, Crossing, index_of

KEEP_ALL = (1 << 64) - 1
ORDERING = "record(fence, first)\nwait(second, fence, 0)\n"
"""Makes the second of `Driver.two_streams` wait for the first."""


class Driver:
    """`cuda.bindings` with its answers checked, and one device's primary context current on this thread."""

    checked = staticmethod(checked)

    def __init__(self, index: int) -> None:
        self.calls: Any = import_module("cuda.bindings.driver")
        self.checked(self.calls.cuInit(0))
        self.device = self.checked(self.calls.cuDeviceGet(index))
        self._before = self.checked(self.calls.cuCtxGetCurrent())
        context = self.checked(self.calls.cuDevicePrimaryCtxRetain(self.device))
        self.checked(self.calls.cuCtxSetCurrent(context))

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


class MemAllocAsync(Allocator):
    """`cuMemAllocAsync` and `cuMemFreeAsync` by cuda.bindings, on the device's default pool, which keeps its memory."""

    name = "cuMemAllocAsync"
    unlike: ClassVar[Mapping[str, str]] = SINGLE_CALLS

    def __init__(self, device: str) -> None:
        self.driver = Driver(index_of(device))
        calls = self.driver.calls
        self.pool = self.driver.checked(calls.cuDeviceGetDefaultMemPool(self.driver.device))
        threshold = calls.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.driver.checked(calls.cuMemPoolSetAttribute(self.pool, threshold, calls.cuuint64_t(KEEP_ALL)))

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Calls]:
        """Return the calls on the default stream, with a trimmed pool."""
        _ = limit
        driver, calls = self.driver, self.driver.calls
        driver.synchronize()
        driver.checked(calls.cuMemPoolTrimTo(self.pool, 0))
        names = {"allocate": calls.cuMemAllocAsync, "free": calls.cuMemFreeAsync, "stream": calls.CUstream(0)}
        yield Calls(names=names, allocate="allocate({size}, stream)[1]", release="free({block}, stream)")
        driver.synchronize()
        driver.checked(calls.cuMemPoolTrimTo(self.pool, 0))

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Return an allocation on one stream and a free on the other."""
        calls = self.driver.calls
        with self.driver.two_streams() as names:
            names |= {"allocate": calls.cuMemAllocAsync, "free": calls.cuMemFreeAsync}
            yield Crossing(
                names=names, statement=f"block = allocate({{size}}, first)[1]\n{ORDERING}free(block, second)"
            )

    def close(self) -> None:
        """Leave the device's context."""
        self.driver.close()


NOTHING: Final = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
\0"""
"""A kernel that ends at once, as text that every driver and every card from compute capability 7.5 on takes."""


@contextmanager
def empty_launches(index: int) -> Iterator[Callable[[], None]]:
    """Give a function that launches an empty kernel on a stream of its own and records a fence behind it.

    Neither waits. In the end the last launch is waited for (blocks).

    Args:
        index: The device's number. Its primary context becomes current on this thread.
    """
    driver = Driver(index)
    calls, checked = driver.calls, driver.checked
    module = checked(calls.cuModuleLoadData(NOTHING))
    kernel = checked(calls.cuModuleGetFunction(module, b"nothing"))
    stream = checked(calls.cuStreamCreate(1))
    fence = checked(calls.cuEventCreate(2))

    def launch() -> None:
        checked(calls.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
        checked(calls.cuEventRecord(fence, stream))

    try:
        yield launch
    finally:
        driver.synchronize()
        checked(calls.cuEventDestroy(fence))
        checked(calls.cuStreamDestroy(stream))
        checked(calls.cuModuleUnload(module))
        driver.close()
