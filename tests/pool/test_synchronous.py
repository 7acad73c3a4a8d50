"""What a synchronous call does on its way to memory, and what it leaves alone."""

import asyncio
import copyreg
import gc
import signal
import threading
import time

import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeviceError, OutOfMemoryError, PoolTimeout
from asyncmem.core import Request
from asyncmem.devices import Simulated
from asyncmem.options import OptionArguments

MIB = 1 << 20
NOTHING_CACHED: OptionArguments = {"stream_cache_blocks": 0, "shared_cache_blocks": 0}


def test_a_call_that_may_not_wait_asks_the_device_for_nothing() -> None:
    """Its time is over before there could be any growth."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        for _ in range(2):
            with pytest.raises(PoolTimeout):
                pool.allocate(8 * MIB, timeout=0)
        assert pool.stats().reserved_bytes == 0
        assert pool.stats().timeouts == 2


@pytest.mark.asyncio
async def test_nor_does_one_on_a_loops_thread_hold_the_loop() -> None:
    """There growth would be worse than anywhere else."""
    async with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        with pytest.raises(PoolTimeout):
            pool.allocate(8 * MIB, timeout=0)
        assert pool.stats().loop_blocking_calls == 0


def test_the_main_thread_makes_the_calls_of_its_growth_itself() -> None:
    """Another thread's would cost it the time to wake that one, and to be woken."""
    device = Simulated("8 MiB")
    with AsyncMemoryPool(device, segments="paged", min_free=0) as pool:
        pool.allocate(MIB).free()
        assert {call.thread for call in device.calls if call.name in ("create", "map")} == {threading.get_ident()}


def test_an_interrupt_ends_the_main_threads_wait_for_the_device() -> None:
    """Another thread waits in its place, and the memory is there once the device is done."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    device = Simulated("8 MiB", clock="wall")
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with AsyncMemoryPool(device, segments="paged", min_free=0) as pool:
            busy = device.create_stream("busy")
            held = [pool.allocate(2 * MIB, stream=busy) for _ in range(4)]
            for buffer in held[::2]:
                busy.launch(0.5, writes=[buffer])
                buffer.free()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            began = time.monotonic()
            with pytest.raises(Stop):
                pool.allocate(4 * MIB)
            assert time.monotonic() < began + 0.4
            with pool.allocate(4 * MIB, timeout=60):
                pool.check()
            held.clear()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("main", [True, False], ids=["main thread", "another thread"])
@pytest.mark.parametrize("copies", ["plain", "with frames"])
def test_nothing_is_kept_of_a_request_that_a_device_failed(
    monkeypatch: pytest.MonkeyPatch, copies: str, main: bool
) -> None:
    """Its thread is where the error was made: a request that kept the frames would keep itself, and its memory."""
    if copies == "with frames":  # as those are once distributed is imported
        support = pytest.importorskip("tblib.pickling_support")
        monkeypatch.setitem(copyreg.dispatch_table, DeviceError, support.pickle_exception)
    else:
        monkeypatch.delitem(copyreg.dispatch_table, DeviceError, raising=False)
    device = Simulated("8 MiB")

    def ask() -> None:
        with pytest.raises(DeviceError):
            pool.allocate(MIB)

    with AsyncMemoryPool(device, segments="paged", min_free=0) as pool:
        device.fail("map")
        gc.collect()
        gc.disable()
        try:
            if main:
                ask()
            else:
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()
            assert not [one for one in gc.get_objects() if isinstance(one, Request) and one._core is pool._opened.core]
        finally:
            gc.enable()


def test_a_lease_that_is_full_leaves_the_caches_of_the_pool_alone() -> None:
    """They hold nothing that lies in its range."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size="16 MiB") as pool:
        kept = [pool.allocate(MIB) for _ in range(12)]
        kept.clear()
        cached = pool.stats().cached_bytes
        with pool.lease("4 MiB") as lease, lease.allocate(3 * MIB), pytest.raises(OutOfMemoryError):
            lease.allocate(2 * MIB)
        assert pool.stats().cached_bytes >= cached > 0
        assert pool.stats().remedies.get("flush", 0) == 0


@pytest.mark.parametrize("within", ["pool", "budget"])
def test_what_is_freed_while_a_call_comes_to_stand_serves_it(monkeypatch: pytest.MonkeyPatch, within: str) -> None:
    """All that can be had is in pieces, and the block between two of them comes back before anything was done.

    So nobody is asked for memory, and nothing is collected.
    """
    asked: list[object] = []
    with AsyncMemoryPool(
        Simulated("8 MiB"), limit="8 MiB", segment_size="8 MiB", on_oom=lambda facts: asked.append(facts) is not None,
        **NOTHING_CACHED,
    ) as pool:  # fmt: skip
        blocks = {number: pool.allocate(MIB) for number in range(8)}
        for number in (0, 2):
            del blocks[number]
        door = pool if within == "pool" else pool.budget("part", limit="4 MiB")
        serve = pool._opened._serve

        def serve_later(request: Request[Buffer]) -> None:
            blocks.pop(1, None)
            serve(request)

        monkeypatch.setattr(pool._opened, "_serve", serve_later)
        with door.allocate(2 * MIB) as buffer:
            assert buffer.nbytes == 2 * MIB
        remedies = pool.stats().remedies
        assert remedies.get("trim", 0) == remedies.get("collect", 0) == 0
        assert asked == []
        blocks.clear()


