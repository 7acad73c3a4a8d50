"""What pipelines are to reach: the bottleneck's speed under a small limit, little cost of their own, true reports."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import pytest
from rich.console import Console

from asyncmem import Buffer, InvalidRequest
from asyncmem.cli.bench.pipeline import by_pipeline, by_queues, same
from asyncmem.pipeline import Pipeline, PipelineReport, Stage, StageShare, stage
from asyncmem.pipeline.report import show

from .loops import Run
from .support import MIB, make_pool, stepped_pool

Item = tuple[int, Buffer]
AnyStage = Stage[Any, Any]
BUSIEST = 0.010
"""Seconds that the bottleneck takes for an item."""
TURNS = 20
"""Of a loop of the benchmark, which makes a hundred items a turn."""


@stage(credit=MIB)
async def decode(number: int, pool: StageShare) -> Item:
    buffer = await pool.allocate_async(MIB)
    await anyio.sleep(0.004)
    return number, buffer


@stage(credit=0)
async def forward(item: Item, _: StageShare) -> Item:
    await anyio.sleep(BUSIEST)
    return item


@stage(credit=0)
async def head(item: Item, _: StageShare) -> int:
    await anyio.sleep(0.004)
    return item[0]


@stage(credit=MIB)
async def forward_anew(item: Item, pool: StageShare) -> Item:
    buffer = await pool.allocate_async(MIB)
    await anyio.sleep(BUSIEST)
    return item[0], buffer


async def mapped(limit: int, *stages: AnyStage) -> PipelineReport:
    """Run 200 items through stages under a limit."""
    async with stepped_pool(limit) as pool:
        async with Pipeline(*stages, pool=pool) as pipe:
            assert [one async for one in pipe.map(range(200))] == list(range(200))
        assert pool.stats().peak_allocated <= limit
        return pipe.report()


@pytest.mark.parametrize(
    ("limit", "stages"), [(3 * MIB, (decode, forward, head)), (4 * MIB, (decode, forward_anew, head))]
)
def test_the_bottleneck_sets_the_pace(virtually: Run, limit: int, stages: Sequence[AnyStage]) -> None:
    """Stages of 4, 10 and 4 ms reach 95 % of the bottleneck's speed under three items, in place.

    Where the second stage returns memory of its own, a fourth is taken: two items of each are in use at once.
    """

    async def main() -> None:
        report = await mapped(limit, *stages)
        assert report.items_per_s >= 0.95 / BUSIEST
        assert report.bottleneck == stages[1].name
        assert report.peak_bytes <= limit

    virtually(main)


def test_a_report_says_where_the_time_went(virtually: Run) -> None:
    """Under virtual time every figure is known: busy, waits for memory and for input, and they add up."""

    async def main() -> None:
        report = await mapped(3 * MIB, decode, forward, head)
        first, second, third = report.stages
        assert [one.items for one in report.stages] == [200] * 3 == [report.items] * 3
        assert first.busy == pytest.approx(0.4, abs=0.02)
        assert first.waiting_for_memory == pytest.approx(0.6, abs=0.03)
        assert second.busy == pytest.approx(1.0, abs=0.02)
        assert third.busy == pytest.approx(0.4, abs=0.02)
        assert third.waiting_for_input == pytest.approx(0.6, abs=0.03)
        for one in report.stages:
            assert one.busy + one.waiting_for_memory + one.waiting_for_input + one.held_back == pytest.approx(1.0)
        assert first.peak_bytes == report.peak_bytes == 3 * MIB
        assert second.peak_bytes == 0
        text = str(report)
        assert "200 items in 2.0" in text
        assert "peak 3 MiB of 3 MiB" in text
        assert "forward *" in text
        assert len({len(line) for line in text.splitlines()[1:]}) == 1

    virtually(main)


@stage(credit=0)
async def look(number: int, _: StageShare) -> int:
    await anyio.sleep(0.001)
    return number


@stage(credit=0)
async def ponder(number: int, _: StageShare) -> int:
    await anyio.sleep(BUSIEST)
    return number


async def arriving() -> AsyncIterator[int]:
    for number in range(100):
        await anyio.sleep(BUSIEST)
        yield number


@pytest.mark.parametrize(
    ("source", "stages", "dwell", "waits", "held_back"),
    [
        (lambda: range(100), (look, ponder), 0, (0, 0), (0.9, 0)),
        (lambda: range(100), (look, look), BUSIEST, (0, 0.1), (0.9, 0.8)),
        (arriving, (look, look), 0, (0.9, 0.9), (0, 0)),
    ],
    ids=["slow stage", "slow consumer", "slow source"],
)
def test_a_stage_held_back_from_downstream_does_not_wait_for_input(
    virtually: Run,
    source: Callable[[], Any],
    stages: Sequence[AnyStage],
    dwell: float,
    waits: tuple[float, float],
    held_back: tuple[float, float],
) -> None:
    """A stage waits for input while the source makes an item, and is held back while all items are further on."""

    async def main() -> None:
        async with stepped_pool() as pool, Pipeline(*stages, pool=pool) as pipe:
            async for _ in pipe.map(source()):
                await anyio.sleep(dwell)
            report = pipe.report()
        assert [one.waiting_for_input for one in report.stages] == pytest.approx(waits, abs=0.05)
        assert [one.held_back for one in report.stages] == pytest.approx(held_back, abs=0.05)

    virtually(main)


def test_progress_shows_the_report_while_it_runs_and_at_the_end(virtually: Run) -> None:
    """The display is asked for, writes to its console, and ends with the run."""

    async def main() -> None:
        console = Console(file=io.StringIO(), width=80, force_terminal=True)
        async with stepped_pool() as pool, Pipeline(decode, forward, head, pool=pool) as pipe:
            results = pipe.map(range(100), progress=True)
            results._run.helpers = [lambda: show(pipe.report, console)]
            assert [one async for one in results] == list(range(100))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert shown.count("waits for") > 2 * 3
        assert "100 items" in shown
        assert "decode" in shown
        assert "…" not in shown

    virtually(main)


def test_progress_is_told_once_where_there_is_no_terminal(virtually: Run) -> None:
    """A log has the last state, in lines of its own."""

    async def main() -> None:
        console = Console(file=io.StringIO(), width=80)
        async with stepped_pool() as pool, Pipeline(decode, forward, head, pool=pool) as pipe:
            results = pipe.map(range(100), progress=True)
            results._run.helpers = [lambda: show(pipe.report, console)]
            assert [one async for one in results] == list(range(100))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert shown.count("100 items") == 1
        assert shown.endswith("\n")

    virtually(main)


def test_progress_without_rich_says_what_to_install(virtually: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of a pipeline needs a library for terminals."""
    monkeypatch.setitem(sys.modules, "rich", None)

    async def main() -> None:
        async with stepped_pool() as pool, Pipeline(same, pool=pool) as pipe:
            with pytest.raises(InvalidRequest, match="install rich"):
                pipe.map([1], progress=True)

    virtually(main)


@pytest.mark.may_block
def test_an_item_costs_at_most_four_times_what_queues_cost() -> None:
    """Three stages that do nothing: the least of several tries, in turns in one process. It is about 1.7 times."""

    async def main() -> None:
        async with make_pool() as pool, Pipeline(same, same, same, pool=pool) as pipe:
            ours = by_pipeline(pipe)
            tries = [(await ours(TURNS), await by_queues(TURNS)) for _ in range(9)]
        pipeline, queues = (min(column) for column in zip(*tries, strict=True))
        assert pipeline <= 4 * queues

    asyncio.run(main())
