"""Gives the stages of a pipeline their places: the shares that its plan says, and their streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncmem.pipeline.plan import divide
from asyncmem.pipeline.share import Region, StageBudget, ranges
from asyncmem.pipeline.station import Station
from asyncmem.pipeline.streams import Lent
from asyncmem.pool import AsyncMemoryPool, Budget
from asyncmem.runtime import device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices import Stream
    from asyncmem.pipeline.plan import AnyStage, Quota
    from asyncmem.pool.share import Share


class Settled(NamedTuple):
    """Stages at their places.

    Attributes:
        stations: The stages' own, in order.
        tops: The budgets that hold what they allocate, one for each device.
        lent: The streams that were named and not given, for each device.
    """

    stations: list[Station]
    tops: list[Budget]
    lent: list[Lent]

    def end(self) -> None:
        """Give all of it back."""
        for top in self.tops:
            top.close()
        for lent in self.lent:
            lent.give_back()


async def settle(name: str, stages: Sequence[AnyStage], pool: Share) -> Settled:
    """Open the pools; make the stations of stages, and what they have.

    Raises:
        InvalidRequest: The credits are more than a pool's limit; nothing has been made then.
    """
    roots = [await _root(stage, pool) for stage in stages]
    groups = {id(root): [at for at, other in enumerate(roots) if other is root] for root in roots}
    plans = [
        (group, divide([stages[at] for at in group], roots[group[0]].capacity(), final=group[-1] == len(stages) - 1))
        for group in groups.values()
    ]
    stations: dict[int, Station] = {}
    settled = Settled([], [], [])
    try:
        for group, quotas in plans:
            root = roots[group[0]]
            top, lent = Budget(root, name, root.capacity()), Lent(root._opened)
            settled.tops.append(top)
            settled.lent.append(lent)
            made = await _make(top, lent, [stages[at] for at in group], quotas)
            stations |= zip(group, made, strict=True)
    except BaseException:
        settled.end()
        raise
    settled.stations.extend(stations[at] for at in range(len(stages)))
    return settled


async def _root(stage: AnyStage, pool: Share) -> Share:
    if isinstance(pool, AsyncMemoryPool):
        await pool.open()
    if stage.device is None or stage.device == pool._opened.device.name:
        return pool
    other = device(stage.device).pool
    await other.open()
    return other


async def _make(top: Budget, lent: Lent, stages: Sequence[AnyStage], quotas: Sequence[Quota]) -> list[Station]:
    """Make the shares, the last first.

    A stage with credit has a region. The others have budgets, each beside a budget that holds all before it to what is
    not kept for it.
    """
    streams: dict[str, Stream] = {}
    stations = []
    joint = top
    sizes = [quota.kept for stage, quota in zip(stages, quotas, strict=True) if stage.credit]
    grounds = await ranges(top, sizes, top.name)
    for stage, quota in zip(reversed(stages), reversed(quotas), strict=True):
        stream = _stream(stage, lent, streams)
        if stage.credit:
            share: StageBudget = Region(grounds.pop(), stage.name, stream)
        else:
            joint = Budget(joint, f"{top.name}, up to {stage.name}", quota.limit)
            share = StageBudget(joint, stage.name, quota.limit, stream)
        stations.append(Station(stage, quota, share))
    return stations[::-1]


def _stream(stage: AnyStage, lent: Lent, made: dict[str, Stream]) -> Stream | None:
    """Answer a stage's stream; those that it names by the same name are the same."""
    wanted = stage.stream
    if wanted is None:
        return None
    if not isinstance(wanted, str):
        return lent.device.stream_of(wanted)
    if wanted not in made:
        made[wanted] = lent.stream(wanted)
    return made[wanted]
