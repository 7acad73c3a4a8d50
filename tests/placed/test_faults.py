"""Workers, clients and schedulers that end, stand still or begin anew while a pipeline runs."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from distributed import Client

from asyncmem.distributed import edges, runner
from asyncmem.distributed.placed import PlacedPipeline
from asyncmem.errors import PoolClosed, StageLost
from asyncmem.pipeline import Pipeline, stage

from .machines import Machines, wait_for_end
from .stages import expected, three
from .test_placed import runners

ITEMS = 40


@stage(credit=0)
async def ends_its_process(item: int, pool: Any) -> int:
    """End like a process whose memory is out."""
    del pool
    os.kill(os.getpid(), signal.SIGKILL)
    return item


async def break_link(dask_worker: Any, *, number: int) -> None:
    """Close a link of a pipeline."""
    (active,) = (await runner.Service.of(dask_worker)).runners.values()
    active._links[number].result().close()


async def break_windows(dask_worker: Any, *, error: Exception) -> None:
    """Fail at what comes to a worker over a link."""
    del dask_worker

    async def fail(*_: object) -> None:
        raise error

    edges.Incoming.run = fail  # type: ignore[method-assign]  # in a process of its own


async def break_service(dask_worker: Any) -> None:
    """Let a worker not listen."""
    del dask_worker

    async def fail(_: object) -> None:
        raise RuntimeError("no port is left")

    runner.Service.open = fail  # type: ignore[method-assign]  # in a process of its own


async def break_stages(dask_worker: Any) -> None:
    """Let a worker not have what stages need."""
    del dask_worker

    def fail(_: object) -> None:
        raise ModuleNotFoundError("no stages")

    runner.loads = fail


async def on_worker(address: str, worker: str, call: Callable[..., object]) -> None:
    """Call a function on a worker."""
    options = {"asynchronous": True, "set_as_default": False}
    async with Client(address, **options) as client:  # type: ignore[no-untyped-call]  # of Dask
        await client.run(call, workers=[worker])


async def run(
    pipe: PlacedPipeline[int, tuple[int, float]],
    victim: int,
    step: int,
    number: signal.Signals,
    then: Callable[[], object] | None = None,
) -> None:
    """Run a pipeline over items, and send a signal to a process once so many results are there; then soon call that."""
    got = []
    if step == 0:
        os.kill(victim, number)
    async for y in pipe.map(range(ITEMS)):
        got.append(y)
        if len(got) == step:
            os.kill(victim, number)
            if then is not None:
                asyncio.get_running_loop().call_later(0.3, then)
    assert got == expected(ITEMS)


@pytest.mark.parametrize(
    ("share", "steps"), [(True, (0, 1, ITEMS // 2, ITEMS - 1)), (False, (ITEMS // 2,))], ids=["share", "tcp"]
)
def test_any_worker_may_be_killed_at_any_step(machines: Machines, share: bool, steps: tuple[int, ...]) -> None:
    """Each item's result comes exactly once and in order, and the others keep nothing."""

    async def main() -> None:
        scheduler = machines.scheduler()
        for _ in range(3):
            machines.worker(scheduler)
        for step in steps:
            for at in range(3):
                async with three().place(scheduler.address, share=share, window="512 KiB", timeout=10) as pipe:
                    used = sorted({part.node for part in pipe.plan().parts if part.workers})
                    await run(pipe, pipe.plan().nodes[used[at]].pid, step, signal.SIGKILL)
                machines.worker(scheduler)
        assert await runners(scheduler.address) == 0

    asyncio.run(main())


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [PoolClosed("window"), RuntimeError("no sense")], ids=["pool", "other"])
async def test_who_was_lost_and_why_is_said(
    machines: Machines, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """In the report and in the log, also where it is no link that has failed."""
    scheduler = machines.scheduler()
    broken, *_ = [machines.worker(scheduler) for _ in range(4)]
    await on_worker(scheduler.address, broken.address, partial(break_windows, error=error))
    async with three().place(scheduler.address, share=False, window="512 KiB") as pipe:
        assert [y async for y in pipe.map(range(ITEMS))] == expected(ITEMS)
        lost = f"{broken.address}: {type(error).__name__}: {error}"
        assert {one[: len(lost)] for one in pipe.report().lost} == {lost}
        assert f"lost: {lost}" in str(pipe.report())
    assert f"lost {lost}" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("break_it", "reason"),
    [(break_service, "RuntimeError: no port is left"), (break_stages, "ModuleNotFoundError: no stages")],
    ids=["port", "module"],
)
async def test_a_worker_that_cannot_take_part_is_said(
    machines: Machines, break_it: Callable[..., object], reason: str
) -> None:
    """The plan does without it, and says why; where none is left, the error does."""
    scheduler = machines.scheduler()
    broken, other = machines.worker(scheduler), machines.worker(scheduler)
    await on_worker(scheduler.address, broken.address, break_it)
    async with three().place(scheduler.address) as pipe:
        assert f"\n{broken.address}: takes no stage: {reason}" in str(pipe.plan())
        assert [y async for y in pipe.map(range(ITEMS))] == expected(ITEMS)
    await on_worker(scheduler.address, other.address, break_it)
    if break_it is break_stages:  # the other one listens already
        with pytest.raises(StageLost, match=f"'decode' was lost at item 0: tcp://.*: {reason}"):
            await three().place(scheduler.address).__aenter__()


