"""A card that is fed works as if its data were there: copies run beside the work, and cost it next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.pipeline import DoubleBuffer, Prefetcher

from .card import Card

ROWS = 4096
SHAPE = (ROWS, ROWS)  # 64 MiB
BATCHES = 40
TRIES = 3
LIMIT = 1 << 30

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def pool(card: Card) -> Iterator[AsyncMemoryPool]:
    """A pool that has nothing live at the end."""
    with AsyncMemoryPool(card.device, limit=LIMIT, segment_size=LIMIT) as pool:
        yield pool
        card.synchronize()
        assert pool.stats().allocated_bytes == 0
        pool.check()


class Work:
    """Products of matrices on one stream of torch's, which take a few times as long as a batch's copy."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream()
        self.weights = torch.ones(SHAPE, device="cuda", dtype=torch.float32) / ROWS
        self.total = torch.zeros((), device="cuda")

    def __call__(self, batch: Any) -> None:
        self.total += (batch @ self.weights).sum() / ROWS**2

    def through(self, batches: Iterable[Any]) -> float:
        """Return the seconds that it takes to go through all batches."""
        with self.torch.cuda.stream(self.stream):
            self.total.zero_()
            self.stream.synchronize()
            start = time.perf_counter()
            for batch in batches:
                self(batch)
            del batch
            self.stream.synchronize()
            taken = time.perf_counter() - start
            # Batches are of ones, twos, threes: a float holds the sum of their means.
            assert abs(self.total.item() - sum(range(1, BATCHES + 1))) < 1
        return taken


@pytest.fixture
def work(torch: Any, card: Card) -> Work:
    """The work, with what torch loads at its first product loaded."""
    card.enter()
    made = Work(torch)
    with torch.cuda.stream(made.stream):
        made(made.weights)
        made.stream.synchronize()
    return made


def best(run: Callable[[], float]) -> float:
    return min(run() for _ in range(TRIES))


def ready(work: Work) -> float:
    """Return the seconds of the work alone, on batches that are on the card."""
    there = work.torch.ones(SHAPE, device="cuda")
    return best(lambda: work.through(there * number for number in range(1, BATCHES + 1)))


def copies(work: Work) -> float:
    """Return the seconds of the copies alone, from page-locked memory."""
    here, there = work.torch.empty(SHAPE).pin_memory(), work.torch.empty(SHAPE, device="cuda")

    def run() -> float:
        work.stream.synchronize()
        start = time.perf_counter()
        with work.torch.cuda.stream(work.stream):
            for _ in range(BATCHES):
                there.copy_(here, non_blocking=True)
            work.stream.synchronize()
        return time.perf_counter() - start

    return best(run)


def locked_batches(work: Work) -> list[Any]:
    return [work.torch.full(SHAPE, float(number)).pin_memory() for number in range(1, BATCHES + 1)]


def test_prefetching_takes_as_long_as_the_longer_of_copies_and_work(pool: AsyncMemoryPool, work: Work) -> None:
    """Within a twentieth, from page-locked memory."""
    bound = max(ready(work), copies(work))
    prefetched = Prefetcher(pool, stream=work.stream, convert=work.torch.from_dlpack).wrap(locked_batches(work))
    taken = best(lambda: work.through(prefetched))
    assert bound / taken >= 0.95, f"{taken * 1e3:.1f} ms, and {bound * 1e3:.1f} ms at best"


def test_taking_turns_takes_as_long_as_the_longer_of_copies_and_work(pool: AsyncMemoryPool, work: Work) -> None:
    """Within a twentieth, from page-locked memory."""
    bound = max(ready(work), copies(work))
    data = locked_batches(work)

    def turns(feed: DoubleBuffer) -> Iterator[Any]:
        feed.prefetch_next(data[0])
        for following in [*data[1:], None]:
            current = feed.swap()
            if following is not None:
                feed.prefetch_next(following)
            yield work.torch.from_dlpack(current)

    def run() -> float:
        with DoubleBuffer(pool, SHAPE, stream=work.stream) as feed:
            return work.through(turns(feed))

    taken = best(run)
    assert bound / taken >= 0.95, f"{taken * 1e3:.1f} ms, and {bound * 1e3:.1f} ms at best"


def test_prefetching_is_as_fast_as_the_loader_of_torch(pool: AsyncMemoryPool, work: Work) -> None:
    """On the same batches, in ordinary memory, which torch copies to page-locked memory by as many threads as cores."""
    data = [np.full(SHAPE, number, np.float32) for number in range(1, BATCHES + 1)]

    def load(**options: Any) -> Any:
        return work.torch.utils.data.DataLoader(
            [work.torch.from_numpy(one) for one in data], batch_size=None, **options
        )

    def theirs() -> Iterator[Any]:
        for batch in load(pin_memory=True):
            yield batch.to("cuda", non_blocking=True)

    prefetched = Prefetcher(pool, stream=work.stream, workers=8, convert=work.torch.from_dlpack).wrap(load())
    work.through(prefetched)  # locks memory, which is kept
    ours, others = best(lambda: work.through(prefetched)), best(lambda: work.through(theirs()))
    assert ours <= others * 1.02, f"{ours * 1e3:.1f} ms, torch's loader {others * 1e3:.1f} ms"
