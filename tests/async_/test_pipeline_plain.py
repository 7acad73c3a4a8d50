"""Stages that say nothing of their needs, or that they have none: faster with `credit=0`, and never locked up by it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

import anyio
import pytest
from rich.console import Console

from asyncmem import Buffer, InvalidRequest
from asyncmem.errors import StageError
from asyncmem.pipeline import Pipeline, PipelineReport, Stage, StageShare, stage
from asyncmem.pipeline.report import show
from asyncmem.pipeline.stage import divide
from asyncmem.testing import StepLoop, run_steps
from tests.conservation import whole

from .loops import Run
from .support import MIB, stepped_pool

Item = tuple[int, tuple[Buffer, ...]]
AnyStage = Stage[Any, Any]
ITEMS = 40
PATIENCE = 1000.0
"""Seconds of virtual time after which a pipeline counts as locked up."""


@dataclass
class Kind:
    """What a stage does with memory: takes so many bytes anew, beside what it gets or instead, or for itself alone."""

    nbytes: int
    seconds: list[float]
    fails_at: int | None = None

    async def work(self, item: Item) -> None:
        await anyio.sleep(self.seconds[item[0] % len(self.seconds)])
        if item[0] == self.fails_at:
            raise RuntimeError("told to")


def instead(kind: Kind) -> Callable[..., Coroutine[Any, Any, Item]]:
    async def instead(item: Item, pool: StageShare) -> Item:
        made = await pool.allocate_async(kind.nbytes)
        await kind.work(item)
        return item[0], (made,)

    return instead


def beside(kind: Kind) -> Callable[..., Coroutine[Any, Any, Item]]:
    async def beside(item: Item, pool: StageShare) -> Item:
        made = await pool.allocate_async(kind.nbytes)
        await kind.work(item)
        return item[0], (*item[1], made)

    return beside


def scratch(kind: Kind) -> Callable[..., Coroutine[Any, Any, Item]]:
    async def scratch(item: Item, pool: StageShare) -> Item:
        async with pool.allocate_async(kind.nbytes):
            await kind.work(item)
        return item

    return scratch


def in_place(kind: Kind) -> Callable[..., Coroutine[Any, Any, Item]]:
    async def in_place(item: Item, pool: StageShare) -> Item:  # noqa: ARG001 - it needs no memory
        await kind.work(item)
        return item

    return in_place


async def count(item: Item, pool: StageShare) -> int:  # noqa: ARG001 - likewise
    return item[0]


def credit_of(maker: Callable[..., Any]) -> int | None:
    return 0 if maker is in_place else None


def undeclared(source: AnyStage) -> AnyStage:
    """Return the same stage without credit, so that memory is kept free for it."""
    return replace(source, credit=None)


@dataclass
class Outcome:
    """Which items came out, after how long, and what failed."""

    items: list[int] = field(default_factory=list)
    seconds: float = 0.0
    error: StageError | None = None


@dataclass
class Plan:
    """A pipeline made by chance, and how it is run."""

    stages: list[AnyStage]
    kinds: list[Kind]
    limit: int
    ordered: bool
    in_flight: Any

    @classmethod
    def by(cls, chance: random.Random) -> Plan:
        """All take the same, so that free memory is never in pieces that are too short."""
        count_last = chance.random() < 0.6
        makers = [chance.choice([instead, beside, in_place, in_place, scratch]) for _ in range(chance.randint(1, 4))]
        most = chance.choice([1, 2, 3, 8]) * MIB
        limit = most * (len(makers) + count_last + chance.randint(0, 2))
        nbytes = chance.choice([most, most // 2])
        kinds = [Kind(nbytes, [chance.random() / 100 for _ in range(ITEMS)]) for _ in makers]
        stages: list[AnyStage] = [
            stage(workers=chance.choice([1, 1, 2, 3]), credit=credit_of(maker))(maker(kind))
            for maker, kind in zip(makers, kinds, strict=True)
        ]
        if count_last:
            stages.append(stage(credit=0)(count))
        return cls(stages, kinds, limit, chance.random() < 0.7, chance.choice(["auto", 2, 5]))

    def run(self, stages: list[AnyStage], patience: float = PATIENCE) -> Outcome:
        """Run it on a clock of its own, and see that it kept to its memory and left none behind."""

        async def main() -> Outcome:
            outcome = Outcome()
            async with stepped_pool(self.limit) as pool:
                with anyio.move_on_after(patience):
                    async with Pipeline(*stages, pool=pool) as pipe:
                        await self.collect(pipe, outcome)
                assert pool.stats().peak_allocated <= self.limit
                whole(pool)
            outcome.seconds = anyio.current_time()
            return outcome

        return run_steps(main(), StepLoop(max_steps=1_000_000))

    async def collect(self, pipe: Pipeline[Any, Any], outcome: Outcome) -> None:
        """Hold each result until the next one comes, as loops do."""
        source: list[Item] = [(number, ()) for number in range(ITEMS)]
        one = None
        try:
            async for one in pipe.map(source, ordered=self.ordered, in_flight=self.in_flight):
                outcome.items.append(one if isinstance(one, int) else one[0])
        except StageError as error:
            outcome.error = error
        finally:
            del one


TAKE, SLOW, PASS = (Kind(MIB, [seconds]) for seconds in (0.004, 0.010, 0.004))
SLOWEST = 0.010
"""Seconds that the bottleneck takes for an item."""


@stage(credit=0)
async def number_of(item: Item, pool: StageShare) -> int:  # noqa: ARG001 - likewise
    await PASS.work(item)
    return item[0]


def declared(kind: Kind) -> AnyStage:
    return stage(credit=0)(in_place(kind))


def wide(workers: tuple[int, ...], seconds: tuple[float, ...]) -> list[AnyStage]:
    """Three stages of several workers that do their work in place, but the first."""
    kinds = [Kind(MIB, [each]) for each in seconds]
    makers = [instead, in_place, in_place]
    return [
        stage(workers=count, credit=credit_of(maker))(maker(kind))
        for count, maker, kind in zip(workers, makers, kinds, strict=True)
    ]


async def paced(limit: int, stages: list[Any], items: int = 200) -> PipelineReport:
    """Run items on the virtual clock, and see that all come out under the limit."""
    async with stepped_pool(limit) as pool:
        async with Pipeline(*stages, pool=pool) as pipe:
            with anyio.fail_after(PATIENCE):
                async for one in pipe.map([(number, ()) for number in range(items)]):
                    last = one if isinstance(one, int) else one[0]
                del one
        assert last == items - 1
        assert pool.stats().peak_allocated <= limit
        return pipe.report()


@pytest.mark.parametrize(
    ("limit", "stages"),
    [
        (3, [instead(TAKE), declared(SLOW), number_of]),
        (3, [instead(TAKE), declared(SLOW), declared(PASS)]),
        (4, wide((1, 2, 1), (0.004, 0.020, 0.004))),
        (5, wide((2, 2, 2), (0.008, 0.020, 0.008))),
        (6, [instead(TAKE), instead(SLOW), number_of]),
        (6, [instead(TAKE), instead(SLOW), instead(PASS)]),
    ],
)
def test_stages_keep_the_pace_of_the_slowest(virtually: Run, limit: int, stages: list[Any]) -> None:
    """95 % of it, in memory for three items where all but the first have `credit=0`, and two for each that takes some.

    Several workers at once have one each.
    """

    async def main() -> None:
        report = await paced(limit * MIB, stages)
        assert report.items_per_s >= 0.95 / SLOWEST
        assert report.advice is None

    virtually(main)


def test_a_report_says_what_is_kept_free_for_nothing(virtually: Run) -> None:
    """Of a stage that takes nothing and does not declare it; to do what is said makes it as fast as the others."""

    async def main() -> None:
        first, second = instead(TAKE), in_place(SLOW)
        report = await paced(3 * MIB, [first, second, number_of])
        assert report.items_per_s < 0.6 / SLOWEST
        assert (
            report.advice == "kept free and never used: 1.50 MiB for in_place; @stage(credit=0) leaves it to the others"
        )
        assert str(report).endswith(report.advice)
        console = Console(file=io.StringIO(), width=80)
        with anyio.move_on_after(1):
            await show(lambda: report, console)
        assert "@stage(credit=0)" in cast("io.StringIO", console.file).getvalue()
        report = await paced(3 * MIB, [first, stage(credit=0)(second), number_of])
        assert report.items_per_s >= 0.95 / SLOWEST
        assert "kept free and" not in str(report)

    virtually(main)


@pytest.mark.parametrize("first", [1, 20, ITEMS - 3])
def test_what_a_stage_has_not_asked_for_so_far_it_may_ask_for_yet(virtually: Run, first: int) -> None:
    """Items that need three times what those before them needed pass too, under a limit of no more than that."""

    async def rarely(item: Item, pool: StageShare) -> Item:
        await anyio.sleep(SLOWEST)
        more = [await pool.allocate_async(MIB)] if item[0] >= first else []
        return item[0], (*item[1], *more)

    async def rarely_at_last(item: Item, pool: StageShare) -> int:
        return (await rarely(item, pool))[0]

    async def main() -> None:
        await paced(3 * MIB, [instead(TAKE), rarely, rarely_at_last], items=ITEMS)

    virtually(main)


TAKES, NOTHING = stage(instead(TAKE)), declared(SLOW)
CREDIT = stage(credit=MIB)(instead(TAKE))


@pytest.mark.parametrize(
    ("stages", "kept", "limits"),
    [
        ([TAKES, TAKES, TAKES], [2, 2, 2], [2, 4, 6]),
        ([TAKES, NOTHING, NOTHING], [6, 0, 0], [6, 0, 0]),
        ([NOTHING, TAKES, TAKES], [0, 3, 3], [0, 3, 6]),
        ([TAKES, NOTHING, TAKES], [3, 0, 3], [3, 0, 6]),
        ([CREDIT, NOTHING, NOTHING], [6, 0, 0], [6, 0, 0]),
        ([TAKES, NOTHING, CREDIT], [1, 0, 4], [1, 0, 4]),
    ],
)
def test_nothing_is_kept_for_a_stage_that_declares_that_it_takes_nothing(
    stages: list[AnyStage], kept: list[int], limits: list[int]
) -> None:
    """The others have its part."""
    quotas = divide(stages, 6 * MIB)
    assert [quota.kept // MIB for quota in quotas] == kept
    assert [quota.limit // MIB for quota in quotas] == limits


def test_stages_that_take_nothing_need_no_room_beside_credits() -> None:
    """The credits alone may be all there is; a stage without credit is refused then."""
    assert [quota.kept for quota in divide([CREDIT, NOTHING], MIB)] == [MIB, 0]
    with pytest.raises(InvalidRequest, match=r"= 1 MiB, and some for stages without credit"):
        divide([CREDIT, TAKES], MIB)


def test_a_stage_that_declares_to_take_nothing_is_refused_memory(virtually: Run) -> None:
    """As one with any other credit is, at once; a buffer of no bytes is no memory."""

    async def main() -> None:
        with pytest.raises(StageError, match="stage 'instead' failed at item 0: OutOfMemoryError"):
            await paced(3 * MIB, [stage(credit=0)(instead(TAKE))], items=1)
        await paced(3 * MIB, [stage(credit=0)(instead(Kind(0, [0.0])))], items=1)

    virtually(main)


@pytest.mark.parametrize("seed", range(100))
def test_declaring_no_need_makes_no_pipeline_slower_and_locks_none_up(seed: int) -> None:
    """Any row of stages, held against the same ones without the declaration.

    Those may lock up: a loop holds one result while it waits for the next, which is more than the stages' own needs.
    """
    plan = Plan.by(random.Random(seed))
    without = plan.run([undeclared(one) for one in plan.stages])
    declared = plan.run(plan.stages)
    if len(without.items) == ITEMS:
        assert sorted(declared.items) == list(range(ITEMS))
        assert declared.items == sorted(declared.items) or not plan.ordered
        assert declared.seconds <= 1.001 * without.seconds


@pytest.mark.parametrize("seed", range(30))
def test_pipelines_that_fail_or_are_cancelled_leave_nothing(seed: int) -> None:
    """At any item of any stage, and at any time."""
    chance = random.Random(seed)
    plan = Plan.by(chance)
    plan.run(plan.stages, patience=chance.random() / 4)
    at, item = chance.randrange(len(plan.kinds)), chance.randrange(ITEMS)
    plan.kinds[at].fails_at = item
    outcome = plan.run(plan.stages)
    if outcome.error is not None:
        assert (outcome.error.stage, outcome.error.item) == (plan.stages[at].name, item)
    else:
        assert len(outcome.items) <= item + 3  # it had locked itself up
