"""Where does the memory go? A small model whose layers are tagged, a leak, and what finds both.

Run it with `python examples/see_memory.py`; it needs no GPU.
"""

import asyncio

import asyncmem
from asyncmem.insight import AllocationTracker, Kind

LAYERS = ("attention", "mlp")
KIB = 1 << 10


async def layer(pool: asyncmem.AsyncMemoryPool, name: str, cache: list[asyncmem.Buffer]) -> None:
    """Work on some memory of a layer's own, and keep a little of it."""
    with asyncmem.tag(name):
        async with pool.allocate_batch(["1 MiB"] * 3):
            await asyncio.sleep(0)
        if name == "attention":
            cache.append(await pool.allocate_async("16 KiB"))  # never freed


async def main() -> None:
    """Run a few steps, and look at them three ways."""
    cache: list[asyncmem.Buffer] = []
    async with asyncmem.AsyncMemoryPool("simulated", limit="64 MiB") as pool:
        async with asyncmem.profile_memory(pool) as profile, AllocationTracker(pool, warn=False) as tracker:
            for _ in range(20):
                await asyncio.gather(*(layer(pool, name, cache) for name in LAYERS))
        print(profile.memory_summary())
        print()
        print(tracker.report())

        records = profile.records()
        at_peak = {group.name: group.nbytes for group in records.live_at(records.peak().time).by("tag")}
        assert set(at_peak) == set(LAYERS)
        assert len(records.of(Kind.ALLOCATED)) == 20 * (3 * len(LAYERS) + 1)
        assert {(leak.tag, leak.nbytes) for leak in tracker.leaks} == {("attention", 16 * KIB)}
        assert len(tracker.leaks) == 20
        cache.clear()


if __name__ == "__main__":
    asyncmem.run(main)
