"""Awaiting the GPU: whatever becomes of the wait, the loop or the device, nobody waits for ever and nothing is left."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import trio
import trio.testing

from asyncmem.devices import Fence, Stream
from asyncmem.devices.gpu import fence as gpu_fence
from asyncmem.devices.gpu.device import Gpu
from asyncmem.errors import DeviceError, InvalidRequest

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

Busy = Callable[[], Stream]


@pytest.fixture
def busy(fake: FakeDriver, gpu: Gpu) -> Iterator[Busy]:
    """Make streams with work that does not end before `fake.release`."""

    def make() -> Stream:
        stream = gpu.create_stream()
        fake.hold(stream.handle)
        fake.launch(stream.handle)
        return stream

    yield make
    fake.release()


async def wait_for(fence: Fence) -> None:
    await fence


@pytest.mark.every_vendor
@pytest.mark.asyncio
async def test_asyncio_waits_for_many_at_once(fake: FakeDriver, busy: Busy) -> None:
    """Each of a hundred waits ends when its own fence is reached, in whatever order."""
    streams = [busy() for _ in range(100)]
    tasks = [asyncio.ensure_future(wait_for(stream.record())) for stream in streams]
    await asyncio.sleep(0)
    for at in (70, 3, 99):
        fake.release(streams[at].handle)
        await asyncio.wait_for(tasks[at], 60)
    assert sum(task.done() for task in tasks) == 3
    fake.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)


@pytest.mark.every_vendor
@pytest.mark.anyio
async def test_trio_waits_for_many_at_once(fake: FakeDriver, busy: Busy) -> None:
    """The same on trio."""
    streams = [busy() for _ in range(100)]
    ended: list[int] = []

    async def wait(at: int) -> None:
        await streams[at].record()
        ended.append(at)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for at in range(100):
                nursery.start_soon(wait, at)
            await trio.testing.wait_all_tasks_blocked()
            fake.release(streams[70].handle)
            while not ended:
                await trio.testing.wait_all_tasks_blocked()
            assert ended == [70]
            fake.release()
    assert sorted(ended) == list(range(100))


@pytest.mark.every_vendor
@pytest.mark.asyncio
async def test_a_wait_on_asyncio_that_is_cancelled_leaves_nothing(fake: FakeDriver, busy: Busy) -> None:
    """The task goes, the fence with it, and its event serves again although the work still runs."""
    stream = busy()
    fence = stream.record()
    gone = weakref.ref(fence)
    task = asyncio.ensure_future(wait_for(fence))
    del fence
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    gc.collect()
    assert gone() is None
    await asyncio.to_thread(stream.device.watcher.stop)
    before = fake.calls("cuEventCreate")
    assert not stream.record().done()
    assert fake.calls("cuEventCreate") == before
    fake.release()
    await asyncio.wait_for(wait_for(stream.record()), 60)


@pytest.mark.every_vendor
@pytest.mark.anyio
async def test_a_wait_on_trio_that_is_cancelled_leaves_nothing(fake: FakeDriver, busy: Busy) -> None:
    """The same on trio, and the task can wait again."""
    stream = busy()
    with trio.move_on_after(0.01) as scope:
        await stream.record()
    assert scope.cancelled_caught
    await trio.to_thread.run_sync(stream.device.watcher.stop)
    fake.release()
    with trio.fail_after(60):
        await stream.record()


@pytest.mark.asyncio
async def test_asyncio_hears_of_a_lost_device(fake: FakeDriver, busy: Busy) -> None:
    """Every wait ends with the error, those that begin afterwards too."""
    fence = busy().record()
    task = asyncio.ensure_future(wait_for(fence))
    await asyncio.sleep(0)
    fake.lose(0, 719)
    with pytest.raises(DeviceError, match=r"(?i)launch_?fail"):
        await asyncio.wait_for(task, 60)
    with pytest.raises(DeviceError, match=r"(?i)launch_?fail"):
        await fence
    fake.reset()


@pytest.mark.anyio
async def test_trio_hears_of_a_lost_device(fake: FakeDriver, busy: Busy) -> None:
    """The same on trio."""
    fence = busy().record()
    caught: list[DeviceError] = []

    async def wait() -> None:
        try:
            await fence
        except DeviceError as error:
            caught.append(error)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            fake.lose(0, 719)
    assert caught[0].code == 719
    fake.reset()


@pytest.mark.every_vendor
def test_a_loop_that_is_closed_is_no_trouble(fake: FakeDriver, busy: Busy) -> None:
    """News for it stay unread; the next loop begins anew, and forgets the closed one with all that waited there."""
    fence = busy().record()
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait_for(fence))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert loop in gpu_fence._asyncio_readers
    fake.release()
    asyncio.run(wait_until_released(fake, busy()))
    assert loop not in gpu_fence._asyncio_readers
    del task
    gc.collect()


async def wait_until_released(fake: FakeDriver, stream: Stream) -> None:
    task = asyncio.ensure_future(wait_for(stream.record()))
    await asyncio.sleep(0)
    fake.release()
    await asyncio.wait_for(task, 60)


@pytest.mark.every_vendor
def test_loops_of_several_threads_wait_side_by_side(fake: FakeDriver, busy: Busy) -> None:
    """Each has its own descriptor."""
    fence = busy().record()
    started = threading.Barrier(4)

    async def wait() -> None:
        task = asyncio.ensure_future(wait_for(fence))
        await asyncio.sleep(0)
        started.wait(60)
        await asyncio.wait_for(task, 60)

    threads = [threading.Thread(target=asyncio.run, args=(wait(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(60)
    fake.release()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.every_vendor
@pytest.mark.asyncio
async def test_a_closed_devices_fences_are_awaited_all_the_same(fake: FakeDriver, busy: Busy) -> None:
    """Closing waits for those who wait, and whoever comes later is served too."""
    stream = busy()
    task = asyncio.ensure_future(wait_for(stream.record()))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(asyncio.to_thread(stream.device.close))
    await asyncio.sleep(0.01)
    assert not closing.done()
    fake.release()
    await asyncio.wait_for(closing, 60)
    await asyncio.wait_for(task, 60)
    fake.launch(stream.handle, 10_000_000)
    await asyncio.wait_for(wait_for(stream.record()), 60)


@pytest.mark.every_vendor
def test_no_loop_is_a_wrong_place_to_await(busy: Busy) -> None:
    """The error says what to do instead."""
    with pytest.raises(InvalidRequest, match=r"block\(\)"):
        wait_for(busy().record()).send(None)
