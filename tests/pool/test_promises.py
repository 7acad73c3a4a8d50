"""What a pool promises beside waiting: modes, fallbacks, owners, figures."""

import copy

import anyio.lowlevel
import pytest

from asyncmem import AsyncMemoryPool, DeadlockError, InvalidRequest, OutOfMemoryError, Pressure
from asyncmem.core import Request
from asyncmem.devices import Latencies, Simulated
from asyncmem.testing import SteppedPool, run_steps

pytestmark = pytest.mark.anyio

MIB = 1 << 20


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test on both."""
    return str(request.param)


def device(capacity: int = 64 * MIB, *, backing: bool = False) -> Simulated:
    """Make a device whose calls take no time."""
    return Simulated(capacity, latencies=Latencies.zero(), backing=backing)


async def test_direct_pool_keeps_nothing() -> None:
    """Every request gets a segment of its own, which goes back when it is freed."""
    async with AsyncMemoryPool(device(), limit=16 * MIB, segments="direct") as pool:
        small, large = await pool.allocate_async(100), await pool.allocate_async(3 * MIB)
        assert len(pool.segments()) == 2
        small.free()
        large.free()
        await pool.trim()
        assert (pool.stats().reserved_bytes, pool.stats().trims) == (0, 2)


async def test_what_was_granted_meanwhile_is_not_failed() -> None:
    """What ends in an error leaves alone whom the worker has served since it was decided on."""
    async with AsyncMemoryPool(device(), limit=16 * MIB) as pool:
        request = pool.allocate_async(MIB)
        assert isinstance(request, Request)
        number = request._id
        assert number
        while not request.done():
            await anyio.lowlevel.checkpoint()
        pool._opened.core.fail(number, MemoryError())
        assert request.exception() is None
        assert request.result().nbytes == MIB


@pytest.mark.may_block  # the worker's calls are steps of the loop
def test_direct_pool_serves_who_waits_for_what_goes_back() -> None:
    """Room that a free makes is used as soon as the segment is back, without waiting for the worker to look again."""

    async def main() -> None:
        async with SteppedPool(device(), limit=16 * MIB, segments="direct") as pool:
            (await pool.allocate_async(MIB)).free()
            (await pool.allocate_async(16 * MIB, timeout=1)).free()

    run_steps(main())


async def test_unknown_segment_kind_is_refused_at_the_opening() -> None:
    """The error names what the device has."""
    with pytest.raises(InvalidRequest, match="'direct'"):
        await AsyncMemoryPool(device(), segments="weird").open()


async def test_host_stands_in_for_a_device_that_is_out() -> None:
    """The buffer says where it is, and moves to the device with what it holds."""
    async with AsyncMemoryPool(device(4 * MIB, backing=True), limit=4 * MIB, fallback="host") as pool:
        everything = await pool.allocate_async(4 * MIB)
        stand_in = await pool.allocate_async(MIB, tag="kv")
        memoryview(stand_in)[:3] = b"abc"
        assert stand_in.location == "host"
        assert pool.stats().cpu_fallbacks == 1
        everything.free()
        moved = await stand_in.to_device()
        assert (moved.location, moved.tag, bytes(memoryview(moved)[:3])) == ("simulated", "kv", b"abc")
        assert not stand_in.alive
        moved.free()


async def test_what_was_held_is_not_held_after_its_block() -> None:
    """Tasks that hold one after the other, and never at once, are no deadlock."""
    async with AsyncMemoryPool(device(), limit=4 * MIB) as pool:
        for _ in range(3):
            async with pool.allocate_async(3 * MIB), anyio.create_task_group():
                pass
            async with pool.lease(4 * MIB):
                pass
            with pool.owner("stage"):
                (await pool.allocate_async(4 * MIB)).free()
                (await pool.allocate_async(0)).free()
            async with pool.allocate_async(0):
                pass
        assert not pool._opened.core.scheduler.holds()


async def test_task_that_waits_for_itself_is_told_where() -> None:
    """Named owners count, and the table names them."""
    async with AsyncMemoryPool(device(), limit=4 * MIB) as pool:
        with pool.owner("decode"):
            held = await pool.allocate_async(3 * MIB)
            with pytest.raises(DeadlockError, match="decode"):
                await pool.allocate_async(2 * MIB)
        held.free()


async def test_full_lease_tells_its_own_figures() -> None:
    """Not those of the pool around it."""
    async with AsyncMemoryPool(device(), limit=16 * MIB) as pool, pool.lease(4 * MIB) as lease:
        held = await lease.allocate_async(3 * MIB)
        with pytest.raises(OutOfMemoryError) as caught:
            await lease.allocate_async(2 * MIB)
        facts = caught.value.facts
        assert (facts.reserved, facts.live, facts.free, facts.largest_hole) == (4 * MIB, 3 * MIB, MIB, MIB)
        held.free()


async def test_budget_counts_its_own_waits() -> None:
    """A budget's statistics are those of its requests."""
    async with AsyncMemoryPool(device(), limit=16 * MIB) as pool:
        decode = pool.budget("decode", limit=2 * MIB)
        first = await decode.allocate_async(2 * MIB)
        before = decode.stats().waits
        request = decode.allocate_async(2 * MIB)
        assert (decode.stats().waits - before, decode.stats().waiting_bytes) == (1, 2 * MIB)
        first.free()
        (await request).free()
        assert decode.stats().num_allocations == 2
        assert pool.budget("other", limit=MIB).stats().waits == 0


