"""A pool over a CUDA device, for each way to get memory from the driver."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeviceError, LeakWarning, OutOfMemoryError, PoolClosed, PoolTimeout
from asyncmem.devices import Stream
from asyncmem.devices.gpu.device import Gpu
from tests.conftest import close_pools
from tests.conservation import refillable, whole

from .conftest import Usage
from .fake import FakeDriver
from .users import User

MIB = 1 << 20
LARGE = 256 * MIB
KINDS = ("paged", "stream_ordered", "direct")
POOLED = KINDS[:2]

OpenPool = Callable[..., AsyncMemoryPool]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_pool(request: pytest.FixtureRequest, gpu: Gpu, kind: str) -> Iterator[OpenPool]:
    made: list[AsyncMemoryPool] = []

    def make(limit: int = 32 * MIB, **options: Any) -> AsyncMemoryPool:
        settings = {"segment_size": 8 * MIB, "stall_after": None, "min_free": 0, "segments": kind, **options}
        made.append(AsyncMemoryPool(gpu, limit=limit, **settings))
        return made[-1]

    yield make
    close_pools(request, made)  # keeps none: pools know their streams


def fill(buffer: Buffer, value: int, stream: Stream) -> None:
    stream.device.fill(buffer.address, buffer.nbytes, value, stream)


def first_byte(buffer: Buffer, stream: Stream) -> int:
    back = bytearray(1)
    stream.device.copy_out(memoryview(back), buffer.address, stream)
    stream.synchronize_blocking()
    return back[0]


@pytest.mark.every_vendor
class TestGrowth:
    def test_memory_comes_from_the_driver_as_it_is_needed(self, usage: Usage, make_pool: OpenPool) -> None:
        """The first request brings a segment, the next ones that fit bring none, and closing gives all back."""
        pool = make_pool(LARGE, segment_size=64 * MIB)
        assert usage.reaches(0)
        held = [pool.allocate(10 * MIB + 1) for _ in range(6)]
        reserved = pool.stats().reserved_bytes
        assert reserved >= sum(buffer.nbytes for buffer in held)
        assert usage.reaches(reserved)
        for buffer in held:
            buffer.free()
        pool.close()
        assert usage.reaches(0)

    def test_direct_gives_each_buffer_back_at_once(self, usage: Usage, gpu: Gpu) -> None:
        """There is no pooling in the mode for suspicion."""
        with AsyncMemoryPool(gpu, limit=LARGE, segments="direct") as pool:
            buffer = pool.allocate(64 * MIB)
            taken = usage.reaches(64 * MIB)
            buffer.free()
            assert taken
            assert usage.reaches(0)

    @pytest.mark.parametrize("kind", POOLED, indirect=True)
    def test_a_hit_is_no_call_of_the_driver(self, gpu: Gpu, make_pool: OpenPool) -> None:
        """Its own stream takes what it gave back."""
        pool = make_pool()
        pool.allocate(MIB).free()
        before = gpu.driver_calls
        for _ in range(10):
            pool.allocate(MIB).free()
        assert gpu.driver_calls == before

    def test_more_than_the_limit_is_refused_at_once(self, make_pool: OpenPool) -> None:
        """It could never fit."""
        pool = make_pool(8 * MIB)
        with pytest.raises(OutOfMemoryError, match=r"out of memory(\. On| on) "):
            pool.allocate(9 * MIB)

    @pytest.mark.fake_only
    def test_what_others_hold_is_no_room(self, fake: FakeDriver, gpu: Gpu, make_pool: OpenPool) -> None:
        """Within the limit and still too much for the card: an error then, and memory once others gave it back."""
        pool = make_pool(512 * MIB)
        fake.others(gpu.capacity - 16 * MIB)
        with pytest.raises(OutOfMemoryError) as caught:
            pool.allocate(64 * MIB)
        assert caught.value.facts.device_free == 16 * MIB
        assert pool.allocate(8 * MIB)._block_bytes == 8 * MIB
        fake.others(0)
        assert pool.allocate(64 * MIB)._block_bytes == 64 * MIB
        pool.check()

    @pytest.mark.fake_only
    def test_less_than_a_usual_segment_is_taken_where_no_more_is_left(
        self, fake: FakeDriver, gpu: Gpu, make_pool: OpenPool
    ) -> None:
        """The last megabytes of a card are of use too."""
        pool = make_pool(512 * MIB, segment_size=64 * MIB)
        fake.others(gpu.capacity - 10 * MIB)
        assert pool.allocate(9 * MIB)._block_bytes == 9 * MIB

    @pytest.mark.parametrize("kind", POOLED, indirect=True)
    def test_trimming_gives_free_segments_back(self, usage: Usage, gpu: Gpu, make_pool: OpenPool) -> None:
        """Behind the work that used them; what is live stays. The limit leaves no room for growth ahead of need."""
        pool = make_pool(3 * 64 * MIB, segment_size=64 * MIB)
        stream = gpu.create_stream()
        held = [pool.allocate(64 * MIB, stream=stream) for _ in range(3)]
        for buffer in held:
            fill(buffer, 1, stream)
        assert usage.reaches(pool.stats().reserved_bytes)
        for buffer in held[1:]:
            buffer.free()
        pool.empty_cache()
        assert usage.reaches(64 * MIB)
        assert first_byte(held[0], stream) == 1


@pytest.mark.every_vendor
class TestStreams:
    @pytest.mark.fake_only
    @pytest.mark.parametrize("kind", POOLED, indirect=True)
    def test_anothers_memory_is_taken_only_behind_its_work(
        self, fake: FakeDriver, gpu: Gpu, make_pool: OpenPool
    ) -> None:
        """The taker's stream waits for the work of the one that freed, and the host does not."""
        a, b = gpu.create_stream("a"), gpu.create_stream("b")
        pool = make_pool(8 * MIB, overlap=0)
        buffer = pool.allocate(8 * MIB, stream=a)
        fake.hold(a.handle)
        fill(buffer, 1, a)
        buffer.free()
        again = pool.allocate(8 * MIB, stream=b, timeout=10)
        fill(again, 2, b)
        assert not b.record().done()
        fake.release()
        assert first_byte(again, b) == 2

    def test_a_buffer_is_used_on_another_stream(self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool) -> None:
        """`use_on` puts that stream behind what was done at home, and later takers behind that stream."""
        if driver is not None:
            driver.pace(300_000)
        a, b = gpu.create_stream("a"), gpu.create_stream("b")
        pool = make_pool(8 * MIB)
        buffer = pool.allocate(8 * MIB, stream=a)
        fill(buffer, 1, a)
        buffer.use_on(b)
        assert first_byte(buffer, b) == 1
        back = bytearray(1)
        gpu.copy(buffer.address + MIB, buffer.address, MIB, b)
        buffer.free()
        again = pool.allocate(8 * MIB, stream=a, timeout=10)
        fill(again, 3, a)
        gpu.copy_out(memoryview(back), again.address + MIB, a)
        a.synchronize_blocking()
        assert back == b"\x03"

    def test_a_buffer_gets_another_home(self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool) -> None:
        """`hand_over` puts the new home behind the old one."""
        if driver is not None:
            driver.pace(300_000)
        a, b = gpu.create_stream("a"), gpu.create_stream("b")
        buffer = make_pool().allocate(MIB, stream=a)
        fill(buffer, 1, a)
        buffer.hand_over(b)
        assert buffer.stream is b
        fill(buffer, 2, b)
        buffer.free()
        assert a.record().block()

    def test_memory_is_freed_on_another_stream(self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool) -> None:
        """Who takes it then is behind that stream too."""
        if driver is not None:
            driver.pace(300_000)
        a, b = gpu.create_stream("a"), gpu.create_stream("b")
        pool = make_pool(8 * MIB)
        for _ in range(4):
            buffer = pool.allocate(8 * MIB, stream=a, timeout=10)
            fill(buffer, 1, a)
            b.wait(a.record())
            gpu.copy(buffer.address, buffer.address + MIB, MIB, b)
            buffer.free(stream=b)

    def test_the_default_streams_serve_too(self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool) -> None:
        """The legacy one, this thread's own, and a raw handle of a stream that others made."""
        if driver is not None:
            driver.pace(100_000)
        pool = make_pool(8 * MIB)
        own = gpu.create_stream()
        for source in (None, 2, own.handle, 1, 0, own, 2):
            stream = gpu.stream_of(source)
            buffer = pool.allocate(8 * MIB, stream=source, timeout=10)
            fill(buffer, 5, stream)
            assert first_byte(buffer, stream) == 5
            buffer.free()

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("pace", [0, 50_000])
    def test_random_programs_read_what_was_written(
        self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool, pace: int, seed: int
    ) -> None:
        """Buffers that are shared, handed over, dropped and freed on any stream are never reused too early."""
        if driver is not None:
            driver.pace(pace)
        user = User(gpu, seed)
        pool = make_pool(48 * MIB)
        user.run(pool, 200)
        pool.check()
        assert pool.stats().allocated_bytes == 0
        pool.close()
        user.check()


