"""Memory for libraries that ask in C, on threads of theirs: what `asyncmem.interop.torch` gives to torch."""

import asyncio
import ctypes
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda_driver

from asyncmem import AsyncMemoryPool, InvalidRequest, LeakWarning, Lease, OutOfMemoryError, PoolClosed, PoolTimeout
from asyncmem.core import ROUTE_CALLS, Route, route_failure
from asyncmem.devices import Cuda
from asyncmem.pool.share import Share
from tests.cuda.fake import FakeDriver

from .conftest import MIB

allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(ROUTE_CALLS[0])
release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(ROUTE_CALLS[1])


@contextmanager
def routed(share: Share, **options: Any) -> Iterator[Route]:
    route = Route(share, 0, lambda handle: handle, tag="library", **options)
    route.enter()
    try:
        yield route
    finally:
        route.leave()


def settle(holds: Callable[[], bool]) -> None:
    """Wait for what the pool is told soon."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def count_routes() -> int:
    gc.collect()
    return sum(type(one) is Route for one in gc.get_objects())


class TestServing:
    def test_lease_serves_from_its_range_alone(self, pool: AsyncMemoryPool) -> None:
        """What a thread allocates lies in the lease that it has entered, and is the lease's again once it is freed."""
        with pool.lease(8 * MIB) as lease:
            with routed(lease) as route:
                first, second = allocate(2 * MIB, 0, None), allocate(6 * MIB, 0, None)
                assert {first, second} == {lease.address, lease.address + 2 * MIB}
                assert route.live == 8 * MIB
                assert allocate(512, 0, None) is None
                release(first, 2 * MIB, 0, None)
                assert allocate(2 * MIB, 0, None) == first
                release(first, 2 * MIB, 0, None)
                release(second, 6 * MIB, 0, None)
            assert lease.stats().allocated_bytes == 0
        settle(lambda: not route.core.routes)

    def test_memory_that_is_freed_during_a_capture_is_got_after_it(self, pool: AsyncMemoryPool, cuda: Cuda) -> None:
        """No fence behind all streams may be recorded before; nobody has to tell the pool when it may."""
        side = cuda.create_stream()
        with routed(pool):
            block = allocate(64 * MIB, 0, None)
        cuda.begin_captures()
        release(block, 64 * MIB, 0, None)
        with ThreadPoolExecutor() as threads:
            waits = threads.submit(pool.allocate, 64 * MIB, stream=side, timeout=30)
            settle(lambda: pool.stats().waiting == 1)
            time.sleep(0.02)
            assert not waits.done()
            cuda.end_captures()
            waits.result(60).free()

    def test_thread_without_a_route_gets_nothing(self, pool: AsyncMemoryPool) -> None:
        """A route is its thread's; other threads, other devices and the time after it get nothing."""
        with pool.lease(MIB) as lease, routed(lease), ThreadPoolExecutor() as threads:
            assert threads.submit(allocate, 512, 0, None).result() is None
            assert allocate(512, 1, None) is None
        assert allocate(512, 0, None) is None

    def test_thread_that_python_has_never_seen_gets_nothing(self, pool: AsyncMemoryPool, native: Any) -> None:
        """It has entered no route, and learns nothing of those of others."""
        streams = (ctypes.c_void_p * 4)()
        with routed(pool):
            assert native.storm(*ROUTE_CALLS, None, 0, streams, 4, 10, MIB) == 40

    def test_inner_route_serves_until_it_is_left(self, pool: AsyncMemoryPool) -> None:
        """Routes nest, and are left in turn."""
        with pool.lease(MIB) as outer, pool.lease(MIB) as inner, routed(outer) as one:
            with routed(inner):
                release(found := allocate(512, 0, None), 512, 0, None)
                assert found == inner.address
                with pytest.raises(RuntimeError, match="left"):
                    one.leave()
            release(found := allocate(512, 0, None), 512, 0, None)
            assert found == outer.address

    def test_pool_and_budget_grow(self, pool: AsyncMemoryPool) -> None:
        """They serve what they do not have yet, within their limits."""
        with pool.budget("some", limit=16 * MIB) as budget, routed(budget):
            found = [allocate(8 * MIB, 0, None) for _ in range(2)]
            assert all(found)
            assert allocate(512, 0, None) is None
            assert isinstance(route_failure(), OutOfMemoryError)
            with routed(pool):
                release(allocate(512, 0, None), 512, 0, None)
            for one in found:
                release(one, 8 * MIB, 0, None)
            settle(lambda: budget.stats().allocated_bytes == 0)

    def test_failure_says_what_is_full(self, pool: AsyncMemoryPool) -> None:
        """The error is the lease's own, with what is live by the route's tag, and is forgotten once it is asked for."""
        with pool.lease(4 * MIB) as lease, routed(lease):
            found = allocate(3 * MIB, 0, None)
            assert allocate(2 * MIB, 0, None) is None
            error = route_failure()
            assert isinstance(error, OutOfMemoryError)
            assert error.holders == (("library", 3 * MIB),)
            assert "from a lease of 4 MiB" in str(error)
            assert "lease 5 MiB" in error.advice
            assert route_failure() is None
            release(found, 3 * MIB, 0, None)
        with pool.lease(4 * MIB) as lease, routed(lease):
            assert allocate(5 * MIB, 0, None) is None
            release(allocate(512, 0, None), 512, 0, None)
            assert route_failure() is not None, "a hit says nothing of earlier failures"

    def test_fallback_to_the_host_is_refused(self, cuda: Cuda) -> None:
        """Memory of the host, which a pool may fall back to, is no device's, so the library gets none."""
        with AsyncMemoryPool(cuda, limit=8 * MIB, min_free=0, fallback="host") as small, routed(small):
            held = allocate(8 * MIB, 0, None)
            assert allocate(MIB, 0, None) is None
            assert isinstance(route_failure(), InvalidRequest)
            assert small.stats().cpu_fallbacks == 1
            release(held, 8 * MIB, 0, None)
            settle(lambda: small.stats().allocated_bytes == 0)


