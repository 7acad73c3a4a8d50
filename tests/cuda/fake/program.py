"""A program that calls the driver itself, by `cuda.bindings`, with nothing of asyncmem between."""

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

MIB = 1 << 20
PAGE = 2 * MIB
GLOBAL, RELAXED = (
    cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
)


def ok(answer: tuple[Any, ...]) -> Any:
    """Return what a call answered beside its code, which must be 0."""
    code, *values = answer
    assert code == 0, code.name
    return values[0] if len(values) == 1 else tuple(values)


def code(answer: tuple[Any, ...]) -> int:
    """Return the code alone."""
    return int(answer[0])


def enter(ordinal: int = 0) -> Any:
    """Make a device's primary context the current one."""
    ok(cuda.cuInit(0))
    context = ok(cuda.cuDevicePrimaryCtxRetain(ordinal))
    ok(cuda.cuCtxSetCurrent(context))
    return context


def stream(flags: int = 1) -> Any:
    return ok(cuda.cuStreamCreate(flags))


def recorded(on: Any) -> Any:
    """Return an event behind all work of a stream so far."""
    event = ok(cuda.cuEventCreate(2))
    ok(cuda.cuEventRecord(event, on))
    return event


def wait(later: Any, earlier: Any) -> None:
    """Order the later work of one stream behind all of another so far."""
    ok(cuda.cuStreamWaitEvent(later, recorded(earlier), 0))


def fill(address: Any, value: int, nbytes: int, on: Any) -> None:
    ok(cuda.cuMemsetD8Async(address, value, nbytes, on))


def read(address: Any, nbytes: int, on: Any) -> bytes:
    """Copy from the device and wait for it."""
    target = ctypes.create_string_buffer(nbytes)
    ok(cuda.cuMemcpyDtoHAsync(ctypes.addressof(target), address, nbytes, on))
    ok(cuda.cuStreamSynchronize(on))
    return target.raw


def wish(ordinal: int = 0) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _place(ordinal)
    return properties


def access(ordinal: int = 0) -> Any:
    description = cuda.CUmemAccessDesc()
    description.location = _place(ordinal)
    description.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return description


def pool(ordinal: int = 0, most: int = 0) -> Any:
    properties = cuda.CUmemPoolProps()
    properties.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _place(ordinal)
    properties.maxSize = most
    return ok(cuda.cuMemPoolCreate(properties))


def reserved(of: Any) -> int:
    return int(ok(cuda.cuMemPoolGetAttribute(of, cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)))


def keep(of: Any, nbytes: int) -> None:
    """Let a pool keep so much of what it does not use."""
    threshold = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok(cuda.cuMemPoolSetAttribute(of, threshold, cuda.cuuint64_t(nbytes)))


def mapped(address: Any, nbytes: int = PAGE, ordinal: int = 0) -> None:
    """Map memory of its own at an address, usable by the device that has it."""
    handle = ok(cuda.cuMemCreate(nbytes, wish(ordinal), 0))
    ok(cuda.cuMemMap(address, nbytes, 0, handle, 0))
    ok(cuda.cuMemRelease(handle))
    ok(cuda.cuMemSetAccess(address, nbytes, [access(ordinal)], 1))


def _place(ordinal: int) -> Any:
    location = cuda.CUmemLocation()
    location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location
