"""What it costs to give an item to another process of the host: by `asyncmem.share`, and through a pipe.

``python -m benchmarks.share`` prints the times from when the item is there in one process until the other has an array
over it; for "seen free" also the way back.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

import asyncmem
from asyncmem import share

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SIZE = 10_000_000
ROUNDS = 300
BOUND = 1.5e-3


def read(items: Connection) -> None:
    """Open each item, or take its bytes, and answer with the time; the other process."""
    asyncio.run(_read(items))


async def _read(items: Connection) -> None:
    while message := items.recv_bytes():
        if len(message) == SIZE:
            array = np.frombuffer(message, np.uint8)
            items.send((time.monotonic(), int(array[0])))
            continue
        async with share.attach_async(message) as shared:
            bytes_ = shared.numpy()
            items.send((time.monotonic(), int(bytes_[0])))
            del bytes_


async def by_descriptor(items: Connection) -> tuple[list[float], list[float]]:
    """Return the seconds until the reader has each item, and until its end is seen here."""
    there, back = [], []
    async with asyncmem.AsyncMemoryPool("host", share_limit="64 MiB") as pool:
        for number in range(ROUNDS):
            async with pool.shared.allocate_async(SIZE) as buffer:
                buffer.view().numpy()[:] = number % 251
                started = time.monotonic()
                exported = share.export(buffer)
                items.send_bytes(exported.descriptor)
                await exported.wait()
                back.append(time.monotonic() - started)
                arrived, first = items.recv()
                there.append(arrived - started)
                assert first == number % 251
    return there, back


def by_pipe(items: Connection) -> list[float]:
    """Return the seconds until the reader has all bytes of each item."""
    there = []
    for number in range(ROUNDS // 4):
        array = np.full(SIZE, number % 251, np.uint8)
        started = time.monotonic()
        items.send_bytes(array.data)
        arrived, first = items.recv()
        there.append(arrived - started)
        assert first == number % 251
    return there


def main() -> None:
    """Measure both, and print a line for each."""
    here, other = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read, args=(other,))
    reader.start()
    there, back = asyncmem.run(by_descriptor(here))
    piped = by_pipe(here)
    here.send_bytes(b"")
    reader.join()
    for name, times in (("by descriptor", there), ("seen free", back), ("by pipe", piped)):
        line = ", ".join(f"{q:.0f} % {statistics.quantiles(times, n=100)[q - 1] * 1e3:.3f} ms" for q in (10, 50, 90))
        print(f"10 MB {name}: {line}")  # noqa: T201  # a program's output
    verdict = "within" if statistics.median(there) <= BOUND else "ABOVE"
    print(f"the first is {verdict} the bound of {BOUND * 1e3} ms")  # noqa: T201  # as above


if __name__ == "__main__":
    main()
