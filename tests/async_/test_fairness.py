"""Who came first is served first, nobody is overtaken by more than the bypass budget, and nobody barges in."""

import itertools
import random

import anyio
import pytest

from asyncmem import AsyncMemoryPool
from tests.conservation import whole, within_limit

from .loops import Run
from .support import LIMIT, MIB, stepped_pool, turns


class Race:
    """Tasks that note the order in which they are served."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self.pool = pool
        self.served: list[str] = []

    async def run(self, name: str, mib: int, priority: int = 0, hold: float = 1) -> None:
        async with self.pool.allocate_async(mib * MIB, priority=priority):
            self.served.append(name)
            await anyio.sleep(hold)


def test_equal_requests_are_served_in_order_of_arrival(virtually: Run) -> None:
    """Ten requests for everything are served one after the other as they came."""

    async def main() -> list[str]:
        async with stepped_pool() as pool, anyio.create_task_group() as group:
            race = Race(pool)
            for number in range(10):
                group.start_soon(race.run, str(number), 8)
                await turns(2)
        return race.served

    assert virtually(main) == [str(number) for number in range(10)]


@pytest.mark.hazard("H6")
def test_newcomer_cannot_take_what_was_freed_for_a_waiter(virtually: Run) -> None:
    """Between a release and the waiter's next step no door gives the bytes to somebody else."""

    async def main() -> None:
        async with stepped_pool(bypass=0) as pool:
            held = await pool.allocate_async(LIMIT)
            waiter = pool.allocate_async(LIMIT)
            held.free()
            assert pool.try_allocate(512) is None
            newcomer = pool.allocate_async(512)
            assert waiter.done()
            assert not newcomer.done()
            waiter.result().free()
            assert newcomer.done()
            newcomer.result().free()
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H6")
def test_newcomer_is_refused_while_the_freed_bytes_do_not_suffice(virtually: Run) -> None:
    """In strict order what is freed piece by piece stays for the head, whoever asks by whatever door."""

    async def main() -> None:
        async with stepped_pool(bypass=0) as pool:
            pieces = [await pool.allocate_async(2 * MIB) for _ in range(4)]
            head = pool.allocate_async(8 * MIB)
            for piece in pieces:
                assert pool.try_allocate(MIB) is None
                late = pool.allocate_async(MIB)
                assert not late.done()
                late.cancel()
                piece.free()
            assert head.done()
            head.result().free()
            within_limit(pool)

    virtually(main)


@pytest.mark.hazard("H7")
def test_large_requests_are_overtaken_by_no_more_than_the_bypass_budget(virtually: Run) -> None:
    """A hundred large requests among small ones each see at most twice the limit granted past them."""
    overtaking = Overtaking()

    async def main() -> None:
        async with stepped_pool() as pool:
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(overtaking.ask_often, pool, random.Random(number), 1, 150)
                for number in range(10):
                    group.start_soon(overtaking.ask_often, pool, random.Random(-number), 20, 10)
            whole(pool)

    virtually(main)
    assert overtaking.large == 100
    assert 0 < overtaking.worst <= 2 * LIMIT


@pytest.mark.hazard("H7")
@pytest.mark.parametrize("budget", [0, 2 * MIB, 5 * MIB])
def test_hits_that_pass_growth_keep_to_the_same_budget(virtually: Run, budget: int) -> None:
    """Where memory goes and comes all the time, those who hit meanwhile pass each large one by no more than that."""
    overtaking, ended, passed = Overtaking(), anyio.Event(), 0

    async def main() -> None:
        nonlocal passed
        limit = 64 * MIB
        async with stepped_pool(limit, segment_size=MIB, bypass=budget / limit) as pool:
            async with anyio.create_task_group() as group:
                group.start_soon(trim_often, pool)
                async with anyio.create_task_group() as askers:
                    for number in range(8):
                        askers.start_soon(overtaking.ask_often, pool, random.Random(number), 1, 100)
                    for number in range(4):
                        askers.start_soon(overtaking.ask_often, pool, random.Random(-number), 20, 25)
                ended.set()
            passed = pool.stats().bypassed_bytes
            whole(pool)

    async def trim_often(pool: AsyncMemoryPool) -> None:
        while not ended.is_set():
            await pool.trim()
            await anyio.sleep(0.3)

    virtually(main)
    assert overtaking.large == 100
    assert overtaking.worst <= budget
    assert (passed > 0) == (budget > 0)


