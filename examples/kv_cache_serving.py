"""Serving a language model: the keys and values of every text lie in pages, and there are too few pages for all.

Each text takes one page after the other as it grows. That is hold-and-wait, the way into a deadlock, so no text waits
for long: one that gets no page in time gives all its pages back and starts again, with everything it will need in one
request. Interactive requests come first (`priority`), and a request that waited too long fails (`timeout`).

It runs on the host; ``main("cuda:0", cupy)`` does the same on a GPU.
"""

import asyncio
import random
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import asyncmem

WIDTH = 128
TOKENS_PER_PAGE = 16
PAGE = TOKENS_PER_PAGE * 2 * WIDTH * 8  # a key and a value of float64 for each token
PAGES = 64  # 2 MiB in all, a page of a GPU: a limit is rounded up to whole ones
PATIENCE = 0.02  # seconds that a text holds pages while it waits for one more

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Text:
    """What a client asked for, and how far it has come."""

    seed: int
    length: int
    priority: int
    restarts: int = 0

    @property
    def pages(self) -> int:
        """How many pages it will fill."""
        return -(-self.length // TOKENS_PER_PAGE)


class Model:
    """One layer of attention, by numpy or by a library like it."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.weights = library.asarray(np.random.default_rng(0).standard_normal((3, WIDTH, WIDTH)) / WIDTH**0.5)

    def begin(self, text: Text) -> Matrix:
        """Return the first token."""
        first: Matrix = self.library.asarray(np.random.default_rng(text.seed).standard_normal(WIDTH))
        return first

    def remember(self, token: Matrix, into: Matrix) -> None:
        """Fill in the key and the value of a token."""
        into[0], into[1] = self.weights[1] @ token, self.weights[2] @ token

    def next_token(self, token: Matrix, known: Matrix) -> Matrix:
        """Attend to everything before, and return the next token."""
        query = self.weights[0] @ token
        keys, values = known[:, 0].copy(), known[:, 1].copy()
        scores = keys @ query / WIDTH**0.5
        weights = self.library.exp(scores - scores.max())
        following: Matrix = self.library.tanh(weights @ values / weights.sum() + query)
        return following

    def by_one_array(self, text: Text) -> Matrix:
        """Compute a text with keys and values in one array, as large as it will ever be."""
        cache = self.library.empty((text.length, 2, WIDTH))
        token = self.begin(text)
        for at in range(text.length):
            self.remember(token, cache[at])
            token = self.next_token(token, cache[: at + 1])
        return token

    def page(self, buffer: asyncmem.Buffer) -> Matrix:
        """Return a page of the pool as an array."""
        page: Matrix = self.library.asarray(buffer.view("float64", (TOKENS_PER_PAGE, 2, WIDTH)))
        return page


async def write_text(text: Text, model: Model, pool: asyncmem.AsyncMemoryPool, pages: list[asyncmem.Buffer]) -> Matrix:
    """Write a text, taking pages as it grows.

    Raises:
        PoolTimeout: There was none in time.
    """
    token = model.begin(text)
    for at in range(text.length):
        number, row = divmod(at, TOKENS_PER_PAGE)
        if number == len(pages):
            pages.append(await pool.allocate_async(PAGE, priority=text.priority, timeout=PATIENCE))
        model.remember(token, model.page(pages[number])[row])
        known = [*map(model.page, pages[:number]), model.page(pages[number])[: row + 1]]
        token = model.next_token(token, model.library.concatenate(known))
        del known  # a view keeps its page
        await asyncio.sleep(0)  # a step of the model: the other tasks take one too
    return token


async def serve(text: Text, model: Model, pool: asyncmem.AsyncMemoryPool, patience: float | None) -> Matrix | None:
    """Write a text, again from the start if it was in the way; None for a client that waited longer than it wanted."""
    pages: list[asyncmem.Buffer] = []
    try:
        return await write_text(text, model, pool, pages)
    except asyncmem.PoolTimeout:
        text.restarts += 1
    finally:
        for page in pages:
            page.free()
    try:
        sizes = [PAGE] * text.pages
        async with pool.allocate_batch(sizes, priority=text.priority, timeout=patience) as batch:
            return await write_text(text, model, pool, list(batch))
    except asyncmem.PoolTimeout:
        return None


async def main(device: str = "host", library: ModuleType = np) -> None:
    """Serve more texts than there are pages for, and compare each with the same text from one array."""
    model = Model(library)
    chance = random.Random(7)  # noqa: S311 - repeatable, not secret
    texts = [Text(seed, chance.randint(20, 120), priority=seed % 2) for seed in range(40)]
    async with asyncmem.AsyncMemoryPool(device, limit=PAGES * PAGE, segment_size=PAGES * PAGE) as pool:
        # Every tenth client has no time at all: it is served at once, or told that there is no room.
        clients = [serve(text, model, pool, 0.0 if text.seed % 10 == 0 else None) for text in texts]
        answers = await asyncio.gather(*clients)
        stats = pool.stats()

    served = [(text, answer) for text, answer in zip(texts, answers, strict=True) if answer is not None]
    assert all(library.array_equal(answer, model.by_one_array(text)) for text, answer in served)
    assert all(answer is not None for text, answer in zip(texts, answers, strict=True) if text.seed % 10)
    assert stats.peak_allocated <= PAGES * PAGE
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
