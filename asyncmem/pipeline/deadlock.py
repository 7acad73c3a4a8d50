"""Detects a deadlock of a pipeline: no stage can ever go on.

The plan excludes that as long as stages keep to it and free memory is in one piece. The proof: each worker that has an
item waits for memory, each consumer waits for a result and holds none, others hold nothing of the pool, and no memory
is on its way. The detector checks three times in `stall_after`, and needs checks without progress in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asyncmem.errors import DeadlockError, DeviceError
from asyncmem.facts import OwnerInfo
from asyncmem.figures import format_size
from asyncmem.pipeline.resources import pool_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncmem.pipeline.run import ActiveStage
    from asyncmem.pool import AsyncMemoryPool, Budget
    from asyncmem.stats import WaiterInfo


async def watch(stages: Sequence[ActiveStage], budgets: Sequence[Budget], consumers_wait: Callable[[], bool]) -> None:
    """Look three times in the pool's `stall_after`, and fail the last waiting stage once none can go on.

    Args:
        stages: All of a pipeline's stages, in order.
        budgets: The budgets that hold what they allocate, one for each pool.
        consumers_wait: Tells whether all consumers wait for a result, and hold none.
    """
    pools = [pool_of(budget) for budget in budgets]
    idle = False
    last: object = None
    while (stall_after := pools[0].options.stall_after) is not None:
        await anyio.sleep(stall_after / 3)
        state = [_moved(pool) for pool in pools], [(active.items, active.at_work) for active in stages]
        suspect = state == last and consumers_wait() and all(map(_holds_all, budgets, pools))
        if suspect and idle:
            _fail_last(stages)
        # What devices still do may free memory. Once it is done, the pool has until the next look to notice.
        idle = suspect and await _are_idle(pools)
        last = state


def _moved(pool: AsyncMemoryPool) -> object:
    one = pool.stats()
    return one.num_allocations, one.num_frees, one.grows, one.trims, one.spills, one.returns, one.waiting


def _holds_all(budget: Budget, pool: AsyncMemoryPool) -> bool:
    """Return whether all of the memory is held by items under way, and none is coming."""
    whole = pool.stats()
    return not (whole.growing or whole.exported_bytes) and whole.allocated_bytes == budget.stats().allocated_bytes


async def _are_idle(pools: Sequence[AsyncMemoryPool]) -> bool:
    try:
        for pool in pools:
            await pool.device.record_all()
    except DeviceError:
        return False  # the work there gets the error
    return True


def _fail_last(stages: Sequence[ActiveStage]) -> None:
    waiting = [active.share.waiters() for active in stages]
    stuck = [active.share for active, requests in zip(stages, waiting, strict=True) if requests]
    if stuck and all(len(requests) >= active.at_work for active, requests in zip(stages, waiting, strict=True)):
        stuck[-1]._fail_first(_error(pool_of(stuck[-1]), stages, waiting))


def _error(
    pool: AsyncMemoryPool, stages: Sequence[ActiveStage], waiting: Sequence[Sequence[WaiterInfo]]
) -> DeadlockError:
    owners = [
        OwnerInfo(
            owner=f"stage {active.stage.name}",
            held=active.share.stats().allocated_bytes,
            waiting=sum(one.nbytes for one in requests),
            age=max(one.age for one in requests),
        )
        for active, requests in zip(stages, waiting, strict=True)
        if requests
    ]
    stats = pool.stats()
    free = (stats.limit or 0) - stats.allocated_bytes
    pieces = f"of {format_size(free)} free, {format_size(stats.largest_hole)} are in one piece"
    hints = [pieces, "raise the limit", "state by @stage(credit=...) how much one item needs"]
    return DeadlockError(pool=pool.name, owners=owners, hints=hints)
