"""A plugin for pytest that has another library's tests allocate from a pool: `pytest -p over_a_pool`.

`SUITE_LIBRARY` names the library; without it the tests run as they are. `SUITE_RESULTS` names a file that gets a line
of JSON for each test, and `SUITE_POOL` one for each process, with what its pool has seen.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import asyncmem

LIBRARY = os.environ.get("SUITE_LIBRARY", "")


@cache
def pool() -> asyncmem.AsyncMemoryPool:
    """Return the pool of this process, which stays open."""
    if LIBRARY == "numba":  # it allocates from the process's own
        return asyncmem.device("cuda:0").pool
    return asyncmem.AsyncMemoryPool("cuda:0", limit=os.environ.get("SUITE_LIMIT", "16 GiB")).__enter__()


def put_torch() -> Callable[[], AbstractContextManager[object]]:
    """Have each test run in a block of the pool."""
    import asyncmem.interop.torch

    return lambda: asyncmem.interop.torch.use(pool())


def put_cupy() -> Callable[[], AbstractContextManager[object]]:
    """Have each test run in a block of the pool."""
    import asyncmem.interop.cupy

    return lambda: asyncmem.interop.cupy.use(pool())


def put_numba() -> Callable[[], AbstractContextManager[object]]:
    """Name the memory manager, before Numba makes its context."""
    os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "asyncmem.interop.numba"
    return nullcontext


def put_cuda_core() -> Callable[[], AbstractContextManager[object]]:
    """Have devices, and the tests' own resources for a device's memory, allocate from the pool.

    `DeviceMemoryResource` makes ours where a test asks for one without options.
    """
    import cuda.core
    import helpers.buffers

    from asyncmem.interop.cuda_core import ShareMemoryResource

    theirs = cuda.core.DeviceMemoryResource

    class DeviceMemoryResource(theirs):  # type: ignore[misc, valid-type]
        def __new__(cls, device: object, options: object = None) -> Any:
            return theirs(device, options) if options is not None else pool().as_memory_resource()

    class DummyDeviceMemoryResource(ShareMemoryResource):
        def __init__(self, _device: object = None) -> None:
            super().__init__(pool())

        def allocate(self, size: int, *, stream: Any = None) -> Any:
            return super().allocate(size, stream=stream or cuda.core.Device().default_stream)

    class TrackingMR(DummyDeviceMemoryResource):
        def __init__(self) -> None:
            super().__init__()
            self.active: dict[int, int] = {}

        def allocate(self, size: int, *, stream: Any = None) -> Any:
            buffer = super().allocate(size, stream=stream)
            self.active[int(buffer.handle)] = size
            return buffer

        def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
            super().deallocate(ptr, size, stream=stream)
            del self.active[int(ptr)]

    cuda.core.DeviceMemoryResource = DeviceMemoryResource
    helpers.buffers.DummyDeviceMemoryResource = DummyDeviceMemoryResource
    helpers.buffers.TrackingMR = TrackingMR

    def put() -> AbstractContextManager[object]:
        cuda.core.Device(0).memory_resource = pool().as_memory_resource()
        return nullcontext()

    return put


def put_rmm() -> Callable[[], AbstractContextManager[object]]:
    """Have each test, fixtures included, begin with the pool as the current resource, and build its own on the pool."""
    import rmm.mr

    from asyncmem.interop.rmm import memory_resource

    rmm.mr.CudaMemoryResource = lambda: memory_resource(pool())

    before.append(lambda: rmm.mr.set_current_device_resource(memory_resource(pool())))
    return nullcontext


before: list[Callable[[], object]] = []
"""What each test, and its fixtures, begin with."""
PUT = {"torch": put_torch, "cupy": put_cupy, "numba": put_numba, "cuda.core": put_cuda_core, "rmm": put_rmm}
inside: Callable[[], AbstractContextManager[object]] = PUT[LIBRARY]() if LIBRARY else nullcontext


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin a test."""
    for one in before:
        one()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Run a test inside."""
    with inside():
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a phase of a test has ended, if that says something."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    text = report.longreprtext
    said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:]
    row = {"test": report.nodeid, "outcome": outcome, "said": said[0] if said and report.failed else "",
           "text": text[-4000:] if report.failed else "", "seconds": report.duration}  # fmt: skip
    _write("SUITE_RESULTS", row)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that cannot be imported."""
    if report.failed:
        _write(
            "SUITE_RESULTS", {"test": report.nodeid, "outcome": "failed", "said": report.longreprtext.splitlines()[-1]}
        )


def pytest_sessionfinish() -> None:
    """Write down what the pool has seen."""
    if LIBRARY == "numba" and "numba.cuda" in sys.modules:
        pool()
    if pool.cache_info().currsize:
        gc.collect()
        stats = pool().stats()
        fields = ("num_allocations", "active_buffers", "active_bytes", "peak_allocated", "peak_reserved")
        _write("SUITE_POOL", {field: getattr(stats, field) for field in fields})


def _write(file: str, row: dict[str, object]) -> None:
    with Path(os.environ[file]).open("a") as out:
        out.write(json.dumps(row) + "\n")
