"""The queue in which the tasks of a run wait."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from asyncmem.devices.awaiting import AsyncioSleeper
from asyncmem.pipeline import tasks
from asyncmem.pipeline.tasks import ItemQueue

WAITING = 2_000


class Counted(AsyncioSleeper):
    """Counts how often one is looked for among those that wait."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return self is other

    def __hash__(self) -> int:
        Counted.looks += 1
        return id(self)


@pytest.mark.asyncio
async def test_thousands_that_wait_leave_in_any_order_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a run of so many workers: none is looked for among all the others."""
    monkeypatch.setattr(tasks, "sleeper_here", lambda _: Counted(asyncio.get_running_loop()))
    queue = ItemQueue[Any]()
    waiting = [asyncio.create_task(queue.get()) for _ in range(WAITING)]
    await asyncio.sleep(0)
    assert queue.getters == WAITING
    Counted.looks = 0
    leaving = random.Random(7).sample(waiting, WAITING - 1)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    assert Counted.looks <= 10 * WAITING
    (last,) = set(waiting) - set(leaving)
    queue.put("value")
    assert await last == "value"
    assert (queue.getters, len(queue)) == (0, 0)
