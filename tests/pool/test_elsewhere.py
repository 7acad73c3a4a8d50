"""Memory that others take from the same device: growth leaves it theirs, and what is free goes back in time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, Buffer, OutOfMemoryError
from asyncmem.devices import Latencies, Segment, Simulated
from asyncmem.pool.worker import TICK
from asyncmem.testing import SteppedPool, run_steps
from tests.conservation import whole

from .support import MIB, quick_device

pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop


def paged_device(capacity: int) -> Simulated:
    """A device with pages whose calls take no time."""
    return Simulated(capacity, latencies=Latencies.zero(), page=MIB)


@pytest.fixture
def device() -> Simulated:
    """A device whose calls take no time."""
    return quick_device()


def test_growth_leaves_others_what_is_theirs(device: Simulated) -> None:
    """Whatever others have taken, `min_free` of the device stays free, and the error says so."""

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segment_size="16 MiB") as pool:
            device.take_elsewhere("32 MiB")
            first = await pool.allocate_async(4 * MIB)
            assert pool.stats().reserved_bytes == 16 * MIB
            second = await pool.allocate_async(16 * MIB, timeout=1) if device.memory().free > 24 * MIB else None
            assert second is None
            device.take_elsewhere("6 MiB")
            first.free()
            with pytest.raises(OutOfMemoryError, match=r"8 MiB stay free for others") as caught:
                await pool.allocate_async(20 * MIB)
            assert caught.value.facts.device_free == 26 * MIB
            assert device.memory().free >= 8 * MIB
            device.give_back_elsewhere("38 MiB")
            (await pool.allocate_async(20 * MIB)).free()
            whole(pool)

    run_steps(main())


def test_less_is_asked_for_where_the_usual_would_leave_too_little(device: Simulated) -> None:
    """The need is met as long as it leaves `min_free`, without the rest of an ordinary segment."""

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segment_size="32 MiB") as pool:
            device.take_elsewhere("40 MiB")
            async with pool.allocate_async(4 * MIB):
                assert pool.stats().reserved_bytes == 4 * MIB

    run_steps(main())


def test_limit_in_bytes_has_been_thought_about(device: Simulated) -> None:
    """Who names bytes may use them all, unless `min_free` is named too."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB") as pool:
            (await pool.allocate_async(64 * MIB)).free()
        async with SteppedPool(device, limit="64 MiB", min_free="1 MiB") as pool:
            with pytest.raises(OutOfMemoryError):
                await pool.allocate_async(64 * MIB)

    run_steps(main())