class TestWaiting:
    @pytest.mark.asyncio
    async def test_a_request_waits_for_a_free(self, gpu: Gpu, make_pool: OpenPool) -> None:
        """It is served by the free of another task, whose work on the card is behind it then."""
        a, b = gpu.create_stream("a"), gpu.create_stream("b")
        async with make_pool(8 * MIB) as pool:
            first = await pool.allocate_async(8 * MIB, stream=a)
            fill(first, 1, a)
            waiting = asyncio.ensure_future(pool.allocate_async(8 * MIB, stream=b, timeout=20))
            await asyncio.sleep(0)
            assert not waiting.done()
            first.free()
            second = await waiting
            fill(second, 2, b)
            await b.synchronize()
            second.free()
            whole(pool)

    @pytest.mark.asyncio
    async def test_a_request_gives_up_after_its_timeout(self, make_pool: OpenPool) -> None:
        """And leaves nothing behind."""
        async with make_pool(8 * MIB) as pool:
            held = await pool.allocate_async(8 * MIB)
            with pytest.raises(PoolTimeout):
                await pool.allocate_async(MIB, timeout=0.01)
            held.free()
            await refillable(pool, 8 * MIB)
            whole(pool)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("seed", range(2))
    async def test_chaos_conserves_every_byte(
        self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool, seed: int
    ) -> None:
        """Tasks that take, use, cancel and time out at random on three streams leave the pool as they found it."""
        if driver is not None:
            driver.pace(20_000)
        streams = [gpu.default_stream, gpu.create_stream(), gpu.create_stream()]

        async def play(number: int) -> None:
            random_ = random.Random(1000 * seed + number)
            for _ in range(25):
                stream = random_.choice(streams)
                request = pool.allocate_async(random_.randrange(1, 3 * MIB), stream=stream, timeout=30)
                if random_.random() < 0.2:
                    request.cancel()
                    continue
                try:
                    async with asyncio.timeout(random_.choice([0.001, 30])):
                        buffer = await request
                except (TimeoutError, PoolTimeout):
                    continue
                fill(buffer, number, stream)
                if random_.random() < 0.3:
                    buffer.use_on(random_.choice(streams))
                if random_.random() < 0.5:
                    await asyncio.sleep(0)
                if random_.random() < 0.05:
                    await pool.trim()
                buffer.free()

        async with make_pool(8 * MIB, segment_size=4 * MIB) as pool:
            async with asyncio.TaskGroup() as group:
                for number in range(16):
                    group.create_task(play(number))
            whole(pool)
            await refillable(pool, 8 * MIB)


