"""Pools on a simulated device for the tests of this folder, and small things to do with them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Latencies, Segment, Simulated, Stream
from asyncmem.devices.base import Move, Remapped, Span
from asyncmem.testing import SteppedPool
from tests.conservation import refillable, whole
from tests.sweeps import Stage

MIB = 1 << 20
LIMIT = 8 * MIB


def quick_device(capacity: int | None = None) -> Simulated:
    """A simulated device whose calls take no time, with small pages."""
    return Simulated(capacity, latencies=Latencies.zero(), page=64 << 10)


def make_pool(
    limit: int = LIMIT,
    *,
    device: Simulated | None = None,
    kind: type[AsyncMemoryPool] = AsyncMemoryPool,
    **options: Any,
) -> AsyncMemoryPool:
    """A pool with a real worker thread; nothing is reported that takes wall time to notice."""
    settings: dict[str, Any] = {"segment_size": limit, "stall_after": None, **options}
    return kind(device or quick_device(), limit=limit, **settings)


def stepped_pool(limit: int = LIMIT, **options: Any) -> AsyncMemoryPool:
    """A pool for virtual time."""
    return make_pool(limit, kind=SteppedPool, **options)


@asynccontextmanager
async def staged(stage: Stage, limit: int = LIMIT, **options: Any) -> AsyncIterator[AsyncMemoryPool]:
    """A pool for a scenario of a sweep: at the end all actors have finished and nothing is missing."""
    async with stepped_pool(limit, **options) as pool:
        yield pool
        await stage.finish()
        whole(pool)
        await refillable(pool, limit)


async def turns(count: int = 1) -> None:
    """Let everybody else run."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


class GatedDevice(Simulated):
    """A device whose driver takes as long over a segment as the test wants."""

    def __init__(self) -> None:
        super().__init__(latencies=Latencies.zero())
        self.gate = threading.Event()
        self.entered = threading.Event()

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        self.entered.set()
        assert self.gate.wait(30), "the test never opened the gate"
        return super().allocate_segment(nbytes, kind, stream)

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        if into:
            self.entered.set()
            assert self.gate.wait(30), "the test never opened the gate"
        return super().remap(out, into, moves)
