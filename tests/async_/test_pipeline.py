"""A pipeline gives what its stages give one after the other, in order, within its memory, on every loop."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, Buffer, InvalidRequest
from asyncmem.devices import Simulated
from asyncmem.devices.simulated.stream import SimulatedStream
from asyncmem.errors import OutOfMemoryError, StageError
from asyncmem.pipeline import Pipeline, Stage, StageShare, stage
from asyncmem.testing import StepLoop, run_steps

from .loops import Run
from .support import LIMIT, MIB, make_pool, stepped_pool

Item = tuple[int, Buffer]


async def decode(number: int, pool: StageShare) -> Item:
    return number, await pool.allocate_async(MIB)


async def forward(item: Item, pool: StageShare) -> Item:
    return item[0] * 2, await pool.allocate_async(MIB)


async def head(item: Item, pool: StageShare) -> int:
    async with pool.allocate_async(MIB):
        return item[0] + 1


EXPECTED = [2 * number + 1 for number in range(30)]


def test_results_are_those_of_the_stages_one_after_the_other(everywhere: Run) -> None:
    """Every item comes out once and in order, nothing is held afterwards, and the books of the pool are clean."""

    async def main() -> None:
        async with make_pool(6 * MIB) as pool:
            async with Pipeline(decode, forward, head, pool=pool) as pipe:
                for _ in range(2):
                    assert [result async for result in pipe.map(range(30))] == EXPECTED
                assert pool.stats().allocated_bytes == 0
            assert pool.stats().peak_allocated <= 6 * MIB
            assert not pool._opened.budgets
            pool.check()

    everywhere(main)


def test_a_source_may_be_awaited(everywhere: Run) -> None:
    """An async iterable is asked only for what may be in flight, and is closed."""

    async def main() -> None:
        asked: list[int] = []

        async def source() -> AsyncIterator[int]:
            try:
                for number in range(30):
                    asked.append(number)
                    await anyio.lowlevel.checkpoint()
                    yield number
            finally:
                asked.append(-1)

        async with make_pool() as pool, Pipeline(decode, forward, head, pool=pool) as pipe:
            got = []
            async for result in pipe.map(source(), in_flight=2):
                got.append(result)
                assert len(asked) <= len(got) + 3
            assert got == EXPECTED
            assert asked == [*range(30), -1]

    everywhere(main)


@pytest.mark.parametrize("ordered", [True, False])
def test_workers_finish_in_any_order_and_results_come_in_the_one_that_was_asked_for(
    virtually: Run, ordered: bool
) -> None:
    """With several workers each item takes its own time; `ordered` restores the source's order."""

    @stage(workers=3)
    async def work(number: int, pool: StageShare) -> int:
        async with pool.allocate_async(MIB):
            await anyio.sleep(3 if number % 3 == 0 else 1)
            return number

    async def main() -> None:
        async with stepped_pool() as pool, Pipeline(work, pool=pool) as pipe:
            got = [result async for result in pipe.map(range(12), ordered=ordered)]
            assert sorted(got) == list(range(12))
            assert (got == sorted(got)) is ordered

    virtually(main)


@pytest.mark.parametrize("credit", [2 * MIB, None])
def test_an_item_that_waits_for_memory_is_not_overtaken_for_ever(virtually: Run, credit: int | None) -> None:
    """Items behind the oldest of a stage may be finished early, but not so many that it finds no memory."""

    @stage(workers=2, credit=credit)
    async def work(number: int, pool: StageShare) -> Item:
        first = await pool.allocate_async(MIB)
        if number % 10 == 0:
            await anyio.sleep(100)
        second = await pool.allocate_async(MIB)
        del first
        return number, second

    @stage(credit=0)
    async def use(item: Item, _: StageShare) -> int:
        return item[0]

    async def main() -> None:
        async with stepped_pool(8 * MIB) as pool, Pipeline(work, use, pool=pool) as pipe:
            assert [result async for result in pipe.map(range(40), in_flight=20)] == list(range(40))

    virtually(main)


def greedy(share: Callable[[StageShare], AsyncMemoryPool | StageShare]) -> list[Callable[[int, StageShare], object]]:
    """Three stages that each return a buffer of a MiB."""

    async def first(number: int, pool: StageShare) -> Item:
        return number, await share(pool).allocate_async(MIB)

    async def second(item: Item, pool: StageShare) -> Item:
        await anyio.sleep(1)
        return item[0], await share(pool).allocate_async(MIB)

    return [first, second, second]  # type: ignore[list-item]  # each takes what the one before returns


