"""The row `take_back`: the time of a training step while the worker takes pages back beside it.

The step multiplies, activates and updates in the pool's memory, with another height each time. Meanwhile, or not, a
task on a loop of its own asks for memory, frees it and has the worker give it back, and pauses for 5 ms. Steps with and
without take turns: with 256 MiB a time, and with 2 GiB, about as much as the step works in. A third time they are made
with the driver's calls alone in the pool's place: what they cost the device's work nobody can save.

Such a step keeps the device busy for some 20 ms, of which the host needs a fifth to submit it. A shorter one, which
the host can hardly keep up with, is shown as well: it tells how much the host is held up by threads that run Python
beside it, which costs about the same where these do nothing at all.
"""

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from types import ModuleType
from typing import Final, Self, TypeAlias

from asyncmem import AsyncMemoryPool
from asyncmem.cli.bench.timing import Effort, collector_off
from asyncmem.figures import format_size
from benchmarks.allocators import Allocator
from benchmarks.driver import Driver
from benchmarks.pytorch import AsyncmemAndTorch, PooledTensor, Tensors
from benchmarks.suite import Measured, Task

LAYERS: Final = 8
WIDTH: Final = 4096
HEIGHTS: Final = (8192, 16384)
SHORT: Final = (2048, 4096)
STEPS: Final = 10
ROUNDS: Final = 12
TAKEN: Final = (256 << 20, 2 << 30)
PEAK: Final = 12 << 30
"""More than is ever needed here: pools exchange segments instead of growing only beyond what they have had before."""


class Training:
    """A stack of layers whose memory, weights too, is a pool's."""

    def __init__(self, torch: ModuleType, pool: AsyncMemoryPool) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream()
        self.home = pool.device.stream_of(self.stream)
        self.tensors = Tensors(torch, pool, "bfloat16")
        with torch.cuda.stream(self.stream):
            self.weights = [self._random((WIDTH, WIDTH)) for _ in range(LAYERS)]

    def _random(self, shape: tuple[int, int]) -> PooledTensor:
        piece = self.tensors.empty(shape, self.home)
        piece.tensor.normal_(std=WIDTH**-0.5)
        return piece

    def step(self, rows: int) -> None:
        """Go forwards and backwards once; the device may still be at it afterwards."""
        torch, shape = self.torch, (rows, WIDTH)
        with torch.cuda.stream(self.stream):
            kept = [self._random(shape)]
            for weight in self.weights:
                kept.append(self.tensors.empty(shape, self.home))
                torch.matmul(kept[-2].tensor, weight.tensor, out=kept[-1].tensor)
                kept.append(self.tensors.empty(shape, self.home))
                torch.ops.aten.gelu.out(kept[-2].tensor, out=kept[-1].tensor)
            above = kept.pop()
            for weight in reversed(self.weights):
                kept.pop()
                below, change = self.tensors.empty(shape, self.home), self.tensors.empty((WIDTH, WIDTH), self.home)
                torch.matmul(above.tensor, weight.tensor.t(), out=below.tensor)
                torch.matmul(kept.pop().tensor.t(), above.tensor, out=change.tensor)
                weight.tensor.add_(change.tensor, alpha=-1e-6)
                above = below