@pytest.mark.asyncio
async def test_a_worker_that_stands_still_is_lost(machines: Machines) -> None:
    """After so many seconds of silence, its stages go elsewhere."""
    scheduler = machines.scheduler()
    for _ in range(4):
        machines.worker(scheduler)
    async with three().place(scheduler.address, timeout=3.0) as pipe:
        victim = pipe.plan().nodes[next(part.node for part in pipe.plan().parts if part.workers)]
        await run(pipe, victim.pid, 10, signal.SIGSTOP)
        assert victim.name not in [pipe.plan().nodes[part.node].name for part in pipe.plan().parts if part.workers]


@pytest.mark.asyncio
async def test_a_worker_that_stands_still_for_a_moment_is_waited_for(machines: Machines) -> None:
    """Nothing is placed anew."""
    scheduler = machines.scheduler()
    worker = machines.worker(scheduler)
    async with three().place(scheduler.address, timeout=20.0) as pipe:
        plan = pipe.plan()
        await run(pipe, worker.pid, 10, signal.SIGSTOP, partial(worker.signal, signal.SIGCONT))
        assert pipe.plan() is plan


@pytest.mark.asyncio
async def test_a_stage_without_a_worker_is_lost_and_named(machines: Machines) -> None:
    """When none comes in time."""
    scheduler = machines.scheduler()
    worker = machines.worker(scheduler)
    async with three().place(scheduler.address, timeout=2.0) as pipe:
        with pytest.raises(StageLost, match=r"stage 'decode' was lost at item .*: there is no worker"):
            await run(pipe, worker.pid, 5, signal.SIGKILL)
        with pytest.raises(StageLost):
            [y async for y in pipe.map([1])]


@pytest.mark.asyncio
async def test_a_worker_that_begins_anew_takes_the_stages_again(machines: Machines) -> None:
    """The only one ends, another comes, and the pipeline goes on."""
    scheduler = machines.scheduler()
    worker = machines.worker(scheduler)
    async with three().place(scheduler.address, timeout=20.0) as pipe:
        await run(pipe, worker.pid, 10, signal.SIGKILL, partial(machines.worker, scheduler))


@pytest.mark.asyncio
async def test_an_item_that_ends_its_workers_is_not_tried_for_ever(machines: Machines) -> None:
    """After three of them the stage is lost, and it is named."""
    scheduler = machines.scheduler()
    for _ in range(4):
        machines.worker(scheduler)
    async with Pipeline(ends_its_process).place(scheduler.address, timeout=10.0) as pipe:
        with pytest.raises(StageLost, match="'ends_its_process' was lost at item 0: 3 workers one after the other"):
            [y async for y in pipe.map([1])]


@pytest.mark.asyncio
@pytest.mark.parametrize("share", [True, False], ids=["share", "tcp"])
async def test_a_link_that_breaks_alone_is_made_anew(machines: Machines, share: bool) -> None:
    """Both processes live, and items without a result are sent once more."""
    scheduler = machines.scheduler()
    for _ in range(3):
        machines.worker(scheduler)
    got = []
    async with three().place(scheduler.address, share=share, timeout=20.0) as pipe:
        plan = pipe.plan()
        number = next(n for n, edge in enumerate(plan.edges) if plan.parts[edge.sender].node and edge.kind != "process")
        worker = plan.nodes[plan.parts[plan.edges[number].sender].node].name
        async for y in pipe.map(range(ITEMS)):
            got.append(y)
            if len(got) == 10:
                await on_worker(scheduler.address, worker, partial(break_link, number=number))
        assert pipe.plan() is not plan
    assert got == expected(ITEMS)


@pytest.mark.asyncio
async def test_a_client_that_is_killed_leaves_nothing(machines: Machines) -> None:
    """The workers give back all they had for it, within a second or so."""
    scheduler = machines.scheduler()
    for _ in range(3):
        machines.worker(scheduler)
    client = machines.client(scheduler, 10_000)
    assert await runners(scheduler.address) == 3
    client.signal(signal.SIGKILL)
    started = time.monotonic()
    while await runners(scheduler.address):
        assert time.monotonic() - started < 60
        await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_a_scheduler_may_begin_anew(machines: Machines) -> None:
    """Items go on without it; its workers end with it, and those of the next one take the stages."""
    scheduler = machines.scheduler()
    workers = [machines.worker(scheduler) for _ in range(2)]
    got = []
    async with three().place(scheduler.address, timeout=30.0) as pipe:
        async for y in pipe.map(range(ITEMS)):
            got.append(y)
            if len(got) == 10:
                scheduler.signal(signal.SIGKILL)
                for worker in workers:
                    worker.signal(signal.SIGKILL)
                await asyncio.to_thread(wait_for_end, scheduler)
                again = machines.scheduler(port=int(scheduler.address.rpartition(":")[2]))
                machines.worker(again)
    assert got == expected(ITEMS)
