"""However a pass ends: errors come out in their place, threads end, and memory comes back."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from asyncmem import (
    AsyncMemoryPool,
    BufferReleased,
    DeviceError,
    InvalidRequest,
    LeakWarning,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
)
from asyncmem.pipeline import Prefetcher
from tests.async_.loops import LOOPS, Run

from .feeds import LIMIT, MIB, TimedDevice, all_free, feeding_threads, read, soon


@pytest.fixture(params=LOOPS, ids=lambda run: run.__name__)
def everywhere(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each real loop."""
    run: Run = request.param
    return run


class BrokenLoader(Exception):
    """What a loader raises."""


class Loader:
    """Numbers as arrays, by threads or tasks; breaks or waits at one of them, and says when it has been closed."""

    def __init__(self, count: int = 100, *, breaks_at: int = -1, waits_at: int = -1) -> None:
        self.count, self.breaks_at, self.waits_at = count, breaks_at, waits_at
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.closed = threading.Event()

    def items(self) -> Iterator[np.ndarray]:
        try:
            for number in range(self.count):
                if number == self.waits_at:
                    self.waiting.set()
                    assert self.gate.wait(30)
                yield self.item(number)
        finally:
            self.closed.set()

    async def items_in_a_task(self) -> AsyncIterator[np.ndarray]:
        try:
            for number in range(self.count):
                if number == self.waits_at:
                    self.waiting.set()
                    while not self.gate.is_set():  # noqa: ASYNC110 -- another thread sets it
                        await anyio.sleep(0.001)
                yield self.item(number)
        finally:
            self.closed.set()

    def item(self, number: int) -> np.ndarray:
        if number == self.breaks_at:
            raise BrokenLoader(number)
        return np.full(1000, number)

    def by(self, way: str) -> Any:
        return self.items() if way == "threads" else self.items_in_a_task()


WAYS = pytest.mark.parametrize("way", ["threads", "tasks"])


def test_error_of_a_loader_comes_out_behind_what_it_gave_before() -> None:
    """In its place, once; then there is nothing more, and nothing is left of it."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        found = iter(Prefetcher(pool, ahead=4).wrap(Loader(breaks_at=7).items()))
        assert [read(next(found))[0] for _ in range(7)] == list(range(7))
        with pytest.raises(BrokenLoader, match="7"):
            next(found)
        assert next(found, None) is None
        assert not feeding_threads()
        all_free(pool)


@WAYS
def test_error_of_a_loader_reaches_the_task_that_asks(everywhere: Run, way: str) -> None:
    """Behind what came before, as in a plain loop."""

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
            async with Prefetcher(pool, ahead=4).wrap(Loader(breaks_at=7).by(way)) as found:
                batches = aiter(found)
                assert [(await anext(batches)).size for _ in range(7)] == [1000] * 7
                with pytest.raises(BrokenLoader, match="7"):
                    await anext(batches)
                with pytest.raises(StopAsyncIteration):
                    await anext(batches)
            soon(lambda: not feeding_threads())
            assert pool.stats().allocated_bytes == 0

    everywhere(main)


FAULTS: list[tuple[object, type[Exception]]] = [
    (np.zeros(4, ">f4"), InvalidRequest),
    (np.zeros(LIMIT + 1, np.int8), OutOfMemoryError),
]


@pytest.mark.parametrize(("bad", "error"), FAULTS, ids=["elements", "size"])
@pytest.mark.parametrize("workers", [1, 3])
def test_batch_that_cannot_go_to_the_device_fails_in_its_place(
    bad: object, error: type[Exception], workers: int
) -> None:
    """Those before it come out, and what was read after it is let go."""
    good = np.zeros(10)
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        found = iter(Prefetcher(pool, ahead=4, workers=workers).wrap([good, good, [good, bad], good, good]))
        assert [len(next(found)), len(next(found))] == [10, 10]
        with pytest.raises(error):
            next(found)
        assert next(found, None) is None
        all_free(pool)


@pytest.mark.parametrize("locked", [False, True])
def test_copy_that_fails_is_raised_in_its_place(locked: bool) -> None:
    """The batch's memory comes back, and the pool goes on."""
    device = TimedDevice(locked=locked)
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        device.fail("copy_in", 3)
        found = iter(Prefetcher(pool, workers=1).wrap(Loader(10).items()))
        for number in range(2):
            assert read(next(found))[0] == number
        with pytest.raises(DeviceError, match="copy_in"):
            next(found)
        all_free(pool)
        with Prefetcher(pool).wrap(Loader(10).items()) as again:
            assert [read(array)[0] for array in again] == list(range(10))


