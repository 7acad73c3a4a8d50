"""A pool beside others: threads that share it, neighbours that take the card's memory, and a driver that complains."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, OutOfMemoryError, PoolTimeout
from asyncmem.devices import Cuda, GpuStream
from tests.conservation import whole

from .fake import FakeDriver

MIB = 1 << 20
KINDS = ("paged", "stream_ordered", "direct")
THREADS = 4
STEPS = 60


class Player:
    """A thread with a stream of its own, which writes buffers, hands some to its neighbour and reads them back."""

    def __init__(self, pool: AsyncMemoryPool, streams: list[GpuStream], number: int) -> None:
        self.pool = pool
        self.number = number
        self.stream, self.next = streams[number], streams[(number + 1) % THREADS]
        self.refused = 0
        self.thread = threading.Thread(target=self.play, name=f"player {number}")
        self.error: BaseException | None = None

    def play(self) -> None:
        random_ = random.Random(self.number)
        try:
            for step in range(STEPS):
                self.step(random_, 1 + (7 * step + self.number) % 250)
        except BaseException as error:  # noqa: BLE001 -- shown by the test's own thread
            self.error = error

    def step(self, random_: random.Random, value: int) -> None:
        device = self.stream.device
        try:
            buffer = self.pool.allocate(random_.randrange(1, 4 * MIB), stream=self.stream, timeout=60)
        except (OutOfMemoryError, PoolTimeout):
            self.refused += 1
            return
        device.fill(buffer.address, buffer.nbytes, value, self.stream)
        reader = self.stream
        if random_.random() < 0.5:
            reader = self.next
            buffer.use_on(reader)
        back = bytearray(1)
        if random_.random() < 0.3:
            device.copy_out(memoryview(back), buffer.address + buffer.nbytes - 1, reader)
            reader.synchronize_blocking()
            assert back[0] == value
        else:
            device.copy(buffer.address, buffer.address + buffer.nbytes // 2, buffer.nbytes // 4, reader)
        if random_.random() < 0.2:
            self.pool.empty_cache()
        buffer.free()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_pool(driver: FakeDriver | None, cuda: Cuda, kind: str) -> None:
    """Each on its stream, with memory that goes from stream to stream; all of them are served."""
    if driver is not None:
        driver.pace(30_000)
    assert play(cuda, kind, limit=12 * MIB) == 0


@pytest.mark.fake_only
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_take_and_give_the_cards_memory(fake: FakeDriver, cuda: Cuda, kind: str) -> None:
    """Some requests fail meanwhile, none of them spoils anything, and afterwards all of the limit can be had."""
    fake.pace(30_000)
    over = threading.Event()

    def neighbour() -> None:
        random_ = random.Random(0)
        while not over.is_set():
            fake.others(cuda.capacity - random_.randrange(0, 24) * MIB)
            if random_.random() < 0.2:
                fake.over_budget(MIB)
            over.wait(0.002)
        fake.others(0)

    thread = threading.Thread(target=neighbour)
    thread.start()

    def move_out() -> None:
        over.set()
        thread.join()

    try:
        play(cuda, kind, limit=16 * MIB, done=move_out)
    finally:
        move_out()


@pytest.mark.fake_only
@pytest.mark.parametrize("kind", KINDS)
def test_pool_knows_what_another_pool_of_the_process_has_taken(
    cuda: Cuda, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the driver again once that leaves little, however fresh its last answer; each pool has its own device."""
    monkeypatch.setattr("asyncmem.pool.executor._FRESH", 3600.0)
    settings: dict[str, Any] = {"segments": kind, "segment_size": 2 * MIB, "min_free": 16 * MIB}
    with (
        AsyncMemoryPool(cuda, **settings) as one,
        AsyncMemoryPool("cuda:0", **settings) as other,
        one.allocate(200 * MIB),
        other.allocate(cuda.memory().free - 18 * MIB),
    ):
        with pytest.raises(OutOfMemoryError) as caught:
            one.allocate(4 * MIB)
        assert caught.value.facts.device_free == cuda.memory().free >= 16 * MIB


@pytest.mark.fake_only
@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_that_complains_gets_what_is_free(fake: FakeDriver, cuda: Cuda, kind: str) -> None:
    """Being over its budget, the pool keeps only what is in use."""
    before = fake.used()
    with AsyncMemoryPool(cuda, limit=64 * MIB, segment_size=16 * MIB, segments=kind, min_free=0) as pool:
        kept = pool.allocate(8 * MIB)
        for buffer in [pool.allocate(8 * MIB) for _ in range(4)]:
            buffer.free()
        fake.over_budget(MIB)
        deadline = threading.Event()
        while fake.used() - before > 16 * MIB and not deadline.wait(0.01):  # the worker looks about four times a second
            pass
        assert pool.stats().reserved_bytes <= 16 * MIB
        kept.free()


def play(cuda: Cuda, kind: str, limit: int, done: Callable[[], object] = int) -> int:
    """Let the threads play, see that the pool is whole and all of its limit can be had, and return the refusals."""
    streams = [cuda.create_stream() for _ in range(THREADS)]
    with AsyncMemoryPool(cuda, limit=limit, segment_size=4 * MIB, segments=kind, min_free=0, stall_after=None) as pool:
        players = [Player(pool, streams, number) for number in range(THREADS)]
        for player in players:
            player.thread.start()
        for player in players:
            player.thread.join()
            if player.error is not None:
                raise player.error
        done()
        whole(pool)
        pool.allocate(limit, timeout=60).free()
        return sum(player.refused for player in players)
