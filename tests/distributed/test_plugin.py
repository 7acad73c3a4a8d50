"""A pool on each worker of a Dask cluster: in tasks of both kinds, through restarts, deaths and errors."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from click import NoSuchOption
from click.testing import CliRunner
from distributed import Client, Worker
from distributed.cli import dask_worker
from distributed.preloading import process_preloads

import asyncmem
from asyncmem import BackendUnavailable, InvalidRequest, OutOfMemoryError, PoolClosed
from asyncmem.distributed import PoolPlugin, worker_pool

from . import tasks
from .tasks import MIB, tell, tell_all, until, workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.may_block  # tasks in threads block, which is what they are for


def asked_outside_of_tasks() -> str:
    return worker_pool().name


def test_tasks_get_the_pool_of_their_worker(client: Client) -> None:
    """Each worker of the process has one: tasks in threads block on it, async ones await it."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    told = tell_all(client)
    assert {one.pool for one in told} == {"worker 0", "worker 1"}
    assert all(one.pool == one.worker and one.limit == 8 * MIB for one in told)
    assert sum(one.on_loop for one in told) == 2


def test_workers_that_come_later_have_one(client: Client) -> None:
    """Dask sets the plugin up on those, too."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    client.cluster.scale(3)
    client.wait_for_workers(3)
    assert {one.pool for one in tell_all(client)} == {"worker 0", "worker 1", "worker 2"}


def test_limits_are_shares_of_what_a_worker_may_use(client: Client) -> None:
    """Others on the host have the rest, and two workers with 60 % of the host would have 120 % of it."""
    most = workers(client)[0].memory_manager.memory_limit
    assert most
    for limit, expected in (("60%", 0.6 * most), (None, 0.9 * most), ("8 MiB", 8 * MIB)):
        client.register_plugin(PoolPlugin("host", limit=limit))
        assert [one.limit for one in tell_all(client)] == [pytest.approx(expected, rel=1e-6)] * 4
    client.register_plugin(PoolPlugin("simulated", limit="50%"))
    pools = [worker_pool(one) for one in workers(client)]
    assert [pool.stats().limit for pool in pools] == [pool.device.memory().total // 2 for pool in pools]


def test_the_pool_is_closed_when_the_plugin_goes(client: Client) -> None:
    """Those who wait there hear of it, in threads and on the loop; no memory is left."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    pools = [worker_pool(one) for one in workers(client)]
    held = [pool.allocate("8 MiB") for pool in pools]
    waiting = [
        client.submit(take, "1 MiB", workers=[one.address], pure=False)
        for take in (tasks.take, tasks.take_async)
        for one in workers(client)
    ]
    until(lambda: [pool.stats().waiting for pool in pools] == [2, 2])
    for one in held:
        one.free()
    client.gather(waiting)
    held = [pool.allocate("8 MiB") for pool in pools]
    waiting = [client.submit(take, "1 MiB", pure=False) for take in (tasks.take, tasks.take_async)]
    until(lambda: sum(pool.stats().waiting for pool in pools) == 2)
    with pytest.warns(asyncmem.LeakWarning):
        client.unregister_worker_plugin("asyncmem")
    for one in waiting:
        with pytest.raises(PoolClosed):
            one.result()
    with pytest.raises(InvalidRequest, match="PoolPlugin"):
        client.submit(tell, pure=False).result()
    for one in held:
        one.free()
    until(lambda: [pool.stats().reserved_bytes for pool in pools] == [0, 0])


def test_another_plugin_takes_the_place_of_the_first(client: Client) -> None:
    """The pool of the first is closed."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    first = worker_pool(workers(client)[0])
    client.register_plugin(PoolPlugin("host", limit="4 MiB", name="ours"))
    assert {(one.pool, one.limit) for one in tell_all(client)} == {("ours", 4 * MIB)}
    with pytest.raises(PoolClosed):
        first.allocate(1)


def test_a_plugin_may_go_while_its_pool_opens(client: Client, tmp_path: Path) -> None:
    """Whatever step that is at: a worker that is about to start does so, and nothing is left."""
    worker = workers(client)[0]

    async def come_and_go(steps: int) -> bool:
        plugin = PoolPlugin("host", limit="8 MiB", record=tmp_path / str(steps))  # its file is begun on a thread
        coming = asyncio.ensure_future(worker.plugin_add(plugin, catch_errors=False))
        for _ in range(steps):
            await asyncio.sleep(0)
        in_time = not coming.done()
        await worker.plugin_remove("asyncmem")
        await coming
        return in_time

    steps = 1
    while client.sync(come_and_go, steps):
        steps *= 2
        with pytest.raises(InvalidRequest, match="PoolPlugin"):
            worker_pool(worker)
        assert "asyncmem" not in worker.metrics
    assert steps > 1


def test_a_task_waits_for_its_turn_and_can_be_cancelled(client: Client) -> None:
    """Dask drops a task that waits, but does not interrupt it: it gives back what it gets, and nothing is lost."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    worker = workers(client)[0]
    pool = worker_pool(worker)
    held = pool.allocate("8 MiB")
    futures = [client.submit(one, "8 MiB", workers=[worker.address]) for one in (tasks.take, tasks.take_async)]
    until(lambda: pool.stats().waiting == 2)
    client.cancel(futures)
    held.free()
    assert client.submit(tasks.take, "8 MiB", workers=[worker.address], pure=False).result() == worker.address
    until(lambda: pool.stats().allocated_bytes == 0 and not pool.stats().waiting)