async def test_who_is_held_up_further_out_is_not_passed_from_beside() -> None:
    """A newcomer who would use up what the one before needs waits, too, where nobody may overtake."""
    async with AsyncMemoryPool(device(), limit=16 * MIB, bypass=0) as pool:
        outer = pool.budget("outer", limit=6 * MIB)
        middle = outer.budget("middle", limit=4 * MIB)
        one, other = middle.budget("one", limit=4 * MIB), middle.budget("other", limit=4 * MIB)
        held = await outer.allocate_async(4 * MIB)
        first = one.allocate_async(3 * MIB)  # the middle one has room for it, the outer one has not
        second = other.allocate_async(2 * MIB)
        assert other.try_allocate(MIB) is None
        assert not second.done()
        held.free()
        got = await first
        assert not second.done()
        assert middle.stats().allocated_bytes == 3 * MIB
        got.free()
        (await second).free()


async def test_budget_that_shrinks_refuses_who_cannot_fit_any_more() -> None:
    """A limit below what is live or waited for harms nobody else, and lets nobody wait for ever."""
    async with AsyncMemoryPool(device(), limit=16 * MIB) as pool:
        decode = pool.budget("decode", limit=4 * MIB)
        held = await decode.allocate_async(3 * MIB)
        request = decode.allocate_async(4 * MIB)
        decode.resize(limit=2 * MIB)
        pool.check()
        with anyio.fail_after(5), pytest.raises(OutOfMemoryError):
            await request
        held.free()
        (await decode.allocate_async(2 * MIB)).free()


async def test_counters_start_again_at_a_reset() -> None:
    """`reset_stats` starts counters at zero and peaks at what there is."""
    async with AsyncMemoryPool(device(), limit=16 * MIB) as pool:
        (await pool.allocate_async(8 * MIB)).free()
        pool.reset_stats()
        stats = pool.stats()
        assert (stats.num_allocations, stats.num_frees, stats.grows, stats.peak_allocated) == (0, 0, 0, 0)
        (await pool.allocate_async(MIB)).free()
        assert pool.stats().num_allocations == 1


async def test_pressure_is_told_as_it_changes() -> None:
    """Each change of level reaches a listener, in order."""
    levels: list[Pressure] = []
    async with AsyncMemoryPool(device(), limit=10 * MIB) as pool:

        async def listen() -> None:
            async for level in pool.pressure_changes():
                levels.append(level)
                if level is Pressure.LOW:
                    return

        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            buffers = [await pool.allocate_async(7 * MIB), await pool.allocate_async(2 * MIB)]
            assert pool.stats().pressure is Pressure.HIGH
            for buffer in buffers:
                buffer.free()
    assert levels == [Pressure.MEDIUM, Pressure.HIGH, Pressure.LOW]


async def test_buffer_cannot_be_copied() -> None:
    """A copy of the handle would free the block twice."""
    async with AsyncMemoryPool(device(), limit=4 * MIB) as pool:
        buffer = await pool.allocate_async(MIB)
        with pytest.raises(TypeError):
            copy.copy(buffer)
        buffer.free()


async def test_pool_shows_itself_in_a_notebook() -> None:
    """The figures, as text that HTML shows as it is."""
    async with AsyncMemoryPool(device(), limit=4 * MIB, name="<b>") as pool:
        shown = pool._repr_html_()
        assert "&lt;b&gt;" in shown
        assert "4 MiB" in shown
