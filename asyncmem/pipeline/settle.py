"""Gives the stages of a pipeline their places: the shares that its plan says, and their streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.pipeline.plan import divide
from asyncmem.pipeline.share import Region, StageBudget, ranges
from asyncmem.pipeline.station import Station
from asyncmem.pool import AsyncMemoryPool, Budget
from asyncmem.runtime import device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices import Stream
    from asyncmem.pipeline.plan import AnyStage, Quota
    from asyncmem.pool.share import Share


async def settle(name: str, stages: Sequence[AnyStage], pool: Share) -> tuple[list[Station], list[Budget]]:
    """Open the pools; make the stations of stages in their order, and the budgets that hold them, one for each device.

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
    tops: list[Budget] = []
    try:
        for group, quotas in plans:
            root = roots[group[0]]
            tops.append(Budget(root, name, root.capacity()))
            made = await _make(tops[-1], [stages[at] for at in group], quotas)
            stations |= zip(group, made, strict=True)
    except BaseException:
        for top in tops:
            top.close()
        raise
    return [stations[at] for at in range(len(stages))], tops


async def _root(stage: AnyStage, pool: Share) -> Share:
    if isinstance(pool, AsyncMemoryPool):
        await pool.open()
    if stage.device is None or stage.device == pool.flow.pool.device.name:
        return pool
    other = device(stage.device).pool
    await other.open()
    return other


async def _make(top: Budget, stages: Sequence[AnyStage], quotas: Sequence[Quota]) -> list[Station]:
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
        stream = _stream(stage, top, streams)
        if stage.credit:
            share: StageBudget = Region(grounds.pop(), stage.name, stream)
        else:
            joint = Budget(joint, f"{top.name}, up to {stage.name}", quota.limit)
            share = StageBudget(joint, stage.name, quota.limit, stream)
        stations.append(Station(stage, quota, share))
    return stations[::-1]


def _stream(stage: AnyStage, top: Budget, made: dict[str, Stream]) -> Stream | None:
    """Answer a stage's stream; those that it names by the same name are the same."""
    wanted, home = stage.stream, top.flow.pool.device
    if wanted is None:
        return None
    if not isinstance(wanted, str):
        return home.stream_of(wanted)
    if wanted not in made:
        made[wanted] = home.create_stream(wanted)
    return made[wanted]