def test_a_worker_that_ends_has_its_waiting_tasks_done_elsewhere(client: Client) -> None:
    """Dask cancels what waits on its loop, and the other worker does it."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    ends, stays = workers(client)
    pool = worker_pool(ends)
    held = pool.allocate("8 MiB")
    future = client.submit(tasks.take_async, "1 MiB", workers=[ends.address], allow_other_workers=True)
    until(lambda: pool.stats().waiting == 1)
    held.free()
    assert future.result() == ends.address
    held = pool.allocate("8 MiB")
    future = client.submit(tasks.take_async, "1 MiB", workers=[ends.address], allow_other_workers=True, pure=False)
    until(lambda: pool.stats().waiting == 1)
    with pytest.warns(asyncmem.LeakWarning):
        client.sync(ends.close)
    assert future.result() == stays.address
    held.free()
    with pytest.raises(PoolClosed):
        pool.allocate(1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"limti": "1 GiB"}, "did you mean 'limit'"),
        ({"limit": "3 parrots"}, "limit"),
        ({"limit": -1}, "limit"),
        ({"device": 3}, "device: expected a name"),
        ({"device": asyncmem.Host()}, "device: expected a name"),
        ({"device": None}, "device: expected a name"),
    ],
)
def test_wrong_arguments_raise_where_the_plugin_is_made(arguments: dict[str, Any], said: str) -> None:
    """And not in the log of a worker."""
    with pytest.raises(InvalidRequest, match=said):
        PoolPlugin(**arguments)


def test_a_device_that_workers_lack_is_told_to_the_client_and_to_tasks(client: Client) -> None:
    """When it is registered, and to a task that asks for the pool all the same."""
    for device, error in (("parrot:3", InvalidRequest), ("rocm:7", BackendUnavailable)):
        with pytest.raises(error, match=device):
            client.register_plugin(PoolPlugin(device))
        with pytest.raises(InvalidRequest, match=f"could be opened.*{device}"):
            client.submit(tell, pure=False).result()
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    assert len(tell_all(client)) == 4


def test_who_asks_for_no_pool_is_told_what_to_do(client: Client) -> None:
    """Outside of tasks, without a plugin, and with something else than a worker."""
    with pytest.raises(InvalidRequest, match="inside a Dask task"):
        worker_pool()
    with pytest.raises(InvalidRequest, match="a worker of Dask's"):
        worker_pool("tcp://127.0.0.1:8786")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"register_plugin\(asyncmem.distributed.PoolPlugin"):
        client.submit(tell).result()
    with pytest.raises(InvalidRequest, match=r"in client.run, worker_pool\(dask_worker\)"):
        client.run(asked_outside_of_tasks)


def test_a_request_that_no_limit_allows_fails_in_its_task(client: Client) -> None:
    """With all facts, which come through the cluster whole."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    with pytest.raises(OutOfMemoryError) as caught:
        client.submit(tasks.take, "9 MiB").result()
    assert (caught.value.asked, caught.value.limit) == (9 * MIB, 8 * MIB)


def test_workers_preload_a_pool(client: Client) -> None:
    """From the command line, with its options; a plugin that is registered takes its place."""
    plain = client.cluster.scheduler.address
    arguments = ["--asyncmem-limit", "8 MiB", "--asyncmem-device", "host"]

    async def start() -> Worker:
        return await Worker(
            plain, name="preloaded", preload="asyncmem.distributed.preload", preload_argv=arguments, nthreads=1
        )

    worker = client.sync(start)
    told = client.submit(tell, workers=[worker.address]).result()
    assert (told.pool, told.limit) == ("worker preloaded", 8 * MIB)
    client.register_plugin(PoolPlugin("host", limit="4 MiB"))
    assert client.submit(tell, workers=[worker.address], pure=False).result().limit == 4 * MIB
    client.sync(worker.close)


def test_a_wrong_limit_ends_the_command() -> None:
    """The command of Dask's says what is wrong, and starts nothing."""
    arguments = ["tcp://127.0.0.1:1", "--preload", "asyncmem.distributed.preload", "--asyncmem-limit", "3 parrots"]
    done = CliRunner().invoke(dask_worker.main, arguments)
    assert done.exit_code == 2
    assert "--asyncmem-limit" in done.output
    assert "3 parrots" in done.output


def test_options_of_other_preloads_pass(client: Client) -> None:
    """Dask gives the options of all preloads to each; dask-cuda adds one to those of every worker."""
    worker = workers(client)[0]
    module = "asyncmem.distributed.preload"

    async def preload(*words: str) -> str:
        (one,) = process_preloads(worker, [module], [["--asyncmem-device", "host", *words]])
        await one.start()
        return worker_pool(worker).device.name

    assert client.sync(preload, "--create-cuda-context", "--other", "3") == "host"
    with pytest.raises(NoSuchOption, match="--asyncmem-limti"):
        client.sync(preload, "--create-cuda-context", "--asyncmem-limti", "3")
