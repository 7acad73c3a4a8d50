"""Batches come out in order, on the device, with the loader's nesting, and the loader is read ahead of them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import asyncmem
from asyncmem import Array, AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Device, Host, SimulatedStream, Stream
from asyncmem.pipeline import Prefetcher
from tests.async_.loops import LOOPS, Run
from tests.metal.session import open_metal
from tests.processor import open_processor

from .feeds import LIMIT, MIB, TimedDevice, all_free, feeding_threads, read, soon

Loader = Callable[[int], Any]


@pytest.fixture(params=LOOPS, ids=lambda run: run.__name__)
def everywhere(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each real loop."""
    run: Run = request.param
    return run


@pytest.fixture(params=["host", "simulated", "page-locked", "opencl", "metal"])
def device(request: pytest.FixtureRequest) -> Device:
    """A device with real memory; one copies by itself only what is page-locked."""
    if request.param == "opencl":
        return open_processor()
    if request.param == "metal":
        return open_metal(request)
    return Host() if request.param == "host" else TimedDevice(0.001, locked=request.param == "page-locked")


def batch(number: int) -> dict[str, Any]:
    """A tree whose arrays grow, so that memory of all sizes is used again."""
    image = np.random.default_rng(number).normal(size=(3 + number, 500)).astype(np.float32)
    return {"image": image, "labels": (np.arange(number), [f"name {number}"]), "number": number}


def batches(count: int) -> Iterator[dict[str, Any]]:
    yield from map(batch, range(count))


async def batches_in_a_task(count: int) -> AsyncIterator[dict[str, Any]]:
    for number in range(count):
        yield batch(number)


def check(found: dict[str, Any], number: int, stream: Stream) -> None:
    """See that it is the batch of that number, by the values that the stream finds."""
    expected = batch(number)
    assert found["number"] == number
    assert found["labels"][1] == expected["labels"][1]
    arrays = [(found["image"], expected["image"]), (found["labels"][0], expected["labels"][0])]
    for array, values in arrays:
        assert isinstance(array, Array)
        if isinstance(stream, SimulatedStream):
            stream.launch(0.002, reads=[(array.address, array.nbytes)])
        np.testing.assert_array_equal(read(array, stream), values)


def test_a_plain_loop_gets_every_batch_in_order(device: Device) -> None:
    """The stream finds the data there, and memory of former batches is not overwritten while it reads them."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        prefetched = Prefetcher(pool, ahead=3, stream=stream, tag="batch").wrap([batch(number) for number in range(20)])
        assert len(prefetched) == 20
        for _ in range(2):  # a loader may be gone through again
            count = 0
            for found in prefetched:
                check(found, count, stream)
                count += 1
            assert count == 20
            del found
            assert not feeding_threads()
        all_free(pool)
    device.close()


@pytest.mark.may_block
@pytest.mark.parametrize("loader", [batches, batches_in_a_task], ids=["threads", "tasks"])
def test_a_task_gets_every_batch_in_order(device: Device, loader: Loader, everywhere: Run) -> None:
    """From a loader that is iterated over by a thread, and from one that a task iterates over."""
    stream = device.create_stream()

    async def main() -> None:
        async with AsyncMemoryPool(device, limit=LIMIT) as pool:
            count = 0
            async for found in Prefetcher(pool, stream=stream).wrap(loader(10)):
                check(found, count, stream)
                count += 1
            assert count == 10
            del found
            all_free(pool)
        soon(lambda: not feeding_threads())

    everywhere(main)
    device.close()


def test_a_loop_is_not_held_while_batches_are_read(everywhere: Run) -> None:
    """Not by a loader that blocks, nor by copies that would hold up the caller: the guard over this test would tell."""
    device = TimedDevice(locked=True)

    async def main() -> None:
        async with AsyncMemoryPool(device, limit=LIMIT) as pool:
            prefetcher = Prefetcher(pool, pinned=False)
            numbers = [found["number"] async for found in prefetcher.wrap(batches(5))]
            numbers += [found["number"] async for found in prefetcher.wrap(batches_in_a_task(5))]
            assert numbers == [*range(5), *range(5)]
            assert len(device.unlocked_in_threads) == 18  # of both arrays, but for the two that are empty

    everywhere(main)


def test_copies_run_beside_the_work() -> None:
    """On the device's clock, 4 ms of copying and 5 ms of work a batch take 5 ms: none waits for a later one's copy."""
    device = TimedDevice(0.004)
    stream = device.create_stream()
    count = 60
    data = [np.zeros(MIB // 4, np.float32)] * count
    with AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT) as pool:
        for array in Prefetcher(pool, stream=stream).wrap(data):
            stream.launch(0.005, reads=[(array.address, array.nbytes)])
        stream.record().block()
        del array
        assert device.now <= (count * 0.005 + 0.004) / 0.95
        all_free(pool)


def test_no_more_is_read_ahead_than_was_asked() -> None:
    """Beside the batch that is in use, and the one that is about to be asked for."""
    asked = 0

    def loader() -> Iterator[np.ndarray]:
        for number in range(30):
            assert number <= asked + 3
            yield np.full(10, number)

    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool, Prefetcher(pool, ahead=3).wrap(loader()) as found:
        for _ in found:
            asked += 1
    assert asked == 30


def test_consumer_who_runs_ahead_of_the_device_is_held_up() -> None:
    """What the device has not copied is kept on the host, so there is a bound to it: one copy a filler."""
    device = TimedDevice(0.01, locked=True)
    most = 0
    with (
        AsyncMemoryPool(device, limit=LIMIT) as pool,
        Prefetcher(pool, ahead=2).wrap(np.zeros(MIB // 8) for _ in range(30)) as found,
    ):
        for _ in found:
            most = max(most, pool.pinned.stats().allocated_bytes)
        assert 0 < most <= 5 * MIB


def test_staged_batches_go_in_one_copy() -> None:
    """However many arrays they are of; page-locked ones go by themselves."""
    device = TimedDevice(locked=True)
    tree = [np.full(10, number, np.float32) for number in range(7)]
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        with Prefetcher(pool).wrap([tree]) as staged:
            (found,) = staged
            assert len(device.copied) == 1
            assert not device.unlocked_in_threads
            for array, values in zip(found, tree, strict=True):
                np.testing.assert_array_equal(read(array), values)
        with pool.pinned.allocate(40) as locked:
            views = [locked.view("float32"), locked.view("int8")]
            with Prefetcher(pool).wrap([views]) as direct:
                assert len(list(direct)) == 1
            assert device.copied[1:] == [40, 40]
        all_free(pool)


def test_batch_that_the_device_copies_by_holding_a_thread_comes_out_when_it_is_there() -> None:
    """No stream can wait for such a copy before it has been made."""
    device = TimedDevice(locked=True)
    with (
        AsyncMemoryPool(device, limit=LIMIT) as pool,
        Prefetcher(pool, pinned=False).wrap([np.full(100, number) for number in range(1, 5)]) as found,
    ):
        for number, array in enumerate(found, 1):
            assert set(read(array)) == {number}
    assert len(device.unlocked_in_threads) == 4


def test_several_workers_keep_the_order() -> None:
    """Though a later batch is staged faster than an earlier one."""
    device = TimedDevice(locked=True)
    sizes = [200_000 if number % 3 == 0 else 10 for number in range(40)]
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        found = [len(array) for array in Prefetcher(pool, 5, workers=4).wrap(np.zeros(size) for size in sizes)]
        assert found == sizes


def test_several_consumers_share_a_pass(everywhere: Run) -> None:
    """Each batch comes out once, and all consumers end."""
    seen: list[int] = []

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
            found = aiter(Prefetcher(pool, ahead=2).wrap(batches(20)))

            async def consume() -> None:
                seen.extend([one["number"] async for one in found])

            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(consume)

    everywhere(main)
    assert sorted(seen) == list(range(20))


def test_arrays_are_converted_as_they_come_out() -> None:
    """On the consumer's thread, leaves alone."""
    threads: set[int] = set()

    def convert(array: Array) -> np.ndarray:
        threads.add(threading.get_ident())
        return np.from_dlpack(array)

    host = Host()
    with AsyncMemoryPool(host, limit=LIMIT) as pool:
        for number, found in enumerate(Prefetcher(pool, convert=convert).wrap(batches(5))):
            host.default_stream.record().block()
            np.testing.assert_array_equal(found["image"], batch(number)["image"])
            assert found["number"] == number
        assert threads == {threading.get_ident()}
        del found
        all_free(pool)
    host.close()


