"""Pools whose memory comes by pages: what they reserve, what they wait for, and that nothing is lost on the way."""

import asyncio
import itertools
import math
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeviceError, InvalidRequest, OutOfMemoryError, Pressure
from asyncmem.core import Effect, Heap, Scheduler
from asyncmem.devices import Device, Host, Latencies, Simulated, SimulatedStream
from asyncmem.devices.base import Move, Remapped, Span
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.testing import SteppedPool, run_steps
from tests.conservation import refillable, whole
from tests.sweeps import Stage, sweep, sweep_on_trio

from .support import MIB

pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop

KIB = 1 << 10
CALLS = ("unmap", "create", "map", "set_access", "release", "memory", "record")


def paged_device(capacity: int = 64 * MIB, *, page: int = 64 * KIB, backing: bool = False) -> Simulated:
    """A device whose calls take no time, with small pages."""
    return Simulated(capacity, latencies=Latencies.zero(), page=page, backing=backing)


@asynccontextmanager
async def opened(device: Simulated, limit: int = 8 * MIB, **options: object) -> AsyncIterator[AsyncMemoryPool]:
    settings = {"stall_after": None, "min_free": 0, **options}
    async with SteppedPool(device, limit=limit, segments="paged", **settings) as pool:  # type: ignore[arg-type]
        pool._opened.executor.clock = lambda: device.now  # so that moves cost nothing, however busy the machine is
        yield pool


def run(main: Callable[[], object]) -> None:
    run_steps(main())  # type: ignore[arg-type]


class TestLittleReserved:
    def test_only_what_is_asked_for_is_reserved(self) -> None:
        """Whole pages, and no segment beside them."""

        async def main() -> None:
            device = paged_device()
            async with opened(device) as pool, pool.allocate_async(3 * MIB), pool.allocate_async(1000):
                assert pool.stats().reserved_bytes == device.reserved == 3 * MIB + 64 * KIB
                assert {one.kind for one in pool.segments()} == {"paged"}
                pool.check()
            assert device.reserved == 0

        run(main)

    def test_growth_asks_for_more_at_once_where_the_devices_calls_are_dear(self) -> None:
        """A pool that does nothing but grow soon gets memory for several requests by one call.

        It is a twentieth too much at most, and a 256th where calls are cheap.
        """

        async def grown(seconds: float) -> tuple[int, float]:
            device = paged_device(1024 * MIB)
            async with opened(device, limit=1024 * MIB) as pool:
                pool._opened.executor.clock = partial(next, itertools.count(0.0, seconds))
                kept = []
                for _ in range(400):
                    device.advance(1e-4)
                    kept.append(await pool.allocate_async(MIB))
                stats = pool.stats()
                kept.clear()
                return stats.grows, stats.peak_reserved / (400 * MIB)

        async def main() -> None:
            cheap, little = await grown(0)
            dear, more = await grown(1e-3)
            assert dear < 0.4 * cheap
            assert little <= 1.004
            assert more <= 1.05

        run(main)

    def test_memory_of_other_sizes_is_moved_before_new_is_taken(self) -> None:
        """Ten buffers of different sizes, one after the other, need what the largest does."""

        async def main() -> None:
            device = paged_device()
            async with opened(device, 32 * MIB) as pool:
                for size in (5 * MIB, 300 * KIB, 4 * MIB, 700 * KIB, 2 * MIB, 5 * MIB, 100 * KIB, 3 * MIB):
                    async with pool.allocate_async(size) as buffer:
                        device.fill(buffer.address, size, 1, device.default_stream)
                    pool._opened.look_after()
                    pool.check()
                assert pool.stats().peak_reserved <= 5 * MIB + 256 * KIB

        run(main)

    def test_a_move_neither_makes_nor_releases_memory(self) -> None:
        """What is idle goes where a request of the other size class lacks some, in one go."""

        async def main() -> None:
            device = paged_device()
            async with opened(device) as pool:
                (await pool.allocate_async(4 * MIB)).free()
                pool._opened.look_after()
                before = len(device.calls)
                async with pool.allocate_async(512 * KIB):
                    made = [call.name for call in list(device.calls)[before:]]
                    assert (made.count("unmap"), made.count("map"), made.count("set_access")) == (8, 8, 1)
                    assert not {"create", "release"} & set(made)
                    assert pool.stats().grows == 2

        run(main)

    def test_steady_state_makes_no_call(self) -> None:
        """Who takes again what it took before is served without the device."""

        async def main() -> None:
            device = paged_device()
            async with opened(device) as pool:
                for _ in range(3):
                    batch = await pool.allocate_batch([2 * MIB, 100 * KIB, 3 * MIB])
                    batch.free()
                before = device.driver_calls
                for _ in range(50):
                    batch = await pool.allocate_batch([2 * MIB, 100 * KIB, 3 * MIB])
                    batch.free()
                assert device.driver_calls == before

        run(main)

    def test_a_batch_is_planned_as_a_whole(self) -> None:
        """Pieces of many sizes, some of which there is memory for already."""

        async def main() -> None:
            device = paged_device()
            async with opened(device, 16 * MIB) as pool:
                first = await pool.allocate_batch([MIB, 2 * MIB, 3 * MIB, 10 * KIB])
                held = first[1]
                for one in (first[0], first[2], first[3]):
                    one.free()
                sizes = [3 * MIB, 600 * KIB, 64 * KIB, 5 * MIB, 1000, 4 * MIB]
                second = await pool.allocate_batch(sizes)
                pool.check()
                assert pool.stats().reserved_bytes <= 2 * MIB + sum(sizes) + 8 * 64 * KIB
                second.free()
                held.free()

        run(main)


