"""Eight threads use pools in every way, while others ask how they are: each answer has to be right in itself.

    python tests/soak/onlookers.py --hours 1

Time is the simulated device's, which the work of the threads moves on. It ends with one line of figures, and with an
error that names the seed where an answer contradicts itself or the one before, or anything unexpected was raised.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from prometheus_client.registry import CollectorRegistry

from asyncmem import (
    AsyncMemoryPool,
    Budget,
    BufferReleased,
    Lease,
    OutOfMemoryError,
    PoolClosed,
    PoolStats,
    PoolTimeout,
    Pressure,
)
from asyncmem.devices import Latencies, Simulated
from asyncmem.insight import serve_live
from asyncmem.insight.live.client import ask
from asyncmem.insight.prometheus import PoolCollector
from tests.conservation import whole

MIB = 1 << 20
LIMIT = 32 * MIB
LOWEST = 16 * MIB
USERS = 8
GROWING = (
    "num_allocations", "num_frees", "hits_stream", "hits_shared", "num_cache_misses", "grows", "trims", "waits",
    "wait_seconds", "longest_wait", "growth_waits", "growth_seconds", "bypassed_bytes", "timeouts", "cancellations",
    "driver_calls", "peak_allocated", "peak_reserved",
)  # fmt: skip
"""Figures that never go down: nobody resets them here."""


def agree(stats: PoolStats, before: PoolStats | None = None) -> None:
    """Raise `AssertionError` where the figures of a pool, budget or lease contradict each other or those before."""
    claims = {
        "active <= allocated": 0 <= stats.active_bytes <= stats.allocated_bytes,
        "no buffer holds nothing": (stats.active_buffers > 0) >= (stats.allocated_bytes > 0),
        "waiting": (stats.waiting > 0) == (stats.waiting_bytes > 0) and stats.waiting >= 0,
        "growing": (stats.growing > 0) == (stats.growing_bytes > 0) and stats.growing >= 0,
        "peak": stats.allocated_bytes <= stats.peak_allocated,
        "pressure": stats.pressure == Pressure.of(stats.allocated_bytes / (stats.limit or 1)),
        "within the limit": max(stats.peak_allocated, stats.peak_reserved) <= max(LIMIT, stats.limit),
    }
    if stats.total_memory:  # a pool
        claims |= {
            "allocated and cached are reserved": stats.allocated_bytes + stats.cached_bytes == stats.reserved_bytes,
            "what is held up is cached": 0 <= stats.inactive_split_bytes <= stats.cached_bytes,
            "what has a fence is cached": 0 <= stats.pending_fence_bytes <= stats.cached_bytes,
            "the hole is cached": 0 <= stats.largest_hole <= stats.cached_bytes,
            "reserved is below its peak": stats.reserved_bytes <= stats.peak_reserved,
            "memory is in segments": (stats.segments > 0) == (stats.reserved_bytes > 0),
            "buffers are allocations less frees": stats.active_buffers == stats.num_allocations - stats.num_frees >= 0,
            "segments are grows less trims, and fewer while some go back": stats.segments <= stats.grows - stats.trims,
            "each came from somewhere": stats.num_cache_hits + stats.num_cache_misses == stats.num_allocations,
        }
    if before is not None:
        claims |= {name: getattr(before, name) <= getattr(stats, name) for name in GROWING}
    wrong = [claim for claim, holds in claims.items() if not holds]
    if wrong:
        raise AssertionError(f"{'; '.join(wrong)}: {stats}, after {before}")


class Crowd:
    """Those who use a pool, and those who look on."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed = seed
        self.seconds = seconds
        self.device = Simulated(2 * LIMIT, latencies=Latencies.zero(), page=4096, check_order=False)
        self.pool = AsyncMemoryPool(self.device, limit=LIMIT, segment_size=2 * MIB, stall_after=None, name="crowd")
        self.budgets: dict[int, Budget] = {}
        self.leases: dict[int, Lease] = {}
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self.counts: Counter[str] = Counter()

    def run(self, wall: float = float("inf")) -> Counter[str]:
        """Let them be, for so many seconds of the device's time or of the wall's; return what they have done.

        Raises:
            AssertionError: An answer was wrong, or something is lost.
        """
        end = time.monotonic() + wall
        users = [threading.Thread(target=self._guard, args=(self._use, number)) for number in range(USERS - 1)]
        users.append(threading.Thread(target=self._guard, args=(self._run_loop, USERS - 1)))
        looks = [self._look_at_pool, self._look_at_shares, self._collect, self._ask]
        onlookers = [threading.Thread(target=self._guard, args=(self._look_on, look)) for look in looks]
        with serve_live(), self.pool:
            for thread in [*users, *onlookers]:
                thread.start()
            while not self.over.wait(0.05) and time.monotonic() < end and self.device.now < self.seconds:
                pass
            self.over.set()
            for thread in [*users, *onlookers]:
                thread.join(60)
                if thread.is_alive():
                    raise AssertionError(f"seed {self.seed}: {thread.name} never ends: {self.pool.waiters()}")
            if self.errors:
                raise AssertionError(f"seed {self.seed}: {self.errors}") from self.errors[0]
            self.pool.resize(limit=LIMIT)
            whole(self.pool)
            agree(self.pool.stats())
        self.counts["virtual seconds"] = int(self.device.now)
        return self.counts

    def _guard(self, play: Callable[..., None], *arguments: object) -> None:
        try:
            play(*arguments)
        except BaseException as error:  # noqa: BLE001  # the run fails with it
            self.errors.append(error)
            self.over.set()

    # -- users -------------------------------------------------------------------------------------------------------

    def _use(self, number: int) -> None:
        draw = random.Random(f"{self.seed} {number}")
        stream = self.device.create_stream(str(number))
        plays = [self._single, self._single, self._single, self._batch, self._lease, self._change, self._other_pool]
        while not self.over.is_set():
            play = draw.choices(plays, (8, 8, 8, 4, 3, 2, 0.2))[0]
            with contextlib.suppress(PoolTimeout, OutOfMemoryError, PoolClosed):  # of a budget that another has closed
                play(draw, stream, number)
            self.counts[play.__name__] += 1
            self.device.advance(draw.random() * 0.02)

    def _share(self, draw: random.Random) -> AsyncMemoryPool | Budget:
        budgets = list(self.budgets.values())
        return draw.choice(budgets) if budgets and draw.random() < 0.4 else self.pool

    def _single(self, draw: random.Random, stream: object, _: int) -> None:
        size = draw.choice([draw.randrange(1, 4096), draw.randrange(1, 8 * MIB)])
        with self._share(draw).allocate(size, stream=stream, timeout=draw.choice([None, 0.001, 0.01])):
            time.sleep(draw.choice([0, 0, 0.0001]))

    def _batch(self, draw: random.Random, stream: object, _: int) -> None:
        request = self._share(draw).allocate_batch([draw.randrange(0, MIB) for _ in range(4)], stream=stream)
        request.block(draw.random() * 0.002)
        if request.done() or not request.cancel():
            assert request.block(60), request  # it is being granted
            request.result().free()

    def _lease(self, draw: random.Random, stream: object, number: int) -> None:
        with self._share(draw).lease(draw.randrange(1, 2 * MIB), stream=stream, timeout=0.01) as lease:
            self.leases[number] = lease
            inner = [lease.try_allocate(draw.randrange(1, MIB)) for _ in range(3)]
            time.sleep(draw.choice([0, 0.0001]))
            del inner

    def _change(self, draw: random.Random, _: object, number: int) -> None:
        match draw.randrange(4):
            case 0:
                self.pool.empty_cache()
            case 1:
                self.pool.resize(limit=draw.choice([LIMIT, LOWEST]))
            case _:
                budget = self.budgets.pop(number, None)
                if budget is None:
                    self.budgets[number] = self.pool.budget(f"of {number}", limit=draw.randrange(MIB, LOWEST))
                else:
                    budget.close()

    def _other_pool(self, draw: random.Random, _: object, number: int) -> None:
        with AsyncMemoryPool(Simulated(latencies=Latencies.zero()), limit=LIMIT, name=f"pool of {number}") as pool:
            held = pool.allocate(draw.randrange(1, LIMIT))
            agree(pool.stats())
            held.free()

    def _run_loop(self, number: int) -> None:
        asyncio.run(self._be_a_loop(random.Random(f"{self.seed} {number}")))

    async def _be_a_loop(self, draw: random.Random) -> None:
        async def follow() -> None:
            last = None
            async for level in changes:
                assert level != last, f"told {level} twice"
                last = level
                self.counts["pressure"] += 1

        async def want() -> None:
            with contextlib.suppress(PoolTimeout, OutOfMemoryError, PoolClosed):
                async with self._share(draw).allocate_async(draw.randrange(1, 12 * MIB), timeout=draw.random() * 0.05):
                    await asyncio.sleep(draw.random() * 0.002)

        changes = self.pool.pressure_changes()
        tasks = {asyncio.create_task(follow())}
        follower = next(iter(tasks))
        while not self.over.is_set():
            tasks.add(asyncio.create_task(want()))
            await asyncio.sleep(draw.random() * 0.001)
            if draw.random() < 0.3:
                draw.choice([one for one in tasks if one is not follower]).cancel()
            for task in [one for one in tasks if one.done()]:
                tasks.discard(task)
                if not task.cancelled():
                    task.result()
            self.counts["awaited"] += 1
        follower.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- onlookers ---------------------------------------------------------------------------------------------------

    def _look_on(self, look: Callable[[dict[str, PoolStats]], None]) -> None:
        before: dict[str, PoolStats] = {}
        while not self.over.is_set():
            look(before)
            self.counts[look.__name__] += 1
            time.sleep(0.001)  # or they would be all that runs

    def _look_at_pool(self, before: dict[str, PoolStats]) -> None:
        stats = self.pool.stats()
        agree(stats, before.get("pool"))
        before["pool"] = stats
        assert "crowd" in repr(self.pool)
        assert "crowd" in self.pool.summary()
        for one in self.pool.segments():
            assert 0 <= one.live <= one.live + one.largest_hole <= one.nbytes, one
        for waiter in self.pool.waiters():
            assert waiter.nbytes > 0, waiter
            assert waiter.age >= 0, waiter

    def _look_at_shares(self, _: dict[str, PoolStats]) -> None:
        for share in [*self.budgets.values(), *self.leases.values()]:
            with contextlib.suppress(PoolClosed, BufferReleased):
                agree(share.stats())
                share.waiters()
            assert "of " in repr(share)

    def _collect(self, _: dict[str, PoolStats]) -> None:
        registry = CollectorRegistry()
        registry.register(PoolCollector())
        found = {
            one.name: {sample.labels["pool"]: sample.value for sample in one.samples} for one in registry.collect()
        }
        for pool, reserved in found["asyncmem_pool_reserved_bytes"].items():
            parts = [found[f"asyncmem_pool_{name}_bytes"][pool] for name in ("allocated", "cached")]
            assert sum(parts) == reserved, (pool, parts, reserved)

    def _ask(self, _: dict[str, PoolStats]) -> None:
        for pool in ask(os.getpid(), 30)["pools"]:
            stats = {name: value for name, value in pool["stats"].items() if name in PoolStats.__dataclass_fields__}
            agree(PoolStats(**{**stats, "pressure": Pressure[stats["pressure"]]}))  # type: ignore[arg-type]  # from JSON


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="of the device's time")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--switch", type=float, default=sys.getswitchinterval(), help="seconds between threads' turns")
    options = parser.parse_args()
    sys.setswitchinterval(options.switch)
    started = time.monotonic()
    counts = Crowd(options.seed, options.hours * 3600).run()
    print(f"seed {options.seed}, {time.monotonic() - started:.1f} s: {dict(counts)}")  # noqa: T201  # what it is for


if __name__ == "__main__":
    main()
