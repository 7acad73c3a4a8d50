"""What the tests have workers do."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from distributed import Client, Worker, get_worker

from asyncmem import Array, AsyncMemoryPool
from asyncmem.distributed import worker_pool
from asyncmem.pipeline import StageShare, stage

MIB = 1 << 20


class Told(NamedTuple):
    """What a task says of its pool: names, the limit, and whether it ran on the thread of the worker's loop."""

    pool: str
    worker: str
    limit: int
    on_loop: bool


def tell() -> Told:
    """Allocate in a thread."""
    pool = worker_pool()
    with pool.allocate("1 MiB") as buffer:
        memoryview(buffer)[:] = bytes(MIB)
    return _told(pool)


async def tell_async() -> Told:
    """Allocate on the worker's event loop."""
    pool = worker_pool()
    async with pool.allocate_async("1 MiB") as buffer:
        memoryview(buffer)[:] = bytes(MIB)
    return _told(pool)


def _told(pool: AsyncMemoryPool) -> Told:
    worker = get_worker()
    on_loop = threading.get_ident() == worker.loop.asyncio_loop._thread_id  # type: ignore[attr-defined]
    return Told(pool.name, f"worker {worker.name}", pool.stats().limit, on_loop)


def take(size: str, timeout: float = 60) -> str:
    """Wait for memory in a thread, and free it."""
    with worker_pool().allocate(size, timeout=timeout):
        return get_worker().address


async def take_async(size: str) -> str:
    """Wait for memory on the loop, and free it."""
    async with worker_pool().allocate_async(size):
        return get_worker().address


def tell_all(client: Client) -> list[Told]:
    """What tasks of both kinds say on all workers."""
    where = addresses(client)
    futures = [client.submit(one, workers=[at], pure=False) for one in (tell, tell_async) for at in where]
    return client.gather(futures)


def addresses(client: Client) -> list[str]:
    """The workers that there are, which the client itself hears of late."""
    return list(client.sync(client.scheduler.identity)["workers"])


def workers(client: Client) -> list[Worker]:
    """The workers of a cluster in this process."""
    return list(client.cluster.workers.values())


def until(true: Callable[[], object], seconds: float = 100) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@stage(credit=MIB)
async def make(number: int, pool: StageShare[Any]) -> Array:
    """Return an array."""
    array: Array = await pool.empty((MIB,), "uint8")
    array.numpy()[:] = number
    return array


@stage(credit=0)
async def length(array: Array, pool: StageShare[Any]) -> int:
    """Return its bytes."""
    del pool
    return array.nbytes