@pytest.mark.every_vendor
class TestClosing:
    def test_with_live_buffers_leaves_them_valid(self, usage: Usage, gpu: Gpu, make_pool: OpenPool) -> None:
        """They are named in a warning, and their memory goes back with them."""
        pool = make_pool(LARGE, segment_size=64 * MIB)
        buffer = pool.allocate(64 * MIB)
        with pytest.warns(LeakWarning, match="closed while buffers of 64 MiB were held"):
            pool.close()
        assert usage.reaches(64 * MIB)
        fill(buffer, 9, gpu.default_stream)
        assert first_byte(buffer, gpu.default_stream) == 9
        buffer.free()
        assert usage.reaches(0)

    def test_waits_for_the_work_on_what_it_gives_back(
        self, driver: FakeDriver | None, gpu: Gpu, make_pool: OpenPool
    ) -> None:
        """Free memory goes back to the driver only once the card is done with it."""
        if driver is not None:
            driver.pace(5_000_000)
        pool = make_pool()
        stream = gpu.create_stream()
        buffer = pool.allocate(8 * MIB, stream=stream)
        fill(buffer, 1, stream)
        buffer.free()
        pool.close()
        assert stream.record().done()


TAKING = {
    "paged": "cuMemCreate",
    "stream_ordered": "cuMemAllocFromPoolAsync",
    "direct": "cuMemAlloc",
}


