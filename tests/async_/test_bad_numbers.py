"""Numbers that cannot be right, as arguments of calls: refused at once by name, and the pool is as it was."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Buffer, InvalidRequest, profile_memory
from asyncmem.core import Request
from asyncmem.insight import LifetimeAnalyzer, Records
from asyncmem.pipeline import Channel, DoubleBuffer, Pipeline, Prefetcher
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel
from asyncmem.replay import Policy, Trace, fit, replay

from .support import LIMIT, MIB, make_pool

pytestmark = pytest.mark.may_block


class Hostile:
    """Raises where it is taken for a number."""

    def __index__(self) -> int:
        raise RuntimeError("no number")

    __float__ = __index__


TIMES = [-1, True, math.nan, math.inf, -math.inf, 10**400, b"1", "soon", Decimal(1), np.array([1, 2]), 1j, Hostile()]
COUNTS = [2**70, -1, True, math.nan, math.inf, 10**400, "many", b"1", 1.5, Decimal(1), 1j, Hostile(), object()]

Call = Callable[[AsyncMemoryPool, Any], object]

TIMED: dict[str, Call] = {
    "allocate": lambda pool, value: pool.allocate(1, timeout=value),
    "allocate_async": lambda pool, value: pool.allocate_async(1, timeout=value),
    "allocate_batch": lambda pool, value: pool.allocate_batch([1], timeout=value),
    "lease": lambda pool, value: pool.lease(1, timeout=value).__enter__(),
    "wait": lambda pool, value: pool.wait(value),
    "aclose": lambda pool, value: pool.aclose(value),
    "drain": lambda pool, value: pool.aclose(value, drain=True),
    "close": lambda pool, value: pool.close(value),
    "block": lambda pool, value: waiting(pool).block(value),
    "copy": lambda pool, value: pool.allocate(8).copy_from(bytes(8)).block(value),
}
COUNTED: dict[str, Call] = {
    "size": lambda pool, value: pool.allocate(value),
    "batch": lambda pool, value: pool.allocate_batch([1, value]),
    "budget": lambda pool, value: pool.budget("one", limit=value),
    "lease": lambda pool, value: pool.lease(value),
    "trim": lambda pool, value: pool.trim(value),
    "warmup": lambda pool, value: pool.warmup([(1, value)]),
    "align": lambda pool, value: pool.empty_batch([1], align=value),
    "resize": lambda pool, value: pool.resize(limit=value),
    "max_items": lambda pool, value: Channel(pool, MIB, max_items=value),
    "ahead": lambda pool, value: Prefetcher(pool, ahead=value),
    "workers": lambda pool, value: Prefetcher(pool, workers=value),
    "buffers": lambda pool, value: DoubleBuffer(pool, MIB, buffers=value),
}


def waiting(pool: AsyncMemoryPool) -> Request[Buffer]:
    """A request that waits."""
    request = pool.allocate_async(LIMIT)
    assert isinstance(request, Request)
    return request


def test_absurd_times_are_refused() -> None:
    """A pool whose close was given one is still open."""
    sweep(TIMED, TIMES)


def test_absurd_counts_are_refused() -> None:
    """None of them holds up the caller, or is taken for as many as there are."""
    sweep(COUNTED, COUNTS)


def sweep(calls: dict[str, Call], values: list[Any]) -> None:
    async def main() -> list[str]:
        async with make_pool() as pool:
            with pool.allocate(MIB):
                tried = [(name, await refused(pool, call, value)) for name, call in calls.items() for value in values]
            pool.allocate(LIMIT).free()
            pool.check()
        return [name for name, right in tried if not right]

    assert asyncio.run(main()) == []


async def refused(pool: AsyncMemoryPool, call: Call, value: object) -> bool:
    """Whether the pool refuses by name, within a second."""
    try:
        async with asyncio.timeout(1):
            found = call(pool, value)
            if isinstance(found, Coroutine):
                await found
    except InvalidRequest:
        return True
    return False


def test_times_beyond_what_threads_can_wait_are_any_time() -> None:
    """They are as good as None."""
    pool = make_pool()
    copy = pool.allocate(8).copy_from(bytes(8))
    assert copy.block(1e300)
    held = pool.allocate(LIMIT)
    request = waiting(pool)
    held.free()
    assert request.block(1e300)
    del request
    pool.close(1e300)
    assert pool._opened.released


def test_text_is_no_list_of_sizes() -> None:
    """Its characters would be taken for one each."""
    with make_pool() as pool:
        for text in ("64", b"64"):
            with pytest.raises(InvalidRequest, match="sizes: expected several of them"):
                pool.allocate_batch(text)
        pool.allocate(MIB).free()
        pool.allocate_batch(["64", "1 KiB"]).result().free()


def test_tags_of_a_subclass_of_text_are_counted_under_that_text() -> None:
    """As those of an enumeration of texts are."""

    class Tag(str):
        __slots__ = ()

    with make_pool() as pool, pool.allocate(MIB, tag=Tag("mine")) as buffer:
        assert buffer.tag == "mine"
        assert type(buffer.tag) is str
        assert pool._opened.core.tag_bytes() == {"mine": MIB}


def trace() -> Trace:
    """Make a program of one allocation."""
    return Trace(*map(np.array, ([0, 1], [0, 0], [0, 0], [5, 5], [0, 1])))


def records() -> Records:
    """Return the records of one allocation."""
    with AsyncMemoryPool("host", limit=MIB) as pool, profile_memory(pool) as profile:
        pool.allocate(1).free()
    return profile.records()


NUMBERS: dict[str, Callable[[Any], object]] = {
    "limit of a replay": lambda it: replay(trace(), limit=it),
    "policy of a replay": lambda it: replay(trace(), it),
    "model of a replay": lambda it: replay(trace(), None, it),
    "waiting of a fit": lambda it: fit(trace(), waiting=it),
    "text of a policy": Policy.parse,
    "column of a trace": lambda it: Trace(it, it, it, it, it),
    "align of a plan": lambda it: LifetimeAnalyzer().compute_reuse_plan(align=it),
    "tolerance of a plan": lambda it: LifetimeAnalyzer().compute_reuse_plan(tolerance=it),
    "time of records": lambda it: records().live_at(it),
}


@pytest.mark.parametrize("what", NUMBERS)
@pytest.mark.parametrize("wrong", [math.nan, -1.5e300], ids=repr)
def test_arguments_of_replays_and_plans_are_refused_by_name(what: str, wrong: float) -> None:
    """A fit that nothing can satisfy would go on for ever, and others end in an error about something inside."""
    with pytest.raises(InvalidRequest):
        NUMBERS[what](wrong)


def test_stages_are_refused_at_once() -> None:
    """Names that are no text, what is no stage, and more items at once than there is room to count."""

    async def work(item: object, _: object) -> object:
        return item

    async def main() -> None:
        async with AsyncMemoryPool("host", limit=MIB) as pool:
            with pytest.raises(InvalidRequest, match="name"):
                ParallelStage(work, work, saved=1, output=1, name=5)  # type: ignore[arg-type]  # what this is about
            with pytest.raises(InvalidRequest, match="stages"):
                PipelineParallel([work], [pool])  # type: ignore[list-item]  # what this is about
            async with Pipeline(work, pool=pool) as pipe:
                with pytest.raises(InvalidRequest, match="in_flight"):
                    pipe.map([1], in_flight=1 << 40)

    asyncio.run(main())
