"""A budget that is closed takes nobody's memory away, lets nobody wait for ever, and leaves nothing in the books."""

from __future__ import annotations

import anyio
import pytest

from asyncmem import PoolClosed

from .loops import Run
from .support import MIB, stepped_pool


def test_closing_a_budget_ends_who_waits_in_it_and_in_its_parts(virtually: Run) -> None:
    """Requests that wait for room in it, or in a budget inside it, get `PoolClosed`; others wait on."""

    async def main() -> None:
        ended: list[str] = []
        async with stepped_pool() as pool:
            outer = pool.budget("outer", limit=4 * MIB)
            inner = outer.budget("inner", limit=2 * MIB)
            held = await inner.allocate_async(2 * MIB)
            rest = await pool.allocate_async(6 * MIB)

            async def wait(share_of: str, nbytes: int) -> None:
                share = {"inner": inner, "outer": outer, "pool": pool}[share_of]
                try:
                    await share.allocate_async(nbytes)
                except PoolClosed:
                    ended.append(share_of)

            async with anyio.create_task_group() as group:
                for name in ("inner", "outer", "pool"):
                    group.start_soon(wait, name, 2 * MIB)
                await anyio.wait_all_tasks_blocked()
                assert {one.share for one in pool.waiters()} == {inner.name, outer.name, pool.name}
                outer.close()
                outer.close()
                await anyio.wait_all_tasks_blocked()
                assert sorted(ended) == ["inner", "outer"]
                assert [one.nbytes for one in pool.waiters()] == [2 * MIB]
                rest.free()
            held.free()

    virtually(main)


def test_buffers_outlive_their_budget_and_count_in_the_pool(virtually: Run) -> None:
    """What is held stays valid and live in the pool; once it is freed, the next budget finds a clean book."""

    async def main() -> None:
        async with stepped_pool() as pool:
            budget = pool.budget("part", limit=2 * MIB)
            held = await budget.allocate_async(2 * MIB)
            budget.close()
            assert held.alive
            assert pool.stats().allocated_bytes == 2 * MIB
            held.free()
            accounts = set()
            for _ in range(5):
                again = pool.budget("part", limit=2 * MIB)
                accounts.add(again._account)
                assert again.stats().peak_allocated == 0
                (await again.allocate_async(2 * MIB)).free()
                again.close()
            assert len(accounts) <= 2  # books are used again
            pool.check()

    virtually(main)


def test_every_door_of_a_closed_budget_is_shut(virtually: Run) -> None:
    """Each way to ask says that the budget has been closed; none serves from the pool instead."""

    async def main() -> None:
        async with stepped_pool() as pool:
            budget = pool.budget("part", limit=2 * MIB)
            budget.close()
            assert "closed" in repr(budget)
            doors = (budget.allocate_async, budget.allocate, budget.try_allocate)
            for door in doors:
                with pytest.raises(PoolClosed, match="'part' is closed: the budget has been closed"):
                    door(MIB)
            with pytest.raises(PoolClosed):
                budget.budget("inner", limit=MIB)
            with pytest.raises(PoolClosed):
                budget.stats()

    virtually(main)


def test_leases_leave_nothing_in_the_books_either(virtually: Run) -> None:
    """However many leases there have been, also with budgets inside and buffers that outlive them."""

    async def main() -> None:
        async with stepped_pool() as pool:
            accounts = set()
            for number in range(6):
                async with pool.lease(2 * MIB) as lease:
                    accounts.add(lease._account)
                    inner = lease.budget("inner", limit=MIB)
                    accounts.add(inner._account)
                    held = await inner.allocate_async(MIB)
                if number % 2:  # its lease has closed it
                    inner.close()
                assert held.alive
                held.free()
            assert len(accounts) <= 4  # books are used again
            pool.check()

    virtually(main)
