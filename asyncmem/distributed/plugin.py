"""`PoolPlugin`: a pool on each worker of a Dask cluster; `worker_pool`, which returns it inside a task."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final, Unpack, final

from distributed import Client, Worker, WorkerPlugin, get_worker

from asyncmem import readers
from asyncmem.distributed.observing import recording_path, shown
from asyncmem.errors import InvalidRequest
from asyncmem.insight import Recording, Records, merge
from asyncmem.options import OptionArguments, PoolOptions
from asyncmem.pool import AsyncMemoryPool
from asyncmem.text import printable

if TYPE_CHECKING:
    from asyncmem.devices import Device

_HINT: Final = (
    'client.register_plugin(asyncmem.distributed.PoolPlugin(limit="80%")), or start workers with '
    "--preload asyncmem.distributed.preload"
)


@dataclass(eq=False)
class _Opened:
    """What a worker has."""

    pool: AsyncMemoryPool[Device]
    recording: Recording | None = None
    end: AsyncExitStack = field(default_factory=AsyncExitStack)


_opened: weakref.WeakKeyDictionary[Worker, _Opened | Exception] = weakref.WeakKeyDictionary()
"""What the workers of this process have; of one whose pool could not be opened, why."""


@final
class PoolPlugin(WorkerPlugin):
    """Opens a pool on each worker, on the worker's event loop, and closes it when the worker ends.

    ``client.register_plugin(PoolPlugin(limit="80%"))`` does so on the workers there are and on those to come, also
    after a restart. Tasks get the pool from `worker_pool()`. Registering another one closes the pools of the first:
    requests that wait there raise `PoolClosed`.

    Args:
        device: Name of the device, as each worker sees it: "auto", "host", "cuda:0".
        record: A folder in which each worker records its pool and those of pipelines that are placed on it later, in a
            file that ends with ``.amem``. Needs the extra `insight` there.
        **options: The fields of `PoolOptions`, which beat the environment of the worker. Without `name` a pool is
            named after its worker. On the host a limit that is a share is a share of the worker's memory limit.

    Raises:
        InvalidRequest: An option is unknown, or its value cannot be right. A device that a worker does not have
            raises when the plugin is registered.
    """

    name = "asyncmem"
    """What Dask knows it by: there is one on each worker."""

    def __init__(
        self, device: str = "auto", *, record: str | PathLike[str] | None = None, **options: Unpack[OptionArguments]
    ) -> None:
        if not isinstance(device, str):
            raise InvalidRequest("device", device, 'a name such as "cuda:0", for each worker opens its own')
        PoolOptions(**options)  # raises here, and not on the workers
        self._device = device
        self._record = None if record is None else readers.file(fspath(record), "record")
        self._options = options

    async def setup(self, worker: Worker) -> None:
        """Open the pool of a worker."""
        options: OptionArguments = {"name": f"worker {worker.name}", **self._options}
        pool = AsyncMemoryPool(self._device, **options)
        opened = _opened[worker] = _Opened(pool)
        try:
            await self._open(opened, worker)
        except Exception as error:
            wanted = _opened.get(worker) is opened
            if wanted:
                _opened[worker] = error.with_traceback(None)
            await opened.end.aclose()
            if wanted:  # else that is why, and the error would end a worker that is about to start
                raise
        if _opened.get(worker) is not opened:  # the worker has ended meanwhile, or the plugin is removed
            await opened.end.aclose()

    async def _open(self, opened: _Opened, worker: Worker) -> None:
        opened.end.push_async_callback(opened.pool.aclose)
        await opened.end.enter_async_context(opened.pool)
        _limit_to_worker(opened.pool, worker)
        if self._record is not None:
            path = await asyncio.to_thread(recording_path, self._record, worker)
            opened.recording = Recording(opened.pool, file=path, frames=8)
            await opened.end.enter_async_context(opened.recording)
        opened.end.enter_context(shown(worker))

    async def teardown(self, worker: Worker) -> None:
        """Close the pool of a worker; requests that wait raise `PoolClosed`."""
        found = _opened.pop(worker, None)
        if isinstance(found, _Opened):
            await found.end.aclose()


def worker_pool(dask_worker: Worker | None = None) -> AsyncMemoryPool[Device]:
    """Return the pool of the worker that runs this task.

    An async task awaits it on the worker's event loop. A task in a thread calls `pool.allocate`, which may block that
    thread and no other.

    Args:
        dask_worker: The worker, where no task runs: Dask gives it to a function of that argument in `client.run`.

    Raises:
        InvalidRequest: No task runs here, or its worker has no pool; the text says what to do.
    """
    worker = _worker_here() if dask_worker is None else dask_worker
    if worker is None:
        hint = "call it in the task itself and hand the pool to threads; in client.run, worker_pool(dask_worker)"
        raise InvalidRequest("dask_worker", None, "a call inside a Dask task", hint=hint)
    if not isinstance(worker, Worker):
        raise InvalidRequest("dask_worker", worker, "a worker of Dask's")
    found = _opened.get(worker)
    if found is None:
        raise InvalidRequest("dask_worker", worker.address, "a worker with a PoolPlugin", hint=_HINT)
    if isinstance(found, Exception):
        wanted, hint = "a worker whose pool could be opened", printable(str(found))
        raise InvalidRequest("dask_worker", worker.address, wanted, hint=hint) from found
    return found.pool


def records(client: Client) -> Records:
    """Return what the workers have recorded so far, as one (blocks); with an asynchronous client it is awaited.

    It comes through the cluster from those workers that are there, whatever disks they write to. The file of a worker
    that has ended is where it was: `asyncmem.insight.read` and `asyncmem.insight.merge` take it in.

    Raises:
        InvalidRequest: No worker records.
    """
    found: Records = client.sync(_merged_records, client)
    return found


async def _merged_records(client: Client) -> Records:
    found: dict[str, Records | None] = await client.run(_records_of)
    recorded = [one for one in found.values() if one is not None]
    if not recorded:
        raise InvalidRequest("client", client, "workers that record", hint='PoolPlugin(record="FOLDER")')
    return merge(*recorded)


async def _records_of(dask_worker: Worker) -> Records | None:
    recording = _recording_of(dask_worker)
    return None if recording is None else await asyncio.to_thread(recording.records)


def record_with(worker: Worker, pool: AsyncMemoryPool[Device]) -> None:
    """Record an open pool beside that of a worker, where this is recorded."""
    recording = _recording_of(worker)
    if recording is not None:
        recording._add(pool._opened)


def _recording_of(worker: Worker) -> Recording | None:
    found = _opened.get(worker)
    return found.recording if isinstance(found, _Opened) else None


def _worker_here() -> Worker | None:
    try:
        return get_worker()
    except ValueError:  # whose context Dask cannot send, so nothing is to be raised in here
        return None


def _limit_to_worker(pool: AsyncMemoryPool[Device], worker: Worker) -> None:
    """Take a share of the host's memory as one of what the worker may use, as others on the host have the rest."""
    most = worker.memory_manager.memory_limit
    share = pool.options.fraction if pool.options.limit is None else pool.options.limit
    if pool.device.kind == "host" and most and isinstance(share, float):
        pool.resize(limit=int(share * most))
