"""How the memory of a pipeline is divided, so that no stage can take what another one needs to go on.

What a stage has allocated is held until the stages behind it are done with it. A stage with credit has a range of
memory of its own, in which each item takes all its credit at once, or waits. The last of them therefore always goes on,
once its earlier items have left; so its input leaves the stage before it, which therefore goes on; and so on to the
first.

Stages without credit share what is left. A stage and all before it together are held to that without what is kept for
the stages behind. The same follows for items that need no more than an equal part of what is left, as long as free
memory is not in pieces.

A stage that declares `credit=0` takes nothing, and nothing is kept for it. That is not learnt from items: say three
stages have room for three items, the last two have taken nothing so far, and the oldest item has one of the three. If
the next item may take another now, a single one is left, and the oldest may by its part want two, and never end. If it
may not, no two items are under way side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.core import GRANULE
from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_count, format_size
from asyncmem.pipeline.stage import StageShare
from asyncmem.pool import Budget, Lease

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from asyncmem.devices import Stream
    from asyncmem.pipeline.stage import AnyStage
    from asyncmem.pool.share import Share

IN_FLIGHT = 4
"""Items under way for each worker of the pipeline, where nothing else is said."""

AHEAD = 2
"""Items that may be begun for each worker of a stage of several, while the order of an earlier one is waited for."""


RESULTS = 2
"""Items for which the last stage has room besides: a loop holds one result while it waits for the next. As that lies
anywhere in the stage's range, two more leave room for an item on one side of it."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage's part of the plan. Sizes are bytes."""

    kept: int
    """What is kept free for it: a range of its own if it has credit, else what those before it leave."""
    limit: int
    """What it may hold; without credit, together with those before it that have none either."""
    window: int
    """How many items it may have begun beyond the oldest that it has not passed on."""


def divide(stages: Sequence[AnyStage], limit: int, *, final: bool = True) -> list[StagePlan]:
    """Divide a pool's limit between stages in their order.

    Args:
        stages: Those that use the pool.
        limit: Bytes that it may have.
        final: Whether what the last of them makes are results.

    Raises:
        InvalidRequest: One item for each worker of all stages is more than the limit; the text has the sum.
    """
    results = [0] * (len(stages) - 1) + [RESULTS if final else 0]
    needs = [granules(stage.credit or 0) * (stage.workers + more) for stage, more in zip(stages, results, strict=True)]
    spare = limit - sum(needs)
    unknown = any(stage.credit is None for stage in stages)
    if spare < 0 or (unknown and spare < GRANULE * len(stages)):
        raise InvalidRequest("limit", Described(format_size(limit)), _sum(stages, needs, results, unknown=unknown))
    weights = _weights(stages, needs)
    # No stage has more items than are under way, so the range of one with credit need not be longer.
    most = IN_FLIGHT * sum(stage.workers for stage in stages) + RESULTS
    kept = [
        min(need + spare * weight // max(sum(weights), 1), granules(stage.credit or limit) * most) // GRANULE * GRANULE
        for stage, need, weight in zip(stages, needs, weights, strict=True)
    ]
    shared = limit - sum(own for stage, own in zip(stages, kept, strict=True) if stage.credit)
    plans = []
    for stage, own in zip(reversed(stages), reversed(kept), strict=True):
        most = own if stage.credit is not None else max(shared, GRANULE)
        plans.append(StagePlan(kept=own, limit=most, window=_window(stage, own)))
        shared -= own if stage.credit is None else 0
    return plans[::-1]


def _weights(stages: Sequence[AnyStage], needs: Sequence[int]) -> list[int]:
    """Weigh what is left over by need; a stage of unknown need counts as the average of the others."""
    known = [need for need in needs if need]
    average = sum(known) // len(known) if known else 1
    return [average if stage.credit is None else need for stage, need in zip(stages, needs, strict=True)]


def _window(stage: AnyStage, kept: int) -> int:
    most = stage.workers * AHEAD if stage.workers > 1 else 1
    return most if not stage.credit else min(most, kept // granules(stage.credit))


def granules(nbytes: int) -> int:
    """Return the bytes that a buffer of so many is counted as."""
    return -(-nbytes // GRANULE) * GRANULE


def _sum(stages: Sequence[AnyStage], needs: Sequence[int], results: Sequence[int], *, unknown: bool) -> str:
    parts = [
        f"{stage.name} ({_holders(stage.workers, more)}) x {format_size(stage.credit)} = {format_size(need)}"
        for stage, need, more in zip(stages, needs, results, strict=True)
        if stage.credit
    ]
    others = ", and some for stages without credit" if unknown else ""
    return f"at least {format_size(sum(needs))}: {' + '.join(parts)}{others}"


def _holders(workers: int, results: int) -> str:
    return format_count(workers, "worker") + (f" and {results} for results" if results else "")


class StageBudget(StageShare["Stream | None"], Budget):
    """The share of a stage that has not said what it needs; of one that has, all of its items' memory.

    That is over a range of memory, and `waits` for what becomes free there and nowhere else: what is in pieces
    elsewhere is no matter. As an item takes its lease at once and in one piece, and earlier items leave, the range is
    whole again sooner or later; so every item gets its lease.
    """

    def __init__(
        self, parent: Share, name: str, limit: int, stream: Stream | None, *, waits: bool | None = None
    ) -> None:
        """Not made by users; see `Pipeline`."""
        super().__init__(parent, name, limit, waits=waits)
        self.stream = stream


class StageLease(StageShare["Stream | None"], Lease):
    """The share of a stage for one item: all of its credit, at once and in one piece."""

    def __init__(self, share: StageBudget, credit: int) -> None:
        """Not made by users; see `Pipeline`."""
        super().__init__(share, credit, stream=share.stream)
        self.stream = share.stream


async def reserve_ranges(parent: Share, sizes: Sequence[int], tag: str, until: ExitStack) -> list[Lease]:
    """Wait for ranges of memory, all or none, so that none is held during the wait; return their leases.

    Args:
        parent: Where the memory comes from.
        sizes: The lengths of the ranges in bytes.
        tag: A label for reports.
        until: Ends the leases.

    Cancelled: nothing was taken.
    """
    leases = [parent.lease(nbytes) for nbytes in sizes]
    if leases:
        batch = await parent.allocate_batch(sizes, tag=tag)
        for lease, buffer in zip(leases, batch, strict=True):
            until.push(lease._enter(buffer))
    return leases