class TestWaiting:
    def test_thread_blocks_until_another_frees(self, pool: AsyncMemoryPool) -> None:
        """With a timeout the library's thread waits for memory of the pool, which any thread may free."""
        held = pool.allocate(60 * MIB)
        found = []

        def ask() -> None:
            with routed(pool, timeout=30):
                found.append(allocate(32 * MIB, 0, None))

        thread = threading.Thread(target=ask)
        thread.start()
        settle(lambda: pool.stats().waiting == 1)
        held.free()
        thread.join()
        assert found[0]
        release(found[0], 32 * MIB, 0, None)
        settle(lambda: pool.stats().allocated_bytes == 0)

    def test_deadline_ends_the_wait(self, pool: AsyncMemoryPool) -> None:
        """It gets nothing once the time is over, and the error says so."""
        with pool.allocate(60 * MIB), routed(pool, timeout=0.01):
            assert allocate(32 * MIB, 0, None) is None
            assert isinstance(route_failure(), PoolTimeout)

    def test_free_serves_who_waits(self, pool: AsyncMemoryPool) -> None:
        """A free by the library, which takes no lock of the interpreter's, wakes whoever waits in the pool."""
        with pool.lease(60 * MIB) as lease, routed(lease):
            kept = allocate(60 * MIB, 0, None)
        with ThreadPoolExecutor() as threads:
            waits = threads.submit(pool.allocate, 32 * MIB, timeout=30)
            settle(lambda: pool.stats().waiting == 1)
            release(kept, 60 * MIB, 0, None)
            waits.result().free()


