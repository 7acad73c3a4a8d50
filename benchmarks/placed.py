"""What a pipeline over two worker processes costs: an item by descriptor, bytes by TCP and UCX, a stage that is slow.

``python -m benchmarks.placed`` prints each figure beside its bound; `--check` fails if one is missed. The processes are
a Dask `LocalCluster`'s, on the host. Latency is from when a stage returns an item in one process until the next stage
has it in the other. TCP is measured in turns with an asyncio stream that carries the same bytes between two processes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import LocalCluster

from asyncmem.pipeline import Pipeline, StageShare, stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.connection import Connection

    from asyncmem.arrays import Array

SIZE = 10_000_000
CREDIT = 10 << 20
ITEMS = 200
WORK = 0.02
LIMIT = 16 << 20
BOUNDS = {"descriptor": 1.5e-3, "tcp": 0.7, "busy": 0.97}


@stage(credit=CREDIT)
async def make(number: int, pool: StageShare[Any]) -> tuple[float, Array]:
    """Return an item, and when."""
    array: Array = await pool.empty((SIZE,), "uint8")
    array.numpy()[::4096] = number % 251
    return time.monotonic(), array


@stage(credit=0)
async def take(item: tuple[float, Array], pool: StageShare[Any]) -> float:
    """Return how long it was on its way."""
    del pool
    assert item[1].nbytes == SIZE
    return time.monotonic() - item[0]


async def latency(cluster: LocalCluster, *, share: bool = False, ucx: bool = False) -> list[float]:
    """Return the seconds that items are on their way, one at a time."""
    async with Pipeline(make, take).place(cluster, share=share, ucx=ucx, window="24 MiB") as pipe:
        return [seconds async for seconds in pipe.map(range(ITEMS), in_flight=1)]


async def rate(cluster: LocalCluster, *, ucx: bool = False) -> float:
    """Return the bytes a second that go from one process to the other over TCP, or by UCX."""
    async with Pipeline(make, take).place(cluster, share=False, ucx=ucx, window="64 MiB") as pipe:
        started = 0.0
        async for _ in pipe.map(range(ITEMS)):
            started = started or time.monotonic()
        return SIZE * (ITEMS - 1) / (time.monotonic() - started)


def _serve(port: Connection) -> None:
    asyncio.run(_count(port))


async def _count(port: Connection) -> None:
    done = asyncio.Event()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(ITEMS):
            await reader.readexactly(SIZE)
            writer.write(b"k")
        writer.close()
        done.set()

    server = await asyncio.start_server(read, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    async with server:
        await done.wait()


async def stream_rate() -> float:
    """Return the bytes a second that an asyncio stream moves between two processes."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", await asyncio.to_thread(ours.recv))
    data = bytes(SIZE)
    started = time.monotonic()
    for _ in range(ITEMS):
        writer.write(data)
        await writer.drain()
    await reader.readexactly(ITEMS)
    seconds = time.monotonic() - started
    writer.close()
    process.join()
    return SIZE * ITEMS / seconds


@stage(credit="1 MiB", pool=LIMIT)
async def produce(number: int, pool: StageShare[Any]) -> Array:
    """Return an item at once."""
    array: Array = await pool.empty((1 << 20,), "uint8")
    array.numpy()[:] = number % 251
    return array


@stage(credit="1 MiB", pool=LIMIT)
async def work(item: Array, pool: StageShare[Any]) -> int:
    """Take 20 ms for an item."""
    del pool
    await asyncio.sleep(WORK)
    return item.nbytes


class Sizes(threading.Thread):
    """Watches the resident memory of processes from outside; the most that each has above its first."""

    def __init__(self, pids: set[int]) -> None:
        super().__init__(daemon=True)
        self._first = {pid: _resident(pid) for pid in pids}
        self.most = dict.fromkeys(pids, 0)
        self._over = threading.Event()

    def run(self) -> None:
        """Look every 10 ms."""
        while not self._over.wait(0.01):
            for pid, first in self._first.items():
                self.most[pid] = max(self.most[pid], _resident(pid) - first)

    def stop(self) -> None:
        """End it."""
        self._over.set()
        self.join()


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


