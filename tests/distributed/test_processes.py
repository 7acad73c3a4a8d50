"""Workers in processes of their own: restarts, SIGKILL, GPUs, and what is shown of all of them."""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import psutil
import pytest
from click.testing import CliRunner, Result
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

import asyncmem
from asyncmem.cli.app import commands
from asyncmem.devices import Cuda
from asyncmem.distributed import PoolPlugin, records, worker_pool
from asyncmem.distributed.looks import ask_cluster
from asyncmem.insight import Kind, Records, merge, read
from asyncmem.pipeline import Pipeline
from tests.cuda.fake import FakeDriver

from . import tasks
from .tasks import MIB, addresses, tell_all, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.may_block  # tasks in threads block, which is what they are for


def top(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["top", *arguments], prog_name="asyncmem")


def address(client: Client) -> str:
    return client.scheduler.address


def replaced(client: Client, worker: str) -> bool:
    """Whether another process has taken the place of a worker."""
    there = addresses(client)
    return worker not in there and len(there) == 2


def asked(records: Records) -> Counter[str]:
    """Count what tasks have allocated, by pool."""
    return Counter(one.pool for one in records if one.kind is Kind.ALLOCATED and one.task is not None)


def seen(client: Client) -> bool:
    """Whether all workers have told the scheduler of their pools."""
    look = ask_cluster(address(client), timeout=60)
    return not look["silent"] and len(look["pools"]) == len(look["workers"])


def test_tasks_get_the_pool_of_their_process(processes: Client) -> None:
    """In threads and on the loop."""
    processes.register_plugin(PoolPlugin("host", limit="8 MiB"))
    told = tell_all(processes)
    assert {one.pool for one in told} == {"worker 0", "worker 1"}
    assert all(one.pool == one.worker and one.limit == 8 * MIB for one in told)
    assert sum(one.on_loop for one in told) == 2


def test_a_restart_makes_a_new_pool(processes: Client) -> None:
    """In the new process tasks go on as before."""
    processes.register_plugin(PoolPlugin("host", limit="8 MiB"))
    first, _ = addresses(processes)
    processes.restart_workers([first])
    until(lambda: replaced(processes, first))
    assert {one.pool for one in tell_all(processes)} == {"worker 0", "worker 1"}


def test_what_neighbours_hold_is_waited_for_and_comes_back_when_they_die(processes: Client) -> None:
    """With limit="shared" a task waits for another process's memory, which SIGKILL gives back like any other end."""
    group = secrets.token_hex(8)  # others on this machine have limits, too
    processes.run(setattr, asyncmem.Host, "identity", group)
    ceiling = 64 * MIB / psutil.virtual_memory().total
    processes.register_plugin(PoolPlugin("host", limit="shared", fraction=ceiling, segment_size="1 MiB", min_free=0))
    first, second = addresses(processes)

    def hold(dask_worker: Worker) -> None:
        dask_worker.held = worker_pool(dask_worker).allocate("48 MiB")

    processes.run(hold, workers=[first])
    with pytest.raises(asyncmem.PoolTimeout):
        processes.submit(tasks.take, "32 MiB", 0.2, workers=[second]).result()
    waiting = processes.submit(tasks.take_async, "32 MiB", workers=[second])

    def waits(dask_worker: Worker) -> int:
        return worker_pool(dask_worker).stats().growing

    until(lambda: processes.run(waits, workers=[second])[second])
    os.kill(processes.run(os.getpid, workers=[first])[first], signal.SIGKILL)
    assert waiting.result(timeout=100) == second
    until(lambda: replaced(processes, first))


@pytest.mark.fake_only
def test_each_worker_of_a_gpu_takes_that_gpu(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """dask-cuda shows each worker all GPUs, its own first, which "auto" takes."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake.path.parent))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    options = {"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": "1,0"}, "silence_logs": logging.CRITICAL}
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0", "host": "127.0.0.1"}}

    def device(dask_worker: Worker) -> tuple[str, str, int]:
        pool = worker_pool(dask_worker)
        return pool.device.name, pool.device.identity, pool.stats().limit

    with (
        SpecCluster({"worker": {"cls": Nanny, "options": options}}, scheduler=scheduler) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(PoolPlugin(limit="50%"))
        (found,) = client.run(device).values()
    fake.devices(2)
    second = Cuda(1)
    assert found == ("cuda:0", second.identity, second.memory().total // 2)
    second.close()


def test_top_shows_every_worker(processes: Client) -> None:
    """A line for each, with what waits there; without a plugin it says so."""
    until(lambda: "0 workers, 2 without a PoolPlugin" in top(address(processes)).stdout)
    processes.register_plugin(PoolPlugin("host", limit="8 MiB"))
    until(lambda: seen(processes))
    shown = top(address(processes)).stdout
    for name in ("worker 0", "worker 1"):
        (line,) = (one for one in shown.splitlines() if one.startswith(name))
        assert "8 MiB" in line
    found = json.loads(top(address(processes), "--json").stdout)
    assert sorted(found["workers"]) == sorted(pool["worker"] for pool in found["pools"])
    assert (found["scheduler"], found["silent"]) == (address(processes), [])


def test_recordings_of_all_workers_are_one_report(processes: Client, tmp_path: Path) -> None:
    """From the workers that are there, and from their files, of one that was killed too."""
    processes.register_plugin(PoolPlugin("host", limit="8 MiB", record=tmp_path / "runs"))
    first, second = addresses(processes)
    for at in (first, second, second):
        processes.submit(tasks.take, "1 MiB", workers=[at], pure=False).result()
    found = records(processes)
    assert sorted(one.allocations for one in found.by("pool")) == [1, 2]
    assert {one.name for one in found.by("pool")} == {"worker 0", "worker 1"}
    assert found.by("site")[0].name.endswith("(take)")
    files = sorted(map(str, (tmp_path / "runs").iterdir()))
    until(lambda: [len(read(one).by("pool")) for one in files] == [1, 1])
    os.kill(processes.run(os.getpid, workers=[first])[first], signal.SIGKILL)
    until(lambda: replaced(processes, first))
    assert sum(one.allocations for one in merge(*map(read, files)).by("pool")) == 3
    shown = CliRunner().invoke(commands, ["summary", *files])
    assert "worker 0 on host" in shown.stdout


def test_pools_of_pipelines_are_recorded_beside_that_of_the_worker(processes: Client, tmp_path: Path) -> None:
    """Those of stages and of links, of pipelines that came before and after others."""
    processes.register_plugin(PoolPlugin("host", limit="8 MiB", record=tmp_path / "runs"))

    async def run(share: bool) -> None:
        async with Pipeline(tasks.make, tasks.length).place(address(processes), share=share, limit="32 MiB") as pipe:
            assert [y async for y in pipe.map(range(5))] == [1 << 20] * 5

    for share in (True, False):
        asyncio.run(run(share))
    files = sorted(map(str, (tmp_path / "runs").iterdir()))
    # A stage asks once, for a lease of all that it may hold. What outlives that is one more, for which no task asked.
    expected = {"make": 1, "make shared": 1, "make -> length": 5}
    assert asked(records(processes)) == expected
    processes.unregister_worker_plugin("asyncmem")
    assert asked(merge(*map(read, files))) == expected