class TestThreads:
    def test_hit_and_free_take_no_interpreters_lock(self, pool: AsyncMemoryPool, native: Any) -> None:
        """While a thread holds the interpreter's lock for seconds, others are served from their leases, and free."""

        def run(lease: Lease) -> None:
            with routed(lease):
                assert native.wait_and_take(*ROUTE_CALLS, 2 * MIB, 0, None) == lease.address

        with pool.lease(4 * MIB) as one, pool.lease(4 * MIB) as two, ThreadPoolExecutor() as threads:
            running = [threads.submit(run, lease) for lease in (one, two)]
            settle(lambda: native.count_ready() == 2)
            assert native.holding.let_go(2) == 2
            for each in running:
                each.result()

    def test_many_threads_share_a_pool(self, pool: AsyncMemoryPool, native: Any) -> None:
        """Threads in leases, in a budget and in the pool itself are served side by side, and all comes back."""
        seen: list[int] = []

        def run(share: Share, seed: int, most: int) -> None:
            with routed(share, timeout=None if share._has_range else 30):
                seen.append(native.churn(*ROUTE_CALLS, 0, None, 3000, most, 256 << 10, seed))

        with pool.budget("some", limit=16 * MIB) as budget, ThreadPoolExecutor(8) as threads:
            leases = [pool.lease(2 * MIB).__enter__() for _ in range(4)]
            shares: list[Share] = [*leases, budget, budget, pool, pool]
            jobs = [threads.submit(run, share, seed, 8) for seed, share in enumerate(shares)]
            for job in jobs:
                job.result()
            assert all(missed >= 0 for missed in seen)
            for lease in leases:
                lease.__exit__()
        settle(lambda: pool.stats().allocated_bytes == 0 and not pool._core.routes)

    def test_threads_wait_while_tasks_are_cancelled(self, pool: AsyncMemoryPool, native: Any) -> None:
        """In a pool that is full, each is served in the end, however often tasks beside them give up their leases."""
        missed: list[int] = []
        cancelled = threading.Event()

        def run(share: Share, seed: int) -> None:
            with routed(share, timeout=60):
                while True:
                    missed.append(native.churn(*ROUTE_CALLS, 0, None, 300, 1, 24 * MIB, seed))
                    if cancelled.is_set():  # else no task has given up beside it yet: the loop may be slow
                        return

        async def lease(draw: random.Random) -> None:
            async with pool.lease(draw.randrange(1, 48) * MIB):
                await asyncio.sleep(draw.random() / 1000)

        async def cancel(running: list[Future[None]]) -> None:
            draw = random.Random(1)
            while not all(one.done() for one in running):
                tasks = [asyncio.create_task(lease(draw)) for _ in range(8)]
                for task in draw.sample(tasks, 4):
                    await asyncio.sleep(draw.random() / 2000)
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                if any(found):
                    cancelled.set()
                assert all(one is None or isinstance(one, asyncio.CancelledError) for one in found), found

        with pool.budget("some", limit=32 * MIB) as budget, ThreadPoolExecutor(4) as threads:
            shares = (budget, budget, pool, pool)
            running = [threads.submit(run, share, seed * 2654435761 % 2**32) for seed, share in enumerate(shares, 1)]
            asyncio.run(cancel(running))
            for one in running:
                one.result()
        assert len(missed) >= 4
        assert not any(missed)
        settle(lambda: pool.stats().allocated_bytes == 0 and not pool._core.routes)

    def test_frees_come_from_any_thread(self, pool: AsyncMemoryPool) -> None:
        """A block that outlives route and lease is freed by a thread that has entered neither."""
        with pool.lease(4 * MIB) as lease, routed(lease) as route:
            kept = allocate(MIB, 0, None)
        assert pool.stats().allocated_bytes == MIB
        with ThreadPoolExecutor() as threads:
            threads.submit(release, kept, MIB, 0, None).result()
        settle(lambda: pool.stats().allocated_bytes == 0 and route not in pool._core.routes)


