"""What the step sweeps play over a real pool: each scenario holds in every order and under any one cancellation."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial

import anyio

from asyncmem import (
    AsyncMemoryPool,
    Budget,
    BufferReleased,
    LeakWarning,
    PoolClosed,
    PoolTimeout,
    RequestCancelled,
    Spillable,
)
from tests.conservation import idle, whole
from tests.sweeps import Scenario, Stage

from .support import LIMIT, MIB, quick_device, staged, stepped_pool, turns

SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__] = play  # type: ignore[attr-defined]  # a function has a name
    return play


async def use(stage: Stage, pool: AsyncMemoryPool, mib: int, *, hold: float = 1, priority: int = 0) -> None:
    """Wait for memory, keep it for a while, and give it back at the end of the block."""
    async with stage.watch(pool.allocate_async(mib * MIB, priority=priority)):
        await anyio.sleep(hold)


async def keep(stage: Stage, pool: AsyncMemoryPool | Budget, mib: int) -> None:
    """Do the same without a block, so that nobody counts as the holder."""
    buffer = await stage.watch(pool.allocate_async(mib * MIB))
    try:
        await turns(2)
    finally:
        buffer.free()


@scenario
async def one_waiter(stage: Stage) -> None:
    async with staged(stage) as pool:
        stage.actor("holder", partial(use, stage, pool, 8))
        stage.actor("waiter", partial(use, stage, pool, 8))


@scenario
async def mixed_sizes(stage: Stage) -> None:
    async with staged(stage) as pool:
        for name, mib in {"holder": 6, "five": 5, "one": 1, "three": 3, "eight": 8}.items():
            stage.actor(name, partial(keep, stage, pool, mib))


@scenario
async def big_head_with_small_followers(stage: Stage) -> None:
    async with staged(stage, bypass=0.25) as pool:
        stage.actor("holder", partial(use, stage, pool, 4))
        stage.actor("head", partial(use, stage, pool, 8))
        for name in ("small", "tiny"):
            stage.actor(name, partial(use, stage, pool, 2))


@scenario
async def impatient_head(stage: Stage) -> None:
    """The holder goes on only once the small one behind the head has been served, so the head must let it through."""
    async with staged(stage, bypass=0) as pool:
        served = anyio.Event()

        async def hold() -> None:
            async with stage.watch(pool.allocate_async(6 * MIB)):
                await served.wait()

        async def give_up() -> None:
            with anyio.move_on_after(5):
                await use(stage, pool, 8)

        async def follow() -> None:
            try:
                await use(stage, pool, 2)
            finally:
                served.set()

        stage.actor("holder", hold)
        await anyio.sleep(1)
        stage.actor("head", give_up)
        await anyio.sleep(1)
        stage.actor("follower", follow)


@scenario
async def batches_among_singles(stage: Stage) -> None:
    async with staged(stage) as pool:

        async def batch(*sizes: int) -> None:
            async with stage.watch(pool.allocate_batch([mib * MIB for mib in sizes])) as parts:
                assert [part.nbytes // MIB for part in parts] == list(sizes)
                await turns(2)

        stage.actor("holder", partial(keep, stage, pool, 7))
        stage.actor("batch", partial(batch, 1, 2, 4))
        stage.actor("single", partial(keep, stage, pool, 3))
        stage.actor("pair", partial(batch, 2, 2))


@scenario
async def lease_with_inner_allocations(stage: Stage) -> None:
    async with staged(stage) as pool:

        async def lease() -> None:
            async with (
                pool.lease(6 * MIB) as lease,
                stage.watch(lease.allocate_async(2 * MIB)),
                lease.allocate_async(4 * MIB),
            ):
                await turns()

        stage.actor("lease", lease)
        stage.actor("other", lease)
        stage.actor("outside", partial(keep, stage, pool, 4))


@scenario
async def budgets_within_budgets(stage: Stage) -> None:
    async with staged(stage) as pool:
        outer = pool.budget("outer", limit=6 * MIB)
        inner = outer.budget("inner", limit=3 * MIB)
        for name, (share, mib) in {
            "inner": (inner, 3),
            "second": (inner, 2),
            "outer": (outer, 5),
            "pool": (pool, 4),
        }.items():
            stage.actor(name, partial(keep, stage, share, mib))
        await stage.finish()
        idle(outer)
        idle(inner)


@scenario
async def priorities(stage: Stage) -> None:
    async with staged(stage) as pool:
        stage.actor("holder", partial(use, stage, pool, 8))
        for name, priority in {"low": -1, "normal": 0, "high": 5}.items():
            stage.actor(name, partial(use, stage, pool, 5, priority=priority))


@scenario
async def growth_in_flight(stage: Stage) -> None:
    """Nothing is mapped when the requests come, and segments are small: they grow and go in the midst of it."""
    async with staged(stage, segment_size=2 * MIB) as pool:
        for name, mib in {"first": 2, "second": 4, "third": 6}.items():
            stage.actor(name, partial(keep, stage, pool, mib))


@scenario
async def growth_inside_budgets(stage: Stage) -> None:
    """Memory is made for one request of a full budget while others stand behind it there, one of them not for long."""
    async with staged(stage, segment_size=2 * MIB) as pool:
        outer = pool.budget("outer", limit=5 * MIB)
        inner = outer.budget("inner", limit=4 * MIB)

        async def limited() -> None:
            with suppress(PoolTimeout):
                async with stage.watch(outer.allocate_async(2 * MIB, timeout=1)):
                    await turns()

        stage.actor("first", partial(keep, stage, inner, 4))
        stage.actor("limited", limited)
        stage.actor("second", partial(keep, stage, inner, 3))
        stage.actor("pool", partial(keep, stage, pool, 4))
        await stage.finish()
        idle(outer)
        idle(inner)


@scenario
async def memory_of_another_stream(stage: Stage) -> None:
    """What comes back still has work of its stream before it; the next stream is ordered behind that, or waits."""
    device = quick_device()
    async with staged(stage, device=device) as pool:
        streams = [device.create_stream(name) for name in ("left", "right")]

        async def work(at: int, mib: int) -> None:
            stream = streams[at]
            async with stage.watch(pool.allocate_async(mib * MIB, stream=stream)) as buffer:
                stream.launch(1.0, writes=[buffer])
                await turns()

        for name, at, mib in ("left", 0, 5), ("right", 1, 5), ("small", 0, 2), ("last", 1, 8):
            stage.actor(name, partial(work, at, mib))


@scenario
async def timeout_and_grant_in_the_same_tick(stage: Stage) -> None:
    async with staged(stage) as pool:

        async def limited() -> None:
            try:
                async with stage.watch(pool.allocate_async(4 * MIB, timeout=5)) as buffer:
                    assert buffer.alive
            except PoolTimeout:
                pass

        stage.actor("holder", partial(use, stage, pool, 8, hold=5))
        stage.actor("first", limited)
        stage.actor("second", limited)


@scenario
async def dropped_without_an_await(stage: Stage) -> None:
    async with staged(stage) as pool:

        async def drop() -> None:
            waiting = stage.watch(pool.allocate_async(4 * MIB))
            try:
                await turns(3)
            finally:
                # Also under a cancellation, whose traceback would keep what the frame still has.
                stage.watch(_Nothing())
                del waiting
            await turns()

        stage.actor("holder", partial(use, stage, pool, 6))
        stage.actor("dropper", drop)
        stage.actor("waiter", partial(keep, stage, pool, 4))


class _Nothing:
    """A request that is over: lets the stage forget the one before it."""

    def cancel(self) -> bool:
        return False


@scenario
async def result_beside_await(stage: Stage) -> None:
    """Two tasks await one request: both see the same buffer, which is free once both have let go."""
    async with staged(stage) as pool:
        seen: list[object] = []
        held = await pool.allocate_async(LIMIT)
        requests = [pool.allocate_async(5 * MIB)]

        async def wait() -> None:
            # The last awaiter to be cancelled takes the request with it, also from somebody who comes only then.
            with suppress(RequestCancelled):
                seen.append(await requests[0])
                assert requests[0].result() is seen[0]

        async def release() -> None:
            try:
                await turns(3)
            finally:
                held.free()

        stage.actor("holder", release)
        stage.actor("one", wait)
        stage.actor("two", wait)
        await stage.finish()
        assert len({id(buffer) for buffer in seen}) <= 1
        requests.clear()
        seen.clear()


@scenario
async def close_while_they_wait(stage: Stage) -> None:
    """Whoever waits hears that the pool is closed; whoever holds may free later."""
    pool = stepped_pool(segment_size=2 * MIB)

    async def refused(mib: int) -> None:
        with suppress(PoolClosed):
            await use(stage, pool, mib, hold=0)

    async def close() -> None:
        await turns(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LeakWarning)  # somebody may hold a buffer just now
            await pool.aclose()

    await pool.open()
    for name, mib in {"first": 5, "second": 8, "third": 2}.items():
        stage.actor(name, partial(refused, mib))
    stage.actor("closer", close)
    await stage.finish()
    await pool.aclose()
    whole(pool)


@scenario
async def resize_and_trim_while_they_wait(stage: Stage) -> None:
    async with staged(stage, segment_size=2 * MIB) as pool:

        async def manage() -> None:
            await turns()
            pool.resize(limit=6 * MIB)
            await pool.trim()
            pool.empty_cache()
            pool.resize(limit=LIMIT)

        stage.actor("holder", partial(keep, stage, pool, 4))
        stage.actor("waiter", partial(keep, stage, pool, 6))
        stage.actor("manager", manage)
        await stage.finish()
        pool.resize(limit=LIMIT)


@scenario
async def spilled_and_brought_home(stage: Stage) -> None:
    """Three halves take turns over two: one actor wants two at once, another one of these, one needs plain memory."""
    async with staged(stage, spill_limit=2 * LIMIT) as pool:
        halves = [pool.spillable(await pool.allocate_async(LIMIT // 2)) for _ in range(3)]

        async def both() -> None:
            async with halves[0], halves[1]:
                await turns(2)

        async def one() -> None:
            async with halves[2] as buffer:
                await turns()
                assert buffer.alive

        async def limited() -> None:
            with suppress(PoolTimeout):
                async with halves[1].use(timeout=5):
                    await turns()

        stage.actor("both", both)
        stage.actor("one", one)
        stage.actor("limited", limited)
        stage.actor("plain", partial(keep, stage, pool, 6))
        await stage.finish()
        assert pool.stats().spills > 0
        for half in halves:
            half.free()
        whole(pool._host_pool("spilled"))


@scenario
async def spilled_within_a_budget(stage: Stage) -> None:
    """The budget is full and the pool is not: its memory moves for whoever the budget holds up, and comes home."""
    async with staged(stage, spill_limit=LIMIT) as pool:
        budget = pool.budget("half", limit=LIMIT // 2)
        quarters = [pool.spillable(await budget.allocate_async(LIMIT // 4)) for _ in range(3)]

        async def both() -> None:
            async with quarters[0], quarters[1]:
                await turns(2)

        stage.actor("both", both)
        stage.actor("plain", partial(keep, stage, budget, 3))
        stage.actor("other", partial(keep, stage, pool, 2))
        await stage.finish()
        assert pool.stats().spills > 0
        for quarter in quarters:
            quarter.free()
        idle(budget)
        whole(pool._host_pool("spilled"))


@scenario
async def spilled_within_a_lease(stage: Stage) -> None:
    """A lease, where nobody waits for another, has its memory moved for a request, and passes it on at its end."""
    async with staged(stage, spill_limit=LIMIT) as pool:
        kept: list[Spillable] = []

        async def lease() -> None:
            async with pool.lease(4 * MIB) as lease:
                kept.extend([pool.spillable(await lease.allocate_async(MIB)) for _ in range(4)])
                async with stage.watch(lease.allocate_async(2 * MIB)):
                    await turns()
                async with kept[0] as buffer:
                    await turns()
                    assert buffer.alive

        stage.actor("lease", lease)
        stage.actor("outside", partial(keep, stage, pool, 8))
        await stage.finish()
        for one in kept:
            async with one as buffer:
                assert buffer.alive
            one.free()
        whole(pool._host_pool("spilled"))


@scenario
async def freed_while_it_moves(stage: Stage) -> None:
    """A handle is freed, and another one dropped, while they move for a request and come home for a use."""
    async with staged(stage, spill_limit=2 * LIMIT) as pool:
        halves = [pool.spillable(await pool.allocate_async(LIMIT // 2)) for _ in range(3)]

        async def free() -> None:
            try:
                await turns(2)
                halves[0].free()
                await turns()
            finally:
                del halves[1:]

        async def use() -> None:
            with suppress(BufferReleased):
                async with halves[0]:
                    await turns(2)

        stage.actor("user", use)
        stage.actor("plain", partial(keep, stage, pool, 6))
        stage.actor("freer", free)
        await stage.finish()
        halves[0].free()
        halves.clear()
        whole(pool._host_pool("spilled"))


@scenario
async def newcomers_beside_a_waiter(stage: Stage) -> None:
    """`try_allocate` finds nothing while somebody waits, however much has just been freed."""
    async with staged(stage) as pool:

        async def barge() -> None:
            for _ in range(4):
                waiting = bool(pool.waiters())
                found = pool.try_allocate(MIB)
                assert not (waiting and found), "a newcomer was served before the one who waits"
                del found
                await turns()

        stage.actor("holder", partial(use, stage, pool, 8, hold=0))
        stage.actor("waiter", partial(use, stage, pool, 8, hold=0))
        stage.actor("barger", barge)
