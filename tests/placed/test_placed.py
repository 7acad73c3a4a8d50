"""Pipelines over workers: the same results, order and failures as in one process, by every kind of link."""

import asyncio
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from distributed import Client

import asyncmem
from asyncmem import InvalidRequest
from asyncmem.distributed import current_item, runner
from asyncmem.distributed.frames import HELLO, HELLO_META, pack
from asyncmem.distributed.link import connect, need_tls
from asyncmem.distributed.placed import PlacedPipeline
from asyncmem.errors import StageError, StageLost
from asyncmem.pipeline import Pipeline, stage
from asyncmem.pipeline.stage import AnyStage

from .machines import Machine
from .stages import SIZE, Homely, Sample, at_home, decode, double, expected, incomplete, passes, three, warned

MIB = 1 << 20
links = pytest.mark.parametrize("share", [True, False], ids=["share", "tcp"])


async def on_workers(address: str, call: Callable[..., object]) -> list[Any]:
    """Call a function on all workers."""
    options = {"asynchronous": True, "set_as_default": False}
    async with Client(address, **options) as client:  # type: ignore[no-untyped-call]  # of Dask
        return list((await client.run(call)).values())


async def runners(address: str) -> int:
    """How many pipelines the workers have."""

    async def count(dask_worker: Any) -> int:
        return len((await runner.Service.of(dask_worker)).runners)

    return sum(await on_workers(address, count))