@pytest.mark.parametrize("_", range(20))
def test_who_stands_behind_a_call_that_was_served_at_once_is_served(_: int) -> None:
    """The first one joins two blocks of different streams; the second one, of the same moment, has memory made."""
    device = Simulated("64 MiB")
    with AsyncMemoryPool(
        device, limit="64 MiB", segment_size="8 MiB", overlap=0, stall_after=None, **NOTHING_CACHED
    ) as pool:
        one, other = device.create_stream(), device.create_stream()
        parts = [pool.allocate(4 * MIB, stream=stream) for stream in (one, other)]
        parts.clear()
        both = threading.Barrier(2)
        served: list[Buffer] = []

        def ask() -> None:
            both.wait(60)
            served.append(pool.allocate(8 * MIB, stream=one))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [buffer.nbytes for buffer in served] == [8 * MIB, 8 * MIB]
        served.clear()


def test_a_call_that_caches_can_serve_stands_nowhere() -> None:
    """They are emptied, and it takes what they held; nobody else had to look at it."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size="8 MiB") as pool:
        pieces = [pool.allocate(MIB) for _ in range(8)]
        pieces.clear()
        before = pool.stats()
        assert before.cached_bytes == 8 * MIB
        pool.allocate(8 * MIB).free()
        after = pool.stats()
        assert (after.waits, after.grows) == (before.waits, before.grows)
        assert after.num_cache_misses == before.num_cache_misses + 1
        assert after.remedies["flush"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("free", ["in caches", "in pieces of two streams"])
@pytest.mark.parametrize("door", ["allocate", "allocate_async"])
async def test_no_time_at_all_is_enough_for_what_is_free(door: str, free: str) -> None:
    """All of the one segment is, if not in one block; nothing grows, and nobody waits."""
    device = Simulated("64 MiB")
    options: OptionArguments = {} if free == "in caches" else NOTHING_CACHED
    async with AsyncMemoryPool(device, limit="64 MiB", segment_size="8 MiB", min_free=0, **options) as pool:
        streams = [device.create_stream(), device.create_stream()]
        home = streams[0]
        many = [home] * 8 if free == "in caches" else streams
        blocks = [await pool.allocate_async(8 * MIB // len(many), stream=stream) for stream in many]
        blocks.clear()
        before = pool.stats()
        if door == "allocate":
            buffer = pool.allocate(8 * MIB, stream=home, timeout=0)
        else:
            buffer = await pool.allocate_async(8 * MIB, stream=home, timeout=0)
        after = pool.stats()
        assert buffer.nbytes == after.reserved_bytes == 8 * MIB
        assert (after.waits, after.timeouts) == (before.waits, 0)
        with pytest.raises(PoolTimeout):
            pool.allocate(MIB, stream=home, timeout=0)
        buffer.free()


@pytest.mark.asyncio
@pytest.mark.may_block
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["growth", "on_oom"])
async def test_a_call_that_ends_by_an_error_stands_in_nobodys_way(error: type[BaseException], where: str) -> None:
    """An interrupt, or what the user's own function raises: the request is gone with the call."""

    def fail(*_: object) -> bool:
        raise error

    device = Simulated("64 MiB")
    async with AsyncMemoryPool(device, limit="64 MiB", on_oom=fail) as pool:
        with pytest.MonkeyPatch.context() as patched:
            if where == "growth":
                patched.setattr(device, "allocate_segment", fail)
            else:
                device.take_elsewhere("64 MiB")
            with pytest.raises(error):
                pool.allocate(8 * MIB)
        if where == "on_oom":
            device.give_back_elsewhere("64 MiB")
        assert pool.waiters() == ()
        (await pool.allocate_async(8 * MIB, timeout=60)).free()


def test_a_thread_that_waits_is_seen_by_its_name() -> None:
    """Like a task; and no more once it has its memory."""
    with AsyncMemoryPool(Simulated("8 MiB"), limit="8 MiB") as pool:
        held = [pool.allocate(8 * MIB)]
        thread = threading.Thread(target=lambda: pool.allocate(MIB, timeout=60).free(), name="the walker")
        thread.start()
        while "the walker" not in "".join(one.owner for one in pool.waiters()):
            time.sleep(0.001)
        held.clear()
        thread.join()
        assert pool.waiters() == ()