class TestOrder:
    @pytest.mark.fake_only
    def test_memory_comes_back_behind_every_stream(self, pool: AsyncMemoryPool, cuda: Cuda, driver: FakeDriver) -> None:
        """Nobody told which streams have used a block: whoever gets it next comes behind the work of all of them."""
        side, other = cuda.create_stream("side"), cuda.create_stream("other")
        with pool.lease(60 * MIB) as lease, routed(lease):
            block = allocate(60 * MIB, 0, None)
            driver.hold(side.handle)
            driver.launch(side.handle, writes=[(block, 60 * MIB)])
            release(block, 60 * MIB, 0, None)
        with pool.allocate(60 * MIB, stream=other) as again:
            driver.launch(other.handle, writes=[(again.address, 60 * MIB)])
            driver.release()
        assert driver.violations() == []

    @pytest.mark.fake_only
    def test_streams_of_the_library_are_told_apart(self, pool: AsyncMemoryPool, cuda: Cuda, driver: FakeDriver) -> None:
        """A block is ready for the stream that it is asked for, behind what the memory was used for before."""
        streams = [cuda.create_stream(str(i)) for i in range(3)]
        named = {one.handle: one for one in streams}
        route = Route(pool, 0, named.__getitem__, tag="library")
        route.enter()
        for _ in range(20):
            for one in streams:
                block = allocate(24 * MIB, 0, one.handle)
                driver.launch(one.handle, writes=[(block, 24 * MIB)])
                release(block, 24 * MIB, 0, one.handle)
        route.leave()
        assert driver.violations() == []

    def test_stream_that_is_captured_gets_nothing(self, pool: AsyncMemoryPool, cuda: Cuda) -> None:
        """Memory of a graph is not the lease's to lend: the library is refused, and the error says why."""
        stream = cuda.create_stream("captured")
        with pool.lease(4 * MIB, stream=stream) as lease:
            route = Route(lease, 0, {stream.handle: stream}.__getitem__)
            route.enter()
            release(allocate(MIB, 0, stream.handle), MIB, 0, stream.handle)
            relaxed = cuda_driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            call(cuda_driver.cuStreamBeginCapture(stream.handle, relaxed))
            assert allocate(MIB, 0, stream.handle) is None
            assert isinstance(route_failure(), InvalidRequest)
            call(cuda_driver.cuGraphDestroy(call(cuda_driver.cuStreamEndCapture(stream.handle))))
            route.leave()


def call(answer: tuple[Any, ...]) -> Any:
    code, *found = answer
    assert code == 0, code
    return found[0] if found else None