@pytest.mark.parametrize("call", ["allocate_segment", "record", "wait", "copy_in", "query", "block"])
def test_call_of_the_device_that_fails_ends_a_pass_in_its_place(call: str) -> None:
    """What came out before is right, the memory comes back, and the next pass is whole."""
    for nth in range(1, 16):
        device = TimedDevice(0.001, locked=True)
        stream = device.create_stream()
        with AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT) as pool:
            prefetcher = Prefetcher(pool, stream=stream)
            device.fail(call, nth)
            with suppress(DeviceError), prefetcher.wrap(Loader(8).items()) as found:
                for number, array in enumerate(found):
                    assert read(array, stream)[0] == number
            device.log._faults.clear()
            all_free(pool)
            with prefetcher.wrap(Loader(8).items()) as again:
                assert [read(array, stream)[0] for array in again] == list(range(8))
            all_free(pool)


def test_memory_for_one_is_too_little_for_a_plain_loop() -> None:
    """It holds a batch until it has the next one; the error says so in time."""
    with AsyncMemoryPool(TimedDevice(), limit=2 * MIB, segment_size=2 * MIB) as pool:
        data = [np.zeros(2 * MIB, np.uint8)] * 3
        pool.allocate(2 * MIB).free()  # so that the first need not wait, on however busy a machine
        with Prefetcher(pool, timeout=0.2).wrap(data) as found:
            batches = iter(found)
            held = next(batches)
            with pytest.raises(PoolTimeout):
                next(batches)
            assert held.nbytes == 2 * MIB
        all_free(pool)


def test_what_a_loop_gave_last_is_its_variables_or_ends_with_the_block() -> None:
    """A loop over a pass leaves the last batch alive; the end of a block frees it, though it is still named."""
    data = [np.zeros(MIB, np.uint8)] * 3
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT, segment_size=LIMIT) as pool:
        for batch in Prefetcher(pool).wrap(data):
            assert batch.nbytes == MIB
        assert pool.stats().allocated_bytes == MIB
        del batch
        all_free(pool)
        with Prefetcher(pool).wrap(data) as batches:
            for batch in batches:
                assert batch.nbytes == MIB
            assert pool.stats().allocated_bytes == MIB
        assert not batch.buffer.alive
        all_free(pool)


def test_memory_that_does_not_come_in_time_raises_in_its_place() -> None:
    """By the prefetcher's own bound, or because the pool has been closed."""
    pool = AsyncMemoryPool(TimedDevice(), limit=LIMIT, segment_size=LIMIT)
    held = pool.allocate(LIMIT)
    with pytest.raises(PoolTimeout):
        next(iter(Prefetcher(pool, timeout=0.01).wrap(Loader().items())))
    found = iter(Prefetcher(pool).wrap(Loader().items()))
    soon(lambda: pool.stats().waiting == 1)
    with pytest.warns(LeakWarning, match="8 MiB were held"):
        pool.close()
    with pytest.raises(PoolClosed):
        next(found)
    held.free()


def leave_by_break(pool: AsyncMemoryPool, loader: Loader) -> None:
    for array in Prefetcher(pool, ahead=3).wrap(loader.items()):
        if read(array)[0] == 5:
            break


def leave_by_error(pool: AsyncMemoryPool, loader: Loader) -> None:
    with suppress(BrokenLoader), Prefetcher(pool, ahead=3).wrap(loader.items()) as found:
        for _ in found:
            raise BrokenLoader


def leave_unasked(pool: AsyncMemoryPool, loader: Loader) -> None:
    iter(Prefetcher(pool, ahead=3).wrap(loader.items()))


def leave_while_memory_is_waited_for(pool: AsyncMemoryPool, loader: Loader) -> None:
    with pool.allocate(LIMIT):
        found = iter(Prefetcher(pool, ahead=3).wrap(loader.items()))
        soon(lambda: pool.stats().waiting == 1)
        del found
        assert pool.stats().waiting == 0


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_error, leave_unasked, leave_while_memory_is_waited_for],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("locked", [False, True])
def test_loop_that_is_left_early_leaves_nothing(leave: Callable[[AsyncMemoryPool, Loader], None], locked: bool) -> None:
    """Its threads have ended, the generator it read is closed, and memory is back."""
    loader = Loader()
    with AsyncMemoryPool(TimedDevice(locked=locked), limit=LIMIT, segment_size=LIMIT) as pool:
        leave(pool, loader)
        gc.collect()
        assert not feeding_threads()
        assert loader.closed.is_set()
        all_free(pool)


