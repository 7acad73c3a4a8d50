"""How much memory it may cost that streams do not wait for each other: the option `overlap`.

The program is a chain of matrix products over four streams, as a runner of pipeline stages writes it: each round begins
on the first stream, each further stream waits for the one before, and what a stage has read is freed as soon as that
stage has been submitted. The host runs far ahead of the device, so that nothing is done when memory is asked for.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import NamedTuple

import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Latencies, Simulated, SimulatedStream
from asyncmem.testing import SteppedPool, run_steps
from asyncmem.units import Size, parse_size

from .support import MIB, quick_device

pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop

SEGMENT = 64 * MIB  # what a pool grows by
ROUNDS = 60
ROW = 2048 * 4  # bytes of a row of 2048 floats
PER_ROW = 2e-7  # seconds that a product of one row and a 2048 x 2048 matrix takes


class Outcome(NamedTuple):
    """What a run of the program came to."""

    seconds: float
    peak_live: int
    peak_reserved: int
    waits: int

    @property
    def ratio(self) -> float:
        """Reserved among live, at their peaks."""
        return self.peak_reserved / self.peak_live


class FourStreams:
    """The program, on a device whose order checker is on."""

    def __init__(self, pool: AsyncMemoryPool, device: Simulated) -> None:
        self.pool = pool
        self.streams = [device.create_stream(f"stage {number}") for number in range(4)]
        self.choice = random.Random(7)
        self.newest: deque[Buffer] = deque()

    async def run(self) -> None:
        for _ in range(ROUNDS):
            await self.round(self.choice.randrange(512, 8192))
        while self.newest:
            self.newest.popleft().free()

    async def round(self, rows: int) -> None:
        x = await self.pool.allocate_async(rows * ROW, stream=self.streams[0])
        self.streams[0].launch(rows * PER_ROW / 10, writes=[x])
        for stream in self.streams:
            x = await self.stage(x, rows, stream)
        self.newest.append(x)
        while len(self.newest) > self.choice.randrange(1, 6):
            self.newest.popleft().free()

    async def stage(self, x: Buffer, rows: int, stream: SimulatedStream) -> Buffer:
        if x.stream is not stream:
            x.use_on(stream)
        product = await self.pool.allocate_async(rows * ROW, stream=stream)
        stream.launch(rows * PER_ROW, reads=[x], writes=[product])
        x.free()
        result = await self.pool.allocate_async(rows * ROW, stream=stream)
        stream.launch(rows * PER_ROW / 10, reads=[product], writes=[result])
        product.free()
        return result


def play(overlap: Size | float) -> Outcome:
    """Run the program once."""
    device = Simulated("16 GiB", latencies=Latencies.zero())

    async def main() -> Outcome:
        async with SteppedPool(device, overlap=overlap, limit="16 GiB") as pool:
            await FourStreams(pool, device).run()
            stats, waits = pool.stats(), len(device.calls_of("wait"))
            pool.check()
            device.run_until_idle()
            return Outcome(device.now, stats.peak_allocated, stats.peak_reserved, waits)

    return run_steps(main())


AMOUNTS: list[Size] = [0, "512 MiB", "2 GiB", "16 GiB"]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Run the program with more and more memory to spend."""
    return [play(overlap) for overlap in AMOUNTS]


def test_more_memory_buys_time(outcomes: list[Outcome]) -> None:
    """The streams wait less and the program ends sooner, the more may be spent; what is live stays the same."""
    assert len({one.peak_live for one in outcomes}) == 1
    for thrifty, lavish in itertools.pairwise(outcomes):
        assert thrifty.peak_reserved < lavish.peak_reserved
        assert thrifty.seconds > lavish.seconds
        assert thrifty.waits > lavish.waits


def test_no_more_is_spent_than_was_allowed(outcomes: list[Outcome]) -> None:
    """Reserved memory stays within what is live, what may be spent, and one segment."""
    for one, overlap in zip(outcomes, AMOUNTS, strict=True):
        assert one.peak_reserved <= one.peak_live + parse_size(overlap) + 2 * SEGMENT


def test_with_enough_to_spend_the_pool_makes_no_stream_wait(outcomes: list[Outcome]) -> None:
    """What is left are the program's own waits, one a hop."""
    assert outcomes[-1].waits == 3 * ROUNDS
    assert outcomes[0].seconds > 2 * outcomes[-1].seconds


def test_share_is_of_what_was_live() -> None:
    """A quarter of the peak costs about as much."""
    spent = play(0.25)
    assert spent.peak_reserved <= 1.25 * spent.peak_live + 3 * SEGMENT


@pytest.fixture
def device() -> Simulated:
    """A device whose calls take no time."""
    return quick_device()


