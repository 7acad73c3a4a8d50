"""A program for compute-sanitizer: it keeps to its blocks, or does not.

compute-sanitizer --force-blocking-launches python tests/gpu/trespass.py past
"""

import random
import sys
from pathlib import Path

from asyncmem import AsyncMemoryPool, Buffer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from card import Card
else:
    from .card import Card

MIB = 1 << 20


def behave(card: Card, pool: AsyncMemoryPool) -> None:
    """Use memory as one should: to the last word, on several streams, freed in all ways."""
    choice = random.Random(0)
    wrong = card.number()
    streams = [card.device.create_stream() for _ in range(3)]
    live: list[Buffer] = []
    for step in range(300):
        stream = choice.choice(streams)
        buffer = pool.allocate(choice.randrange(1, 500_000) * 4, stream=stream, timeout=10.0)
        card.fill(stream.handle, buffer, step)
        other = choice.choice(streams)
        buffer.use_on(other)
        card.compare(other.handle, buffer, step, wrong)
        live.append(buffer)
        while len(live) > choice.randrange(20):
            live.pop(choice.randrange(len(live))).free()
    with pool.lease("4 MiB", stream=streams[0]) as lease:
        inner = lease.allocate(MIB, stream=streams[0])
        card.fill(streams[0].handle, inner, 1)
        inner.free()
    for buffer in live:
        buffer.free()
    card.synchronize()
    assert wrong.value == 0


def trespass(card: Card, pool: AsyncMemoryPool, deed: str) -> None:
    """Write one word to where there is no block of ours, in a segment that is."""
    stream = card.device.default_stream
    low, kept, high = (pool.allocate(MIB, timeout=10.0) for _ in range(3))
    place = {"past": kept.address + MIB, "before": kept.address - 4, "freed": low.address}[deed]
    for neighbour in (low, high):
        neighbour.free()
    card.write(stream.handle, place, 1, 7)
    card.synchronize()
    kept.free()


def main() -> None:
    """Read what to do, and do it."""
    (deed,) = sys.argv[1:]
    card = Card()
    told = card.device.checker is not None
    with AsyncMemoryPool(card.device, limit=128 * MIB, segment_size=32 * MIB) as pool:
        if deed == "nothing":
            behave(card, pool)
        else:
            trespass(card, pool, deed)
    print(f"{deed}: {'told' if told else 'not told'}, done")  # noqa: T201  # read by the test
    card.close()


if __name__ == "__main__":
    main()