async def finished(limit: int, *, shared: bool) -> int:
    """Count how many of 100 items come out, with all stages on the pool itself, or each on its share."""
    done = 0
    async with stepped_pool(limit) as pool:
        stages = greedy(lambda own: pool if shared else own)
        async with Pipeline(*stages, pool=pool) as pipe:
            with anyio.move_on_after(1000):
                async for result in pipe.map(range(100), in_flight=20):
                    done += 1
                    del result
    return done


def test_shares_finish_where_a_shared_pool_deadlocks(virtually: Run) -> None:
    """The first stage fills a pool that all share, and nothing ever comes out; with the plan's shares all 100 do."""

    async def main() -> None:
        assert await finished(6 * MIB, shared=True) == 0
        assert await finished(6 * MIB, shared=False) == 100

    virtually(main)


NONE = (None, None, None)


@pytest.mark.parametrize(
    ("limit", "needs"),
    [(5, (1, 1, 1)), (3, (2, 1, 0)), (3, NONE), (4, (None, 1, None)), (6, (1, 1, 1)), (7, NONE), (7, (1, None, 0))],
)
def test_no_mixture_of_credits_deadlocks(virtually: Run, limit: int, needs: tuple[int | None, ...]) -> None:
    """All items come out under the smallest limit that leaves each stage an item, and under larger ones."""

    async def main() -> None:
        functions = greedy(lambda own: own)[:2]
        stages = [
            stage(credit=None if credit is None else credit * MIB)(function)  # type: ignore[arg-type]
            for function, credit in zip(functions, needs, strict=False)
        ]

        @stage(credit=None if needs[2] is None else needs[2] * MIB)
        async def last(item: Item, pool: StageShare) -> int:
            if needs[2] == 0:
                return item[0]
            async with pool.allocate_async(MIB):
                return item[0]

        async with stepped_pool(limit * MIB) as pool, Pipeline(*stages, last, pool=pool) as pipe:
            assert [one async for one in pipe.map(range(40), in_flight=12)] == list(range(40))

    virtually(main)


