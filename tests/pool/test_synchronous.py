"""What a synchronous call does on its way to memory, and what it leaves alone."""

import threading

import pytest

from asyncmem import AsyncMemoryPool, OutOfMemoryError, PoolTimeout
from asyncmem.devices import Simulated
from asyncmem.options import OptionArguments
from asyncmem.pool.waiting import Waiting

MIB = 1 << 20
NOTHING_CACHED: OptionArguments = {"stream_cache_blocks": 0, "shared_cache_blocks": 0}


def test_a_call_that_may_not_wait_asks_the_device_for_nothing() -> None:
    """Its time is over before there could be any growth."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        for _ in range(2):
            with pytest.raises(PoolTimeout):
                pool.allocate(8 * MIB, timeout=0)
        assert pool.stats().reserved_bytes == 0
        assert pool.stats().timeouts == 2


@pytest.mark.asyncio
async def test_nor_does_one_on_a_loops_thread_hold_the_loop() -> None:
    """There growth would be worse than anywhere else."""
    async with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        with pytest.raises(PoolTimeout):
            pool.allocate(8 * MIB, timeout=0)
        assert pool.stats().loop_blocking_calls == 0


def test_a_lease_that_is_full_leaves_the_caches_of_the_pool_alone() -> None:
    """They hold nothing that lies in its range."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size="16 MiB") as pool:
        kept = [pool.allocate(MIB) for _ in range(12)]
        kept.clear()
        cached = pool.stats().cached_bytes
        with pool.lease("4 MiB") as lease, lease.allocate(3 * MIB), pytest.raises(OutOfMemoryError):
            lease.allocate(2 * MIB)
        assert pool.stats().cached_bytes >= cached > 0
        assert pool.stats().rungs.get("flush", 0) == 0


@pytest.mark.parametrize("within", ["pool", "budget"])
def test_what_is_freed_while_a_call_comes_to_stand_serves_it(monkeypatch: pytest.MonkeyPatch, within: str) -> None:
    """All that can be had is in pieces, and the block between two of them comes back before anything was decided.

    So nobody is asked for memory, and nothing is collected.
    """
    asked: list[object] = []
    with AsyncMemoryPool(
        Simulated("8 MiB"), limit="8 MiB", segment_size="8 MiB", on_oom=lambda facts: asked.append(facts) is not None,
        **NOTHING_CACHED,
    ) as pool:  # fmt: skip
        blocks = {number: pool.allocate(MIB) for number in range(8)}
        for number in (0, 2):
            del blocks[number]
        door = pool if within == "pool" else pool.budget("part", limit="4 MiB")
        decide = pool.flow.blocking._errand

        def decide_later(waiting: Waiting) -> object:
            blocks.pop(1, None)
            return decide(waiting)

        monkeypatch.setattr(pool.flow.blocking, "_errand", decide_later)
        with door.allocate(2 * MIB) as buffer:
            assert buffer.nbytes == 2 * MIB
        rungs = pool.stats().rungs
        assert rungs.get("trim", 0) == rungs.get("collect", 0) == 0
        assert asked == []
        blocks.clear()


def test_who_stands_behind_a_call_that_was_served_at_once_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one joins two blocks of different streams; the second one need not sleep until its next look."""
    monkeypatch.setattr("asyncmem.pool.blocking._LOOK_AGAIN", 30.0)
    device = Simulated("64 MiB")
    with AsyncMemoryPool(
        device, limit="64 MiB", segment_size="8 MiB", overlap=0, stall_after=None, **NOTHING_CACHED
    ) as pool:
        one, other = device.create_stream(), device.create_stream()
        parts = [pool.allocate(4 * MIB, stream=stream) for stream in (one, other)]
        parts.clear()
        blocking = pool.flow.blocking
        decide, stand_by = blocking._errand, blocking._stand_by
        stands, behind = threading.Event(), threading.Event()
        served: list[int] = []

        def decide_later(waiting: Waiting) -> object:
            if threading.current_thread() is first and not stands.is_set():
                stands.set()
                behind.wait(10)
            return decide(waiting)

        def stand_and_tell() -> object:
            behind.set()
            return stand_by()

        def ask() -> None:
            with pool.allocate(8 * MIB, stream=one) as buffer:
                served.append(buffer.nbytes)

        monkeypatch.setattr(blocking, "_errand", decide_later)
        monkeypatch.setattr(blocking, "_stand_by", stand_and_tell)
        first, second = threading.Thread(target=ask), threading.Thread(target=ask)
        first.start()
        assert stands.wait(10)
        second.start()
        for thread in (first, second):
            thread.join(10)
        assert served == [8 * MIB, 8 * MIB]


def test_a_call_that_caches_can_serve_stands_nowhere() -> None:
    """They are emptied, and it takes what they held; nobody else had to look at it."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size="8 MiB") as pool:
        pieces = [pool.allocate(MIB) for _ in range(8)]
        pieces.clear()
        before = pool.stats()
        assert before.cached_bytes == 8 * MIB
        pool.allocate(8 * MIB).free()
        after = pool.stats()
        assert (after.waits, after.grows) == (before.waits, before.grows)
        assert after.num_cache_misses == before.num_cache_misses + 1
        assert after.rungs["flush"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("free", ["in caches", "in pieces of two streams"])
@pytest.mark.parametrize("door", ["allocate", "allocate_async"])
async def test_no_time_at_all_is_enough_for_what_is_free(door: str, free: str) -> None:
    """All of the one segment is, if not in one block; nothing grows, and nobody waits."""
    device = Simulated("64 MiB")
    options: OptionArguments = {} if free == "in caches" else NOTHING_CACHED
    async with AsyncMemoryPool(device, limit="64 MiB", segment_size="8 MiB", min_free=0, **options) as pool:
        streams = [device.create_stream(), device.create_stream()]
        home = streams[0]
        many = [home] * 8 if free == "in caches" else streams
        blocks = [await pool.allocate_async(8 * MIB // len(many), stream=stream) for stream in many]
        blocks.clear()
        before = pool.stats()
        if door == "allocate":
            buffer = pool.allocate(8 * MIB, stream=home, timeout=0)
        else:
            buffer = await pool.allocate_async(8 * MIB, stream=home, timeout=0)
        after = pool.stats()
        assert buffer.nbytes == after.reserved_bytes == 8 * MIB
        assert (after.waits, after.timeouts) == (before.waits, 0)
        with pytest.raises(PoolTimeout):
            pool.allocate(MIB, stream=home, timeout=0)
        buffer.free()