def test_a_timeout_beyond_what_a_lock_can_wait_for_is_one() -> None:
    """Half of for ever is no error, and wakes in time."""
    with AsyncMemoryPool(Simulated("8 MiB"), limit="8 MiB") as pool:
        held = [pool.allocate(8 * MIB)]
        timer = threading.Timer(0.01, held.clear)
        timer.start()
        pool.allocate(8 * MIB, timeout=1e300).free()
        timer.join()


@pytest.mark.asyncio
@pytest.mark.parametrize("device", ["host", "simulated"])
async def test_an_await_may_come_before_what_is_to_be_warm(device: str) -> None:
    """The worker provides for both."""
    async with AsyncMemoryPool(device, limit="64 MiB", warmup=[("8 MiB", 4)]) as pool:
        (await pool.allocate_async(MIB, timeout=60)).free()
        await pool.wait(60)
        assert pool.stats().reserved_bytes >= 32 * MIB


@pytest.mark.asyncio
async def test_what_cannot_be_warm_is_said_by_the_wait_for_it() -> None:
    async with AsyncMemoryPool(Simulated("8 MiB"), limit="64 MiB", min_free=0, warmup=[("8 MiB", 4)]) as pool:
        with pytest.raises(OutOfMemoryError):
            await pool.wait(60)
        (await pool.allocate_async(MIB, timeout=60)).free()


@pytest.mark.asyncio
async def test_a_host_that_has_too_little_fails_the_request_alone() -> None:
    """The pool it stands in for goes on."""
    huge = 1 << 46
    async with AsyncMemoryPool(Simulated(capacity=2 * huge), limit=2 * huge, fallback="host") as pool:
        held = await pool.allocate_async(2 * huge - 8 * MIB)
        with pytest.raises(OutOfMemoryError):
            await pool.allocate_async(huge, timeout=60)
        with pytest.raises(OutOfMemoryError):
            pool.allocate(huge)
        (await pool.allocate_async(MIB, timeout=60)).free()
        held.free()


@pytest.mark.asyncio
async def test_a_device_that_takes_nothing_back_for_once_leaves_the_pool_open() -> None:
    """On a loop the worker gives back, and there is nobody whom its error could be raised to."""
    device = Simulated("64 MiB")
    async with AsyncMemoryPool(device, limit="64 MiB") as pool:
        (await pool.allocate_async(8 * MIB)).free()
        device.fail("free_segment")
        pool.empty_cache()
        with pytest.warns(RuntimeWarning, match="free_segment"):
            await pool._opened.run(int).wait(60)
        (await pool.allocate_async(8 * MIB, timeout=60)).free()


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("thread", [False, True])
async def test_a_callback_that_raises_is_nobody_elses_trouble(thread: bool) -> None:
    """Whoever was granted memory by the same free is woken."""

    def fail(_: object) -> None:
        raise ValueError

    async with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        held = await pool.allocate_async("64 MiB")
        first = pool.allocate_async("32 MiB")
        first.add_done_callback(fail)
        second = asyncio.ensure_future(pool.allocate_async("32 MiB"))
        await asyncio.sleep(0)
        if thread:
            await asyncio.to_thread(held.free)
        else:
            held.free()
        (await asyncio.wait_for(second, 60)).free()
        first.result().free()


def test_a_loop_that_was_closed_with_a_waiter_is_nobody_elses_trouble() -> None:
    """A free on its thread wakes the others, of whom one is a thread."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        loop, tasks = asyncio.new_event_loop(), []

        async def begin() -> Buffer:
            held = await pool.allocate_async("64 MiB")
            tasks.append(asyncio.ensure_future(pool.allocate_async("32 MiB", timeout=100)))
            tasks.append(asyncio.ensure_future(pool.allocate_async("16 MiB")))
            await asyncio.sleep(0)
            return held

        held = loop.run_until_complete(begin())
        loop.close()
        got: list[Buffer] = []
        thread = threading.Thread(target=lambda: got.append(pool.allocate("16 MiB", timeout=60)))
        thread.start()
        while len(pool.waiters()) < 3:
            time.sleep(0.001)
        held.free()
        thread.join(60)
        assert got
        while tasks:
            tasks.pop()._log_destroy_pending = False
        got.clear()
        gc.collect()


def test_an_owners_block_may_end_anywhere() -> None:
    """A task that is collected in the midst of the pool's own code leaves it there; whoever comes next sees to it."""
    with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB") as pool:
        block = pool.owner("somebody")
        block.__enter__()
        assert pool._opened.core.observed
        with pool._opened.lock:
            block.__exit__(None, None, None)
        pool.allocate(MIB).free()
        assert not pool._opened.core.observed
