"""Calls on what has ended: closed pools, dead workers and forked children return at once, by an error that says so."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable

import pytest

from asyncmem import (
    AsyncmemError,
    AsyncMemoryPool,
    Budget,
    Buffer,
    DeviceError,
    Lease,
    PoolClosed,
    Spillable,
)
from asyncmem.core import Request
from asyncmem.pool.snapshot import PressureChanges

from .support import LIMIT, MIB, make_pool, quick_device

pytestmark = pytest.mark.may_block

PATIENCE = 60.0  # seconds; every call below takes milliseconds


class Held:
    """A pool in use, with one of everything that comes from it."""

    def __init__(self) -> None:
        self.pool = make_pool(segment_size=MIB)
        self.buffer: Buffer = self.pool.allocate(MIB)
        self.budget: Budget = self.pool.budget("share", limit=MIB)
        self.lease: Lease = self.pool.lease(MIB).__enter__()
        self.spillable: Spillable = self.pool.spillable(self.pool.allocate(MIB))
        self.full = self.pool.allocate(4 * MIB)
        self.waiting: Request[Buffer]
        self.levels: PressureChanges = self.pool.pressure_changes()

    async def wait(self) -> None:
        """Have a request wait."""
        request = self.pool.allocate_async(6 * MIB)
        assert isinstance(request, Request)
        self.waiting = request


# What refuses by `PoolClosed`, whatever has ended the pool.
REFUSED: dict[str, Callable[[Held], object]] = {
    "allocate": lambda held: held.pool.allocate(1),
    "allocate, patiently": lambda held: asyncio.to_thread(held.pool.allocate, 1, timeout=1),
    "allocate_async": lambda held: held.pool.allocate_async(1),
    "try_allocate": lambda held: held.pool.try_allocate(1),
    "allocate_batch": lambda held: held.pool.allocate_batch([1, 2]),
    "empty": lambda held: held.pool.empty((2,)),
    "lease": lambda held: held.pool.lease(1).__enter__(),
    "inner": lambda held: held.lease.allocate(8 * MIB),
    "budget": lambda held: held.pool.budget("late", limit=1),
    "of a budget": lambda held: held.budget.allocate(1),
    "trim": lambda held: held.pool.trim(),
    "empty_cache": lambda held: held.pool.empty_cache(),
    "resize": lambda held: held.pool.resize(limit=LIMIT),
    "configure": lambda held: held.pool.configure(timeout=1),
    "warmup": lambda held: held.pool.warmup([(1, 1)]),
    "open": lambda held: held.pool.open(),
    "open, wait": lambda held: held.pool.open(wait=True),
    "with": lambda held: held.pool.__enter__(),
    "async with": lambda held: held.pool.__aenter__(),
    "pressure_changes": lambda held: held.pool.pressure_changes(),
    "graph": lambda held: held.pool.graph(),
    "waiting": lambda held: held.waiting,
    "waiting, block": lambda held: (
        asyncio.to_thread(held.waiting.block, 1) if not held.waiting.done() else held.waiting
    ),
}

# What still works, or has an error of its own.
USABLE: dict[str, Callable[[Held], object]] = {
    "wait": lambda held: held.pool.wait(),
    "stats": lambda held: held.pool.stats(),
    "summary": lambda held: held.pool.summary(),
    "waiters": lambda held: held.pool.waiters(),
    "segments": lambda held: held.pool.segments(),
    "check": lambda held: held.pool.check(),
    "repr": lambda held: repr(held.pool),
    "reset_stats": lambda held: held.pool.reset_stats(),
    "budget.resize": lambda held: held.budget.resize(limit=1),
    "budget.stats": lambda held: held.budget.stats(),
    "budget.close": lambda held: held.budget.close(),
    "lease.exit": lambda held: held.lease.__exit__(None, None, None),
    "levels": lambda held: anext(held.levels, None),
    "spillable": lambda held: held.spillable.use().__enter__(),
    "spillable.free": lambda held: held.spillable.free(),
    "pin": lambda held: held.buffer.pin().unpin(),
    "copy_from": lambda held: asyncio.to_thread(held.buffer.copy_from(bytes(8)).block, 1),
    "use_on": lambda held: held.buffer.use_on(held.buffer.stream),
    "free": lambda held: held.buffer.free(),
    "close": lambda held: asyncio.to_thread(held.pool.close, 0.1),
    "aclose": lambda held: held.pool.aclose(0.1),
    "drain": lambda held: held.pool.aclose(0.1, drain=True),
    "leave": lambda held: held.pool.__aexit__(None, None, None),
}


async def outcome(call: Callable[[Held], object], held: Held) -> str:
    """What a call came to."""
    try:
        found = call(held)
        if isinstance(found, Awaitable):
            async with asyncio.timeout(PATIENCE):
                await found
    except TimeoutError as error:
        return type(error).__name__ if isinstance(error, AsyncmemError) else "hangs"
    except AsyncmemError as error:
        return type(error).__name__
    return "works"


async def sweep(held: Held) -> list[str]:
    """What was not as it should be, of all calls."""
    wrong = [f"{name}: {came}" for name, call in REFUSED.items() if (came := await outcome(call, held)) != "PoolClosed"]
    for _ in range(2):
        for name, call in USABLE.items():
            came = await outcome(call, held)
            if came in ("hangs", "RequestCancelled", "InvalidRequest"):
                wrong.append(f"{name}: {came}")
    return wrong


async def end_by_close(held: Held) -> None:
    await held.pool.aclose()


async def end_by_a_block_that_raises(held: Held) -> None:
    with pytest.raises(ZeroDivisionError):
        async with held.pool:
            raise ZeroDivisionError


async def end_by_death(held: Held) -> None:
    held.pool._opened.worker.submit(divide)
    assert await anext(held.levels, None) is None


def divide() -> None:
    """An error that nobody expects."""
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("end", [end_by_close, end_by_a_block_that_raises, end_by_death])
def test_a_pool_that_has_ended_refuses_by_name_and_nothing_hangs(end: Callable[[Held], Awaitable[None]]) -> None:
    """Whatever has ended it; what looks, frees and closes goes on working, twice."""

    async def main() -> list[str]:
        held = Held()
        await held.wait()
        await end(held)
        return await sweep(held)

    assert asyncio.run(main()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused_by_name_and_nothing_hangs() -> None:
    """A child has neither the worker nor the device, and the parent's requests are not its own."""
    held = Held()
    asyncio.run(held.wait())
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(writer, "\n".join(asyncio.run(sweep(held))).encode())
            code = 0
        except BaseException:  # noqa: BLE001  # it must not go on as a second run of the tests
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as told:
        assert told.read() == ""
    assert os.waitpid(child, 0)[1] == 0
    held.pool.check()
    held.full.free()
    held.waiting.cancel()
    held.pool.allocate(MIB).free()
    del held.spillable
    held.lease.__exit__(None, None, None)
    held.buffer.free()
    held.pool.close()
    assert held.pool._opened.released