def test_idle_pool_gives_back_what_is_free_when_the_driver_says_that_memory_is_short(device: Simulated) -> None:
    """Once a notice; what is held stays."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB", segment_size="1 MiB") as pool:
            held = await pool.allocate_async(8 * MIB)
            (await pool.allocate_async(32 * MIB)).free()
            pool._opened.tick()
            assert pool.stats().reserved_bytes == 40 * MIB
            device.take_elsewhere("32 MiB")
            pool._opened.tick()
            assert pool.stats().reserved_bytes == 8 * MIB
            device.give_back_elsewhere("32 MiB")
            (await pool.allocate_async(32 * MIB)).free()
            pool._opened.tick()
            assert pool.stats().reserved_bytes == 40 * MIB
            held.free()
            whole(pool)

    run_steps(main())


class Taker:
    """Another process: it asks for ever more of the device, keeps what it gets, and tries again a tick later."""

    def __init__(self, device: Simulated) -> None:
        self.device = device
        self.held = 0

    async def take(self, nbytes: int, tick: Callable[[], Awaitable[None]]) -> int:
        """Return how many ticks it took to get so much."""
        for ticks in range(100):
            if self.device.memory().free >= nbytes:
                self.device.take_elsewhere(nbytes)
                self.held += nbytes
                return ticks
            await tick()
        raise AssertionError("it never got it")


async def tick(pool: SteppedPool) -> None:
    """Let the pool look after itself once, and its worker do what comes of it."""
    pool._opened.tick()
    for _ in range(8):
        await asyncio.sleep(0)
    assert not pool._opened.core.scheduler.gauges()["under_way"]


WITHIN = int(1 / TICK)  # a second, in ticks
SEEN_TWICE = 2


@pytest.mark.parametrize("segments", ["auto", "paged"])
def test_pool_at_rest_gives_others_what_is_free_within_a_second(segments: str) -> None:
    """Whether they ask for more than is left or for more than `min_free` below it; what is held stays."""
    device = paged_device(256 * MIB)

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segments=segments) as pool:
            held = await pool.allocate_async(16 * MIB)
            (await pool.allocate_async(160 * MIB)).free()
            for _ in range(8):
                await tick(pool)
            assert pool.stats().reserved_bytes >= 176 * MIB  # nobody has come
            other = Taker(device)
            assert await other.take(8 * MIB, partial(tick, pool)) == 0  # its context
            assert await other.take(100 * MIB, partial(tick, pool)) <= SEEN_TWICE
            assert await other.take(70 * MIB, partial(tick, pool)) <= WITHIN
            assert 16 * MIB <= pool.stats().reserved_bytes <= 64 * MIB
            held.free()
            whole(pool)

    run_steps(main())


@pytest.mark.parametrize("segments", ["auto", "paged"])
def test_pool_at_work_keeps_what_it_uses_and_gives_others_the_rest(segments: str) -> None:
    """What it has needed in the last half second stays, so it does not grow again."""
    device = paged_device(512 * MIB)

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segments=segments) as pool:

            async def step() -> None:
                for _ in range(4):
                    buffers = [pool.allocate(16 * MIB) for _ in range(4)]
                    for buffer in buffers:
                        buffer.free()
                await tick(pool)

            big = [await pool.allocate_async(64 * MIB) for _ in range(5)]
            for buffer in big:
                buffer.free()
            await step()
            await step()
            other = Taker(device)
            assert await other.take(16 * MIB, step) == 0
            assert await other.take(300 * MIB, step) <= WITHIN
            await step()
            reserved, grows = pool.stats().reserved_bytes, pool.stats().grows
            assert reserved >= 64 * MIB
            for _ in range(8):
                await step()
            assert (pool.stats().reserved_bytes, pool.stats().grows) == (reserved, grows)
            whole(pool)

    run_steps(main())


def test_pool_gives_back_until_enough_is_left(device: Simulated) -> None:
    """Others that were there before the pool looked first are noticed by what is left."""

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segment_size="1 MiB") as pool:
            (await pool.allocate_async(24 * MIB)).free()
            device.take_elsewhere("33 MiB")
            for _ in range(WITHIN):
                await tick(pool)
            assert pool.stats().reserved_bytes == 0
            device.give_back_elsewhere("33 MiB")
            whole(pool)

    run_steps(main())


@pytest.mark.parametrize("segments", ["auto", "paged"])
def test_others_that_were_there_before_the_pool_get_more_once_they_have_been_less(segments: str) -> None:
    """What they had when the pool first looked counts for nothing after they have given it back."""
    device = paged_device(256 * MIB)

    async def main() -> None:
        other = Taker(device)
        assert await other.take(100 * MIB, asyncio.Event().wait) == 0
        async with SteppedPool(device, min_free="8 MiB", segments=segments) as pool:
            (await pool.allocate_async(120 * MIB)).free()
            await tick(pool)
            await tick(pool)
            assert pool.stats().reserved_bytes >= 120 * MIB
            device.give_back_elsewhere(100 * MIB)
            await tick(pool)
            await tick(pool)
            assert pool.stats().reserved_bytes >= 120 * MIB
            assert await other.take(100 * MIB, partial(tick, pool)) == 0
            assert await other.take(60 * MIB, partial(tick, pool)) <= WITHIN
            device.give_back_elsewhere(160 * MIB)
            whole(pool)

    run_steps(main())


def test_two_pools_share_a_device() -> None:
    """What one has no more use for, the other one gets within a second."""
    device = quick_device(256 * MIB)

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB") as first, SteppedPool(device, min_free="8 MiB") as second:
            (await first.allocate_async(192 * MIB)).free()
            await tick(first)
            await tick(first)
            kept = await second.allocate_async(16 * MIB)
            for _ in range(WITHIN):
                await tick(first)
            large = await second.allocate_async(128 * MIB)
            assert device.memory().free >= 8 * MIB
            kept.free()
            large.free()
            whole(first)
            whole(second)

    run_steps(main())


def test_device_is_asked_only_while_something_is_idle_and_is_to_be_shared(device: Simulated) -> None:
    """A pool that was given its limit in bytes leaves nothing to others unless `min_free` says so."""

    async def main() -> None:
        for limit, min_free, idle, asked in ((None, MIB, True, 3), (None, MIB, False, 0), ("32 MiB", 0, True, 0)):
            async with SteppedPool(device, limit=limit, min_free=min_free, segment_size="1 MiB") as pool:
                buffer = await pool.allocate_async(8 * MIB)
                if idle:
                    buffer.free()
                before = device.log.counts["memory"]
                for _ in range(3):
                    await tick(pool)
                assert device.log.counts["memory"] - before == asked
                buffer.free()

    run_steps(main())


class Grower:
    """A pool of a device of 1 GiB that keeps all it allocates, and whose device is also taken by others."""

    def __init__(self, pool: SteppedPool, device: Simulated) -> None:
        self.pool, self.device = pool, device
        self.kept: list[Buffer] = []

    async def grow(self, *sizes: int) -> int:
        """Allocate what needs growth each; return how often the device was asked what it has free."""
        asked = self.device.log.counts["memory"]
        for nbytes in sizes:
            grows = self.pool.stats().grows
            self.kept.append(await self.pool.allocate_async(nbytes))
            assert self.pool.stats().grows == grows + 1
        return self.device.log.counts["memory"] - asked

    def refused(self, nbytes: int) -> int | None:
        """Allocate what there is no memory for; return what the error says that the device has free."""
        with pytest.raises(OutOfMemoryError) as caught:
            self.pool.allocate(nbytes)
        return caught.value.facts.device_free

    def leave(self, nbytes: int) -> None:
        """Have others take all but so much."""
        self.device.take_elsewhere(self.device.memory().free - nbytes)


@asynccontextmanager
async def growing(segments: str, min_free: int) -> AsyncIterator[Grower]:
    device = paged_device(1024 * MIB)
    async with SteppedPool(device, min_free=min_free, segment_size=MIB, segments=segments) as pool:
        pool._opened.executor.clock = lambda: device.now  # no call is dear, however busy the machine is
        grower = Grower(pool, device)
        yield grower
        device.give_back_elsewhere(device.elsewhere)
        for buffer in grower.kept:
            buffer.free()
        whole(pool)


@pytest.mark.parametrize("segments", ["stream_ordered", "paged"])
class TestAsking:
    """How often growth asks the device what it has free."""

    def test_burst_asks_once(self, segments: str) -> None:
        """While much is left, what the device has said and what pools have taken since tell what it has."""

        async def main() -> None:
            async with growing(segments, 8 * MIB) as one:
                assert await one.grow(*[4 * MIB] * 16) == 1
                assert one.pool.stats().free_memory == (1024 - 15 * 4) * MIB

        run_steps(main())

    @pytest.mark.parametrize(("min_free", "left"), [(8 * MIB, 70 * MIB), (MIB, 34 * MIB)])
    def test_each_growth_asks_where_little_is_left(self, segments: str, min_free: int, left: int) -> None:
        """Little by `min_free` or by the request: what others take between two growths is seen by the next."""

        async def main() -> None:
            async with growing(segments, min_free) as one:
                one.leave(left)
                assert await one.grow(4 * MIB, 4 * MIB, 4 * MIB) == 3
                one.leave(min_free + 3 * MIB)
                assert one.refused(4 * MIB) == min_free + 3 * MIB

        run_steps(main())

    def test_growth_asks_again_after_ten_milliseconds(self, segments: str) -> None:
        """However much there was: others may have come meanwhile."""

        async def main() -> None:
            async with growing(segments, 8 * MIB) as one:
                assert await one.grow(4 * MIB) == 1
                one.device.advance(0.009)
                assert await one.grow(4 * MIB) == 0
                one.leave(11 * MIB)
                one.device.advance(0.002)
                assert one.refused(4 * MIB) == 11 * MIB

        run_steps(main())

    def test_growth_that_the_device_refuses_asks_again(self, segments: str) -> None:
        """Others that take nearly all within the ten milliseconds are seen then, and the error has what is left."""

        async def main() -> None:
            async with growing(segments, 8 * MIB) as one:
                assert await one.grow(4 * MIB) == 1
                one.leave(6 * MIB)
                assert one.refused(8 * MIB) == 6 * MIB

        run_steps(main())


def test_device_that_fails_while_it_takes_back_is_a_warning(device: Simulated) -> None:
    """The pool goes on, and what the device did not take is offered again."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB") as pool:
            (await pool.allocate_async(64 * MIB)).free()
            device.take_elsewhere("1 MiB")
            device.fail("free_segment")
            with pytest.warns(RuntimeWarning, match="free_segment"):
                pool._opened.tick()
            assert await pool.trim() == 64 * MIB
            whole(pool)

    run_steps(main())


