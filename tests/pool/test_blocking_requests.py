"""A thread waits for a request as a task does: for its end, for so long, or until somebody cancels it."""

from __future__ import annotations

import threading

import pytest

from asyncmem import AsyncMemoryPool, Buffer, PoolTimeout, RequestCancelled
from asyncmem.pool import Request
from tests.conservation import whole

from .support import MIB, quick_device

LIMIT = 8 * MIB


def waiting_for_all(pool: AsyncMemoryPool, timeout: float | None = None) -> Request[Buffer]:
    request = pool.allocate_async(LIMIT, timeout=timeout)
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("end", ["freed", "cancelled"])
def test_thread_waits_until_a_request_ends(end: str) -> None:
    """By memory that came, or by somebody else's cancel."""
    with AsyncMemoryPool(quick_device(), limit=LIMIT) as pool:
        held = pool.allocate(LIMIT)
        request = waiting_for_all(pool)
        ended: list[bool] = []
        thread = threading.Thread(target=lambda: ended.append(request.block()))
        thread.start()
        if end == "freed":
            held.free()
        else:
            request.cancel()
        thread.join(30)
        assert ended == [True]
        if end == "freed":
            request.result().free()
        else:
            with pytest.raises(RequestCancelled):
                request.result()
            held.free()
        whole(pool)


def test_thread_stops_waiting_in_time() -> None:
    """For its own bound the request goes on; for the request's deadline it ends."""
    with AsyncMemoryPool(quick_device(), limit=LIMIT) as pool:
        held = pool.allocate(LIMIT)
        request = waiting_for_all(pool)
        assert not request.block(0)
        assert not request.done()
        held.free()
        assert request.block()
        found = request.result()
        late = waiting_for_all(pool, timeout=0.01)
        assert late.block(30)
        with pytest.raises(PoolTimeout):
            late.result()
        found.free()
        whole(pool)
