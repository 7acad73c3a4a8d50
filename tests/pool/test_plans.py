"""A pool that serves a program's steps by a plan: where it says, in the order of streams, and never without memory."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from asyncmem import AsyncMemoryPool, Buffer, BufferReleased, InvalidRequest, Lease
from asyncmem.devices import Simulated, SimulatedStream
from asyncmem.insight import LifetimeAnalyzer, PlannedPlace
from asyncmem.pool import ReusePlan
from asyncmem.testing import SteppedPool, run_steps
from tests.conservation import whole
from tests.sweeps import Scenario, Stage, sweep, sweep_on_trio

from .support import MIB, quick_device

pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop

PAGE = 2 * MIB

# "a" makes way for "c", which is as long as "b" is.
PLAN = ReusePlan(
    (
        PlannedPlace("a", 3 * MIB, 0, 2, 0),
        PlannedPlace("b", 2 * MIB, 1, 4, 3 * MIB),
        PlannedPlace("c", 2 * MIB, 2, 4, 0),
        PlannedPlace("odd", 700, 2, 4, 2 * MIB),
    )
)


@pytest.fixture
def device() -> Simulated:
    """A device whose calls take no time."""
    return quick_device()


def small_pool(device: Simulated) -> SteppedPool:
    """Make a pool that reserves what is needed and no more."""
    return SteppedPool(device, segments="paged", limit="32 MiB")


class Step(NamedTuple):
    """One allocation or free of a program."""

    allocates: bool
    which: int


def program(plan: ReusePlan) -> list[Step]:
    """Return what a program does that lives as its plan says."""
    turns = [(place.start, True, index) for index, place in enumerate(plan.places)]
    turns += [(place.end, False, index) for index, place in enumerate(plan.places)]
    return [Step(allocates, index) for _, allocates, index in sorted(turns)]


def random_plan(seed: int, count: int = 60) -> ReusePlan:
    """Return the plan of a program whose buffers come and go at random."""
    draw, analyzer = random.Random(seed), LifetimeAnalyzer()
    for index in range(count):
        first = draw.randrange(count)
        nbytes = draw.choice((100, 4096, 70_000, draw.randrange(1, MIB)))
        for step in (first, first + draw.randrange(8)):
            analyzer.record_usage(step, {f"buffer {index}": nbytes})
    return analyzer.compute_reuse_plan()


def test_each_buffer_lies_where_the_plan_says(device: Simulated) -> None:
    """By key or by the next of its size, step after step."""

    async def main() -> None:
        async with small_pool(device) as pool, pool.apply_plan(PLAN) as memory:
            for _ in range(3):
                a, b = await memory.allocate_async(key="a"), await memory.allocate_async(2 * MIB)
                a.free()
                c, odd = await memory.allocate_async("2 MiB"), memory.allocate(700)
                start = b.address - 3 * MIB
                assert (c.address, odd.address) == (start, start + 2 * MIB)
                assert [one.nbytes for one in (b, c, odd)] == [2 * MIB, 2 * MIB, 700]
                for one in (b, c, odd):
                    one.free()
                memory.next_step()
            assert memory.use == (12, 0, 0)

    run_steps(main())


@pytest.mark.parametrize("seed", range(3))
def test_pool_reserves_the_plan_s_peak_and_no_more(device: Simulated, seed: int) -> None:
    """Rounded up to the device's pages; every request is at its place, and none waits once the range is there."""
    plan = random_plan(seed)

    async def main() -> None:
        async with small_pool(device) as pool:
            live: dict[int, Buffer] = {}
            async with pool.apply_plan(plan) as memory:
                start = memory.allocate(plan.places[0].nbytes, key=plan.places[0].key)
                start.free()
                base = start._address - plan.places[0].offset
                memory.next_step()
                for allocates, index in program(plan):
                    if not allocates:
                        live.pop(index).free()
                        continue
                    place = plan.places[index]
                    live[index] = memory.allocate(place.nbytes, key=place.key)
                    assert live[index].address == base + place.offset
                assert memory.use == (1 + len(plan.places), 0, 0)
            assert pool.stats().peak_reserved == -(-plan.peak // PAGE) * PAGE
            assert plan.peak < plan.total / 2
            whole(pool)

    run_steps(main())


async def run_on_streams(pool: AsyncMemoryPool, plan: ReusePlan, device: Simulated, seed: int) -> None:
    """Live as a plan says, with each buffer written and read on streams that are drawn at random."""
    draw = random.Random(seed)
    streams = [device.default_stream, *(device.create_stream() for _ in range(3))]
    live: dict[int, Buffer] = {}
    async with pool.apply_plan(plan) as memory:
        for _ in range(2):
            for allocates, index in program(plan):
                if allocates:
                    stream = draw.choice(streams)
                    buffer = live[index] = await memory.allocate_async(key=plan.places[index].key, stream=stream)
                    stream.launch(draw.random(), writes=[buffer])
                    continue
                buffer, other = live.pop(index), draw.choice(streams)
                if other is not buffer.stream:
                    buffer.use_on(other)
                    other.launch(draw.random(), reads=[buffer])
                buffer.free()
                if draw.random() < 0.2:
                    device.advance(draw.random())
            memory.next_step()
        assert memory.use == (2 * len(plan.places), 0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_who_takes_a_place_over_waits_for_its_last_use(device: Simulated, seed: int) -> None:
    """On whichever stream: the device, which checks the order of all work, finds nothing to complain of."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool:
            await run_on_streams(pool, random_plan(seed), device, seed)
            assert device.calls_of("wait"), "nothing had to be waited for, so nothing was shown"
            device.run_until_idle()
            pool._opened.tick()
            whole(pool)

    run_steps(main())


def test_no_stream_waits_for_itself(device: Simulated) -> None:
    """Places that one stream takes over from itself cost no call of the device."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.apply_plan(PLAN) as memory:
            before = len(device.calls_of("wait")), len(device.calls_of("record"))
            for _ in range(5):
                memory.allocate(key="a").free()
                memory.allocate(key="c").free()
                memory.next_step()
            assert (len(device.calls_of("wait")), len(device.calls_of("record"))) == before

    run_steps(main())


def test_what_the_plan_does_not_have_is_the_pool_s(device: Simulated) -> None:
    """Another size, one more of a size or of a name, more bytes than planned: served elsewhere, and counted."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.apply_plan(PLAN) as memory:
            planned = await memory.allocate_async(key="b")
            others = [
                await memory.allocate_async("1 MiB"),
                await memory.allocate_async(2 * MIB, key="b"),
                await memory.allocate_async(4 * MIB, key="a"),
                await memory.allocate_async(64, key="nobody"),
                memory.allocate("1 MiB"),
            ]
            start = planned.address - 3 * MIB
            assert not [one for one in others if start <= one.address < start + PLAN.peak]
            assert memory.use == (1, len(others), 0)
            assert "1 served as planned, 5 unplanned" in repr(memory)
            for one in (planned, *others):
                one.free()

    run_steps(main())


def test_smaller_than_planned_has_the_place_all_the_same(device: Simulated) -> None:
    """A batch that is not full takes the place of a full one, where it is asked for by its key."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.apply_plan(PLAN) as memory:
            array = await memory.empty((100, 10), "float64", key="a")
            assert array.shape == (100, 10)
            assert memory.use == (1, 0, 0)
            array.buffer.free()
            assert memory.allocate(0).nbytes == 0
            assert memory.use == (1, 0, 0), "what has no bytes needs no place"

    run_steps(main())


def test_place_that_is_still_in_use_is_passed_over(device: Simulated) -> None:
    """A program that holds on to a buffer for longer than planned loses none: who comes next is served elsewhere."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.apply_plan(PLAN) as memory:
            late, other = memory.allocate(key="a"), memory.allocate(key="c")
            assert not late.address <= other.address < late.address + late._block_bytes
            assert memory.use == (1, 0, 1)
            late.free()
            memory.next_step()
            assert memory.allocate(key="c").address != other.address, "the new step has its place again"
            assert memory.use == (2, 0, 1)
            other.free()

    run_steps(main())


def test_what_outlives_the_block_is_the_pool_s(device: Simulated) -> None:
    """A result that is kept stays valid, and the rest of the range is everybody's again."""

    async def main() -> None:
        async with SteppedPool(device, limit="8 MiB", segment_size="8 MiB") as pool:
            with pool.apply_plan(PLAN) as memory:
                result = memory.allocate(key="b")
            with pytest.raises(BufferReleased):
                memory.allocate(key="c")
            with pytest.raises(BufferReleased):
                memory.next_step()
            assert pool.stats().allocated_bytes == result._block_bytes
            assert (await pool.allocate_async("3 MiB")).nbytes == 3 * MIB
            result.free()
            whole(pool)

    run_steps(main())


def test_budget_serves_by_a_plan_too(device: Simulated) -> None:
    """The range counts in it as a whole."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool:
            budget = pool.budget("model", limit="8 MiB")
            async with budget.apply_plan(PLAN) as memory:
                assert budget.stats().allocated_bytes == memory.nbytes == PLAN.peak
            assert budget.stats().allocated_bytes == 0

    run_steps(main())


def test_graph_s_memory_is_no_place_to_share(device: Simulated) -> None:
    """What is allocated while a stream is captured stays with the graph, so the pool serves it."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.apply_plan(PLAN) as memory:
            stream = device.create_stream()
            with pool.graph() as graph:
                stream.begin_capture()
                memory.allocate(key="b", stream=stream).free()
                stream.end_capture()
            assert memory.use == (0, 0, 1)
            graph.release()

    run_steps(main())


def test_lease_serves_by_a_plan_too(device: Simulated) -> None:
    """A range within a range."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.lease("8 MiB") as lease:
            async with lease.apply_plan(PLAN) as memory:
                inside = memory.allocate(key="b")
                assert lease.address <= inside.address < lease.address + lease.nbytes
                inside.free()
            assert lease.largest_hole() == lease.nbytes

    run_steps(main())


@pytest.mark.parametrize("planned", [False, True], ids=["lease", "plan"])
def test_range_may_be_the_host_s(device: Simulated, *, planned: bool) -> None:
    """Where the device is out and the host stands in for it, also for a whole range, which goes back there."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB", fallback="host") as pool:
            held = await pool.allocate_async("30 MiB")
            async with pool.apply_plan(PLAN) if planned else pool.lease("5 MiB") as memory:
                buffer = memory.allocate("2 MiB")
                assert buffer.device.name == "host"
                assert not pool._opened.core.scheduler.holds(), "nobody holds what others of this pool could wait for"
                assert pool.stats().allocated_bytes == held.nbytes
                buffer.free()
            assert pool._host_pool("on the host").stats().allocated_bytes == 0
            held.free()
            whole(pool)

    run_steps(main())


MISTAKES: list[tuple[str, Callable[..., object]]] = [
    ("a size, or the key of a buffer", lambda memory: memory.allocate()),
    ("'a', 'b', 'c', 'odd'", lambda memory: memory.allocate(key="d")),
    ("size", lambda memory: memory.allocate(-1)),
    ("tag", lambda memory: memory.allocate_async(key="a", tag=3)),
]


@pytest.mark.parametrize(("words", "mistake"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_have_clear_errors(device: Simulated, words: str, mistake: Callable[..., object]) -> None:
    """And change nothing."""

    async def main() -> None:
        async with SteppedPool(device, limit="32 MiB") as pool, pool.apply_plan(PLAN) as memory:
            with pytest.raises(InvalidRequest, match=words):
                mistake(memory)
            assert memory.use == (0, 0, 0)
            memory.allocate(key="a").free()

    run_steps(main())


def test_strict_plan_has_no_exceptions(device: Simulated) -> None:
    """What is not in the plan, and what does not keep to it, raises; what follows it goes on."""

    async def main() -> None:
        async with (
            SteppedPool(device, limit="32 MiB") as pool,
            pool.apply_plan(PLAN, strict=True) as memory,
        ):
            with pytest.raises(InvalidRequest, match="the plan has"):
                memory.allocate("1 MiB")
            a = memory.allocate(key="a")
            with pytest.raises(InvalidRequest, match="as planned"):
                memory.allocate_async(key="c")
            a.free()
            c = await memory.allocate_async(key="c")
            c.free()
            assert memory.use == (2, 0, 0)

    run_steps(main())


def test_a_plan_of_empty_buffers_needs_nothing() -> None:
    """Wherever they were said to lie."""
    plan = ReusePlan((PlannedPlace("empty", 0, 0, 1, MIB),))
    assert (plan.peak, str(plan)) == (0, "nothing to place")


@pytest.mark.parametrize("plan", [None, "plan", ReusePlan(())], ids=["none", "text", "empty"])
def test_only_a_plan_of_something_is_applied(device: Simulated, plan: ReusePlan) -> None:
    """The call says so, before anything is waited for."""
    with pytest.raises(InvalidRequest, match="compute_reuse_plan"):
        SteppedPool(device).apply_plan(plan)


async def steps_under_cancellation(stage: Stage) -> None:
    """Three programs want a range each, and there is memory for one at a time."""
    device = quick_device()
    async with SteppedPool(device, limit="8 MiB", segment_size="8 MiB") as pool:

        async def actor(stream: SimulatedStream) -> None:
            async with pool.apply_plan(PLAN, stream=stream) as memory:
                held: deque[Buffer] = deque()
                for key in ("a", "b", "c", "odd"):
                    if key == "c":
                        held.popleft().free()
                    async with memory.allocate_async("1 MiB", stream=stream) as extra:
                        stream.launch(1.0, writes=[extra])
                    held.append(await memory.allocate_async(key=key, stream=stream))
                    stream.launch(1.0, writes=[held[-1]])
                for one in held:
                    one.free()

        for number in range(3):
            stage.actor(f"program {number}", partial(actor, device.create_stream()))
        await stage.finish()
        device.run_until_idle()
        pool._opened.tick()
        whole(pool)
        assert (await pool.allocate_async("7 MiB")).nbytes


def test_cancelling_anybody_at_any_step_loses_nothing() -> None:
    """Whether it waits for its range or is in the middle of a step, on asyncio and on trio."""
    play: Scenario = steps_under_cancellation
    assert sweep(play).strikes > 10
    assert sweep_on_trio(play, stride=2).strikes > 5


BAD_PLACES = {
    "overlap": [PlannedPlace("a", 1024, 0, 2, 0), PlannedPlace("b", 512, 1, 3, 512)],
    "overlap with what lies below": [PlannedPlace("a", 512, 1, 3, 512), PlannedPlace("b", 1024, 2, 4, 0)],
    "within": [PlannedPlace("a", 4096, 0, 9, 0), PlannedPlace("b", 512, 1, 3, 1024)],
    "by rounding": [PlannedPlace("a", 600, 0, 2, 0), PlannedPlace("b", 1, 1, 3, 512)],
    "ends before it starts": [PlannedPlace("a", 512, 3, 3, 0)],
    "below the range": [PlannedPlace("a", 512, 0, 1, -512)],
    "off the granule": [PlannedPlace("a", 512, 0, 1, 100)],
    "negative": [PlannedPlace("a", -512, 0, 1, 0)],
}


@pytest.mark.parametrize("places", BAD_PLACES.values(), ids=BAD_PLACES)
def test_wrong_plan_cannot_be_made(places: list[PlannedPlace]) -> None:
    """It is checked when it is made, and the error names the places."""
    with pytest.raises(InvalidRequest, match="places"):
        ReusePlan(tuple(places))


def in_each_others_way(one: PlannedPlace, other: PlannedPlace) -> bool:
    """Say whether two places share a time and a granule."""
    return (
        max(one.start, other.start) < min(one.end, other.end)
        and max(one.offset, other.offset) < min(place.offset + PLAN.rounded(place.nbytes) for place in (one, other))
        and min(one.nbytes, other.nbytes) > 0
    )


def test_check_finds_every_overlap_and_no_other() -> None:
    """Random places, compared two by two."""
    draw, wrong = random.Random(5), 0
    for _ in range(300):
        places = []
        for _ in range(draw.randrange(2, 7)):
            start = draw.randrange(6)
            nbytes, offset = draw.randrange(3) * 512 - draw.randrange(2), 512 * draw.randrange(6)
            places.append(PlannedPlace(None, max(nbytes, 0), start, start + draw.randrange(1, 5), offset))
        expected = any(itertools.starmap(in_each_others_way, itertools.combinations(places, 2)))
        wrong += expected
        if expected:
            with pytest.raises(InvalidRequest, match="share no byte"):
                ReusePlan(tuple(places))
        else:
            ReusePlan(tuple(places)).check()
    assert 50 < wrong < 250


def test_plan_takes_whole_granules_only() -> None:
    """Two places never share one, because the pool hands out no less."""
    with pytest.raises(InvalidRequest, match="512"):
        ReusePlan((), align=256)


def test_plan_says_what_it_comes_to() -> None:
    """Its peak beside what is live at most, as figures and in words."""
    assert (PLAN.peak, PLAN.lower_bound, PLAN.total) == (5 * MIB, 5 * MIB, 7 * MIB + 1024)
    assert str(PLAN) == "4 buffers of 7.00 MiB in 5 MiB, 0% above the 5 MiB that are live at most"
    assert repr(PLAN) == f"<asyncmem.pool.ReusePlan: {PLAN}>"
    assert str(ReusePlan(())) == "nothing to place"
    assert (ReusePlan(()).peak, ReusePlan(()).lower_bound) == (0, 0)


def test_lease_knows_where_it_lies(device: Simulated) -> None:
    """What is allocated first lies at its beginning."""
    with AsyncMemoryPool(device, limit="32 MiB") as pool, pool.lease("4 MiB") as lease:
        assert isinstance(lease, Lease)
        with lease.allocate("1 MiB") as buffer:
            assert lease.address == buffer.address