class LateDevice(Simulated):
    """A device whose calls for a segment block until `may` is set; `asked` is set when one blocks."""

    def __init__(self) -> None:
        super().__init__("1 GiB", clock="wall", latencies=Latencies.zero())
        self.may, self.asked = threading.Event(), threading.Event()
        self.may.set()

    def allocate_segment(self, *arguments: Any, **named: Any) -> Segment:
        if not self.may.is_set():
            self.asked.set()
        assert self.may.wait(60)
        return super().allocate_segment(*arguments, **named)


@pytest.mark.parametrize("kind", ["stream_ordered", "direct"])
def test_what_comes_while_all_that_is_free_goes_back_goes_back_too(kind: str) -> None:
    """A thread's growth, which began before the driver complained, ends after it, and is not needed any more."""
    device, got = LateDevice(), list[Any]()
    with AsyncMemoryPool(device, limit="64 MiB", segment_size="16 MiB", segments=kind, min_free=0) as pool:
        first = pool.allocate(16 * MIB)
        device.may.clear()
        thread = threading.Thread(target=lambda: got.append(pool.allocate(16 * MIB, timeout=60)))
        thread.start()
        assert device.asked.wait(60)
        first.free()  # it is the thread's now, which needs its growth no more

        looked = threading.Event()
        give_back_all = pool._opened.give_back_all

        def give_back() -> None:
            give_back_all()
            looked.set()

        pool._opened.give_back_all = give_back  # type: ignore[method-assign]
        device.over_budget += 1
        assert looked.wait(60)
        device.may.set()
        thread.join(60)
        (buffer,) = got
        for _ in range(600):
            if pool.stats().reserved_bytes == 16 * MIB:
                break
            threading.Event().wait(0.1)
        assert pool.stats().reserved_bytes == pool.stats().allocated_bytes == 16 * MIB
        buffer.free()
