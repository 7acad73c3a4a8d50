"""Memory moves between addresses, and goes back to the driver, while kernels that were submitted long ago still run.

Four streams hand their results on, as the stages of a pipeline do, each far behind the host. Every page of a result is
written by its own stream and read by the next one; a page that went away too early, or that two streams had at once, is
seen by a wrong word, or as memory that is not there.
"""

import random
from collections.abc import Sequence

import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Stream
from asyncmem.devices.base import Move, Remapped, Span

from .card import Card

STREAMS = 4
MIB = 1 << 20
PAGE = 2 * MIB
LEAST, MOST = 16 * MIB, 64 * MIB
BUSY_NS = 150_000


class Pipeline:
    """Results of random sizes, of which the newest few are kept."""

    def __init__(self, card: Card, pool: AsyncMemoryPool, seed: int) -> None:
        self.card = card
        self.pool = pool
        self.choice = random.Random(seed)
        self.streams = [card.device.create_stream(f"stage {number}") for number in range(STREAMS)]
        self.wrong = card.number()
        self.never = card.gate()
        self.values = 0
        self.most = MOST

    def run(self, rounds: int) -> None:
        """Submit so many rounds; the card may still be at them afterwards."""
        kept: list[tuple[Buffer, int]] = []
        for _ in range(rounds):
            if self.choice.random() < 0.03:  # the work changes, and with it what is needed
                self.most = self.choice.randrange(LEAST, MOST)
            nbytes = self.choice.randrange(LEAST // 2, self.most) & ~3
            result = self.write(nbytes, self.streams[0])
            for stream in self.streams:
                buffer, value = result
                buffer.use_on(stream)
                self.card.hold(stream.handle, self.never, limit=BUSY_NS)
                spare = self.write(nbytes, stream)
                result = self.write(nbytes, stream)
                self.read(buffer, value, stream)
                self.read(*spare, stream)
                del buffer, spare
            kept.append(result)
            del kept[: -self.choice.randint(1, 6)]
        for buffer, value in kept:
            self.read(buffer, value, self.streams[-1])

    def write(self, nbytes: int, stream: Stream) -> tuple[Buffer, int]:
        """Write a word at the beginning of each page of a new block."""
        buffer = self.pool.allocate(nbytes, stream=stream, timeout=30.0)
        self.values += 1
        for address in range(buffer.address, buffer.address + nbytes, PAGE):
            self.card.write(stream.handle, address, 1, self.values)
        return buffer, self.values

    def read(self, buffer: Buffer, value: int, stream: Stream) -> None:
        """Have the card compare these words."""
        for address in range(buffer.address, buffer.address + buffer.nbytes, PAGE):
            self.card.compare_words(stream.handle, address, 1, value, self.wrong)


@pytest.mark.parametrize("limit", [None, "1 GiB"])
@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_memory_moves_and_goes_back_behind_its_last_kernel(
    card: Card, driver: object, monkeypatch: pytest.MonkeyPatch, limit: str | None, overlap: float
) -> None:
    """No word is wrong, and no kernel finds memory gone, with a limit to keep to and without."""
    remap, unmapped = card.device.remap, []

    def counting(out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        unmapped.extend(out)
        return remap(out, into, moves)

    monkeypatch.setattr(card.device, "remap", counting)
    runs, rounds = (2, 100) if driver else (10, 400)
    with AsyncMemoryPool(card.device, limit=limit, overlap=overlap) as pool:
        pipeline = Pipeline(card, pool, seed=7)
        for _ in range(runs):
            pipeline.run(rounds)
            card.synchronize()
        assert pipeline.wrong.value == 0
        assert unmapped, "nothing was shown: memory stayed where it was"
        pool.check()