def take_back(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time steps with and without, in turn, and compare the medians."""
    assert isinstance(peer, AsyncmemAndTorch)
    for nbytes in TAKEN:
        yield _beside(peer, task.effort, nbytes, HEIGHTS, f"{format_size(nbytes)} a time")
    yield _beside(peer, task.effort, TAKEN[-1], SHORT, f"{format_size(TAKEN[-1])} a time, short steps")


def _beside(peer: AsyncmemAndTorch, effort: Effort, nbytes: int, heights: tuple[int, int], case: str) -> Measured:
    draw = random.Random(0)  # noqa: S311 - the same numbers every time are what is wanted
    rows = [draw.randint(*heights) for _ in range(STEPS)]
    with collector_off(), AsyncMemoryPool(peer.device) as pool:
        with pool.allocate(PEAK):
            pass
        asyncio.run(pool.trim())
        training = Training(peer.torch, pool)
        for _ in range(3):
            _steps(training, rows)
        still: list[list[int]] = []
        busy: list[list[int]] = []
        bare: list[list[int]] = []
        lasted = 0.0
        with (
            Repeater(by_pool(pool, nbytes)) as taker,
            Repeater(by_driver(peer.torch.cuda.current_device(), nbytes)) as least,
        ):
            for _ in range(max(2, round(ROUNDS * effort.share))):
                still.append(_steps(training, rows))
                started = time.perf_counter()
                with taker.open():
                    busy.append(_steps(training, rows))
                lasted += time.perf_counter() - started
                with least.open():
                    bare.append(_steps(training, rows))
        trims = pool.stats().trims
        peer.torch.cuda.synchronize()
        del training
    return Measured(
        row="take_back",
        peer=peer.name,
        case=case,
        min=min(map(sum, busy)) / STEPS,
        median=_usual(busy),
        floor=min(map(sum, still)) / STEPS,
        figures={
            "floor_median_ns": round(_usual(still)),
            "to_floor": round(_usual(busy) / _usual(still), 4),
            "driver_alone": round(_usual(bare) / _usual(still), 4),
            "taken_back_bytes_per_second": round(taker.taken / lasted),
            "trims": trims,
        },
        broken="" if taker.taken else "nothing was taken back",
    )


def _usual(rounds: list[list[int]]) -> float:
    """Return the mean of the steps of a round, each the median of its repeats.

    Steps are compared with themselves: a median over all would lie between two of them, which differ by a tenth.
    """
    medians: list[float] = [statistics.median(repeats) for repeats in zip(*rounds, strict=True)]
    return sum(medians) / STEPS


def _steps(training: Training, rows: list[int]) -> list[int]:
    times = []
    for height in rows:
        start = time.perf_counter_ns()
        training.step(height)
        training.torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    return times


# -- memory mapped and taken back meanwhile ----------------------------------------------------------------------------

Take: TypeAlias = Callable[[], Awaitable[int]]
"""Maps memory, has it taken back, and returns how many bytes that were."""
PAUSE_SECONDS: Final = 0.005


@contextmanager
def by_pool(pool: AsyncMemoryPool, nbytes: int) -> Iterator[Take]:
    """Return requests that make the pool's worker map memory, and trims that make it take as much back."""
    stats = pool.stats()
    # More than lies free in one piece while nothing runs, or there would be nothing to map and to take back.
    size = max(nbytes, stats.largest_hole + 1)

    async def take() -> int:
        buffer = await pool.allocate_async(size)
        buffer.free()
        return await pool.trim(stats.reserved_bytes)

    yield take


@contextmanager
def by_driver(index: int, nbytes: int) -> Iterator[Take]:
    """Return the driver's calls alone that do as much, for memory in one handle: the least that it can cost."""
    with closing(Driver(index)) as driver:
        calls = driver.calls
        place = calls.CUmemLocation()
        place.type, place.id = calls.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        wish, access = calls.CUmemAllocationProp(), calls.CUmemAccessDesc()
        wish.type, wish.location = calls.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, place
        access.location, access.flags = place, calls.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        address = driver.checked(calls.cuMemAddressReserve(nbytes, 0, 0, 0))

        async def take() -> int:
            handle = driver.checked(calls.cuMemCreate(nbytes, wish, 0))
            driver.checked(calls.cuMemMap(address, nbytes, 0, handle, 0))
            driver.checked(calls.cuMemSetAccess(address, nbytes, [access], 1))
            driver.checked(calls.cuMemUnmap(address, nbytes))
            driver.checked(calls.cuMemRelease(handle))
            return nbytes

        try:
            yield take
        finally:
            driver.checked(calls.cuMemAddressFree(address, nbytes))


class Repeater(threading.Thread):
    """A thread that has memory mapped and taken back, pauses, and does it again, while its gate is open.

    Args:
        take: Returns what is done each time; entered and left on this thread.
    """

    def __init__(self, take: AbstractContextManager[Take]) -> None:
        super().__init__(name="take_back", daemon=True)
        self.taken = 0
        self._entered = take
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._gate: asyncio.Event
        self._ended = False

    def run(self) -> None:
        """Run the loop of this thread."""
        try:
            with self._entered as take:
                asyncio.run(self._take(take))
        finally:
            self._ended = True
            self._ready.set()
            self._idle.set()

    async def _take(self, take: Take) -> None:
        self._loop, self._gate = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        while not self._ended:
            if not self._gate.is_set():
                self._idle.set()
            await self._gate.wait()
            self.taken += await take()
            await asyncio.sleep(PAUSE_SECONDS)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the gate while the block runs."""
        self._idle.clear()
        if self._ended:
            raise RuntimeError("the task that takes back has ended early")
        self._loop.call_soon_threadsafe(self._gate.set)
        try:
            yield
        finally:
            if not self._ended:
                self._loop.call_soon_threadsafe(self._gate.clear)
            self._idle.wait()

    def __enter__(self) -> Self:
        """Start the thread, and wait until its loop runs."""
        self.start()
        self._ready.wait()
        self._idle.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        if not self._ended:
            self._ended = True
            self._loop.call_soon_threadsafe(self._gate.set)
        self.join()