def test_memory_of_one_batch_is_enough_for_who_lets_go_before_asking() -> None:
    """Reading ahead then waits for memory, and goes on as it comes."""
    with AsyncMemoryPool(TimedDevice(), limit=2 * MIB, segment_size=2 * MIB) as pool:
        found = iter(Prefetcher(pool, ahead=3).wrap(np.full(MIB // 4, number, np.int64) for number in range(8)))
        for number in range(8):
            array = next(found)
            assert read(array)[0] == number
            del array
        assert next(found, None) is None
        all_free(pool)


def test_batches_may_come_from_a_budget_or_a_named_device() -> None:
    """A budget bounds what is read ahead; a name means the pool that the process shares."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        budget = pool.budget("feed", limit=2 * MIB)
        with Prefetcher(budget, ahead=8).wrap([np.zeros(MIB // 2, np.uint8)] * 8) as found:
            assert sum(array.nbytes for array in found) == 4 * MIB
        assert MIB <= budget.stats().peak_allocated <= 2 * MIB
        all_free(pool)
    (array,) = Prefetcher("host").wrap([np.arange(3)])
    assert array.buffer.device is asyncmem.device("host").pool.device
    array.buffer.free()


def test_what_cannot_be_right_is_refused() -> None:
    """At the call; a loader for tasks says so when it is gone through without one."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        for make, words in [
            (lambda: Prefetcher(pool, ahead=0), "ahead: expected a whole number from 1"),
            (lambda: Prefetcher(pool, workers=0), "workers: expected a whole number from 1"),
            (lambda: Prefetcher(pool, timeout="soon"), "timeout: expected seconds"),
            (lambda: Prefetcher(pool, convert=3), "convert: expected something to call"),  # type: ignore[arg-type]
            (lambda: Prefetcher(3), "a pool, a budget"),  # type: ignore[arg-type]  # what is tested
            (lambda: Prefetcher(pool).wrap(3), "something to iterate over"),  # type: ignore[arg-type]  # likewise
            (lambda: iter(Prefetcher(pool).wrap(batches_in_a_task(1))), "async for"),
        ]:
            with pytest.raises(InvalidRequest, match=words):
                make()
        prefetched = Prefetcher(pool).wrap(iter([]))
        with pytest.raises(TypeError, match="has no len"):
            len(prefetched)
        assert prefetched
        assert repr(Prefetcher(pool)) == f"<asyncmem.pipeline.Prefetcher of {pool.name!r}: 2 ahead, 4 workers>"
        assert not feeding_threads()
