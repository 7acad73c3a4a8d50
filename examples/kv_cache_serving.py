"""Serving a language model: the keys and values of every text lie in pages, and there are too few pages for all.

Each text takes one page after the other as it grows. That is hold-and-wait, the way into a deadlock, so no text waits
for long: one that gets no page in time gives all its pages back and starts again, with everything it will need in one
request. People who wait come first (`priority`), and those who have waited too long are told so (`timeout`).
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import asyncmem

WIDTH = 64
TOKENS_PER_PAGE = 16
PAGE = TOKENS_PER_PAGE * 2 * WIDTH * 8  # a key and a value of float64 for each token
PAGES = 64
PATIENCE = 0.02  # seconds that a text holds pages while it waits for one more

Matrix = np.ndarray[Any, np.dtype[np.float64]]
WEIGHTS: Matrix = np.random.default_rng(0).standard_normal((3, WIDTH, WIDTH)) / WIDTH**0.5


@dataclass
class Text:
    """What a client asked for, and how far it has come."""

    seed: int
    length: int
    priority: int
    tokens: list[Matrix] = field(default_factory=list)
    restarts: int = 0

    @property
    def pages(self) -> int:
        """How many pages it will fill."""
        return -(-self.length // TOKENS_PER_PAGE)

    def begin(self) -> Matrix:
        """Answer the first token."""
        self.tokens.clear()
        return np.random.default_rng(self.seed).standard_normal(WIDTH)


def next_token(query: Matrix, keys: Matrix, values: Matrix) -> Matrix:
    """Attend to everything before, and answer the next token."""
    scores = keys @ query / WIDTH**0.5
    weights = np.exp(scores - scores.max())
    mixed: Matrix = weights @ values / weights.sum()
    return np.tanh(mixed + query)


def by_one_array(text: Text) -> Matrix:
    """Compute a text with keys and values in one array each, as large as they will ever be."""
    cache = np.empty((text.length, 2, WIDTH))
    token = text.begin()
    for at in range(text.length):
        cache[at] = WEIGHTS[1] @ token, WEIGHTS[2] @ token
        token = next_token(WEIGHTS[0] @ token, cache[: at + 1, 0].copy(), cache[: at + 1, 1].copy())
    return token


class Cache:
    """The keys and values of one text, in pages of the pool."""

    def __init__(self, pages: list[asyncmem.Buffer]) -> None:
        self.buffers = pages

    def write(self, at: int, key: Matrix, value: Matrix) -> None:
        """Keep what belongs to one token."""
        self._page(at // TOKENS_PER_PAGE)[at % TOKENS_PER_PAGE] = key, value

    def read(self, count: int) -> Matrix:
        """Gather what belongs to the first tokens."""
        full, rest = divmod(count, TOKENS_PER_PAGE)
        parts = [self._page(number) for number in range(full)] + ([self._page(full)[:rest]] if rest else [])
        return np.concatenate(parts)

    def _page(self, number: int) -> Matrix:
        return np.asarray(self.buffers[number].view("float64", (TOKENS_PER_PAGE, 2, WIDTH)))


async def write_text(text: Text, pool: asyncmem.AsyncMemoryPool, pages: list[asyncmem.Buffer]) -> Matrix:
    """Write a text, taking pages as it grows.

    Raises:
        PoolTimeout: There was none in time.
    """
    cache, token = Cache(pages), text.begin()
    for at in range(text.length):
        if at // TOKENS_PER_PAGE == len(pages):
            pages.append(await pool.allocate_async(PAGE, priority=text.priority, timeout=PATIENCE))
        cache.write(at, WEIGHTS[1] @ token, WEIGHTS[2] @ token)
        known = cache.read(at + 1)
        token = next_token(WEIGHTS[0] @ token, known[:, 0].copy(), known[:, 1].copy())
        await asyncio.sleep(0)  # a step of the model: everybody else takes one too
    return token


async def serve(text: Text, pool: asyncmem.AsyncMemoryPool, patience: float | None) -> Matrix | None:
    """Write a text, again from the start if it was in the way; None for a client that waited longer than it wanted."""
    pages: list[asyncmem.Buffer] = []
    try:
        return await write_text(text, pool, pages)
    except asyncmem.PoolTimeout:
        text.restarts += 1
    finally:
        for page in pages:
            page.free()
    try:
        sizes = [PAGE] * text.pages
        async with pool.allocate_batch(sizes, priority=text.priority, timeout=patience) as batch:
            return await write_text(text, pool, list(batch))
    except asyncmem.PoolTimeout:
        return None


async def main() -> None:
    """Serve more texts than there are pages for, and compare each with the same text from one array."""
    chance = random.Random(7)  # noqa: S311 - repeatable, not secret
    texts = [Text(seed, chance.randint(20, 120), priority=seed % 2) for seed in range(40)]
    async with asyncmem.AsyncMemoryPool("host", limit=PAGES * PAGE, segment_size=PAGES * PAGE) as pool:
        # Every tenth client has no time at all: it is served at once, or told that there is no room.
        clients = [serve(text, pool, 0.0 if text.seed % 10 == 0 else None) for text in texts]
        answers = await asyncio.gather(*clients)
        stats = pool.stats()

    served = [(text, answer) for text, answer in zip(texts, answers, strict=True) if answer is not None]
    assert all(np.array_equal(answer, by_one_array(text)) for text, answer in served)
    assert all(answer is not None for text, answer in zip(texts, answers, strict=True) if text.seed % 10)
    assert stats.peak_reserved <= PAGES * PAGE
    assert stats.waits > 0
    wanted = sum(text.pages for text in texts)
    print(
        f"{len(texts)} texts of {wanted} pages went through {PAGES}: {sum(one.restarts for one in texts)} began again"
    )
    print(
        f"{len(served)} were served, bit for bit as from one array; {len(texts) - len(served)} were told to come back"
    )


if __name__ == "__main__":
    asyncmem.run(main)