@pytest.mark.fake_only
@pytest.mark.parametrize(("kind", "call"), TAKING.items())
def test_memory_that_comes_after_the_pools_end_goes_back(spotless: FakeDriver, kind: str, call: str) -> None:
    """A thread grows as the pool closes the device that it has made: that is closed after the memory has come."""
    pool = AsyncMemoryPool("cuda:0", limit=32 * MIB, segments=kind)
    refused: list[PoolClosed] = []

    def grow() -> None:
        with pytest.raises(PoolClosed) as caught:
            pool.allocate(8 * MIB)
        refused.append(caught.value)

    with pool:
        spotless.latency(call, 200_000_000)
        thread = threading.Thread(target=grow)
        thread.start()
        while not pool._opened.core.scheduler.gauges()["coming"]:
            time.sleep(0.001)
    thread.join()
    assert refused


FAILING = [("stream_ordered", "cuMemFreeAsync", 1), ("paged", "cuMemUnmap", 1)]
FAILING += [("paged", "cuMemAddressFree", nth) for nth in (1, 2)]


@pytest.mark.fake_only
@pytest.mark.parametrize("close", [AsyncMemoryPool.close, lambda pool: asyncio.run(pool.aclose())])
@pytest.mark.parametrize(("kind", "call", "nth"), FAILING)
def test_a_close_that_fails_is_made_good_by_the_next(
    spotless: FakeDriver, close: Callable[[AsyncMemoryPool], None], kind: str, call: str, nth: int
) -> None:
    """The pools beside it are closed by the first all the same; the second leaves nothing of its own."""
    pool = AsyncMemoryPool("cuda:0", limit=32 * MIB, segments=kind)
    for one in (pool, pool.pinned):
        one.allocate(MIB).free()
    spotless.fail(call, nth, code=1)
    with pytest.raises(DeviceError, match=call):
        close(pool)
    assert "host" not in spotless.live()
    with pytest.raises(PoolClosed):
        _ = pool.pinned
    close(pool)
    assert pool._opened.released


@pytest.mark.filterwarnings("ignore::asyncmem.LeakWarning")
def test_a_pool_that_is_dropped_with_its_streams_ends_before_them(gpu: Gpu, kind: str) -> None:
    """A driver follows the handle of a stream that was destroyed, and the collector ends in any order what it finds."""
    pool = AsyncMemoryPool(gpu.name, segments=kind, min_free=0)
    stream = pool.device.create_stream("users")
    buffer = pool.allocate(MIB, stream=stream)
    pool.device.fill(buffer.address, MIB, 1, stream)
    buffer.free()
    cycle: list[object] = [pool, stream]
    cycle.append(cycle)
    del pool, stream, buffer, cycle
    gc.collect()
    gc.collect()
