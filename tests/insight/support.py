"""A random program over pools that keeps count of all it does, to compare with what was recorded of it."""

import random
from collections import Counter
from itertools import pairwise

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.insight import Kind, Records

KIB, MIB = 1 << 10, 1 << 20


class Program:
    """Allocates and frees at random, by all the doors, on several streams.

    Attributes:
        taken: Bytes of each buffer that was handed out, in order.
        live: What it holds,
        held: and how many bytes that is.
        peak: The most bytes it held.
    """

    def __init__(self, pool: AsyncMemoryPool, seed: int) -> None:
        self.taken: list[int] = []
        self.held = self.peak = 0
        self.live: list[Buffer] = []
        self._draw = random.Random(seed)
        self._pool = pool
        self._doors = [pool, pool, pool.budget("part", limit="256 MiB")]
        self._streams = [None, *(pool.device.create_stream() for _ in range(2))]

    async def run(self, steps: int) -> None:
        """Do so many steps."""
        for _ in range(steps):
            await self.step()

    async def step(self) -> None:
        """Take one buffer, a batch or a range, or free some."""
        draw = self._draw
        stream = draw.choice(self._streams)
        match draw.randrange(7):
            case 0 | 1:
                self._hold(await draw.choice(self._doors).allocate_async(self._size(), stream=stream))
            case 2:
                self._hold(draw.choice(self._doors).allocate(self._size(), stream=stream))
            case 3:
                self._hold(*await draw.choice(self._doors).allocate_batch([self._size() for _ in range(3)]))
            case _:
                for _ in range(draw.randrange(4)):
                    self.free_one()

    def free_one(self) -> None:
        """Free or drop one of those that are held."""
        if self.live:
            buffer = self.live.pop(self._draw.randrange(len(self.live)))
            self.held -= buffer.nbytes
            if self._draw.random() < 0.3:
                buffer.free(stream=self._draw.choice(self._streams))

    def _size(self) -> int:
        return self._draw.choice((512, 4 * KIB, self._draw.randrange(1, 200 * KIB), self._draw.randrange(1, 2 * MIB)))

    def _hold(self, *buffers: Buffer) -> None:
        self.live += buffers
        sizes = [one.nbytes for one in buffers]
        self.taken += sizes
        self.held += sum(sizes)
        self.peak = max(self.peak, self.held)
        del buffers  # which would keep what is dropped next
        while self.held > 32 * MIB:  # so that nothing ever has to wait
            self.free_one()


def need_consistent(records: Records) -> None:
    """Times never go back, each free has its allocation before it, and lives add up to what is between the two."""
    born: dict[tuple[str, int], float] = {}
    sizes: dict[tuple[str, int], int] = {}
    taken: set[tuple[str, int]] = set()
    for one, other in pairwise(records):
        assert one.time <= other.time
    for record in records:
        key = record.pool, record.number
        if record.kind in {Kind.ALLOCATED, Kind.HELD}:
            assert key not in born
            born[key], sizes[key] = record.time, record.nbytes
            if record.kind is Kind.ALLOCATED:
                taken.add(key)
        elif record.kind is Kind.FREED:
            assert sizes.pop(key) == record.nbytes
            if key in taken:
                assert abs(record.lifetime - (record.time - born[key])) < 1e-6
    times, live = records.live()
    assert (live >= 0).all()
    assert len(times) == len(live)
    assert (int(live[-1]) if len(live) else 0) == sum(sizes.values())
    still = Counter(record.number for record in records.live_at())
    assert still == Counter(number for _, number in sizes)
