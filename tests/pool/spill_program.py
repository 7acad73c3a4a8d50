"""Random programs over marked memory, several times what the device has: each byte that is read was written there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from asyncmem import AsyncMemoryPool, Budget, Spillable
from asyncmem.core import Buffer, Ready
from asyncmem.devices import Stream
from asyncmem.pool import Request
from tests.conservation import idle, whole

PATIENCE = 120  # seconds


@dataclass
class Marked:
    """A handle, what its bytes have to be, and who may change them now."""

    held: Spillable
    value: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Program:
    """Tasks that make, use, change and free marked buffers of one pool, on several streams.

    Args:
        pool: Where.
        streams: What homes and users are chosen from.
        seed: The program.
        reads: Whether the device has real bytes behind its addresses.
        shares: Parts of the pool to choose from for each buffer; the pool itself where there are none. The first has
            the least, which is a third of what is made.
    """

    def __init__(
        self,
        pool: AsyncMemoryPool,
        streams: list[Stream],
        seed: int,
        *,
        reads: bool = True,
        shares: Sequence[AsyncMemoryPool | Budget] = (),
    ) -> None:
        self.pool = pool
        self.streams = streams
        self.random = random.Random(seed)
        self.reads = reads
        self.shares = shares or [pool]
        self.limit = self.shares[0].stats().limit or 0
        self.marked: list[Marked] = []
        self.checks = 0

    async def run(self, tasks: int = 3, steps: int = 25) -> None:
        """Play all tasks, free everything, and see that nothing is left on either side."""
        async with asyncio.timeout(PATIENCE):
            made = 0
            while made < 3 * self.limit:
                made += (await self.make()).held.nbytes
            await asyncio.gather(*(self.play(steps) for _ in range(tasks)))
            for one in self.marked:
                await self.use(one)
                one.held.free()
        assert self.pool.stats().spills > 0
        assert self.pool.stats().peak_reserved <= (self.pool.stats().limit or 0)
        for share in self.shares:
            idle(share)
        whole(self.pool)
        whole(self.pool._host_pool("spilled"))

    async def play(self, steps: int) -> None:
        """Do random things."""
        for _ in range(steps):
            choice = self.random.random()
            if choice < 0.6:
                await self.use(self.random.choice(self.marked))
            elif choice < 0.75:
                small = [one for one in self.marked if one.held.nbytes <= self.limit // 8]
                await self.use(*self.random.sample(small, min(2, len(small))))
            elif choice < 0.9:
                async with self.ask() as buffer:
                    self.write(buffer, buffer.stream, 255)
            else:
                await self.replace(self.random.choice(self.marked))

    def size(self, share: int) -> int:
        """Return a size, up to so many parts of the limit."""
        return self.random.randrange(1, self.limit // self.random.choice([share, 8]))

    def ask(self) -> Ready[Buffer] | Request[Buffer]:
        """Ask one of the shares for memory."""
        share = self.shares[0] if len(self.shares) == 1 else self.random.choice(self.shares)
        return share.allocate_async(self.size(3), stream=self.random.choice(self.streams))

    async def make(self) -> Marked:
        """Allocate, fill and mark."""
        buffer = await self.ask()
        value = self.random.randrange(255)
        self.write(buffer, buffer.stream, value)
        self.marked.append(Marked(self.pool.spillable(buffer), value))
        return self.marked[-1]

    async def replace(self, one: Marked) -> None:
        """Free one and make another."""
        async with one.turn:
            if one in self.marked:
                self.marked.remove(one)
                one.held.free()
                del one
                await self.make()

    async def use(self, *some: Marked) -> None:
        """Check what is there, on any stream, and change it; several at once are entered in one order everywhere."""
        some = tuple(sorted(some, key=id))
        async with AsyncExitStack() as stack:
            for one in some:
                await stack.enter_async_context(one.turn)
                if not one.held.alive:
                    return
            for one in some:
                on = self.random.choice([None, *self.streams])
                buffer = await stack.enter_async_context(one.held.use(on))
                stream = buffer.stream if on is None else on
                await self.check(buffer, stream, one.value)
                one.value = self.random.randrange(255)
                self.write(buffer, stream, one.value)
                if stream is not buffer.stream:
                    buffer.stream.wait(stream.record())  # its next use may be at home

    def write(self, buffer: Buffer, stream: Stream, value: int) -> None:
        """Fill it, as work of a stream."""
        self.pool.device.fill(buffer.address, buffer.nbytes, value, stream)

    async def check(self, buffer: Buffer, stream: Stream, value: int) -> None:
        """Read it, as work of a stream."""
        self.checks += 1
        copy = bytearray(buffer.nbytes)
        self.pool.device.copy_out(memoryview(copy), buffer.address, stream)
        if self.reads:
            await stream.synchronize()
            assert copy.count(value) == len(copy), f"{one_of_the_others(copy, value)} where {value} was written"


def one_of_the_others(copy: bytearray, value: int) -> int:
    """Return a byte that should not be there."""
    return next(byte for byte in copy if byte != value)
