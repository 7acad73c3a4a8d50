"""Libraries share one pool under one limit, and who finds it full is told who holds it: by library, tag and line."""

import ctypes
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, OutOfMemoryError
from asyncmem.core import ROUTE_CALLS, Route
from asyncmem.devices import Cuda
from asyncmem.insight import AllocationTracker, Recording

from .conftest import MIB

core: Any = pytest.importorskip("cuda.core", reason="cuda.core is not installed")

allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(ROUTE_CALLS[0])
release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(ROUTE_CALLS[1])


def test_full_pool_names_all_who_hold_it(pool: AsyncMemoryPool, cuda: Cuda) -> None:
    """torch by compiled calls, cuda.core by its resource, and the program: in the error, and in a tracker's report."""
    route = Route(pool, 0, lambda handle: handle, tag="torch")
    stream = cuda.create_stream()
    with Recording(pool), AllocationTracker(pool) as tracker:
        route.enter()
        tensor = allocate(24 * MIB, 0, None)
        route.leave()
        theirs = pool.as_memory_resource().allocate(16 * MIB, stream=core.Stream.from_handle(stream.handle))
        mine = pool.allocate(8 * MIB, tag="mine")
        with pytest.raises(OutOfMemoryError) as caught:
            pool.allocate(32 * MIB)
        assert caught.value.holders == (("torch", 24 * MIB), ("cuda.core", 16 * MIB), ("mine", 8 * MIB))
        lines = dict(caught.value.sites)
        assert sorted(lines.values()) == [8 * MIB, 16 * MIB, 24 * MIB]
        assert all(__file__ in line for line in lines)
        assert [one.nbytes for one in tracker.by("tag")] == [24 * MIB, 16 * MIB, 8 * MIB]
        assert [one.nbytes for one in tracker.by("site")] == [24 * MIB, 16 * MIB, 8 * MIB]
        assert "torch" in tracker.report()
        del caught
        release(tensor, 24 * MIB, 0, None)
        theirs.close()
        mine.free()