# -- a later close makes good what failed -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["aclose", "close"])
@pytest.mark.parametrize("beside", [False, True], ids=["its own", "its page-locked pool's"])
def test_closing_again_gives_back_what_the_device_did_not_take(how: str, beside: bool) -> None:
    """The first says what failed; the second has all of it back, also of the pools beside."""

    async def main() -> None:
        device = quick_device()
        pool = make_pool(device=device, segment_size=LIMIT)
        of = pool.pinned if beside else pool
        of.allocate(MIB).free()
        failing = of.device
        failing.fail("free_segment", times=1, error=DeviceError("free", code=1, code_name="BUSY"))  # type: ignore[attr-defined]
        with pytest.raises(DeviceError, match="BUSY"):
            await close(pool, how)
        assert [is_out(of), is_out(pool)] == [True, not beside]
        await close(pool, how)
        assert [is_out(of), is_out(pool)] == [False, False]
        await close(pool, how)

    asyncio.run(main())


def is_out(pool: AsyncMemoryPool) -> bool:
    """Whether some of a pool's memory has not gone back."""
    return not pool._opened.released


async def close(pool: AsyncMemoryPool, how: str) -> None:
    await (pool.aclose() if how == "aclose" else asyncio.to_thread(pool.close))


def test_a_device_that_cannot_be_closed_is_closed_by_the_next_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pool has made stays its own until it is gone."""
    pool = AsyncMemoryPool("simulated").__enter__()
    closes: list[int] = []
    real = pool.device.close

    def close_device() -> None:
        closes.append(1)
        if len(closes) == 1:
            raise DeviceError("close", code=1, code_name="BUSY")
        real()

    monkeypatch.setattr(pool.device, "close", close_device)
    with pytest.raises(DeviceError, match="BUSY"):
        pool.close()
    pool.close()
    assert len(closes) == 2


# -- the worker's death -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_was_asked_of_a_worker_that_dies_is_done_all_the_same() -> None:
    """A job that stands behind the one that kills it has somebody who waits for it."""

    async def main() -> None:
        pool = make_pool()
        await pool.open()
        gate = threading.Event()

        def die() -> None:
            gate.wait(PATIENCE)
            raise ZeroDivisionError

        pool._opened.worker.submit(die)
        trimmed = asyncio.create_task(pool.trim())
        await asyncio.sleep(0)
        gate.set()
        async with asyncio.timeout(PATIENCE):
            await trimmed
            await pool.aclose()
        assert pool._opened.released

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::RuntimeWarning")
def test_who_waits_for_a_pool_to_be_ready_hears_that_its_worker_died() -> None:
    """Also of what is no Exception, such as a driver's wrapper that exits."""

    class Gone(BaseException):
        pass

    async def main() -> None:
        device = quick_device()
        device.fail("allocate_segment", times=9, error=Gone())  # type: ignore[arg-type]  # that is the point
        pool = make_pool(device=device, pregrow=MIB)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises((Gone, PoolClosed)):
                await pool.wait()
            await pool.aclose()

    asyncio.run(main())


def test_a_warning_that_raises_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the program, or an output that is closed, fails while a pool breaks down."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))

    def show(*_: object, **__: object) -> None:
        raise ValueError("I/O operation on closed file")

    async def main() -> None:
        pool = make_pool(segment_size=MIB)
        held = pool.allocate(LIMIT)
        request = pool.allocate_async(MIB)
        pool._opened.worker.submit(divide)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(PoolClosed, match="ZeroDivisionError"):
                await request
        held.free()
        await pool.aclose()
        assert pool._opened.released
        with pytest.raises(PoolClosed, match="ZeroDivisionError"):  # and not that it was closed afterwards
            pool.allocate(1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        asyncio.run(main())
    deadline = time.monotonic() + PATIENCE
    while not told and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [str(error) for error in told] == ["I/O operation on closed file"]


def test_the_error_of_a_closed_pool_keeps_no_frames() -> None:
    """Each refusal has an error of its own: what was on the stacks of the others is let go."""
    pool = make_pool().__enter__()
    pool.close()
    lengths = []
    for call in (pool.graph, pool.pressure_changes, lambda: pool.allocate(1)) * 2:
        with pytest.raises(PoolClosed) as caught:
            call()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert lengths[:3] == lengths[3:]
