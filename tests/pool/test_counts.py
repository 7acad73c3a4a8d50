"""Counts of a budget with leases, and peaks."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, Lease

MIB = 1 << 20


def test_what_is_alive_in_a_budget_is_counted_with_leases() -> None:
    """A lease is one buffer of its budget; when it ends, those that are still held inside are the budget's."""
    with AsyncMemoryPool("simulated", limit=8 * MIB) as pool:
        budget = pool.budget("b", limit=4 * MIB)
        for _ in range(3):
            with budget.lease(MIB):
                assert budget.stats().active_buffers == 1
        assert (budget.stats().active_buffers, budget.stats().num_frees) == (0, 3)
        with budget.lease(MIB) as lease:
            late = [lease.allocate(1000), lease.allocate(1000)]
        assert budget.stats().active_buffers == 2
        late.pop().free()
        assert budget.stats().active_buffers == 1
        late.pop().free()
        assert (budget.stats().active_buffers, pool.stats().active_buffers) == (0, 0)


def test_the_peak_of_what_is_cached() -> None:
    """It is of what is reserved and not allocated, as `cached_bytes` is."""
    with AsyncMemoryPool("simulated", limit=8 * MIB, segment_size=4 * MIB) as pool:
        held = pool.allocate(MIB)
        assert pool.stats().peak_cached == 4 * MIB
        pool.reset_peaks()
        assert pool.stats().peak_cached == pool.stats().cached_bytes == 3 * MIB
        held.free()
        assert pool.stats().peak_cached == pool.stats().cached_bytes == 4 * MIB


def test_a_lease_is_entered_once() -> None:
    """Again, inside or after its block, by this task or by another at the same time: refused, and nothing is lost."""
    with AsyncMemoryPool("host", limit=8 * MIB) as pool:
        with pool.lease(MIB) as lease, pytest.raises(InvalidRequest, match="not entered before"), lease:
            pass
        with pytest.raises(InvalidRequest, match="not entered before"), lease:
            pass

        async def use(lease: Lease) -> None:
            async with lease:
                await asyncio.sleep(0)

        async def use_twice() -> None:
            held = await pool.allocate_async(8 * MIB)
            shared = pool.lease(MIB)
            both = asyncio.gather(use(shared), use(shared), return_exceptions=True)
            await asyncio.sleep(0.01)
            held.free()
            assert sorted(type(one).__name__ for one in await both) == ["InvalidRequest", "NoneType"]

        asyncio.run(use_twice())
        assert pool.stats().allocated_bytes == 0


def test_segments_are_listed_while_others_come_and_go() -> None:
    """Whoever asks right after a change of the book that a worker makes, by another thread, gets an answer."""

    class Watched(dict[int, Any]):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            return look_after(found) if name in {"setdefault", "pop"} else found

        def __setitem__(self, address: int, segments: Any) -> None:
            look_after(super().__setitem__)(address, segments)

    def look_after(change: Callable[..., object]) -> Callable[..., object]:
        def changed(*arguments: object) -> object:
            found = change(*arguments)
            thread = threading.Thread(target=lambda: seen.append(pool.segments()))
            thread.start()
            thread.join()
            return found

        return changed

    seen: list[object] = []
    with AsyncMemoryPool("simulated", limit=8 * MIB, segment_size=MIB) as pool:
        pool._opened.executor.segments = Watched()
        for nbytes in (MIB, 5 * MIB, 8 * MIB):
            pool.allocate(nbytes).free()
        assert len(seen) >= 5