async def busy(pool: AsyncMemoryPool, stream: SimulatedStream, mib: int) -> None:
    """Use memory on a stream for longer than the test takes, and free it."""
    async with pool.allocate_async(mib * MIB, stream=stream) as buffer:
        stream.launch(1.0, writes=[buffer])


def test_option_changes_while_the_pool_is_in_use(device: Simulated) -> None:
    """At first the second stream gets memory of its own, later it waits for the first."""

    async def main() -> None:
        first, second, third = (device.create_stream() for _ in range(3))
        async with SteppedPool(device, limit="32 MiB", segment_size=4096, overlap="4 MiB") as pool:
            await busy(pool, first, 4)
            await busy(pool, second, 4)
            assert (pool.stats().reserved_bytes, device.calls_of("wait")) == (8 * MIB, [])
            pool.configure(overlap=0)
            await busy(pool, third, 4)
            assert pool.stats().reserved_bytes == 8 * MIB
            assert len(device.calls_of("wait")) == 1

    run_steps(main())


def test_streams_wait_where_the_device_has_no_more(device: Simulated) -> None:
    """Overlap is a wish: it fails nobody."""

    async def main() -> None:
        first, second = (device.create_stream() for _ in range(2))
        async with SteppedPool(device, limit="64 MiB", segment_size=4096, overlap="64 MiB") as pool:
            device.take_elsewhere("59 MiB")
            await busy(pool, first, 4)
            await busy(pool, second, 4)
            assert pool.stats().reserved_bytes == 4 * MIB
            assert len(device.calls_of("wait")) == 1

    run_steps(main())


def test_nobody_grows_who_must_not_block(device: Simulated) -> None:
    """Where growth would hold an event loop's thread, or may not be at all, the stream waits."""

    async def main() -> None:
        first, second = (device.create_stream() for _ in range(2))
        async with SteppedPool(
            device, limit="64 MiB", segment_size=4096, overlap="64 MiB", stream_cache_bytes=0, shared_cache_bytes=0
        ) as pool:
            await busy(pool, first, 4)
            (pool.allocate(4 * MIB, stream=second)).free()
            found = pool.try_allocate(4 * MIB, stream=first)
            assert found is not None
            found.free()
            assert (pool.stats().loop_blocking_calls, pool.stats().reserved_bytes) == (0, 4 * MIB)
            assert len(device.calls_of("wait")) == 2

    run_steps(main())


def test_caches_are_emptied_before_it_grows(device: Simulated) -> None:
    """What is kept for other sizes is a stream's own memory: to use it makes nobody wait, however much may be spent."""

    async def main() -> None:
        first, second = (device.create_stream() for _ in range(2))
        async with SteppedPool(device, limit="64 MiB", segment_size=8 * MIB, overlap="64 MiB") as pool:
            await busy(pool, second, 8)
            pieces = [await pool.allocate_async(2 * MIB, stream=first) for _ in range(4)]
            pieces.clear()
            assert pool._core.counts().cached == 8 * MIB
            await busy(pool, first, 8)
            assert pool.stats().reserved_bytes == 16 * MIB
            assert device.calls_of("wait") == []

    run_steps(main())


def test_caches_are_left_alone_where_they_cannot_help(device: Simulated) -> None:
    """Too little is free: the caches keep what they have, and the pool grows."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB", segment_size=8 * MIB) as pool:
            pieces = [await pool.allocate_async(2 * MIB) for _ in range(4)]
            del pieces[:2]
            async with pool.allocate_async(8 * MIB):
                assert pool._core.counts().cached == 4 * MIB
            pieces.clear()

    run_steps(main())


def test_segment_is_born_on_the_stream_that_wants_it(device: Simulated) -> None:
    """So its first use needs no wait, and the order checker, which knows where it was born, has nothing to say."""

    async def main() -> None:
        stream = device.create_stream()
        async with SteppedPool(device, limit="64 MiB") as pool, pool.allocate_async(MIB, stream=stream) as buffer:
            stream.launch(writes=[buffer])
            assert device.calls_of("wait") == device.calls_of("record") == []

    run_steps(main())


def test_who_overtakes_takes_what_another_stream_has_freed(device: Simulated) -> None:
    """Nothing grows for those behind the head, so they do not wait for growth that would spare their stream a wait."""
    busy, other = device.create_stream(), device.create_stream()

    async def main() -> None:
        async with SteppedPool(device, limit=8 * MIB, segment_size=2 * MIB, min_free=0, overlap="100%") as pool:
            held = [await pool.allocate_async(2 * MIB, stream=busy) for _ in range(3)]
            busy.launch(1.0, writes=[(held[0].address, MIB)])
            head = pool.allocate_async(6 * MIB, stream=busy)
            held.pop().free()
            small = await pool.allocate_async(2 * MIB, stream=other)
            assert not head.done()
            small.free()
            for one in held:
                one.free()
            (await head).free()

    run_steps(main())