def of_random_sizes(chance: random.Random) -> Stage[tuple[int, list[Buffer]], tuple[int, list[Buffer]]]:
    """A stage whose items take up to its credit in a few pieces, each of another size, and time between them."""
    credit, pieces = chance.randint(1, 8) * MIB, chance.randint(1, 3)

    @stage(credit=credit, workers=chance.choice([1, 1, 2]))
    async def work(item: tuple[int, list[Buffer]], pool: StageShare) -> tuple[int, list[Buffer]]:
        buffers = []
        for _ in range(pieces):
            buffers.append(await pool.allocate_async(int(chance.random() * credit / pieces) // 512 * 512))
            await anyio.sleep(chance.random())
        return item[0], buffers

    return work


@pytest.mark.parametrize("seed", range(12))
def test_sizes_of_any_kind_pass_within_their_credits(seed: int) -> None:
    """Under a limit that is exactly what is asked for, no size and no order locks the pipeline up.

    Its loop holds a result while it waits for the next.
    """

    async def main() -> None:
        chance = random.Random(seed)
        stages = [of_random_sizes(chance) for _ in range(3)]
        limit = sum((one.credit or 0) * one.workers for one in stages) + 2 * (stages[-1].credit or 0)
        async with stepped_pool(limit) as pool, Pipeline(*stages, pool=pool) as pipe:
            source: list[tuple[int, list[Buffer]]] = [(number, []) for number in range(40)]
            assert [number async for number, _ in pipe.map(source)] == list(range(40))

    run_steps(main(), StepLoop(max_steps=1_000_000))


def test_a_stage_has_its_credit_and_no_more(virtually: Run) -> None:
    """A stage is refused at once what is above its credit, and what is there for others is not touched."""

    @stage(credit=MIB)
    async def modest(number: int, pool: StageShare) -> Buffer:
        return await pool.allocate_async(MIB + number)

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(modest, pool=pool) as pipe:
            results = pipe.map(range(2))
            (await anext(results)).free()
            with pytest.raises(StageError, match="stage 'modest' failed at item 1: OutOfMemoryError"):
                await anext(results)

    virtually(main)


def test_credits_that_are_more_than_there_is_are_refused_with_their_sum(virtually: Run) -> None:
    """The error has the product of each stage, and the sum; the pool is as it was."""

    @stage(workers=2, credit="3 MiB")
    async def heavy(item: object, _: StageShare) -> object:
        return item

    @stage(credit="4 MiB")
    async def light(item: object, _: StageShare) -> object:
        return item

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool:
            with pytest.raises(InvalidRequest) as refused:
                async with Pipeline(heavy, light, pool=pool):
                    pass
            told = (
                "at least 18 MiB: heavy (2 workers) x 3 MiB = 6 MiB + light (1 worker and 2 for results) x 4 MiB = 12"
            )
            assert told in str(refused.value)
            assert "got 8 MiB" in str(refused.value)
            assert not pool._opened.budgets

    virtually(main)


def test_opening_waits_for_the_memory_and_leaves_nothing_when_it_is_cancelled(virtually: Run) -> None:
    """What is kept for stages with credit is had before the block begins; given up, the pool is as it was."""

    @stage(credit=2 * MIB)
    async def keep(number: int, pool: StageShare) -> int:
        async with pool.allocate_async(2 * MIB):
            return number

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool:
            other = await pool.allocate_async(MIB)
            pipe = Pipeline(keep, keep, pool=pool)
            with anyio.move_on_after(5) as patience:
                await pipe.__aenter__()
            assert patience.cancelled_caught
            assert pool.stats().allocated_bytes == MIB
            assert not pool._opened.budgets
            other.free()
            async with pipe:
                assert [one async for one in pipe.map(range(3))] == [0, 1, 2]

    virtually(main)


def test_a_stage_that_needs_more_than_its_part_is_told(virtually: Run) -> None:
    """A request above what a stage may ever have fails at once, and names the stage."""

    async def glutton(_: int, pool: StageShare) -> Buffer:
        return await pool.allocate_async(5 * MIB)

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(glutton, forward, pool=pool) as pipe:  # type: ignore[arg-type]
            with pytest.raises(Exception, match="stage 'glutton' failed at item 0: OutOfMemoryError") as told:
                await anext(pipe.map([0]))
            assert isinstance(told.value.__cause__, OutOfMemoryError)

    virtually(main)


def test_streams_are_put_in_order_between_stages() -> None:
    """Each stage works on a stream of its own, and in place; the order checker finds nothing to complain about."""

    @stage(stream="load", credit=MIB)
    async def load(_: int, pool: StageShare) -> Buffer:
        assert isinstance(pool.stream, SimulatedStream)
        buffer = await pool.allocate_async(MIB)
        assert buffer.stream is pool.stream
        pool.stream.launch(1.0, writes=[buffer])
        return buffer

    @stage(stream="compute", credit=0)
    async def compute(buffer: Buffer, pool: StageShare) -> dict[str, Buffer]:
        assert isinstance(pool.stream, SimulatedStream)
        pool.stream.launch(2.0, reads=[buffer], writes=[buffer])
        return {"it": buffer}

    @stage(stream="store", credit=0)
    async def store(item: dict[str, Buffer], pool: StageShare) -> int:
        assert isinstance(pool.stream, SimulatedStream)
        pool.stream.launch(1.0, reads=[item["it"]])
        return item["it"].nbytes

    async def main() -> None:
        pool = make_pool(3 * MIB, device=Simulated("3 MiB"))
        async with pool, Pipeline(load, compute, store, pool=pool) as pipe:
            assert [one async for one in pipe.map(range(20))] == [MIB] * 20

    anyio.run(main)


def test_streams_of_the_device_and_of_one_name_are_shared(virtually: Run) -> None:
    """A stream that is passed is taken as it is; stages that name the same one have the same."""
    seen: list[object] = []

    def noting(stream: object) -> Callable[[int, StageShare], object]:
        @stage(stream=stream)
        async def note(number: int, pool: StageShare) -> int:
            seen.append(pool.stream)
            return number

        return note

    async def main() -> None:
        async with stepped_pool() as pool:
            own = pool.device.create_stream("own")
            async with Pipeline(*map(noting, ("a", own, "a", None)), pool=pool) as pipe:
                assert [one async for one in pipe.map([1])] == [1]
            assert seen[0] is seen[2]
            assert seen[1] is own
            assert seen[3] is None

    virtually(main)


def test_a_stage_may_have_memory_of_another_device(everywhere: Run) -> None:
    """Its share is of the process's pool of that device, planned by itself, and given back like the others."""

    @stage(device="host", credit=MIB)
    async def beside(item: Item, pool: StageShare) -> str:
        async with pool.allocate_async(MIB) as buffer:
            return f"{item[1].device.name} {buffer.device.name} {item[0]}"

    async def main() -> None:
        runtime = asyncmem.device("host").pool
        async with make_pool(2 * MIB) as pool:
            async with Pipeline(decode, beside, pool=pool) as pipe:
                assert [one async for one in pipe.map(range(5))] == [
                    f"simulated:0 host {number}" for number in range(5)
                ]
                assert runtime.stats().allocated_bytes > 0
            assert pool.stats().allocated_bytes == runtime.stats().allocated_bytes == 0
            assert not pool._opened.budgets
            assert not runtime._opened.budgets

    everywhere(main)


def test_leaving_early_ends_the_run_soon(virtually: Run) -> None:
    """A loop that is left by `break` drops the run: what was under way is cancelled, and the pipeline is used again."""
    begun: list[int] = []

    async def slow(number: int, pool: StageShare) -> Buffer:
        begun.append(number)
        buffer = await pool.allocate_async(MIB)
        await anyio.sleep(10)
        return buffer

    async def main() -> None:
        async with stepped_pool(4 * MIB) as pool, Pipeline(slow, pool=pool) as pipe:
            async for result in pipe.map(range(100)):
                del result
                break
            gc.collect()
            await anyio.sleep(1)
            assert pool.stats().allocated_bytes == 0
            seen = len(begun)
            await anyio.sleep(100)
            assert len(begun) == seen
            async with pipe.map(range(100)) as results:
                (await anext(results)).free()
            assert pool.stats().allocated_bytes == 0  # at once, not soon
            assert len([one async for one in pipe.map(range(3))]) == 3

    virtually(main)


def test_leaving_early_closes_the_source(virtually: Run) -> None:
    """An async source that is left in the midst of its items is closed before the pipeline's block ends."""
    ended: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(100):
                yield number
        finally:
            await anyio.lowlevel.checkpoint()
            ended.append("source")

    async def main() -> None:
        async with stepped_pool() as pool:
            async with Pipeline(decode, pool=pool) as pipe:
                _, buffer = await anext(pipe.map(source()))
                buffer.free()
            assert ended == ["source"]

    virtually(main)


@pytest.mark.parametrize("credit", [None, MIB])
def test_results_that_are_held_outlive_the_pipeline(virtually: Run, credit: int | None) -> None:
    """What came out belongs to whoever has it; it counts in the pool until it is freed."""

    async def main() -> None:
        async with stepped_pool() as pool:
            async with Pipeline(stage(credit=credit)(decode), pool=pool) as pipe:
                kept = [buffer async for _, buffer in pipe.map(range(3))]
            assert pool.stats().allocated_bytes == 3 * MIB
            assert all(buffer.alive for buffer in kept)
            kept.clear()
            assert pool.stats().allocated_bytes == 0
            assert not pool._opened.budgets
            pool.check()

    virtually(main)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"workers": -1},
        {"credit": -1},
        {"credit": "much"},
        {"timeout": 0},
        {"timeout": -1},
    ],
)
def test_arguments_of_a_stage_that_cannot_be_right_are_refused(wrong: dict[str, object]) -> None:
    """They are refused where the stage is made."""
    with pytest.raises(InvalidRequest):
        stage(**wrong)(decode)  # type: ignore[call-overload]  # what this is about