async def backpressure(cluster: LocalCluster, *, share: bool) -> tuple[float, int, int]:
    """Return items a second of a slow stage, and what its processes grew by at the most, of what they may."""
    async with Pipeline(produce, work).place(cluster, share=share, window=LIMIT // 2) as pipe:
        async for _ in pipe.map(range(2)):  # so that what is imported is in memory
            pass
        pids = {node.pid for node in pipe.plan().nodes[1:]}
    sizes = Sizes(pids)
    sizes.start()
    async with Pipeline(produce, work).place(cluster, share=share, window=LIMIT // 2, limit=LIMIT * 2) as pipe:
        started, items = 0.0, 200
        async for _ in pipe.map(endless(items)):
            started = started or time.monotonic()
        seconds = time.monotonic() - started
    sizes.stop()
    return (items - 1) / seconds, max(sizes.most.values()), LIMIT * 2


async def alone() -> float:
    """Return items a second of the slow stage's work by itself, in the same way."""
    started, items = time.monotonic(), 100
    for _ in range(items):
        await asyncio.sleep(WORK)
    return items / (time.monotonic() - started)


async def endless(items: int) -> AsyncIterator[int]:
    """Produce so many numbers as fast as they are taken."""
    for number in range(items):
        yield number


async def measure() -> bool:
    """Print all figures; return whether the bounds are met."""
    local = {"n_workers": 2, "threads_per_worker": 1, "asynchronous": True, "dashboard_address": ":0"}
    met = []
    async with LocalCluster(**local) as cluster:  # type: ignore[no-untyped-call]  # of Dask
        has_ucx = find_spec("ucxx") is not None
        kinds: dict[str, dict[str, bool]] = {"descriptor": {"share": True}, "TCP": {}}
        for name, options in (kinds | {"UCX": {"ucx": True}} if has_ucx else kinds).items():
            runs = [await latency(cluster, **options) for _ in range(3)]
            best = min(statistics.median(run) for run in runs)
            least = min(map(min, runs))
            print(f"10 MB by {name}: median {best * 1e3:.3f} ms in the best of 3 runs, least {least * 1e3:.3f} ms")  # noqa: T201  # a program's output
            if name == "descriptor":
                met.append(best <= BOUNDS["descriptor"])
        turns = [
            (await rate(cluster), await stream_rate(), await rate(cluster, ucx=True) if has_ucx else 0.0)
            for _ in range(3)
        ]
        ours, stream, by_ucx = map(max, zip(*turns, strict=True))
        print(f"TCP {ours / 2**30:.2f} GiB/s, asyncio stream {stream / 2**30:.2f} GiB/s: {ours / stream:.0%}")  # noqa: T201  # a program's output
        if has_ucx:
            print(f"UCX {by_ucx / 2**30:.2f} GiB/s, over loopback as TCP")  # noqa: T201  # a program's output
        met.append(ours / stream >= BOUNDS["tcp"])
        for share in (True, False):
            pairs = [(await alone(), await backpressure(cluster, share=share)) for _ in range(3)]
            bound, busy = max(one for one, _ in pairs), max(each for _, (each, _, _) in pairs)
            grown, most = max(grown for _, (_, grown, _) in pairs), pairs[0][1][2]
            print(  # noqa: T201  # a program's output
                f"a stage of 20 ms, {'shared memory' if share else 'TCP'}: {busy:.2f} items/s, by itself {bound:.2f}: "
                f"{busy / bound:.1%}; resident memory grew by {grown / 2**20:.1f} of {most >> 20} MiB"
            )
            met.append(busy / bound >= BOUNDS["busy"] and grown <= most)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; bounds: {'met' if all(met) else 'missed'}")  # noqa: T201  # a program's output
    return all(met)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a bound is missed")
    met = asyncio.run(measure())
    if parser.parse_args().check and not met:
        sys.exit(1)


if __name__ == "__main__":
    main()
