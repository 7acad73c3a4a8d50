"""Tasks that have memory mapped and taken back again and again, on a loop of their own, while a gate is open."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Final, Self, TypeAlias

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.peers.driver import Driver

Take: TypeAlias = Callable[[], Awaitable[int]]
"""Maps memory, has it taken back, and answers how many bytes that were."""
PAUSE_SECONDS: Final = 0.005


@contextmanager
def by_pool(pool: AsyncMemoryPool, nbytes: int) -> Iterator[Take]:
    """Answer requests that make the pool's worker map memory, and trims that make it take as much back."""
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
    """Answer the driver's calls alone that do as much, for memory in one handle: the least that it can cost."""
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


class Taker(threading.Thread):
    """Takes, pauses, and takes again, while the gate is open.

    Args:
        way: Answers what is done; entered and left on this thread.
    """

    def __init__(self, way: AbstractContextManager[Take]) -> None:
        super().__init__(name="take_back", daemon=True)
        self.taken = 0
        self._way = way
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._gate: asyncio.Event
        self._ended = False

    def run(self) -> None:
        """Be the loop of what takes."""
        try:
            with self._way as take:
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
        """Let it take while the block runs."""
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