@pytest.mark.asyncio
async def test_a_plan_that_does_not_begin_leaves_nothing(scheduler: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that have taken their parts give them back at once when the client cannot go on."""

    async def fail(_: object) -> None:
        assert await runners(scheduler.address) == 3
        raise OSError("no connection")

    monkeypatch.setattr("asyncmem.distributed.session.Session.open", fail)
    with pytest.raises(StageLost, match="no connection"):
        await three().place(scheduler.address, timeout=2.0).__aenter__()
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
async def test_a_plan_that_is_cancelled_leaves_nothing(scheduler: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its workers are just taking their parts."""
    prepare = PlacedPipeline._prepare
    with anyio.CancelScope() as scope:

        async def cancel(*arguments: Any) -> None:
            scope.cancel()
            await prepare(*arguments)

        monkeypatch.setattr(PlacedPipeline, "_prepare", cancel)
        await three().place(scheduler.address, timeout=20.0).__aenter__()
    assert scope.cancelled_caught
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_in_a_plan_leaves_nothing(
    scheduler: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` and Ctrl-C do it: no scope shields from that."""
    prepare, pipe = PlacedPipeline._prepare, three().place(scheduler.address, timeout=60.0)

    async def cancel(one: Any, session: Any, told: bytes, node: int) -> None:
        await prepare(one, session, told, node)
        if node == session.nodes()[0]:
            task.cancel()
            await asyncio.sleep(0)

    monkeypatch.setattr(PlacedPipeline, "_prepare", cancel)
    task = asyncio.ensure_future(pipe.__aenter__())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("stages", [[at_home], [at_home, at_home]], ids=["client", "worker"])
async def test_a_record_that_cannot_be_made_elsewhere_is_named(scheduler: Machine, stages: list[AnyStage]) -> None:
    """Whatever its class raises, there or with the client; no worker is lost by it, and the next run works."""
    text = f"'{'results' if len(stages) == 1 else 'at_home'}' failed at item 1: .*cannot be made: RuntimeError"
    options: dict[str, Any] = {"types": [Homely], "share": False, "window": SIZE + 4096}  # of an item, which comes back
    async with Pipeline(*stages).place(scheduler.address, **options) as pipe:
        for _ in range(3):
            with pytest.raises(StageError, match=text) as caught:
                [y async for y in pipe.map([None, 1, None])]
            assert not isinstance(caught.value, StageLost)
        assert [y async for y in pipe.map([None] * 5)] == [None] * 5
    assert pipe.report().lost == ()
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
async def test_a_pool_that_is_closed_under_a_pipeline_fails_its_items(scheduler: Machine) -> None:
    """By the error of the pool, and no task is cancelled."""
    pool = asyncmem.AsyncMemoryPool("host", limit="64 MiB")
    async with Pipeline(decode, pool=pool).place(scheduler.address, share=False) as pipe:
        with pytest.warns(asyncmem.LeakWarning, match="64 MiB"):  # what the pipeline has of it
            await pool.aclose()
        with pytest.raises(StageError, match="PoolClosed") as caught:
            [y async for y in pipe.map(range(3))]
        assert isinstance(caught.value.__cause__, asyncmem.PoolClosed)
    assert pipe.report().lost == ()  # it was no worker
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
@links
async def test_results_come_as_in_one_process(scheduler: Machine, share: bool) -> None:
    """All of them, in order, and again in a second run; then no worker has anything of it."""
    async with three().place(scheduler.address, share=share, window="256 KiB") as pipe:
        kinds = {edge.kind for edge in pipe.plan().edges}
        assert kinds == {"share" if share else "tcp"}
        assert repr(pipe).endswith(": open>")
        assert "decode" in str(pipe.plan())
        assert [y async for y in pipe.map(range(60))] == expected(60)
        assert [value for _, value in [y async for y in pipe.map(range(30))]] == [2.0 * n for n in range(30)]
        assert sorted([y[1] async for y in pipe.map(range(20), ordered=False)]) == [2.0 * n for n in range(20)]
    assert repr(pipe).endswith(": not open>")
    report = pipe.report()
    assert [(one.name, one.items, one.workers) for one in report.stages] == [
        ("decode", 110, 1), ("double", 110, 2), ("total", 110, 1)
    ]  # fmt: skip
    assert 0 < report.stages[0].peak_bytes <= report.limit_bytes
    assert await runners(scheduler.address) == 0


@stage(credit="1 MiB")
async def passes_on(item: Any, pool: Any) -> Any:
    """Return what came, and a buffer."""
    buffer = await pool.allocate_async(1000)
    memoryview(buffer)[:] = bytes(range(250)) * 4
    return item, buffer


@stage(credit="1 MiB")
async def looks(pair: Any, pool: Any) -> Any:
    """Return all of it, the buffer as an array."""
    del pool
    item, buffer = pair
    assert isinstance(buffer, asyncmem.Buffer)
    copied = np.empty(1000, "u1")
    await buffer.copy_to(copied)
    assert copied.tobytes() == memoryview(buffer)
    return item, buffer.view("uint16", (500,)), np.float32(0.5), b"x" * 5000


@pytest.mark.asyncio
@links
async def test_items_may_be_anything_that_needs_no_pickle(scheduler: Machine, share: bool) -> None:
    """Arrays of numpy, large and small, bytes, records, and what contains them, through two other processes."""
    large, small = np.arange(100_000, dtype="i4").reshape(100, 1000), np.arange(3, dtype=">f8")
    item = {"a": [large, None, -1, 1.5], 7: (small, b"abc", bytearray(b"d"), "text", True), "r": Sample(3, large[::2])}
    async with Pipeline(passes_on, looks).place(scheduler.address, share=share, types=[Sample]) as pipe:
        ((same, pixels, half, data),) = [y async for y in pipe.map([item])]
    assert same[7][1:] == item[7][1:]  # type: ignore[index]  # a tuple
    assert type(same[7][2]) is bytearray
    np.testing.assert_array_equal(same["a"][0], large)
    np.testing.assert_array_equal(same["r"].pixels, large[::2])
    assert same[7][0].dtype == small.dtype
    assert (same["a"][1:], same["r"].number, half, data) == ([None, -1, 1.5], 3, np.float32(0.5), b"x" * 5000)
    assert pixels.numpy().tobytes() == bytes(range(250)) * 4


@stage(credit=SIZE)
async def fails_at_seven(item: int, pool: Any) -> int:
    """Fail."""
    del pool
    if item == 7:
        raise KeyError("seven")
    return item


@pytest.mark.asyncio
async def test_a_stage_that_fails_ends_the_run_as_in_one_process(scheduler: Machine) -> None:
    """The error names stage and item, and has the stage's own as its cause; the next run begins anew."""
    async with Pipeline(fails_at_seven).place(scheduler.address) as pipe:
        for first in (0, 5):
            got = []
            with pytest.raises(StageError, match="'fails_at_seven' failed at item") as caught:  # noqa: PT012  # as it is used
                async for y in pipe.map(range(first, 20)):
                    got.append(y)  # noqa: PERF401  # what came before counts
            assert isinstance(caught.value.__cause__, KeyError)
            assert caught.value.item == 7 - first
            assert got == list(range(first, first + len(got)))
        assert [y async for y in pipe.map(range(8, 20))] == list(range(8, 20))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (object(), r"item: expected arrays.*place\(cluster, types="),
        (np.zeros(MIB, "u1"), r"place\(cluster, window="),
        (incomplete(), r"AttributeError: .*pixels"),
    ],
    ids=["pickle", "large", "incomplete"],
)
async def test_an_item_that_cannot_go_fails_its_run(scheduler: Machine, item: object, reason: str) -> None:
    """What needs pickle, what is larger than the window, and records that have lost a part; with what to do."""
    async with Pipeline(fails_at_seven).place(scheduler.address, window=SIZE, types=[Sample]) as pipe:
        with pytest.raises(StageError, match=f"stage 'source' failed at item 0: .*{reason}"):
            [y async for y in pipe.map([item])]  # type: ignore[list-item]  # on purpose
        assert [y async for y in pipe.map([1])] == [1]


@stage(credit=0)
async def loses_a_part(item: int, pool: Any) -> Sample:
    """Make a record that cannot go on."""
    del item, pool
    return incomplete()


@pytest.mark.asyncio
async def test_a_result_that_cannot_go_fails_its_run(scheduler: Machine) -> None:
    """By the stage that has made it, whatever error it is."""
    async with Pipeline(loses_a_part).place(scheduler.address, types=[Sample]) as pipe:
        with pytest.raises(StageError, match=r"stage 'loses_a_part' failed at item 0: AttributeError: .*pixels"):
            [y async for y in pipe.map([1])]
    assert pipe.report().lost == ()


@pytest.mark.asyncio
async def test_a_loop_may_be_left(scheduler: Machine) -> None:
    """What is under way is dropped, and the next run is not disturbed."""
    async with three().place(scheduler.address) as pipe:
        async with pipe.map(range(1000)) as results:
            async for _ in results:
                break
        assert [value for _, value in [y async for y in pipe.map(range(5))]] == [0.0, 2.0, 4.0, 6.0, 8.0]


async def watch_warnings(dask_worker: Any) -> None:
    """Keep what a worker warns of."""
    del dask_worker
    warned.clear()
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: warned.append(str(message))


async def warnings_of(dask_worker: Any) -> list[str]:
    """Return what a worker has warned of."""
    del dask_worker
    return warned


@pytest.mark.asyncio
async def test_results_may_be_kept_and_items_dropped(scheduler: Machine) -> None:
    """Results stay valid after the block, and no worker takes them for a leak, nor what was under way."""
    await on_workers(scheduler.address, watch_warnings)
    async with Pipeline(decode, double, passes).place(scheduler.address) as pipe:
        kept = [y async for y in pipe.map(range(5))]
        for _ in range(5):
            async with pipe.map(range(100)) as results:
                async for _ in results:
                    break
    assert [float(y.numpy()[0]) for y in kept] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert await on_workers(scheduler.address, warnings_of) == [[], [], []]


@pytest.mark.asyncio
async def test_an_error_of_the_block_is_raised_as_it_is(scheduler: Machine) -> None:
    """And the workers have nothing left."""
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the block is what it is about
        async with three().place(scheduler.address) as pipe:
            async for _ in pipe.map(range(1000)):
                raise ZeroDivisionError
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
async def test_a_slow_consumer_holds_all_stages_back(scheduler: Machine) -> None:
    """No stage makes more than there is room for behind it."""
    async with three().place(scheduler.address, share=False, window="256 KiB") as pipe:
        taken = 0

        def source() -> Any:
            nonlocal taken
            while True:
                taken += 1
                yield taken

        async with pipe.map(source(), in_flight=100) as results:
            async for _ in results:
                await asyncio.sleep(0.3)
                break
            assert taken <= 17 + 100


@pytest.mark.asyncio
async def test_what_comes_from_strangers_ends_their_connection_alone(scheduler: Machine) -> None:
    """A worker's links take no bytes without a token, and the pipeline goes on."""
    async with three().place(scheduler.address) as pipe:
        address = pipe.plan().nodes[1].address
        hello = pack(HELLO, HELLO_META.size) + HELLO_META.pack(bytes(16), 0)
        for junk in (b"GET / HTTP/1.1\r\n\r\n" * 10, hello, pack(HELLO, 3) + b"abc", bytes(100_000)):
            link = await connect(address, None, silence=5.0)
            await link.write(junk[: 1 << 16])
            await link.ended.wait()
        assert [y async for y in pipe.map(range(20))] == expected(20)


PROGRAM = f"""
import asyncio, sys
from importlib.util import find_spec
from distributed import LocalCluster
from distributed.security import Security
from asyncmem.distributed.link import connect
sys.path.append({str(Path(__file__).parents[1])!r})
from placed.stages import expected, three

async def main(security, **options):
    cluster = LocalCluster(
        n_workers=2, processes=False, asynchronous=True, dashboard_address=None, memory_limit="256 MiB",
        security=security, **options,
    )
    async with cluster, three().place(cluster, share=False, ucx=True) as pipe:
        lines = str(pipe.plan()).splitlines()[-2:]
        why = "the cluster demands encryption" if security else "No module named 'ucxx'"
        by_ucx = any(edge.kind == "ucx" for edge in pipe.plan().edges)
        assert by_ucx == (not security and find_spec("ucxx") is not None)
        assert by_ucx or all("no UCX" in line and why in line for line in lines), lines
        assert [y async for y in pipe.map(range(20))] == expected(20)
        link = await connect(pipe.plan().nodes[1].address, None, silence=5.0)
        if security:  # what has no certificate gets no answer
            await link.write(bytes(1000))
            await link.ended.wait()
        link.close()

asyncio.run(main(Security.temporary(), protocol="tls://") if "tls" in sys.argv else main(None))
"""


@pytest.mark.parametrize("words", [[], ["tls"]], ids=["plain", "tls"])
def test_workers_of_one_process_will_do(tmp_path: Path, words: list[str]) -> None:
    """As in programs that try things out, also with TLS; in a process of their own, for Dask leaves sockets open."""
    subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, check=True)


@pytest.mark.asyncio
async def test_a_plan_that_does_not_fit_is_refused(scheduler: Machine) -> None:
    """Before anything runs, with the sums."""
    with pytest.raises(InvalidRequest, match=r"limit of host on tcp://.*: expected at least .* stage decode"):
        async with three().place(scheduler.address, limit="1 MiB", window="1 MiB"):
            pass
    with pytest.raises(InvalidRequest, match="a Dask cluster or client"):
        three().place(object())
    for timeout in (0, -1, "soon"):
        with pytest.raises(InvalidRequest, match="timeout"):
            three().place(scheduler.address, timeout=timeout)
    for types in ("int", [3], [int, None]):
        with pytest.raises(InvalidRequest, match="types"):
            three().place(scheduler.address, types=types)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
        async with three().place("tcp://127.0.0.1:1", timeout=0.2):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org", "::"])  # noqa: S104  # they are refused
def test_others_reach_no_link_without_tls(host: str) -> None:
    """Loopback needs none."""
    with pytest.raises(InvalidRequest, match=r"distributed\.Security"):
        need_tls(host, None)
    for own in ("127.0.0.1", "::1", "localhost"):
        need_tls(own, None)


def test_items_are_for_stages_alone() -> None:
    """Elsewhere there is none, and the error says so; it goes through Dask, as a task's."""
    with pytest.raises(LookupError, match="for stages") as caught:
        current_item()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_without_a_place_dask_is_not_imported(tmp_path: Path) -> None:
    """A pipeline in one process needs none of it."""
    code = (
        "import asyncio, sys, asyncmem\n"
        "from asyncmem.pipeline import Pipeline\n"
        "async def work(item, pool): return item\n"
        "async def main():\n"
        "    async with Pipeline(work, pool=asyncmem.AsyncMemoryPool('host', limit='1 MiB')) as pipe:\n"
        "        print([y async for y in pipe.map([1])], {'dask', 'distributed'} & set(sys.modules))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[1] set()\n"
