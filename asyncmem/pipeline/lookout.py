"""Finds out that no stage can ever go on, which the plan excludes as long as it is kept to and memory is in one piece.

It is certain when everybody who could free something waits: each worker that has an item waits for memory, each
consumer for a result, nothing of the pool is held by others, no result is held any more, and no memory is on its way.
It is looked for now and then, and said only of a pipeline that has not moved since the last look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asyncmem.errors import DeadlockError, DeviceError
from asyncmem.facts import OwnerInfo
from asyncmem.figures import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from asyncmem.pipeline.station import Station
    from asyncmem.pool import Budget
    from asyncmem.pool.share import Share


class Lookout:
    """Watches the stations of a pipeline.

    Args:
        stations: All of them, in order.
        tops: The budgets that hold what they allocate, one for each pool.
        consumers_wait: Tells whether everybody who could let go of a result waits for another, and has none.
    """

    def __init__(self, stations: Sequence[Station], tops: Sequence[Budget], consumers_wait: Callable[[], bool]) -> None:
        self._stations = stations
        self._tops = tops
        self._consumers_wait = consumers_wait

    async def watch(self) -> None:
        """Look three times in the pool's `stall_after`, and fail the last stage that waits once nobody can go on."""
        idle = False
        last: object = None
        while (patience := self._tops[0]._opened.options.stall_after) is not None:
            await anyio.sleep(patience / 3)
            state = self._state()
            suspect = state == last and self._consumers_wait() and self._alone()
            if suspect and idle:
                self._give_up()
            # What devices still do may free memory. Once it is done, the pool has until the next look to notice.
            idle = suspect and await self._devices_are_idle()
            last = state

    async def _devices_are_idle(self) -> bool:
        try:
            for top in self._tops:
                await top._opened.device.record_all()
        except DeviceError:
            return False  # whoever works there is told
        return True

    def _state(self) -> object:
        cores = [top._core for top in self._tops]
        pools = [(core.scheduler.gauges()["progress"], core.counts().frees) for core in cores]
        return pools, [(station.items, station.at_work) for station in self._stations]

    def _alone(self) -> bool:
        """Return whether all of the memory is held by items under way, and none is coming."""
        for top in self._tops:
            core = top._core
            if core.scheduler.gauges()["under_way"] or core.exported_bytes:
                return False
            if core.live() != core.account(top._account).live:
                return False
        return True

    def _give_up(self) -> None:
        waiting = [self._waiting_at(station) for station in self._stations]
        all_wait = all(
            len(requests) >= station.at_work for station, requests in zip(self._stations, waiting, strict=True)
        )
        stuck = next((at for at in reversed(range(len(waiting))) if waiting[at]), None)
        if all_wait and stuck is not None:
            share = self._stations[stuck].share
            share._core.fail(waiting[stuck][0]["id"], self._verdict(share, waiting))

    @staticmethod
    def _waiting_at(station: Station) -> list[dict[str, Any]]:
        share = station.share
        return [one for one in share._core.requests() if one["account"] == share._account]

    def _verdict(self, share: Share, waiting: Sequence[Sequence[dict[str, Any]]]) -> DeadlockError:
        owners = [
            OwnerInfo(
                owner=f"stage {station.stage.name}",
                held=station.share.stats().allocated_bytes,
                waiting=sum(one["nbytes"] for one in requests),
                age=max(one["age"] for one in requests),
            )
            for station, requests in zip(self._stations, waiting, strict=True)
            if requests
        ]
        core, opened = share._core, share._opened
        pieces = f"of {format_size(opened.limit - core.live())} free, {format_size(core.largest())} are in one piece"
        hints = [pieces, "raise the limit", "say by @stage(credit=...) how much one item needs"]
        return DeadlockError(pool=opened.name, owners=owners, hints=hints)
