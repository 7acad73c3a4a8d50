"""Minutes of everything at once on a real GPU, with tasks cancelled at random, and every word checked on the card.

    python tests/gpu/soak.py --seconds 600

Tasks allocate, write, hand to other streams, compare, free and forget memory under a limit that makes them wait, while
others cancel them. It ends with one line of JSON, and with an error if a word was wrong, a byte stayed live, an
invariant broke, or anything was raised that a user would not expect.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import asyncmem
from asyncmem import AsyncMemoryPool, Buffer, PoolTimeout
from asyncmem.devices import Stream

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from card import Card
else:
    from .card import Card

MIB = 1 << 20
SIZES = (512, 4096, 65_536, 700_000, MIB, 3 * MIB, 8 * MIB, 13 * MIB)
WORKERS = 48
STREAMS = 6


class Soak:
    """One run."""

    def __init__(self, card: Card, pool: AsyncMemoryPool, seed: int) -> None:
        self.card = card
        self.pool = pool
        self.choice = random.Random(seed)
        self.streams = [card.device.default_stream, *(card.device.create_stream() for _ in range(STREAMS - 1))]
        self.wrong = card.number()
        self.never = card.gate()
        self.values = itertools.count(1)
        self.counts: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        self.threads: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, least: int) -> None:
        """Keep workers at work and cancel some of them, until the time is over or something is wrong.

        However slow the machine is, `least` requests wait and `least` tasks are cancelled.
        """
        workers: set[asyncio.Task[None]] = set()
        end = time.monotonic() + seconds
        while not self.faults and not self.wrong.value:
            if time.monotonic() >= end and min(self.pool.stats().waits, self.counts["cancelled"]) >= least:
                break
            while len(workers) < WORKERS:
                workers.add(asyncio.create_task(self.worker()))
            await asyncio.sleep(self.choice.random() * 0.004)
            for task in self.choice.sample(sorted(workers, key=id), self.choice.choice((0, 0, 1, 1, 2, 5))):
                self.counts["cancelled"] += task.cancel()
            workers = {task for task in workers if not task.done()}
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, *self.threads, return_exceptions=True)
        del workers, task
        for stream in self.streams:
            await stream.synchronize()
        await asyncio.sleep(0.01)
        gc.collect()  # what a cancelled task held may hang on its error for a while

    async def worker(self) -> None:
        """Play until cancelled."""
        plays = (self.alone, self.shared, self.handed, self.batch, self.leased, self.threaded, self.tidy)
        try:
            while True:
                play: Callable[[], Awaitable[None]] = self.choice.choices(plays, (8, 5, 3, 3, 1, 1, 0.2))[0]
                self.counts[play.__name__] += 1
                with suppress(PoolTimeout):
                    await play()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the run is over and says so
            self.faults.append(error)

    # -- plays -------------------------------------------------------------------------------------------------------

    async def alone(self) -> None:
        """Write and read on the home stream; freed, or just forgotten."""
        stream = self.stream()
        timeout = 0.01 if self.choice.random() < 0.1 else None
        buffer = await self.pool.allocate_async(self.size(), stream=stream, timeout=timeout)
        self.use(buffer, stream)
        if self.choice.random() < 0.3:
            await asyncio.sleep(self.choice.random() * 0.003)
        if self.choice.random() < 0.8:
            buffer.free()

    async def shared(self) -> None:
        """Write on the home stream, read on others."""
        stream = self.stream()
        async with self.pool.allocate_async(self.size(), stream=stream) as buffer:
            value = self.use(buffer, stream)
            for reader in self.choice.sample(self.streams, 2):
                buffer.use_on(reader)
                self.linger(reader)
                self.card.compare(reader.handle, buffer, value, self.wrong)
            if self.choice.random() < 0.2:
                await stream.synchronize()

    async def handed(self) -> None:
        """Write on the home stream, part with it, write again on the new one; or free it there."""
        stream, other = self.choice.sample(self.streams, 2)
        buffer = await self.pool.allocate_async(self.size(), stream=stream)
        value = self.use(buffer, stream)
        if self.choice.random() < 0.5:
            buffer.hand_over(other)
            self.card.compare(other.handle, buffer, value, self.wrong)
            self.use(buffer, other)
            buffer.free()
        else:
            other.wait(stream.record())
            self.card.compare(other.handle, buffer, value, self.wrong)
            buffer.free(stream=other)

    async def batch(self) -> None:
        """Several at once."""
        stream = self.stream()
        async with self.pool.allocate_batch([self.size() for _ in range(4)], stream=stream) as buffers:
            for buffer in buffers:
                self.use(buffer, stream)

    async def leased(self) -> None:
        """Pieces of a lease."""
        stream = self.stream()
        async with self.pool.lease(16 * MIB, stream=stream) as lease:
            for _ in range(8):
                buffer = await lease.allocate_async(self.choice.choice(SIZES[:5]), stream=stream)
                self.use(buffer, stream)
                buffer.free()
                await asyncio.sleep(0)

    async def threaded(self) -> None:
        """A caller that cannot await."""
        thread = asyncio.create_task(asyncio.to_thread(self._block, self.size(), self.stream()))
        self.threads.add(thread)
        thread.add_done_callback(self.threads.discard)
        await asyncio.shield(thread)  # who is cancelled leaves the thread to itself

    def _block(self, size: int, stream: Stream) -> None:
        self.card.enter()
        buffer = self.pool.allocate(size, stream=stream, timeout=5.0)
        self.use(buffer, stream)
        buffer.free()

    async def tidy(self) -> None:
        """Give memory back while others work."""
        await self.pool.trim(self.choice.choice((0, 32 * MIB)))

    # -- helpers -----------------------------------------------------------------------------------------------------

    def use(self, buffer: Buffer, stream: Stream) -> int:
        """Write a value that nobody else has, and read it back after a while."""
        value = next(self.values) & 0xFFFF_FFFF
        self.card.fill(stream.handle, buffer, value)
        self.linger(stream)
        self.card.compare(stream.handle, buffer, value, self.wrong)
        return value

    def linger(self, stream: Stream) -> None:
        """Keep a stream busy for a moment, sometimes."""
        if self.choice.random() < 0.3:
            self.card.hold(stream.handle, self.never, limit=self.choice.randrange(20_000, 800_000))

    def size(self) -> int:
        """Return how much to ask for: whole words."""
        return max(4, int(self.choice.choice(SIZES) * self.choice.uniform(0.5, 1.0)) & ~3)

    def stream(self) -> Stream:
        """Return a stream."""
        return self.choice.choice(self.streams)


async def soak(
    card: Card, kind: str, seconds: float, seed: int, limit: int | None, least: int = 0
) -> dict[str, object]:
    """Run on one pool; return what happened. Raises where a promise is broken."""
    options = {"segments": kind, "limit": limit, "segment_size": 16 * MIB, "stall_after": None}
    async with AsyncMemoryPool(card.device, **options) as pool:
        run = Soak(card, pool, seed)
        await run.run(seconds, least)
        if run.faults:
            raise run.faults[0]
        stats = pool.stats()
        assert run.wrong.value == 0, f"{run.wrong.value} words were wrong"
        assert stats.allocated_bytes == 0, f"{stats.allocated_bytes} bytes are still live"
        pool.check()
    assert pool.stats().reserved_bytes == 0, f"{pool.stats().reserved_bytes} bytes did not go back"
    return {"kind": kind, "seconds": seconds, "seed": seed, "waits": stats.waits, **run.counts}


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all kinds together")
    parser.add_argument("--kinds", default="stream_ordered,paged", help="kinds of segments, with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", default="192 MiB", help="the pool's limit; small ones make tasks wait; or none")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    limit = None if options.limit == "none" else asyncmem.units.parse_size(options.limit)
    card = Card()
    for kind in kinds:
        result = asyncmem.run(lambda kind=kind: soak(card, kind, options.seconds / len(kinds), options.seed, limit))
        card.clean_up()
        print(json.dumps(result))  # noqa: T201  # what the script is for
    card.close()


if __name__ == "__main__":
    main()
