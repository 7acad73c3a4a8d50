"""Buffers that take turns: one is worked on, the next is filled, and neither is touched too early."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import anyio
import numpy as np
import pytest

from asyncmem import Array, AsyncMemoryPool, BufferReleased, DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.devices import Device, Host, Simulated, SimulatedStream, Stream
from asyncmem.pipeline import DoubleBuffer
from tests.metal.session import open_metal
from tests.processor import open_processor

from .feeds import LIMIT, MIB, TimedDevice, all_free, read, soon

SHAPE = (4, 3)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test on both."""
    return str(request.param)


@pytest.fixture(params=["host", "simulated", "page-locked", "opencl", "metal"])
def device(request: pytest.FixtureRequest) -> Device:
    """A device with real memory; one copies by itself only what is page-locked."""
    if request.param == "opencl":
        return open_processor()
    if request.param == "metal":
        return open_metal(request)
    return Host() if request.param == "host" else TimedDevice(0.001, locked=request.param == "page-locked")


def batch(number: int, rows: int = 4) -> np.ndarray:
    return np.full((rows, 3), number, np.float32)


def fetch_and_swap(feed: DoubleBuffer, data: np.ndarray) -> None:
    feed.prefetch_next(data)
    feed.swap()


def work(array: Array, stream: Stream) -> None:
    """Read the array for a while, where the device can tell who does."""
    if isinstance(stream, SimulatedStream):
        stream.launch(0.002, reads=[(array.address, array.nbytes)])


