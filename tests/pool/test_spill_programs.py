"""Random programs over marked memory, on the devices that need no GPU; the fake driver plays them in `tests/cuda`."""

from __future__ import annotations

import asyncio

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Host, Latencies, Simulated

from .spill_program import Program

LIMIT = 1 << 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["host", "backed", "ordered"])
def test_every_read_sees_what_was_written_there(name: str, seed: int) -> None:
    """Over real memory each read has its own bytes; over none the checker sees that all work was in order."""
    device = {
        "host": Host,
        "backed": lambda: Simulated(backing=True, latencies=Latencies.zero()),
        "ordered": Simulated,
    }[name]()
    if isinstance(device, Simulated):
        device.suggest_capacity(8 * LIMIT)

    async def main() -> None:
        streams = [device.default_stream, device.create_stream(), device.create_stream()]
        async with AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT, small_limit=512, min_free=0) as pool:
            program = Program(pool, list(streams), seed, reads=name != "ordered")
            await program.run()
            assert program.checks > 50

    asyncio.run(main())
    device.close()
