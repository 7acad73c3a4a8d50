"""Runs the demonstration: many items at once through three stages that share one small pool."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncmem import AsyncMemoryPool
from asyncmem.cli.demonstration.plan import TOTAL_BYTES, Plan
from asyncmem.cli.demonstration.stages import Stages, stages_for
from asyncmem.cli.demonstration.ticker import Ticker
from asyncmem.devices import Device
from asyncmem.errors import PoolTimeout
from asyncmem.stats import PoolStats

REFRESH: float = 0.25
"""Seconds between two looks at the pool."""


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    stats: PoolStats
    seconds: float = 0.0
    items: int = 0
    wrong: int = 0

    @property
    def items_per_s(self) -> float:
        """Items finished a second so far."""
        return self.items / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has shown."""

    plan: Plan
    device: str
    checks: str
    progress: Progress
    longest_stall: float
    """Seconds."""
    stall_p99: float
    """Seconds."""


Show = Callable[[Progress], None]


async def run(device: Device, plan: Plan, show: Show) -> Outcome:
    """Keep the plan's items in flight for its seconds, finish those begun, and answer what happened.

    Cancelling it leaves nothing behind: every buffer is held by a `with` block, and so is the pool.
    """
    stages = stages_for(device, plan.item_bytes)
    async with AsyncMemoryPool(device, limit=plan.limit, segment_size=plan.limit // 8, name="demo") as pool:
        pipeline = Pipeline(pool, stages, plan)
        async with Ticker() as ticker:
            await pipeline.run(show, ticker)
        return Outcome(
            plan=plan,
            device=device.name,
            checks=stages.checks,
            progress=pipeline.progress(),
            longest_stall=ticker.longest,
            stall_p99=ticker.p99,
        )


class Pipeline:
    """Three stages over one pool.

    The first two have a budget each. Otherwise items that wait for their second buffer could hold all of the memory
    with their first, and none would ever finish.
    """

    def __init__(self, pool: AsyncMemoryPool, stages: Stages, plan: Plan) -> None:
        self.pool = pool
        self.stages = stages
        self.plan = plan
        self.raws = pool.budget("decode", limit=plan.stage_limit)
        self.features = pool.budget("transform", limit=plan.stage_limit)
        self._started = time.monotonic()
        self._numbers = itertools.count()
        self._items = 0
        self._wrong = 0

    async def run(self, show: Show, ticker: Ticker) -> None:
        """Begin items until the plan's time is over, finish them, and show the progress meanwhile."""
        async with asyncio.TaskGroup() as both:
            showing = both.create_task(self._show(show, ticker))
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.plan.in_flight):
                    workers.create_task(self._work())
                    # One after the other, as work comes in: all in one turn of the loop would be a stall of our own.
                    await asyncio.sleep(0)
            showing.cancel()

    def progress(self) -> Progress:
        """Look at the pool."""
        return Progress(self.pool.stats(), time.monotonic() - self._started, self._items, self._wrong)

    async def _work(self) -> None:
        deadline = self._started + self.plan.seconds
        # Items that have not begun by the deadline give up waiting; those that have are finished.
        with contextlib.suppress(PoolTimeout):
            while (left := deadline - time.monotonic()) > 0:
                right = await self._item(next(self._numbers), left)
                self._items += 1
                self._wrong += not right

    async def _item(self, index: int, patience: float) -> bool:
        nbytes, stages = self.plan.item_bytes, self.stages
        async with self.raws.allocate_async(nbytes, stream=stages.decoding, tag="raw", timeout=patience) as raw:
            stages.decode(index, raw)
            async with self.features.allocate_async(nbytes, stream=stages.transforming, tag="features") as features:
                stages.transform(raw, features)
                # The work that reads it is still queued: its memory comes back in the order of the stream.
                raw.free()
                async with self.pool.allocate_async(TOTAL_BYTES, stream=stages.reducing, tag="totals") as totals:
                    return await stages.reduce(index, features, totals)

    async def _show(self, show: Show, ticker: Ticker) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            with ticker.excused():
                show(self.progress())
