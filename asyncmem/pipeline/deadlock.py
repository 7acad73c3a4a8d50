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

    from asyncmem.pipeline.shares import ActiveStage
    from asyncmem.pool import AsyncMemoryPool, Budget
    from asyncmem.stats import WaiterInfo


class DeadlockDetector:
    """Watches the stages of a pipeline.

    Args:
        stages: All of them, in order.
        budgets: The budgets that hold what they allocate, one for each pool.
        consumers_wait: Tells whether all consumers wait for a result, and hold none.
    """

    def __init__(
        self, stages: Sequence[ActiveStage], budgets: Sequence[Budget], consumers_wait: Callable[[], bool]
    ) -> None:
        self._stages = stages
        self._budgets = budgets
        self._consumers_wait = consumers_wait

    async def watch(self) -> None:
        """Look three times in the pool's `stall_after`, and fail the last waiting stage once none can go on."""
        idle = False
        last: object = None
        while (stall_after := pool_of(self._budgets[0]).options.stall_after) is not None:
            await anyio.sleep(stall_after / 3)
            state = self._state()
            suspect = state == last and self._consumers_wait() and self._holds_all()
            if suspect and idle:
                self._fail_last()
            # What devices still do may free memory. Once it is done, the pool has until the next look to notice.
            idle = suspect and await self._devices_are_idle()
            last = state

    async def _devices_are_idle(self) -> bool:
        try:
            for budget in self._budgets:
                await pool_of(budget).device.record_all()
        except DeviceError:
            return False  # the work there gets the error
        return True

    def _state(self) -> object:
        pools = [pool_of(budget).stats() for budget in self._budgets]
        moved = [
            (one.num_allocations, one.num_frees, one.grows, one.trims, one.spills, one.returns, one.waiting)
            for one in pools
        ]
        return moved, [(active.items, active.at_work) for active in self._stages]

    def _holds_all(self) -> bool:
        """Return whether all of the memory is held by items under way, and none is coming."""
        for budget in self._budgets:
            pool = pool_of(budget).stats()
            if pool.growing or pool.exported_bytes or pool.allocated_bytes != budget.stats().allocated_bytes:
                return False
        return True

    def _fail_last(self) -> None:
        waiting = [active.share.waiters() for active in self._stages]
        all_wait = all(len(requests) >= active.at_work for active, requests in zip(self._stages, waiting, strict=True))
        stuck = next((at for at in reversed(range(len(waiting))) if waiting[at]), None)
        if all_wait and stuck is not None:
            self._stages[stuck].share._fail_first(self._error(pool_of(self._stages[stuck].share), waiting))

    def _error(self, pool: AsyncMemoryPool, waiting: Sequence[Sequence[WaiterInfo]]) -> DeadlockError:
        owners = [
            OwnerInfo(
                owner=f"stage {active.stage.name}",
                held=active.share.stats().allocated_bytes,
                waiting=sum(one.nbytes for one in requests),
                age=max(one.age for one in requests),
            )
            for active, requests in zip(self._stages, waiting, strict=True)
            if requests
        ]
        stats = pool.stats()
        free = (stats.limit or 0) - stats.allocated_bytes
        pieces = f"of {format_size(free)} free, {format_size(stats.largest_hole)} are in one piece"
        hints = [pieces, "raise the limit", "state by @stage(credit=...) how much one item needs"]
        return DeadlockError(pool=pool.name, owners=owners, hints=hints)