class TestEnds:
    def test_route_ends_with_its_lease(self, pool: AsyncMemoryPool) -> None:
        """Once the lease has ended nothing comes from its range, which may be another's by then."""
        lease = pool.lease(4 * MIB).__enter__()
        with routed(lease):
            lease.__exit__()
            assert allocate(512, 0, None) is None
            assert route_failure() is not None

    def test_pool_may_close_while_blocks_live(self, cuda: Cuda) -> None:
        """They stay valid until they are freed, as buffers do."""
        short = AsyncMemoryPool(cuda, limit=16 * MIB, min_free=0)
        with short.lease(8 * MIB) as lease, routed(lease):
            block = allocate(MIB, 0, None)
        with pytest.warns(LeakWarning):
            short.close()
        release(block, MIB, 0, None)
        settle(lambda: not short._core.routes)

    @pytest.mark.parametrize("own", [False, True])
    def test_blocks_outlive_all_that_knows_of_them(self, cuda: Cuda, own: bool) -> None:
        """They are freed well after pool, lease and route were dropped, as an error that was kept does in its end."""
        ours = count_routes()

        def fail() -> int:
            short = AsyncMemoryPool("cuda:0" if own else cuda, limit=16 * MIB, min_free=0)
            with suppress(ValueError), short.lease(8 * MIB) as lease, routed(lease):
                block = allocate(MIB, 0, None)
                raise ValueError("the program's")
            with pytest.warns(LeakWarning):
                short.close()
            return block

        block = fail()
        gc.collect()
        assert count_routes() == ours + 1
        release(block, MIB, 0, None)
        settle(lambda: count_routes() == ours)

    def test_thread_stays_inside_of_a_route_that_was_dropped(self, cuda: Cuda) -> None:
        """What it asks for then is refused: the route that it never left stays, and its pool stays closed."""

        def enter(share: Share) -> None:
            Route(share, 0, lambda handle: handle).enter()

        def ask() -> tuple[int | None, BaseException | None]:
            return allocate(512, 0, None), route_failure()

        def leave() -> None:
            inside = [one for one in gc.get_objects() if type(one) is Route and one not in before]
            assert len(inside) == 1
            inside[0].leave()

        before = [one for one in gc.get_objects() if type(one) is Route]
        with ThreadPoolExecutor(1) as thread:
            short = AsyncMemoryPool(cuda, limit=16 * MIB, min_free=0)
            thread.submit(enter, short).result()
            short.close()
            del short
            gc.collect()
            found, error = thread.submit(ask).result()
            assert found is None
            assert isinstance(error, PoolClosed)
            thread.submit(leave).result()

    def test_recorded_pools_serve_and_note_the_library(self, pool: AsyncMemoryPool) -> None:
        """While a recording looks at each request, the library's are in it, too."""
        from asyncmem.insight import Recording

        with Recording(pool) as recording, routed(pool):
            release(allocate(MIB, 0, None), MIB, 0, None)
        assert "library" in {record.tag for record in recording.records()}


INSTALLED = """
import ctypes, sys, threading
sys.path.insert(0, {folder!r})
import fake as package
fake = package.FakeDriver({library!r})
import asyncmem
from asyncmem.core import PROCESS_CALLS, Route
from asyncmem.devices import Cuda

MIB = 1 << 20
pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
native = ctypes.CDLL({native!r})
native.take_or_note.argtypes = [pointer, size, number, pointer, ctypes.c_char_p, size]
native.take_or_note.restype = pointer
text = ctypes.create_string_buffer(2000)
free = ctypes.CFUNCTYPE(None, pointer, size, number, pointer)(PROCESS_CALLS[1])
name_stream = ctypes.CFUNCTYPE(None, pointer, pointer)(PROCESS_CALLS[2])

def take(nbytes, stream=None, device=0):
    text.value = b""
    return native.take_or_note(PROCESS_CALLS[0], nbytes, device, stream, text, 2000)

device = Cuda(0)
pool = asyncmem.AsyncMemoryPool(device, limit=64 * MIB, segment_size=64 * MIB, min_free=0)
side, other = device.create_stream(), device.create_stream()
streams = {{one.handle: one for one in (side, other)}}
route = Route(pool, 0, streams.__getitem__, tag="library", names_streams=True)
route.install()
"""


def run_installed(fake: FakeDriver, native: Any, program: str) -> None:
    """Run a program whose process has a route for all threads, over the fake driver."""
    folder = str(Path(__file__).parents[1] / "cuda")
    begin = INSTALLED.format(folder=folder, library=str(fake.path), native=native._name)
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


