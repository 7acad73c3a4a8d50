"""Each thing that can fail does so once: whoever asked is told, nothing hangs, and nothing is lost."""

import asyncio
import gc
import threading

import numpy as np
import pytest

from asyncmem import AsyncmemError, AsyncMemoryPool, DeviceError
from asyncmem.devices import Metal
from tests.conservation import whole
from tests.metal.fake import TIMED_OUT, FakeMetal
from tests.metal.session import a_machine, in_place

MIB = 1 << 20

ANSWER_NIL = (
    "newBufferWithLength_options_",
    "newCommandQueueWithMaxCommandBufferCount_",
    "newSharedEvent",
    "commandBuffer",
    "blitCommandEncoder",
)
RAISE = (
    "commit",
    "encodeSignalEvent_value_",
    "encodeWaitForEvent_value_",
    "fillBuffer_range_value_",
    "copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_",
)


async def program(pool: AsyncMemoryPool, device: Metal) -> None:
    """Work of all kinds on two streams."""
    async with pool:
        other = device.create_stream()
        there, back = np.arange(999, dtype=np.uint8), np.zeros(999, np.uint8)
        with await pool.allocate_async(MIB) as first, await pool.allocate_async(4 * MIB, stream=other) as second:
            device.fill(first.address, MIB, 200, first.stream)
            await first.copy_from(there)
            second.use_on(first.stream)
            device.copy(second.address, first.address, 1024, first.stream)
            device.fill(second.address + 1, 2, 7, first.stream)
            other.wait(first.stream.record())
            await second.copy_to(back, stream=other)
            await device.record_all()
        assert list(back[:4]) == [0, 7, 7, 3]
        assert (back[4:] == there[4:]).all()
        whole(pool)


def run(device: Metal) -> tuple[str, AsyncMemoryPool]:
    """Run the program on a pool, and return what it was told, if anything."""
    pool = AsyncMemoryPool(device, limit=8 * MIB, segment_size=2 * MIB, min_free=0)
    try:
        asyncio.run(asyncio.wait_for(program(pool, device), 30))
    except AsyncmemError as error:
        return str(error), pool  # the error itself would keep all frames that it came through
    return "", pool


def played(machine: FakeMetal) -> str:
    """Run the program on that machine; whatever it was told, all of its memory is back."""
    with in_place(machine):
        try:
            device = Metal()
        except DeviceError as error:
            return str(error)
    told, pool = run(device)
    if not pool._opened.released:  # it could not see its memory done: the next time it can
        pool._opened.release()
    device.close()
    gc.collect()
    assert machine.allocated == 0
    return told


def undisturbed() -> FakeMetal:
    """Run it, and return the machine, which has counted the calls."""
    with a_machine() as machine:
        assert not played(machine)
        return machine


@pytest.mark.parametrize("name", [*ANSWER_NIL, *RAISE])
def test_a_call_that_fails_is_told_and_leaves_nothing(name: str) -> None:
    """The error names the call; where there is no memory, the pool tries again before it tells anybody."""
    count = undisturbed().calls[name]
    words = "it returns nil" if name in ANSWER_NIL else "the exception of Objective-C"
    told = set()
    for nth in range(1, count + 1):
        with a_machine() as machine:
            machine.fail(name, nth=nth, words="" if name in ANSWER_NIL else words)
            told.add(played(machine))
    expected = f"{name} failed on metal:0: {words} (0)"
    assert told - {""} == (set() if name.startswith("newBuffer") else {expected})


def test_work_that_fails_is_told_and_nobody_waits_for_it_for_ever() -> None:
    """Metal signals nothing then: queues that wait for it have to be let go by whoever sees it. The device goes on."""
    told = set()
    for nth in range(1, undisturbed().calls["commit"] + 1):
        with a_machine() as machine, in_place(machine):
            device = Metal()
            machine.fail_work(nth=nth)
            told.add(run(device)[0])
            # What nobody had asked for by then is told to whoever comes next.
            assert not run(device)[0] or not run(device)[0]
            device.close()
    assert told - {""} == {f"MTLCommandBuffer failed on metal:0: {TIMED_OUT} (2)"}


def test_the_host_is_waited_for_though_its_place_in_the_queue_fails() -> None:
    """It goes on with memory that would be given back else."""
    with a_machine() as machine, in_place(machine):
        device = Metal()
        stream = device.create_stream()
        begun, goes_on = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            goes_on.wait(30)

        machine.fail_work(nth=2)  # behind the fence of what comes before
        stream.run_on_host(work)
        fence = stream.record()
        assert begun.wait(30)
        assert not fence.outlast(0.2)
        goes_on.set()
        assert fence.outlast(30)
        with pytest.raises(DeviceError, match="MTLCommandBuffer failed"):
            fence.done()
        device.close()
