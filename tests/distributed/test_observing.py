"""What a cluster shows of its pools, and how what shows something else is taken."""

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import prometheus_client
import pytest
from bokeh.client import pull_session
from bokeh.models import ColumnDataSource
from click.testing import CliRunner
from distributed import Client, LocalCluster, Worker

from asyncmem import InvalidRequest
from asyncmem.cli.app import commands
from asyncmem.distributed import PoolPlugin, records, worker_pool
from asyncmem.distributed.dashboard import add_page
from asyncmem.distributed.looks import ask_cluster, cluster_look
from asyncmem.distributed.preload import dask_setup
from asyncmem.insight.live.server import said
from asyncmem.insight.prometheus import PoolCollector

from . import tasks
from .tasks import MIB, until, workers

pytestmark = pytest.mark.may_block


def test_workers_of_one_process_are_shown_once() -> None:
    """And pools of the same name by their workers; those that say something else are told apart."""
    look = json.loads(said())
    pool = {
        "closed": False, "budgets": [], "waiters": [], "tags": [], "sites": [],
        "stats": {
            "name": "mine", "device": "host", "limit": 1, "pressure": "LOW", "allocated_bytes": 0, "reserved_bytes": 0,
            "waiting": 0, "waiting_bytes": 0, "growing": 0, "num_allocations": 0, "cache_hit_rate": 1.0,
        },
    }  # fmt: skip
    here, there = ({"asyncmem": {"look": json.dumps({**look, "pools": [pool], "process": one})}} for one in (1, 2))
    found = cluster_look("tcp://a:1", {"tcp://a:2": here, "tcp://a:3": here, "tcp://a:4": there, "tcp://b:2": here})
    names = [one["stats"]["name"] for one in found["pools"]]
    assert names == ["mine on tcp://a:3", "mine on tcp://a:4", "mine on tcp://b:2"]
    hostile: list[Any] = [{}, {"asyncmem": None}, {"asyncmem": {"look": 3}}, {"asyncmem": {"look": "[" * 10**5}}]
    hostile += [{"asyncmem": {"look": json.dumps({**look, "pools": [{**pool, "stats": {}}]})}}]
    found = cluster_look("tcp://a:1", {f"tcp://a:{number}": one for number, one in enumerate(hostile)})
    assert (len(found["silent"]), found["pools"]) == (len(hostile), [])


def fetch(port: int, path: str) -> str:
    """What a server of this machine's has there."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200
    text = answer.read().decode()
    connection.close()
    return text


@pytest.fixture
def stranger() -> Iterator[str]:
    """Something that listens, and is no scheduler."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def test_top_says_who_does_not_answer(stranger: str) -> None:
    """In a line: where somebody else listens, and what is no address."""
    for where in (stranger, "parrot://127.0.0.1:1", "tls://127.0.0.1:1", "tcp://"):
        result = CliRunner().invoke(commands, ["top", where], prog_name="asyncmem")
        assert (result.exit_code, where in result.stderr, result.stdout) == (1, True, ""), result.stderr
        assert "Traceback" not in result.stderr


def test_who_is_silent_is_not_waited_for_for_ever() -> None:
    """Nobody, or somebody who listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=r"within 0.2 s"):
            ask_cluster(address, timeout=0.2)
    with pytest.raises(OSError, match=address):
        ask_cluster(address, timeout=0.2)


def test_prometheus_reads_the_pools_of_a_worker(client: Client) -> None:
    """At the worker's own /metrics; the collector goes with the last of the process's workers."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    client.submit(tasks.take, "1 MiB", workers=[workers(client)[0].address]).result()
    text = fetch(workers(client)[0].http_server.port, "/metrics")
    assert 'asyncmem_pool_allocations_total{device="host",pool="worker 0"} 1.0' in text
    assert 'asyncmem_pool_limit_bytes{device="host",pool="worker 1"} 8.388608e+06' in text
    client.unregister_worker_plugin("asyncmem")
    mine = PoolCollector()
    prometheus_client.REGISTRY.register(mine)  # raises where another one is left
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))  # the program's own is used
    client.unregister_worker_plugin("asyncmem")
    prometheus_client.REGISTRY.unregister(mine)