class Overtaking:
    """Counts, for every large request, the bytes granted to later ones before it."""

    def __init__(self) -> None:
        self.large = 0
        self.worst = 0
        self._arrivals = itertools.count()
        self._passed: dict[int, int] = {}

    async def ask_often(self, pool: AsyncMemoryPool, random_: random.Random, quarters: int, times: int) -> None:
        for _ in range(times):
            nbytes = random_.randrange(quarters, quarters + 9) * MIB // 4
            arrival = next(self._arrivals)
            if quarters > 1:
                self._passed[arrival] = 0
            request = pool.allocate_async(nbytes)
            request.add_done_callback(lambda _, arrival=arrival, nbytes=nbytes: self._granted(arrival, nbytes))
            async with request:
                await anyio.sleep(random_.random())

    def _granted(self, arrival: int, nbytes: int) -> None:
        for number in self._passed:
            if number < arrival:
                self._passed[number] += nbytes
        if arrival in self._passed:
            self.large += 1
            self.worst = max(self.worst, self._passed.pop(arrival))


def test_small_requests_pass_a_head_that_does_not_fit(virtually: Run) -> None:
    """Within the budget a smaller request goes first, so that memory is used; once it is spent, order is strict."""

    async def main() -> list[bool]:
        async with stepped_pool(bypass=0.5) as pool:
            held = await pool.allocate_async(4 * MIB)
            head = pool.allocate_async(8 * MIB)
            passed = []
            for _ in range(4):
                small = pool.allocate_async(2 * MIB)
                passed.append(small.done())
                small.cancel()
                del small
            held.free()
            head.result().free()
            return passed

    assert virtually(main) == [True, True, False, False]


def test_higher_priority_is_served_first(virtually: Run) -> None:
    """Among waiters the larger priority goes first, and equal ones by arrival."""

    async def main() -> list[str]:
        async with stepped_pool(bypass=10) as pool, anyio.create_task_group() as group:
            race = Race(pool)
            group.start_soon(race.run, "holder", 8)
            await turns(2)
            for name, priority in {"low": -1, "normal": 0, "high": 1, "also high": 1}.items():
                group.start_soon(race.run, name, 8, priority)
                await turns(2)
        return race.served

    assert virtually(main) == ["holder", "high", "also high", "normal", "low"]


@pytest.mark.hazard("H7")
def test_low_priority_ages(virtually: Run) -> None:
    """A waiter of low priority that was overtaken by the whole budget is served before the next urgent one."""

    async def main() -> list[str]:
        async with stepped_pool() as pool, anyio.create_task_group() as group:
            race = Race(pool)
            group.start_soon(race.run, "holder", 8)
            await turns(2)
            group.start_soon(race.run, "low", 8, -1)
            await turns(2)
            for number in range(6):
                group.start_soon(race.run, f"urgent {number}", 8, 1)
                await turns(2)
        return race.served

    assert virtually(main).index("low") == 3


def test_a_budget_that_is_used_up_holds_nobody_else_up(virtually: Run) -> None:
    """Requests that wait for room in their budget stand in no one else's way."""

    async def main() -> None:
        async with stepped_pool() as pool:
            small = pool.budget("small", limit=2 * MIB)
            held = await small.allocate_async(2 * MIB)
            waiting = small.allocate_async(MIB)
            assert not waiting.done()
            assert small.stats().waiting == 1
            outside = pool.allocate_async(6 * MIB)
            assert outside.done()
            outside.result().free()
            held.free()
            assert waiting.done()
            waiting.result().free()
            whole(pool)

    virtually(main)