@pytest.mark.parametrize("buffers", [2, 4])
def test_each_turn_has_the_data_that_was_fetched_for_it(device: Device, buffers: int) -> None:
    """In order, in the shape of the data, and with no use of a buffer that the device would find too early."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        with DoubleBuffer(pool, SHAPE, buffers=buffers, stream=stream, tag="feed") as feed:
            sources = [batch(number, 4 - number % 2) for number in range(10)]
            for source in sources[: buffers - 1]:
                feed.prefetch_next(source)
            for at, source in enumerate(sources):
                assert feed.ahead == min(buffers - 1, 10 - at)
                assert feed.swap() is feed.current
                if at + buffers - 1 < 10:
                    feed.prefetch_next(sources[at + buffers - 1])
                work(feed.current, stream)
                np.testing.assert_array_equal(read(feed.current, stream), source)
            last = feed.current
        with pytest.raises(BufferReleased):
            last.numpy()
        all_free(pool)
    device.close()


@pytest.mark.anyio
async def test_tasks_swap_without_holding_the_loop(device: Device) -> None:
    """While data is read that is not page-locked, a thread reads it."""
    stream = device.create_stream()
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        async with DoubleBuffer(pool, SHAPE, stream=stream) as feed:
            transfer = feed.prefetch_next(batch(0))
            for number in range(1, 5):
                array = await feed.swap_async()
                work(array, stream)
                back = np.empty(array.shape, np.float32)
                await array.copy_to(back, stream=stream)
                np.testing.assert_array_equal(back, batch(number - 1))
                await transfer
                assert transfer.done()
                transfer = feed.prefetch_next(batch(number))
            await transfer
            assert repr(transfer) == "<asyncmem.pipeline.Transfer: done>"
        assert pool.stats().allocated_bytes == 0
    device.close()


def test_copies_run_beside_the_work_and_the_host_waits_for_neither() -> None:
    """On the device's clock, turns of 4 ms of copying and 5 ms of work take 5 ms."""
    device = TimedDevice(0.004)
    stream = device.create_stream()
    turns = 40
    with AsyncMemoryPool(device, limit=LIMIT) as pool, DoubleBuffer(pool, MIB // 4, stream=stream) as feed:
        data = np.zeros(MIB // 4, np.float32)
        feed.prefetch_next(data)
        for _ in range(turns):
            array = feed.swap()
            feed.prefetch_next(data)
            stream.launch(0.005, reads=[(array.address, array.nbytes)])
        assert device.now == 0  # nobody has waited
        stream.record().block()
        assert device.now <= turns * 0.005 + 0.004 + 1e-6


def test_export_of_the_current_one_does_not_wait_for_the_next() -> None:
    """Whoever takes the array to another stream waits for its data alone."""
    device = TimedDevice(0.5)
    stream, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool, DoubleBuffer(pool, SHAPE, stream=stream) as feed:
        feed.prefetch_next(batch(0))
        feed.swap()
        feed.prefetch_next(batch(1))
        feed.current.buffer.use_on(other)
        other.record().block()
        assert device.now == pytest.approx(0.5)


WRONG: list[tuple[Callable[[DoubleBuffer], object], str]] = [
    (lambda feed: feed.current, "prefetch_next"),
    (lambda feed: feed.swap(), "prefetch_next"),
    (lambda feed: feed.prefetch_next(batch(0, 5)), r"float32\[4, 3\], or shorter"),
    (lambda feed: feed.prefetch_next(batch(0)[:, :2]), r"float32\[4, 3\]"),
    (lambda feed: feed.prefetch_next(batch(0)[0]), r"float32\[4, 3\]"),
    (lambda feed: feed.prefetch_next(batch(0).astype(np.float64)), r"float32\[4, 3\]"),
    (lambda feed: feed.prefetch_next("text"), "an array of the host"),
    (lambda feed: [feed.prefetch_next(batch(0)) for _ in range(3)], "a buffer that is free"),
    (lambda feed: feed.__enter__(), "one that was not entered"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_right_is_refused(call: Callable[[DoubleBuffer], object], words: str) -> None:
    """By an error that says what to do, and the turns go on as before."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        with DoubleBuffer(pool, SHAPE) as feed:
            with pytest.raises(InvalidRequest, match=words):
                call(feed)
            if not feed.ahead:
                feed.prefetch_next(batch(7))
            feed.swap()
            assert feed.current.shape == SHAPE
        with pytest.raises(InvalidRequest, match="inside"):
            feed.prefetch_next(batch(0))
        all_free(pool)


def test_arguments_are_looked_at_when_it_is_made() -> None:
    """One buffer is no double buffer, and memory comes from a pool."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        with pytest.raises(InvalidRequest, match="buffers: expected a whole number from 2"):
            DoubleBuffer(pool, SHAPE, buffers=1)
        with pytest.raises(InvalidRequest, match="workers: expected a whole number from 1"):
            DoubleBuffer(pool, SHAPE, workers=0)
        with pytest.raises(InvalidRequest, match="a pool, a budget"):
            DoubleBuffer(object(), SHAPE)  # type: ignore[arg-type]  # what is tested
        for wrong in [(2, -1), "x", 1.5]:
            with pytest.raises(InvalidRequest, match="shape: expected lengths of 0 and above"):
                DoubleBuffer(pool, wrong)  # type: ignore[arg-type]  # likewise
        feed = DoubleBuffer(pool.budget("feed", limit=MIB), MIB)
        assert repr(feed) == f"<asyncmem.pipeline.DoubleBuffer of 2 x float32[{MIB}]: not in use>"
        with pytest.raises(OutOfMemoryError), feed:
            pass
        all_free(pool)


@pytest.mark.parametrize("locked", [False, True])
def test_copy_that_fails_is_raised_by_its_turn_and_the_buffer_is_filled_again(locked: bool) -> None:
    """What was current stays so."""
    device = TimedDevice(locked=locked)
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        with DoubleBuffer(pool, SHAPE) as feed:
            feed.prefetch_next(batch(0))
            current = feed.swap()
            device.fail("copy_in")
            with pytest.raises(DeviceError, match="copy_in"):
                fetch_and_swap(feed, batch(1))
            assert feed.current is current
            assert feed.ahead == 0
            feed.prefetch_next(batch(2))
            np.testing.assert_array_equal(read(feed.swap()), batch(2))
        all_free(pool)


@pytest.mark.parametrize("pinned", [False, True])
def test_data_that_is_not_page_locked_is_staged_if_wanted(pinned: bool) -> None:
    """Else the device copies it as it can, on a thread of the pool's that it may hold up."""
    device = TimedDevice(locked=True)
    with AsyncMemoryPool(device, limit=LIMIT) as pool, DoubleBuffer(pool, SHAPE, pinned=pinned) as feed:
        feed.prefetch_next(batch(3))
        np.testing.assert_array_equal(read(feed.swap()), batch(3))
        assert bool(device.unlocked_in_threads) is not pinned
        assert all(name.endswith("copies") for name in device.unlocked_in_threads)


def test_data_that_waits_for_page_locked_memory_holds_nobody_up() -> None:
    """Threads of its own stage it, so another feed of the pool goes on, and they end with the block."""
    device = TimedDevice(locked=True)
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        pinned = pool.pinned
        with DoubleBuffer(pool, 2 * MIB, "uint8") as large, DoubleBuffer(pool, MIB, "uint8") as small:
            left = pinned.allocate(MIB)
            held = pinned.allocate(pinned.stats().reserved_bytes - MIB)
            left.free()
            host = device.pinned()
            assert isinstance(host, Simulated)
            host.take_elsewhere(host.capacity)
            waits = large.prefetch_next(np.zeros(2 * MIB, np.uint8))
            soon(lambda: pinned.stats().waiting == 1)
            assert small.prefetch_next(np.ones(MIB, np.uint8)).block(30)
            assert small.swap().numpy().min() == 1
            assert not waits.done()
            held.free()
            assert waits.block(30)
            soon(lambda: len(staging_threads()) == 8)
        soon(lambda: not staging_threads())
        all_free(pool)


def test_buffer_that_is_dropped_in_its_block_ends_its_threads() -> None:
    """Nobody is left to be told of what they would read."""
    with AsyncMemoryPool(TimedDevice(locked=True), limit=LIMIT) as pool:
        feed = DoubleBuffer(pool, SHAPE, workers=2).__enter__()
        fetch_and_swap(feed, batch(1))
        soon(lambda: len(staging_threads()) == 2)
        feed.free()
        feed = DoubleBuffer(pool, SHAPE, workers=1).__enter__()
        fetch_and_swap(feed, batch(1))
        soon(lambda: len(staging_threads()) == 1)
        del feed
        gc.collect()
        soon(lambda: not staging_threads())
        all_free(pool)


def staging_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncmem double buffer")]


@pytest.mark.parametrize("pinned", [False, True])
def test_block_that_ends_while_buffers_are_filled_leaves_nothing(pinned: bool) -> None:
    """Whoever reads the data for them finds them gone, or had begun and is waited for by the memory."""
    device = TimedDevice(locked=True)
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        for _ in range(10):
            with DoubleBuffer(pool, SHAPE, buffers=4, pinned=pinned) as feed:
                for number in range(3):
                    feed.prefetch_next(batch(number))
        all_free(pool)
        soon(lambda: pool.pinned.stats().allocated_bytes == 0)


@pytest.mark.anyio
async def test_memory_that_is_not_there_is_waited_for() -> None:
    """All of the buffers come together or none; a wait that is cancelled leaves nothing behind."""
    async with AsyncMemoryPool(TimedDevice(), limit=LIMIT, segment_size=LIMIT) as pool:
        held = await pool.allocate_async(5 * MIB)
        feed = DoubleBuffer(pool, 2 * MIB, "uint8")
        with anyio.move_on_after(0.01):
            await feed.__aenter__()
        assert pool.stats().allocated_bytes == 5 * MIB
        assert pool.stats().waiting == 0
        held.free()
        async with feed:
            assert pool.stats().allocated_bytes == 4 * MIB
        assert pool.stats().allocated_bytes == 0