@WAYS
def test_task_that_leaves_early_leaves_nothing(everywhere: Run, way: str) -> None:
    """At the end of the block, for certain."""
    loader = Loader()

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
            async with Prefetcher(pool, ahead=3).wrap(loader.by(way)) as found:
                array = await anext(aiter(found))
            soon(lambda: not feeding_threads())
            assert loader.closed.is_set()
            with pytest.raises(BufferReleased):
                _ = array.address
            assert pool.stats().allocated_bytes == 0

    everywhere(main)


@WAYS
def test_task_that_just_breaks_leaves_nothing_soon(everywhere: Run, way: str) -> None:
    """Without a block, the loop goes on while threads end."""
    loader = Loader()

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
            async for array in Prefetcher(pool, ahead=3).wrap(loader.by(way)):
                array.buffer.free()
                break
            with anyio.fail_after(30):
                while feeding_threads():  # noqa: ASYNC110 -- other threads end
                    await anyio.sleep(0.001)
            assert loader.closed.is_set()
            assert pool.stats().allocated_bytes == 0

    everywhere(main)


@WAYS
def test_loop_that_ends_under_a_pass_ends_it(everywhere: Run, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """With nothing to complain of, also when the pass is dropped only after that."""
    loader = Loader()
    kept = []

    async def main() -> None:
        batches = aiter(Prefetcher(pool, ahead=3).wrap(loader.by(way)))
        kept.append(batches)
        (await anext(batches)).buffer.free()

    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        everywhere(main)
        kept.clear()
        soon(lambda: not feeding_threads())
        assert loader.closed.is_set()
        all_free(pool)
    assert not caplog.records


@WAYS
def test_wait_that_is_cancelled_loses_no_batch(everywhere: Run, way: str) -> None:
    """The one that was waited for is still the next."""
    loader = Loader(10, waits_at=4)

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool, Prefetcher(pool).wrap(loader.by(way)) as found:
            batches = aiter(found)
            numbers = [(await anext(batches)).size for _ in range(4)]
            for _ in range(3):
                with anyio.move_on_after(0.01):
                    await anext(batches)
                    pytest.fail("the loader has not given it")
            loader.gate.set()
            numbers += [one.size async for one in batches]
            assert numbers == [1000] * 10

    everywhere(main)


@WAYS
@pytest.mark.parametrize("ahead", [1, 3])
def test_consumer_that_is_cancelled_at_any_step_leaves_nothing(everywhere: Run, way: str, ahead: int) -> None:
    """What it got are the first batches in order; threads and memory are gone at the end of the block."""
    device = TimedDevice(locked=True)

    async def main() -> None:
        async with AsyncMemoryPool(device, limit=LIMIT) as pool:
            for steps in range(25):
                await cancelled_after(pool, steps)
                soon(lambda: not feeding_threads())
                all_free(pool)  # a copy that was under way keeps its memory to its end

    async def cancelled_after(pool: AsyncMemoryPool, steps: int) -> None:
        numbers: list[int] = []

        async def consume() -> None:
            async with Prefetcher(pool, ahead).wrap(Loader(20).by(way)) as found:
                async for array in found:
                    back = np.empty(1000, np.int64)
                    await array.copy_to(back)
                    numbers.append(int(back[0]))

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert numbers == list(range(len(numbers)))

    everywhere(main)


def test_loader_that_does_not_return_is_warned_of() -> None:
    """Its thread cannot be ended, so it ends when the loader returns."""
    loader = Loader(waits_at=2)
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        found = iter(Prefetcher(pool).wrap(loader.items()))
        next(found).buffer.free()
        assert loader.waiting.wait(30)
        with pytest.warns(RuntimeWarning, match="still in a call"):
            found.close(timeout=0.01)
        loader.gate.set()
        soon(lambda: not feeding_threads())
        assert next(found, None) is None
        all_free(pool)


def test_conversion_that_fails_loses_no_memory() -> None:
    """Its error comes out at the batch, and the next one is tried again."""

    def convert(array: object) -> object:
        raise BrokenLoader(array)

    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        with Prefetcher(pool, convert=convert).wrap([np.zeros(3)] * 2) as found:
            batches = iter(found)
            for _ in range(2):
                with pytest.raises(BrokenLoader):
                    next(batches)
            assert next(batches, None) is None
        all_free(pool)


def test_loader_may_use_a_prefetcher_itself() -> None:
    """Threads of one pass may consume another."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        inner = Prefetcher(pool).wrap(Loader(5).items())
        with Prefetcher(pool).wrap({"number": read(array)} for array in inner) as found:
            assert [read(one["number"])[0] for one in found] == list(range(5))
        all_free(pool)
