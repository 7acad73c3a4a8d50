"""Bad input is named at the call, or at the await where only then it is bad, and loses nothing."""

import math
import threading
from collections.abc import Callable

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError, PoolOptions
from asyncmem.insight import (
    AllocationTracker,
    LifetimeAnalyzer,
    Recording,
    analyze_allocation_patterns,
    dump_allocation_trace,
    profile_memory,
)
from asyncmem.pool.share import Share
from asyncmem.testing import run_steps
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, stepped_pool

HALF = LIMIT // 2
SIZES = [-1, 1.5, 4096.0, math.nan, 2**63, 2**200, True, None, "lots", "-4 MiB", b"4096", [4096]]


DOORS: dict[str, Callable[[AsyncMemoryPool, object], object]] = {
    "allocate": lambda pool, size: pool.allocate(size),  # type: ignore[arg-type]  # what this is about
    "allocate_async": lambda pool, size: pool.allocate_async(size),  # type: ignore[arg-type]  # what this is about
    "try_allocate": lambda pool, size: pool.try_allocate(size),  # type: ignore[arg-type]  # what this is about
    "allocate_batch": lambda pool, size: pool.allocate_batch([4096, size]),  # type: ignore[list-item]  # this is it
    "lease": lambda pool, size: pool.lease(size),  # type: ignore[arg-type]  # what this is about
    "budget": lambda pool, size: pool.budget("b", limit=size),  # type: ignore[arg-type]  # what this is about
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_size_that_is_none_is_refused_at_the_call(door: str, size: object) -> None:
    """Negative, non-integer and absurd sizes raise InvalidRequest, a ValueError, when the door is called."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pytest.raises(InvalidRequest) as caught:
                DOORS[door](pool, size)
            assert isinstance(caught.value, ValueError)
            whole(pool)
            await refillable(pool, LIMIT)

    run_steps(main())


def test_zero_is_a_valid_size(virtually: Run) -> None:
    """A request for nothing gives an empty buffer, at once, also when the pool is full."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            for buffer in (
                pool.allocate(0),
                await pool.allocate_async(0),
                pool.try_allocate(0),
                (await pool.allocate_batch([0]))[0],
            ):
                assert buffer is not None
                assert buffer.nbytes == 0
                buffer.free()

    virtually(main)


def fresh(share: Share) -> object:
    """Nothing is mapped: the request would grow."""
    return share


def hit(share: Share) -> object:
    """What is asked for lies in a cache."""
    share.allocate(MIB).free()
    return share


def busy(share: Share) -> object:
    """The next request would let the loop turn once."""
    for _ in range(1001):
        share.allocate_async(MIB).result().free()
    return share


def full(share: Share) -> object:
    """The request would wait."""
    return share.allocate(HALF)


@pytest.mark.parametrize("state", [fresh, hit, busy, full])
@pytest.mark.parametrize("part", ["pool", "budget", "lease"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": math.nan},
        {"priority": "high"},
        {"priority": 1.5},
        {"tag": 7},
        {"stream": Ellipsis},
        {"stream": "default"},
    ],
    ids=repr,
)
def test_other_arguments_are_refused_at_the_call(
    arguments: dict[str, object], part: str, state: Callable[[Share], object]
) -> None:
    """Timeouts, priorities, tags and streams that cannot be right raise at the call, however the request is served."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.lease(HALF) as lease:
            share = {"pool": pool, "budget": pool.budget("b", limit=HALF), "lease": lease}[part]
            doors: list[Callable[..., object]] = [
                share.allocate, share.allocate_async, lambda size, **more: share.allocate_batch([size], **more),
            ]  # fmt: skip
            if arguments.keys() <= {"tag", "stream"}:
                doors.append(share.try_allocate)
            held = state(share)
            for door in doors:
                for size in (0, 512, MIB):
                    with pytest.raises(InvalidRequest):
                        door(size, **arguments)
            assert pool.stats().waiting == 0
            del held

    run_steps(main())


def test_kinds_of_segments_are_listed_once() -> None:
    """Those of the device and those of every device."""
    with pytest.raises(InvalidRequest) as caught, AsyncMemoryPool("host", segments="pages"):
        pass
    assert caught.value.expected.count("direct") == 1


@pytest.mark.parametrize("wrong", ["limit:2GiB", {"limit": "2 GiB"}, PoolOptions, 5, True], ids=repr)
def test_what_is_no_pool_and_no_options_is_refused(wrong: object) -> None:
    """By what takes them, and not as an attribute that it lacks."""
    takers: tuple[Callable[..., object], ...] = (
        lambda it: AsyncMemoryPool("host", options=it), Recording, profile_memory, AllocationTracker,
        analyze_allocation_patterns, dump_allocation_trace, LifetimeAnalyzer.from_records,
    )  # fmt: skip
    for taker in takers:
        with pytest.raises(InvalidRequest):
            taker(wrong)


def test_unknown_options_get_a_suggestion() -> None:
    """An option that does not exist is named together with the one that was probably meant."""
    with pytest.raises(InvalidRequest, match="limit"):
        AsyncMemoryPool("simulated", limti="1 GiB")  # type: ignore[call-arg]  # what this is about
    with pytest.raises(InvalidRequest, match="pregrow"):
        PoolOptions(pregorw="1 GiB")  # type: ignore[call-arg]  # what this is about


def test_unchangeable_options_are_refused_by_name(virtually: Run) -> None:
    """configure() refuses what cannot change in use, by name, and then changes nothing at all."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pytest.raises(InvalidRequest, match="segments"):
                pool.configure(bypass=1.0, segments="direct")
            pool.configure(bypass=1.0)
            async with pool.allocate_async(LIMIT):
                pass

    virtually(main)


def test_await_outside_of_a_loop_is_refused() -> None:
    """A request driven by no event loop says what it needs, and gives up its place."""
    pool = stepped_pool()
    held = pool.allocate(LIMIT)
    request = pool.allocate_async(MIB)
    with pytest.raises(InvalidRequest, match="event loop"):
        request.send(None)
    held.free()
    whole(pool)
    pool.close()


def test_result_before_the_end_is_refused(virtually: Run) -> None:
    """result() of a request that still waits raises, and the request goes on waiting."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            request = pool.allocate_async(MIB)
            with pytest.raises(InvalidRequest):
                request.result()
            held.free()
            (await request).free()

    virtually(main)


def test_lease_is_entered_once(virtually: Run) -> None:
    """A lease asks for its range when it is entered: not before, and not twice."""

    async def main() -> None:
        async with stepped_pool() as pool:
            lease = pool.lease(MIB)
            with pytest.raises(InvalidRequest):
                await lease.allocate_async(512)
            async with lease:
                with pytest.raises(InvalidRequest):
                    await lease.__aenter__()
                with pytest.raises(OutOfMemoryError):
                    await lease.allocate_async(2 * MIB)
            whole(pool)

    virtually(main)


def test_errors_from_threads_are_the_same() -> None:
    """Bad input in another thread is named there and leaves the pool as it was."""
    pool = stepped_pool()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            pool.allocate(-1)
        except InvalidRequest as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(errors) == 1
    whole(pool)
    pool.close()