def test_the_dashboard_has_a_page_of_pools(client: Client) -> None:
    """With a bar for each pool, as the scheduler knows it; Dask's own pages stay, and it is there once."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    held = worker_pool(workers(client)[0]).allocate("2 MiB")
    assert [client.run_on_scheduler(add_page) for _ in range(2)] == ["/asyncmem"] * 2
    port = client.cluster.scheduler.http_server.port
    assert "Dask Diagnostic UI" in fetch(port, "/status")
    assert "Dask: asyncmem" in fetch(port, "/asyncmem")

    def drawn() -> dict[str, tuple[Any, ...]]:
        with pull_session(url=f"http://127.0.0.1:{port}/asyncmem") as session:
            (source,) = session.document.select({"type": ColumnDataSource})
            assert session.document.title == "Dask: asyncmem"
            rows = zip(*(source.data[column] for column in ("pool", "live", "limit", "label")), strict=True)
            return {pool: tuple(row) for pool, *row in rows}  # with those of the process that no plugin opened

    until(lambda: drawn().get("worker 0", (0,))[0] == 2 * MIB)
    found = drawn()
    assert found["worker 0"] == (2 * MIB, 8 * MIB, "  2 MiB")
    assert found["worker 1"] == (0, 8 * MIB, "  0 B")
    held.free()


def test_the_page_is_behind_the_prefix_of_the_dashboard() -> None:
    """As `dask scheduler --dashboard-prefix` has it, and in a scheduler without a dashboard at the root."""
    for prefix, options in (("/some/cluster", {"http_prefix": "/some/cluster/"}), ("", {"dashboard": False})):
        cluster = LocalCluster(
            n_workers=0, processes=False, dashboard_address=":0", silence_logs=logging.CRITICAL,
            scheduler_kwargs=options,
        )  # fmt: skip
        with cluster, Client(cluster) as client:
            assert client.run_on_scheduler(add_page) == f"{prefix}/asyncmem"
            port = client.cluster.scheduler.http_server.port
            page = fetch(port, f"{prefix}/asyncmem")
            scripts = re.findall(r'src="([^"?]*static/[^"?]*)', page)
            assert scripts
            for script in scripts:
                fetch(port, urljoin(f"{prefix}/asyncmem", script))
            with pull_session(url=f"http://127.0.0.1:{port}{prefix}/asyncmem") as session:
                assert session.document.title == "Dask: asyncmem"


def test_a_scheduler_preloads_its_page(client: Client) -> None:
    """With the same module as workers do."""
    client.sync(dask_setup.callback, client.cluster.scheduler, None, "auto")
    assert "Dask: asyncmem" in fetch(client.cluster.scheduler.http_server.port, "/asyncmem")


def test_a_heartbeat_that_is_under_way_goes_on(client: Client) -> None:
    """Dask awaits one metric after the other, and ends a worker whose metrics change meanwhile."""
    worker = workers(client)[0]

    async def beat() -> dict[str, Any]:
        entered, go = asyncio.Event(), asyncio.Event()

        async def slow(_: Worker) -> int:
            entered.set()
            await go.wait()
            return 1

        worker.metrics = {"slow": slow, **worker.metrics}
        beating = asyncio.ensure_future(worker.get_metrics())
        await entered.wait()
        await worker.plugin_add(PoolPlugin("host", limit="8 MiB"))
        await worker.plugin_remove("asyncmem")
        await worker.plugin_add(PoolPlugin("host", limit="8 MiB"))
        go.set()
        await beating
        return await worker.get_metrics()

    assert "asyncmem" in client.sync(beat)


def test_who_records_nothing_is_told_how_to(client: Client, tmp_path: Path) -> None:
    """As are those whose folder cannot be."""
    client.register_plugin(PoolPlugin("host", limit="8 MiB"))
    with pytest.raises(InvalidRequest, match="PoolPlugin\\(record="):
        records(client)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        client.register_plugin(PoolPlugin("host", limit="8 MiB", record=str(tmp_path / "file")))
    for wrong in ("", "a\0b", 3):
        with pytest.raises((InvalidRequest, TypeError)):
            PoolPlugin("host", record=wrong)  # type: ignore[arg-type]