def test_a_stage_is_an_async_function_and_stays_one(virtually: Run) -> None:
    """A plain function is refused; a stage can be called as what it was."""

    async def main() -> None:
        async with stepped_pool() as pool:
            number, buffer = await stage(decode)(1, pool)  # type: ignore[arg-type]  # any share will do
            assert number == 1
            buffer.free()

    virtually(main)
    with pytest.raises(InvalidRequest, match="an async function"):
        stage(len)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="at least one"):
        Pipeline(pool=None)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="a pool or a budget"):
        Pipeline(decode, pool="host")  # type: ignore[arg-type]  # what this is about


def test_a_pipeline_is_used_inside_its_block(virtually: Run) -> None:
    """Mapping before it or after it is refused, and so are entering it twice and no items in flight."""

    async def main() -> None:
        async with stepped_pool() as pool:
            pipe = Pipeline(decode, pool=pool)
            with pytest.raises(InvalidRequest, match="one that is open"):
                pipe.map([1])
            with pytest.raises(InvalidRequest, match="opened"):
                pipe.report()
            async with pipe:
                late = pipe.map([1])
                assert repr(late) == "<asyncmem.Results: not begun, 0 items handed out>"
                async for item in (done := pipe.map([1, 2])):
                    assert "under way" in repr(done)
                    del item
                assert repr(done) == "<asyncmem.Results: over, 2 items handed out>"
                for wrong in (0, "lots"):
                    with pytest.raises(InvalidRequest, match=r"in_flight: expected .*from 1"):
                        pipe.map([1], in_flight=wrong)  # type: ignore[arg-type]  # likewise
                with pytest.raises(InvalidRequest, match="source"):
                    pipe.map(1)  # type: ignore[arg-type]  # what this is about
            with pytest.raises(InvalidRequest, match="its block has ended"):
                await anext(late)
            with pytest.raises(InvalidRequest, match="make another"):
                await pipe.__aenter__()

    virtually(main)