class TestLimit:
    def test_it_waits_for_the_earliest_fences_that_are_enough(self) -> None:
        """Under a limit, memory of one stream goes to another size once that stream is done, and not later."""

        async def main() -> None:
            device = paged_device()
            one, two = device.create_stream("one"), device.create_stream("two")
            async with opened(device, 8 * MIB) as pool:
                early, late = (
                    await pool.allocate_async(4 * MIB, stream=one),
                    await pool.allocate_async(4 * MIB, stream=two),
                )
                one.launch(1.0, writes=[early])
                two.launch(9.0, writes=[late])
                early.free()
                late.free()
                async with pool.allocate_async(3 * MIB, stream=device.create_stream("three")) as buffer:
                    assert device.now < 9.0
                    device.fill(buffer.address, buffer.nbytes, 0, buffer.stream)
                pool.check()

        run(main)

    @pytest.mark.parametrize("limit", [KIB, 3 * MIB, 8 * MIB + 1])
    def test_a_limit_is_rounded_up_to_whole_pages(self, limit: int) -> None:
        """Else what the limit allows could not be had, as memory comes in whole pages."""
        with AsyncMemoryPool(Simulated("1 GiB"), segments="paged", limit=limit) as pool:
            pool.allocate(limit).free()
            assert pool.stats().reserved_bytes == pool.stats().limit == -(-limit // pool.device.page) * pool.device.page

    @pytest.mark.parametrize("limit", [8 * MIB, 8 * MIB + 100 * KIB])
    def test_all_of_the_limit_can_be_had_after_anything(self, limit: int) -> None:
        """In one piece, whatever pieces it was in before."""

        async def main() -> None:
            device = paged_device()
            async with opened(device, limit) as pool:
                for sizes in ([3 * MIB, 5 * MIB], [100 * KIB] * 70, [MIB, 7 * MIB - 64 * KIB], [2 * MIB] * 4):
                    batch = await pool.allocate_batch(sizes)
                    batch.free()
                    await refillable(pool, limit // (64 * KIB) * (64 * KIB))
                    pool.check()

        run(main)

    def test_a_piece_across_a_border_does_not_stand_in_the_way(self) -> None:
        """Memory moves in whole pieces; where that is not enough all that is idle goes back and comes anew."""

        async def main() -> None:
            async with opened(paged_device(), 64 * MIB) as pool:
                first, second = await pool.allocate_async(40 * MIB), await pool.allocate_async(16 * MIB + 512 * KIB)
                first.free()
                third = await pool.allocate_async(44 * MIB)
                second.free()
                third.free()
                async with pool.allocate_batch([64 * MIB]):  # whose memory does not move while it is in use
                    assert pool.stats().remedies["trim"] == 1
                pool.check()

        run(main)

    def test_what_is_to_stay_free_on_the_device_forbids_no_exchange(self) -> None:
        """A change that gives more back than it takes needs nothing of what the device has left."""

        async def main() -> None:
            choice = random.Random(3)
            async with opened(paged_device(9 * MIB), min_free=MIB) as pool:
                held: list[Buffer] = []
                for _ in range(300):
                    nbytes = choice.randrange(1, 60) * 100 * KIB
                    while sum(one.nbytes for one in held) + nbytes > 7 * MIB:
                        held.pop(choice.randrange(len(held))).free()
                    held.append(await asyncio.wait_for(pool.allocate_async(nbytes), 60))
                for one in held:
                    one.free()
                assert pool.stats().remedies["grow"] < 600

        run(main)

    def test_who_may_overtake_has_memory_made(self) -> None:
        """What a limit leaves beside a head that does not fit serves smaller ones, though it is not mapped yet."""

        async def main() -> None:
            device = paged_device()
            async with opened(device, 8 * MIB) as pool:
                held = await pool.allocate_async(5 * MIB)
                head = asyncio.ensure_future(_take(pool, 4 * MIB))
                await asyncio.sleep(0)
                async with pool.allocate_async(2 * MIB):
                    assert not head.done()
                held.free()
                (await head).free()

        run(main)

    def test_threads_have_memory_made_too(self) -> None:
        """Callers who do not await carry the moves out by themselves."""
        device = paged_device()
        with AsyncMemoryPool(device, limit=8 * MIB, segments="paged", min_free=0) as pool:
            for size in (5 * MIB, 700 * KIB, 8 * MIB, 3 * MIB):
                with pool.allocate(size):
                    pool.check()
            with pool.allocate(6 * MIB), pytest.raises(OutOfMemoryError):
                pool.allocate(3 * MIB)
            pool.empty_cache()
            assert device.reserved == 0

    def test_a_lowered_limit_gives_memory_back(self) -> None:
        """As far as it is idle, at once; the rest as it becomes so."""

        async def main() -> None:
            device = paged_device()
            async with opened(device, 16 * MIB) as pool:
                held, freed = await pool.allocate_async(6 * MIB), await pool.allocate_async(6 * MIB)
                freed.free()
                pool.resize(limit=4 * MIB)
                await asyncio.sleep(0.01)
                assert device.reserved <= 6 * MIB + 256 * KIB
                held.free()
                await asyncio.sleep(0.01)
                assert device.reserved <= 4 * MIB
                pool.check()

        run(main)


class TestAheadOfNeed:
    """A device of 1 GiB; where 32 MiB are live, half a handle of 256 KiB more is mapped with them."""

    STOCK = 128 * KIB

    def test_a_little_is_mapped_beside_what_is_asked_for(self) -> None:
        """The next small buffers are served without the device, and nothing is added while that lasts."""

        async def main() -> None:
            device = paged_device(1024 * MIB)
            async with opened(device, 1024 * MIB, small_limit=KIB) as pool, pool.allocate_async(32 * MIB):
                assert pool.stats().reserved_bytes == device.reserved == 32 * MIB + self.STOCK
                before = device.driver_calls
                async with pool.allocate_async(self.STOCK):
                    assert (device.driver_calls, pool.stats().grows) == (before, 1)
                pool.check()
            assert device.reserved == 0

        run(main)

    def test_what_is_free_is_enough(self) -> None:
        """Who has freed memory of any size has nothing mapped ahead, even if none of it can be moved yet."""

        async def main() -> None:
            device = paged_device(1024 * MIB)
            async with opened(device, 1024 * MIB) as pool:
                first, held = [await pool.allocate_async(size * MIB) for size in (8, 1)]
                device.default_stream.launch(1.0, writes=[first])
                first.free()
                async with pool.allocate_batch([56 * MIB]):  # whose memory does not move while it is in use
                    assert device.reserved == (8 + 1 + 56) * MIB
                held.free()
                device.run_until_idle()

        run(main)

    def test_nothing_is_added_near_the_limit(self) -> None:
        """What is left is for what is asked for."""

        async def main() -> None:
            device = paged_device(1024 * MIB)
            async with opened(device, 34 * MIB) as pool, pool.allocate_async(32 * MIB):
                assert device.reserved == 32 * MIB

        run(main)

    def test_what_the_device_lacks_is_left_out(self) -> None:
        """It has room for the request and no more, though the limit is far off."""

        async def main() -> None:
            device = paged_device(32 * MIB)
            async with opened(device, 1024 * MIB) as pool, pool.allocate_async(32 * MIB):
                assert device.reserved == 32 * MIB
                assert pool._opened.core.scheduler.gauges()["coming"] == 0
                pool.check()

        run(main)

    def test_who_waits_does_not_fail_for_it(self) -> None:
        """The call that fails is one for what nobody waits for."""

        async def main() -> None:
            device = paged_device(1024 * MIB)
            async with opened(device, 1024 * MIB) as pool:
                device.fail("map", nth=17)
                async with pool.allocate_async(32 * MIB):
                    assert device.reserved == 32 * MIB
                    pool.check()
                async with pool.allocate_async(40 * MIB):
                    pool.check()

        run(main)


@pytest.mark.parametrize(("overlap", "waits"), [(0.25, 0), (0.0, 7)])
def test_streams_that_hand_over_do_not_wait_for_each_other(overlap: float, waits: int) -> None:
    """While a few pages are enough for that, though it is a large share of what is live."""

    async def main() -> None:
        device = paged_device()
        one, two = device.create_stream("one"), device.create_stream("two")
        async with opened(device, overlap=overlap) as pool:
            for _ in range(8):
                buffer = await pool.allocate_async(64 * KIB, stream=one)
                buffer.use_on(two)
                two.launch(1.0, writes=[buffer])
                buffer.free(stream=two)
            assert len(device.calls_of("wait")) == 8 + waits  # the second has waited for the first eight times

    run(main)


class SlowFences:
    """A scheduler of pages alone, at whatever time a test says, whose patience is a tenth of its life."""

    def __init__(self) -> None:
        self.heap = Heap()
        for arena in (0, 1):
            self.heap.add_space((arena + 1) << 42, 64 * MIB, arena, 64 * KIB)
        self.scheduler = Scheduler(
            self.heap, 0.0, limit=32 * MIB, limited=True, paged=True, page=64 * KIB, patience=math.inf,
            patience_share=0.1,
        )  # fmt: skip

    def work(self, now: float) -> Effect | None:
        """See to fences and pages; return the wait that is asked for."""
        while effects := self.scheduler.effects():
            for effect in effects:
                if effect.kind == "look":
                    for stream in effect.streams:
                        self.heap.publish(stream, self.heap.close_epoch(stream))
                    self.scheduler.looked(0, now)
                elif effect.kind == "remap":
                    self.scheduler.remapped(effect.job, len(effect.moves), len(effect.out), len(effect.into), now)
                elif effect.kind == "wait":
                    return effect
        return None

    def use(self, nbytes: int, now: float) -> float:
        """Ask for a batch of one, and free it; return how long that would have waited, which takes longer, in vain.

        What is in use moves for no batch.
        """
        request = self.scheduler.submit([nbytes], now)
        wait = self.work(now)
        if wait is not None:
            self.scheduler.waited(wait.job, False, now + 0.8)
            assert self.work(now + 0.8) is None
        (block,) = self.scheduler.claim(request)
        self.scheduler.freed(self.heap.free(block), now)
        self.look(now)
        return 0.0 if wait is None else wait.seconds

    def look(self, now: float) -> None:
        self.scheduler.begin_beat()
        self.work(now)


class TestPatience:
    def test_all_waits_together_are_a_share_of_the_time(self) -> None:
        """What has been waited is no more to be had, until the pool has lived long enough for more."""
        pool = SlowFences()
        pool.use(4 * MIB, 1.0)
        pool.heap.mark_done(0, pool.heap.open_epoch(0) - 1)
        pool.look(1.5)  # so fences are done within half a second
        waits = []
        for nbytes, now in ((512, 10.0), (768, 11.0), (1000, 14.0)):
            assert pool.use(4 * MIB, now) == 0.0
            waits.append(pool.use(nbytes * KIB, now))
        assert waits == pytest.approx([1.0, 0.0, 0.6])  # 0.3 s would have been left for the second

    @pytest.mark.parametrize(("patience", "reserved"), [(0, 3.5), ("20 s", 3)])
    def test_growth_waits_as_long_as_it_may(self, patience: object, reserved: float) -> None:
        """Without patience new memory is taken at once; with enough of it, what is about to be ready is moved."""

        async def main() -> None:
            device = paged_device()
            one, two = device.create_stream("one"), device.create_stream("two")
            async with opened(device, 32 * MIB, patience=patience, overlap=0.0) as pool:
                first = await pool.allocate_async(3 * MIB, stream=one)
                one.launch(0.001, writes=[first])
                first.free()
                async with pool.allocate_async(512 * KIB, stream=two):
                    assert pool.stats().reserved_bytes == reserved * MIB
                assert (pool.stats().remedies.get("wait", 0) > 0) == (patience == "20 s")

        run(main)


class TestOrder:
    def test_memory_is_never_taken_away_under_unfinished_work(self) -> None:
        """The device raises where it would be; and new work on what moved is ordered."""

        async def main() -> None:
            device = paged_device(backing=True)
            streams = [device.create_stream(str(number)) for number in range(3)]
            async with opened(device, 12 * MIB) as pool:

                async def play(stream: SimulatedStream, seed: int) -> None:
                    for turn in range(20):
                        size = (1 + (seed * 7 + turn * 13) % 50) * 70 * KIB
                        async with pool.allocate_async(size, stream=stream) as buffer:
                            stream.launch(0.001, writes=[buffer])
                            if turn % 3 == 0:
                                buffer.use_on(streams[(seed + 1) % 3])
                                streams[(seed + 1) % 3].launch(0.002, reads=[buffer])

                await asyncio.gather(*(play(stream, seed) for seed, stream in enumerate(streams)))
                pool.check()
                await pool.trim()
                assert device.reserved == 0

        run(main)

    def test_new_memory_is_zero_where_that_is_asked_for(self) -> None:
        """Before anybody may use it; a fill that cannot be waited for holds the memory back until it can."""

        async def main() -> None:
            device = paged_device(backing=True)
            async with opened(device, zero_segments=True) as pool:
                async with pool.allocate_async(MIB) as buffer:
                    assert bytes(memoryview(buffer)) == bytes(MIB)  # type: ignore[arg-type]
                device.fail("block", 1)
                with pytest.raises(DeviceError):
                    await pool.allocate_async(3 * MIB, stream=device.create_stream())
                async with pool.allocate_async(3 * MIB, stream=device.create_stream()) as buffer:
                    device.fill(buffer.address, buffer.nbytes, 1, buffer.stream)
                pool.check()

        run(main)


async def _take(pool: AsyncMemoryPool, size: int) -> object:
    return await pool.allocate_async(size)


async def many_sizes(stage: Stage) -> None:
    """Actors take, use and free memory of different sizes on streams of their own, under a limit."""
    device = paged_device()
    streams = [device.create_stream(name) for name in ("one", "two")]
    async with opened(device, 4 * MIB) as pool:

        async def through(stream: SimulatedStream, *sizes: int) -> None:
            for size in sizes:
                async with stage.watch(pool.allocate_async(size, stream=stream)) as buffer:
                    stream.launch(0.001, writes=[buffer])

        stage.actor("one", partial(through, streams[0], 3 * MIB, 200 * KIB, 2 * MIB))
        stage.actor("two", partial(through, streams[1], 500 * KIB, 4 * MIB, MIB))
        stage.actor("three", partial(through, streams[0], MIB, 3 * MIB))
        await stage.finish()
        device.run_until_idle()
        whole(pool)
        await refillable(pool, 4 * MIB)


def test_cancelling_anybody_at_any_step_loses_nothing() -> None:
    """Neither memory nor order."""
    assert sweep(many_sizes).strikes > 20
    assert sweep_on_trio(many_sizes, stride=3).strikes > 5


@pytest.mark.parametrize("name", CALLS)
def test_each_call_may_fail(name: str) -> None:
    """The error reaches somebody or is made up for; afterwards all of the limit can be had, and goes back."""
    for nth in range(1, 6):
        device = paged_device()

        async def main(device: Simulated = device, nth: int = nth) -> None:
            async with opened(device, 4 * MIB) as pool:
                side = device.create_stream()
                device.fail(name, nth)
                for size in (MIB, 3 * MIB, 100 * KIB, 2 * MIB, 4 * MIB, MIB):
                    try:
                        async with pool.allocate_async(size, stream=side) as buffer:
                            device.fill(buffer.address, size, 0, side)
                    except (DeviceError, OutOfMemoryError):
                        pass
                    pool.check()
                device.log._faults.clear()
                await refillable(pool, 4 * MIB)
                whole(pool)
                await pool.trim()
                assert device.reserved == 0

        run(main)


def test_what_the_pool_says_of_itself_is_so() -> None:
    """Figures of pages, in use and idle."""

    async def main() -> None:
        device = paged_device()
        async with opened(device, 16 * MIB) as pool:
            held, freed = await pool.allocate_async(2 * MIB), await pool.allocate_async(3 * MIB)
            freed.free()
            stats = pool.stats()
            assert (stats.reserved_bytes, stats.cached_bytes, stats.segments) == (5 * MIB, 3 * MIB, 1)
            assert stats.largest_hole == 3 * MIB
            assert stats.inactive_split_bytes == 0
            assert [(one.nbytes, one.live, one.arena) for one in pool.segments()] == [(5 * MIB, 2 * MIB, "large")]
            assert await pool.trim() == 3 * MIB
            assert pool.stats().trims == 1
            held.free()
        assert (device.reserved, [call.name for call in device.calls][-2:]) == (0, ["unreserve", "unreserve"])

    run(main)


def test_the_options_say_patience_as_it_is_meant() -> None:
    """Seconds for each request, or a share for all."""
    pool = AsyncMemoryPool("simulated", patience="5 ms")
    assert pool._options.patience == (0.005, math.inf)


def test_pages_are_asked_for_by_name() -> None:
    """Neither "auto" nor a kind of segments means them."""
    for kind in ("auto", "stream_ordered"):
        with AsyncMemoryPool(paged_device(), segments=kind, limit=8 * MIB) as pool, pool.allocate(KIB):
            assert "paged" not in {one.kind for one in pool.segments()}


@pytest.mark.parametrize("make", [Host, partial(Simulated, 64 * MIB, page=0)])
def test_a_device_without_pages_has_no_such_kind(make: Callable[[], Device]) -> None:
    """The error names those that it has."""
    with pytest.raises(InvalidRequest, match="segments: expected one of 'auto', 'direct'"):
        AsyncMemoryPool(make(), segments="paged", limit=8 * MIB).allocate(KIB)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_pool_that_gets_no_addresses_leaves_nothing(nth: int) -> None:
    """The failure is the opening's, and the next try succeeds."""
    device = paged_device()
    device.fail("reserve", nth)
    pool = AsyncMemoryPool(device, segments="paged", limit=8 * MIB, min_free=0)
    with pytest.raises(DeviceError):
        pool.allocate(KIB)
    assert [call.name for call in device.calls].count("unreserve") == nth - 1
    with AsyncMemoryPool(device, segments="paged", limit=8 * MIB, min_free=0) as pool, pool.allocate(8 * MIB):
        pass
    assert device.reserved == 0


def test_memory_that_is_to_be_ready_is_mapped_at_the_opening() -> None:
    """`pregrow` and `warmup`, and no headroom beyond."""
    device = paged_device()
    options: dict[str, object] = {"pregrow": 4 * MIB, "warmup": [(MIB, 6)]}

    async def main() -> None:
        async with opened(device, 16 * MIB, **options) as pool:
            await pool.wait()
            assert device.reserved == 6 * MIB

    run(main)


def test_planning_for_a_batch_hides_no_pressure() -> None:
    """Its pieces are taken and put back while it is planned for, and crossing a mark then is not forgotten."""

    async def main() -> None:
        async with opened(paged_device(), 8 * MIB) as pool:
            first = await pool.allocate_async(6 * MIB)
            first.free()
            batch = await pool.allocate_batch([6 * MIB, 2 * MIB - 64 * KIB])
            assert pool._opened.core.scheduler.gauges()["pressure"] == Pressure.of(batch.nbytes / (8 * MIB))
            batch.free()

    run(main)


def test_a_failed_call_reaches_who_waited_for_it() -> None:
    """With the driver's words, and the next request works."""

    async def main() -> None:
        device = paged_device()
        async with opened(device) as pool:
            device.fail("map", error=DeviceError("cuMemMap", code=700, code_name="ILLEGAL_ADDRESS"))
            with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
                await pool.allocate_async(MIB)
            await refillable(pool, 8 * MIB)
            whole(pool)

    run(main)


def test_pages_leave_others_what_is_theirs() -> None:
    """`min_free` of the device stays free, whatever the limit allows."""
    device = paged_device(16 * MIB)
    with AsyncMemoryPool(device, segments="paged", limit=16 * MIB, min_free=4 * MIB) as pool:
        with pytest.raises(OutOfMemoryError):
            pool.allocate(13 * MIB)
        with pool.allocate(12 * MIB):
            assert device.memory().free == 4 * MIB


def test_a_stream_waits_for_another_before_the_host_does() -> None:
    """Streams are kept apart while growth can be had; where the limit forbids it, what another one freed will do."""

    async def main() -> None:
        device = paged_device()
        one, two = device.create_stream("one"), device.create_stream("two")
        async with opened(device, 8 * MIB, overlap=64 * MIB, track=True) as pool:  # so that no door decides
            held, freed = await pool.allocate_async(4 * MIB, stream=two), await pool.allocate_async(4 * MIB, stream=one)
            one.launch(9.0, writes=[freed])
            freed.free()
            async with pool.allocate_async(4 * MIB, stream=two) as buffer:
                assert device.now < 9.0
                two.launch(writes=[buffer])
            assert (pool.stats().remedies.get("wait", 0), pool._opened.core.scheduler.gauges()["foreign"]) == (0, 1)
            held.free()

    run(main)


def test_a_pool_that_is_closed_ends_behind_all_that_was_begun() -> None:
    """Its worker is busy meanwhile, and then about to unmap addresses that memory has left."""
    device = paged_device()
    goes_on = threading.Event()
    with AsyncMemoryPool(device, segments="paged", min_free=0) as pool:
        first, held = pool.allocate(8 * MIB), pool.allocate(MIB)
        device.default_stream.launch(1.0, writes=[first])
        first.free()
        second = pool.allocate(12 * MIB)  # behind the held one; the first one's memory is there as well
        assert device.reserved == 13 * MIB
        pool._opened.worker.submit(lambda: goes_on.wait(60))
        device.run_until_idle()
        held.free()
        second.free()
        threading.Timer(0.3, goes_on.set).start()
    assert device.reserved == 0


def test_memory_that_cannot_be_mapped_at_a_second_address_goes_back_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without memory for its tables refuses that whenever it is asked, and is not asked for ever."""
    device = paged_device()
    remap, refused = device.remap, 0

    def refusing(out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        nonlocal refused
        if moves:
            refused += 1
            assert refused < 100
            device.fail("set_access", error=OutOfMemoryError(OutOfMemoryFacts(asked=8 * MIB, device=device.name)))
        return remap(out, into, moves)

    monkeypatch.setattr(device, "remap", refusing)
    with AsyncMemoryPool(device, segments="paged", min_free=0) as pool:
        pool._opened.executor.clock = lambda: 0.0  # so that handles are small, however busy the machine is
        first, below, second, above = (pool.allocate(size * MIB) for size in (4, 1, 4, 1))
        device.default_stream.launch(1.0, writes=[first, second])
        first.free()
        second.free()
        third = pool.allocate(8 * MIB)
        assert refused
        assert device.reserved == 10 * MIB
        pool.check()
        for buffer in (below, above, third):
            buffer.free()
