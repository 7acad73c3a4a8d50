"""What the workers of a cluster show of their pools. Heartbeats bring it to the scheduler, which tells it who asks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from distributed import Worker
from distributed.comm.addressing import get_address_host
from distributed.core import rpc
from distributed.security import Security

from asyncmem.insight.live.client import ClusterLook, PoolLook, ProcessLook, read_look
from asyncmem.insight.live.server import said
from asyncmem.text import printable

METRIC: Final = "asyncmem"
"""The name of what a worker tells in its heartbeats."""


async def look_of(worker: Worker) -> dict[str, str]:
    """Return what a worker tells in its heartbeats: as JSON, whose texts any message can hold."""
    del worker  # the pools are those of its process
    return {"look": said()}


def ask_cluster(scheduler: str, timeout: float = 5.0) -> ClusterLook:
    """Ask a scheduler for the pools of its workers (blocks). Nothing that it answers is unpickled.

    Args:
        scheduler: Its address, as in tcp://127.0.0.1:8786; for tls:// Dask's configuration names the certificates.
        timeout: Seconds for the answer.

    Raises:
        OSError: There is no scheduler, or it does not answer in time.
    """
    try:
        found = asyncio.run(asyncio.wait_for(_identity(scheduler, timeout), timeout))
        workers = found["workers"]
    except TimeoutError as error:
        raise TimeoutError(f"{printable(scheduler)} did not answer within {timeout:g} s") from error
    except Exception as error:  # whatever Dask makes of a wrong address, of certificates, and of another program there
        raise OSError(f"{printable(scheduler)} does not answer as a scheduler: {printable(str(error))}") from error
    return cluster_look(scheduler, {address: one["metrics"] for address, one in workers.items()})


async def _identity(scheduler: str, timeout: float) -> dict[str, Any]:
    arguments = Security().get_connection_args("client")
    async with rpc(scheduler, timeout=timeout, connection_args=arguments, deserialize=False) as connection:
        answer: dict[str, Any] = await connection.identity()
        return answer


def cluster_look(scheduler: str, metrics: Mapping[str, Mapping[str, Any]]) -> ClusterLook:
    """Return the pools of all workers, from what each has told the scheduler, by address."""
    looks: dict[tuple[str, int], tuple[str, ProcessLook]] = {}  # workers of one process show the same
    workers, silent = [], []
    for address, told in metrics.items():
        try:
            found = read_look(told[METRIC]["look"], address)
        except (KeyError, TypeError, OSError):  # it has no plugin, or that of another version
            silent.append(address)
        else:
            workers.append(address)
            looks[get_address_host(address), found["process"]] = address, found
    pools = sorted(_pools([*looks.values()]), key=lambda pool: str(pool["stats"]["name"]))
    return {"time": time.time(), "scheduler": scheduler, "workers": workers, "silent": silent, "pools": pools}


def _pools(looks: Sequence[tuple[str, ProcessLook]]) -> Iterator[PoolLook]:
    counts = Counter(str(pool["stats"]["name"]) for _, found in looks for pool in found["pools"])
    for address, found in looks:
        for pool in found["pools"]:
            name = str(pool["stats"]["name"])
            if counts[name] > 1:
                name = f"{name} on {address}"
            yield {**pool, "stats": {**pool["stats"], "name": name}, "worker": address, "time": found["time"]}