class TestInstalled:
    """A route that serves all threads of a process, which has no other end."""

    def test_all_threads_are_served_and_counted(self, fake: FakeDriver, native: Any) -> None:
        """What is not there throws, with all facts; another device, or nothing, is said."""
        program = """
found = []
thread = threading.Thread(target=lambda: found.append(take(48 * MIB)))
thread.start(); thread.join()
assert found[0] and take(32 * MIB) is None
assert b"CUDA out of memory." in text.value, text.value
assert b"'library' 48 MiB" in text.value, text.value
assert take(512, None, 1) is None and b"No pool serves this device" in text.value
assert take(0) is None and not text.value
free(found[0], 48 * MIB, 0, None)
assert pool.stats().allocated_bytes == 0
assert route.counts() == ((0, 48 * MIB, 48 * MIB, 48 * MIB), (0, 1, 1, 1))
route.reset_peaks()
one = take(MIB)
assert route.counts() == ((MIB, MIB, 49 * MIB, 48 * MIB), (1, 1, 2, 1))
with pool.lease(4 * MIB) as lease:
    inside = Route(lease, 0, streams.__getitem__, names_streams=True)
    inside.enter()
    two = take(MIB)
    inside.leave()
    assert two == lease.address
    free(two, MIB, 0, None)
    assert lease.stats().allocated_bytes == 0
free(one, MIB, 0, None)
"""
        run_installed(fake, native, program)

    def test_threads_that_python_has_never_seen(self, fake: FakeDriver, native: Any) -> None:
        """They allocate side by side, free each other's blocks, and get nothing where there is no room."""
        program = """
streams |= {one.handle: one for one in (device.create_stream() for _ in range(2))}
many = (pointer * 4)(*streams)
native.storm.argtypes = [pointer, pointer, pointer, number, pointer, number, ctypes.c_long, size]
native.storm.restype = ctypes.c_long
over = threading.Event()

def beside():
    while not over.is_set():
        with pool.lease(MIB, timeout=60) as lease:
            lease.allocate(1000).free()

thread = threading.Thread(target=beside, daemon=True)
thread.start()
assert native.storm(*PROCESS_CALLS, 0, many, 4, 2000, MIB) == 0
assert native.storm(*PROCESS_CALLS, 0, many, 4, 300, 16 * MIB) > 0
over.set()
thread.join()
assert (pool.stats().allocated_bytes, route.live, fake.violations()) == (0, 0, [])
pool.check()
"""
        run_installed(fake, native, program)

    def test_waiting_in_vain_reads_like_no_memory(self, fake: FakeDriver, native: Any) -> None:
        """Programs look for these words, and the rest tells how long it has waited."""
        program = """
patient = Route(pool, 0, streams.__getitem__, timeout=0.01)
patient.enter()
with pool.allocate(48 * MIB):
    assert take(32 * MIB) is None
patient.leave()
assert text.value.startswith(b"CUDA out of memory. pool 'pool-1' had no 32 MiB within 10 ms"), text.value
"""
        run_installed(fake, native, program)

    def test_memory_goes_back_behind_the_streams_that_were_named(self, fake: FakeDriver, native: Any) -> None:
        """Its own stream takes it again at once; another comes behind that one, and behind each that was named."""
        program = """
def use(named):
    block = take(60 * MIB, side.handle)
    place = (block, 60 * MIB)
    fake.launch(side.handle, writes=[place])
    if named:
        other.wait(side.record())
        fake.hold(other.handle)
        fake.launch(other.handle, writes=[place])
        name_stream(block, other.handle)
    else:
        fake.hold(side.handle)
    free(block, 60 * MIB, 0, side.handle)
    return place

place = use(named=False)
again = take(60 * MIB, side.handle)
assert again == place[0]
free(again, 60 * MIB, 0, side.handle)
third = device.create_stream()
for named in (False, True):
    with pool.allocate(60 * MIB, stream=third) as taken:
        assert taken.address == place[0]
        fake.launch(third.handle, writes=[place])
        fake.release()
    if not named:
        place = use(named=True)
assert fake.violations() == []
"""
        run_installed(fake, native, program)

    def test_stream_that_is_captured_gets_nothing(self, fake: FakeDriver, native: Any) -> None:
        """A graph would go on using what the pool gives to others."""
        program = """
from cuda.bindings import driver
assert driver.cuStreamBeginCapture(side.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)[0] == 0
assert take(MIB, side.handle) is None
assert b"not being captured" in text.value, text.value
driver.cuGraphDestroy(driver.cuStreamEndCapture(side.handle)[1])
"""
        run_installed(fake, native, program)
