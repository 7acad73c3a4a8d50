"""A memory checker hears of every segment and of every block in it, whichever way a buffer comes and goes."""

import asyncio
import threading

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Simulated

MIB = 1 << 20


class Listener:
    """A memory checker that only looks whether what it hears makes sense."""

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self.heard = 0
        self._busy = threading.Lock()

    def open_segment(self, address: int, nbytes: int) -> None:
        with self._busy:
            assert all(address + nbytes <= one or one + size <= address for one, size in self.segments.items())
            self.segments[address] = nbytes

    def close_segment(self, address: int) -> None:
        with self._busy:
            end = address + self.segments.pop(address)
            assert not [block for block in self.blocks if address <= block < end]

    def open_block(self, address: int, nbytes: int) -> None:
        with self._busy:
            end = address + nbytes
            assert nbytes > 0
            assert any(one <= address and end <= one + size for one, size in self.segments.items())
            assert all(end <= one or one + size <= address for one, size in self.blocks.items())
            self.blocks[address] = nbytes
            self.heard += 1

    def close_block(self, address: int) -> None:
        with self._busy:
            del self.blocks[address]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def device(listener: Listener) -> Simulated:
    device = Simulated()
    device.checker = listener
    return device


@pytest.mark.may_block  # the synchronous calls grow the pool
@pytest.mark.parametrize("segments", ["auto", "direct"])
@pytest.mark.asyncio
async def test_every_way_to_a_buffer_is_told(device: Simulated, listener: Listener, segments: str) -> None:
    """Awaited, synchronous, tried, in a batch, in a lease, in a budget: each block is told by its exact size."""
    async with AsyncMemoryPool(device, limit="64 MiB", segments=segments) as pool:
        held = [await pool.allocate_async(700), pool.allocate(5000), await pool.allocate_async(2 * MIB)]
        tried = pool.try_allocate(900)
        held += [tried] if tried is not None else []
        held += await pool.allocate_batch([100, 0, 300])
        held.append(await pool.budget("part", limit="8 MiB").allocate_async(4000))
        assert listener.blocks == {one.address: one.nbytes for one in held if one.nbytes}
        async with pool.lease("4 MiB") as lease:
            inner = await lease.allocate_async(333)
            assert listener.blocks[inner.address] == 333
            assert len(listener.blocks) == sum(1 for one in held if one.nbytes) + 1
            inner.free()
        for one in held:
            one.free()
        assert not listener.blocks
        assert listener.heard > 7
    assert not listener.segments


@pytest.mark.asyncio
async def test_what_a_waiter_is_handed_is_told(device: Simulated, listener: Listener) -> None:
    """Memory that goes from hand to hand is closed for the one and opened for the other."""
    async with AsyncMemoryPool(device, limit="2 MiB") as pool:

        async def take(nbytes: int) -> None:
            async with pool.allocate_async(nbytes) as buffer:
                assert listener.blocks == {buffer.address: nbytes}

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(take(2 * MIB - number))
        assert listener.heard == 20
        assert not listener.blocks


@pytest.mark.asyncio
async def test_forgotten_and_lent_buffers_are_told(device: Simulated, listener: Listener) -> None:
    """A buffer that is dropped is closed like one that is freed, and so is one that another stream used."""
    stream = device.create_stream()
    async with AsyncMemoryPool(device, limit="8 MiB") as pool:
        dropped = await pool.allocate_async(MIB)
        lent = await pool.allocate_async(MIB)
        lent.use_on(stream)
        lent.free(stream=stream)
        del dropped
        assert not listener.blocks
        again = await pool.allocate_async(3 * MIB)
        assert listener.blocks == {again.address: 3 * MIB}
        again.free()


def test_pages_and_a_checker_exclude_each_other(device: Simulated) -> None:
    """It would hear of no segment, so whoever asks for both is told."""
    with pytest.raises(InvalidRequest, match="while a memory checker is at work"):
        AsyncMemoryPool(device, segments="paged", limit="8 MiB").allocate(1)
