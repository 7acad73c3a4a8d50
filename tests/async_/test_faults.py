"""Whatever driver call fails, bytes are conserved, waiters get an answer, and the pool is usable or closed loudly."""

import random
import warnings

import anyio
import pytest

from asyncmem import AsyncmemError, AsyncMemoryPool, DeviceError, OutOfMemoryError, PoolClosed
from asyncmem.devices import Simulated
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.testing import run_steps
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, quick_device, stepped_pool, turns

CALLS = ["allocate_segment", "free_segment", "record", "record_all", "wait", "query", "block", "memory", "fill", "*"]

ERRORS = {
    "driver": lambda: DeviceError("call", code=999, code_name="UNKNOWN"),
    "memory": lambda: OutOfMemoryError(OutOfMemoryFacts(asked=MIB, device="simulated:0")),
}


class Workload:
    """Tasks on two streams that take single buffers, batches and leases, and trim; they count their errors."""

    def __init__(self, pool: AsyncMemoryPool, device: Simulated) -> None:
        self.pool = pool
        self.streams = [device.create_stream(name) for name in ("left", "right")]
        self.failed = 0

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(self.play, number)

    async def play(self, number: int) -> None:
        random_ = random.Random(number)
        for turn in range(4):
            for part in (self.single, self.batch, self.lease, self.trim):
                try:
                    await part(number + turn, random_)
                except AsyncmemError:
                    self.failed += 1

    async def single(self, number: int, random_: random.Random) -> None:
        stream, other = self.streams[number % 2], self.streams[(number + 1) % 2]
        nbytes = random_.randrange(1, 4) * MIB
        async with self.pool.allocate_async(nbytes, stream=stream, timeout=30) as buffer:
            stream.launch(0.001, writes=[buffer])
            if random_.random() < 0.5:
                buffer.use_on(other)
            await turns()
            if random_.random() < 0.3:
                buffer.free(stream=other)

    async def batch(self, number: int, random_: random.Random) -> None:
        if random_.random() < 0.4:
            async with self.pool.allocate_batch([MIB, 2 * MIB], stream=self.streams[number % 2], timeout=30):
                await turns()

    async def lease(self, number: int, random_: random.Random) -> None:
        if random_.random() < 0.3:
            async with self.pool.lease(3 * MIB, stream=self.streams[number % 2], timeout=30) as lease:
                (await lease.allocate_async(MIB)).free()

    async def trim(self, _: int, random_: random.Random) -> None:
        if random_.random() < 0.2:
            await self.pool.trim()


async def survive(pool: AsyncMemoryPool, device: Simulated, workload: Workload) -> None:
    """Run a workload and see that the pool is whole, and usable or closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a fault that met nobody who waits is a warning
        await workload.run()
    device.log._faults.clear()  # what was to fail and did not come to it
    device.run_until_idle()
    whole(pool)
    try:
        await refillable(pool, LIMIT)
    except PoolClosed:
        with pytest.raises(PoolClosed):
            pool.try_allocate(MIB)


def calls_made(name: str) -> int:
    """How often the undisturbed workload makes that call."""
    device = quick_device()

    async def main() -> int:
        async with stepped_pool(device=device, segment_size=2 * MIB) as pool:
            workload = Workload(pool, device)
            await workload.run()
            assert workload.failed == 0
            return len(device.calls_of(name)) if name != "*" else device.driver_calls

    return run_steps(main())


@pytest.mark.hazard("H8")
@pytest.mark.parametrize("name", CALLS)
def test_failing_call_loses_nothing(virtually: Run, name: str) -> None:
    """Each call of each kind that the workload makes fails once, in a run of its own."""
    for nth in some_of(calls_made(name)):
        device = quick_device()

        async def main(device: Simulated = device, nth: int = nth) -> None:
            async with stepped_pool(device=device, segment_size=2 * MIB) as pool:
                workload = Workload(pool, device)
                device.fail(name, nth)
                await survive(pool, device, workload)

        virtually(main)


def some_of(count: int, most: int = 25) -> list[int]:
    """All the numbers from 1 to count, or an even choice of them."""
    return sorted({1 + round(place * (count - 1) / (most - 1)) for place in range(most)}) if count > 1 else [1] * count


@pytest.mark.hazard("H8", "H13")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("seed", range(10))
def test_many_failing_calls_lose_nothing(virtually: Run, error: str, seed: int) -> None:
    """A driver that fails again and again, at random, ends no wait in silence."""

    async def main() -> None:
        device = quick_device()
        random_ = random.Random(seed)
        async with stepped_pool(device=device, segment_size=2 * MIB) as pool:
            workload = Workload(pool, device)
            nth = 0
            for _ in range(10):
                nth += random_.randrange(1, 12)
                device.fail("allocate_segment", nth, error=ERRORS[error]())
                device.fail("record", nth * 3)
                device.fail("free_segment", nth)
            await survive(pool, device, workload)

    virtually(main)


def test_waiter_gets_the_drivers_error(virtually: Run) -> None:
    """A failed growth reaches who waited for it as DeviceError, with the driver's words, and the next request works."""

    async def main() -> None:
        device = quick_device()
        async with stepped_pool(device=device) as pool:
            device.fail("allocate_segment", error=DeviceError("cuMemMap", code=700, code_name="ILLEGAL_ADDRESS"))
            with pytest.raises(DeviceError, match="cuMemMap") as caught:
                await pool.allocate_async(MIB)
            assert caught.value.code == 700
            await refillable(pool, LIMIT)

    virtually(main)


def test_out_of_memory_tells_all_it_knows(virtually: Run) -> None:
    """OutOfMemoryError carries what was asked, what is held and by whom, and what was tried; the ladder is counted."""

    async def main() -> None:
        device = quick_device(8 * MIB)
        device.take_elsewhere(4 * MIB)
        async with stepped_pool(8 * MIB, device=device, segment_size=2 * MIB) as pool:
            with pytest.raises(OutOfMemoryError) as caught:
                await pool.allocate_async(7 * MIB, tag="greedy")
            error = caught.value
            assert isinstance(error, MemoryError)
            assert isinstance(error, RuntimeError)
            assert (error.asked, error.limit) == (7 * MIB, 8 * MIB)
            assert pool.stats().remedies
            await refillable(pool, 4 * MIB)

    virtually(main)


def test_more_than_the_device_has_fails_at_once(virtually: Run) -> None:
    """Whatever limit was asked for: the device is its highest, and nothing is waited for that can never come."""

    async def main() -> None:
        async with stepped_pool(64 * MIB, device=quick_device(8 * MIB), segment_size=MIB) as pool:
            assert pool.stats().limit == 8 * MIB
            with await pool.allocate_async(MIB), pytest.raises(OutOfMemoryError, match="more than there may ever be"):
                await pool.allocate_async(32 * MIB)

    virtually(main)


def test_on_oom_may_ask_for_another_try(virtually: Run) -> None:
    """The user's callback sees the facts before the error; True tries once more."""
    seen: list[OutOfMemoryFacts] = []

    async def main() -> None:
        device = quick_device()

        def on_oom(facts: OutOfMemoryFacts) -> bool:
            seen.append(facts)
            return len(seen) < 3

        async with stepped_pool(device=device, on_oom=on_oom) as pool:
            device.fail("allocate_segment", times=100, error=ERRORS["memory"]())
            with pytest.raises(OutOfMemoryError):
                await pool.allocate_async(MIB)
        assert len(seen) == 3
        assert seen[0].asked == MIB

    virtually(main)
