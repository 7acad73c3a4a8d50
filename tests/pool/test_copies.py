"""Copies: they start at the call, keep order on both sides, end at the await, and go on when nobody waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import anyio
import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Buffer, BufferReleased, DeviceError, InvalidRequest, PoolClosed
from asyncmem.devices import Device, Host, Simulated, SimulatedStream, StreamOrderError
from asyncmem.testing import SteppedPool, run_steps
from tests.conservation import refillable, whole
from tests.metal.session import open_metal
from tests.processor import open_processor
from tests.sweeps import Scenario, Stage, sweep, sweep_on_trio

from .support import MIB, quick_device

LIMIT = 8 * MIB


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test on both."""
    return str(request.param)


@pytest.fixture(params=["host", "simulated", "opencl", "metal"])
def device(request: pytest.FixtureRequest) -> Device:
    """A device with real memory."""
    make = {
        "host": Host,
        "simulated": lambda: quick_device(backing=True),
        "opencl": open_processor,
        "metal": lambda: open_metal(request),
    }
    made: Device = make[request.param]()
    return made


@pytest.mark.anyio
async def test_bytes_go_there_and_back(device: Device) -> None:
    """Through buffers and arrays, by the home and by a stream of the caller's."""
    there, back = np.arange(1000, dtype=np.float32), np.empty(1000, np.float32)
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        for stream in (None, device.create_stream()):
            back[:] = 0
            array = await pool.empty(1000)
            copy = array.copy_from(there, stream=stream)
            assert repr(copy) == "<asyncmem.pool.Copy of 4000 bytes>"
            await copy
            assert copy.done()
            async with pool.allocate_async(5000) as other:
                await array.buffer.copy_to_device(other)
                await other.copy_to(back, stream=stream)
            np.testing.assert_array_equal(back, there)
            array.buffer.free()
    device.close()


class Tensor:
    """An array of the host that speaks DLPack alone, as torch's do."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def __dlpack__(self, **options: object) -> object:
        return self._numbers.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._numbers.__dlpack_device__()


@pytest.mark.anyio
async def test_array_of_the_host_that_speaks_dlpack_is_memory_too(device: Device) -> None:
    """torch's tensors have no buffer protocol."""
    there, back = np.arange(10, dtype=np.int64), np.zeros(10, np.int64)
    async with AsyncMemoryPool(device, limit=LIMIT) as pool, pool.allocate_async(80) as buffer:
        await buffer.copy_from(Tensor(there))
        await buffer.copy_to(Tensor(back))
    assert list(back) == list(there)
    device.close()


@pytest.mark.anyio
async def test_pinned_memory_is_a_pool_of_its_own(device: Device) -> None:
    """It is made at the first need, has the device's streams, and is closed with the pool that it belongs to."""
    pool = AsyncMemoryPool(device, limit=LIMIT, name="kv")
    stream = device.create_stream()
    async with pool:
        pinned = pool.pinned
        assert pinned is pool.pinned
        assert pinned.name == "kv pinned"
        staging = await pinned.allocate_async(1000, stream=stream)
        np.frombuffer(staging, np.uint8)[:] = 7
        target = await pool.allocate_async(1000, stream=stream)
        await target.copy_from(staging)
        back = bytearray(1000)
        await target.copy_to(back)
        assert bytes(back) == b"\x07" * 1000
        staging.free()
        target.free()
    with pytest.raises(PoolClosed, match="kv pinned"):
        _ = pool.pinned
    device.close()


@pytest.mark.parametrize("kind", ["paged", "stream_ordered"])
def test_the_environments_segments_are_the_devices_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that belongs to a pool comes as it can, whatever ASYNCMEM_SEGMENTS says for the device."""
    monkeypatch.setenv("ASYNCMEM_SEGMENTS", kind)
    with AsyncMemoryPool(quick_device(), limit=LIMIT, fallback="host") as pool:
        assert {one.kind for one in pool.segments()} <= {kind}
        with pool.pinned.allocate(MIB) as staging, pool.allocate(LIMIT), pool.allocate(MIB) as on_the_host:
            assert staging.nbytes == on_the_host.nbytes


@pytest.mark.anyio
async def test_wrong_arguments_raise_at_the_call() -> None:
    """Nothing has been started then, and the error says what was expected."""
    device = quick_device(backing=True)
    async with AsyncMemoryPool(device, limit=LIMIT) as pool, pool.allocate_async(100) as buffer:
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: buffer.copy_from("text"), "a buffer, or an array of the host"),
            (lambda: buffer.copy_from(bytes(101)), "at most 100 bytes"),
            (lambda: buffer.copy_to(bytes(100)), "writable"),
            (lambda: buffer.copy_from(np.zeros((10, 10), np.uint8)[:, 0]), "contiguous"),
            (lambda: buffer.copy_to_device(bytearray(100)), "a buffer or an array over one"),
            (lambda: buffer.copy_from(bytes(1), stream=quick_device().create_stream()), "stream"),
            (lambda: buffer.view("float32", 5).copy_from(np.zeros(5)), "elements of 4"),
            (lambda: buffer.view("float32", 5).copy_from(np.zeros(4, np.float32)), "20 bytes"),
        ]
        for call, words in wrong:
            with pytest.raises(InvalidRequest, match=words):
                call()
        small = await pool.allocate_async(99)
        with pytest.raises(InvalidRequest, match="at most 99 bytes"):
            buffer.copy_to_device(small)
        small.free()
        for call in (lambda: small.copy_from(bytes(1)), lambda: buffer.copy_from(small), small.pin):
            with pytest.raises(BufferReleased):
                call()
        assert not device.calls_of("copy_in") + device.calls_of("copy_out") + device.calls_of("copy")


@pytest.mark.anyio
async def test_empty_copy_is_done_and_calls_no_device() -> None:
    """Nothing takes no time."""
    device = quick_device()
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        empty = await pool.allocate_async(0)
        calls = device.driver_calls
        for copy in (empty.copy_from(b""), empty.copy_to(bytearray()), empty.copy_to_device(empty)):
            assert copy.done()
            await copy
        assert device.driver_calls == calls


def busy(buffer: Buffer, stream: SimulatedStream | None = None, seconds: float = 1.0) -> None:
    """Write to a buffer for a second."""
    on = stream or buffer.stream
    assert isinstance(on, SimulatedStream)
    on.launch(seconds, writes=[buffer])


@pytest.mark.may_block
def test_side_stream_copies_behind_the_home_and_the_home_goes_on_behind_the_copy() -> None:
    """The order checker has nothing to say, and time shows that the copy waited."""

    async def main() -> None:
        device = quick_device()
        home, side = device.create_stream("home"), device.create_stream("side")
        async with SteppedPool(device, limit=LIMIT) as pool:
            buffer = await pool.allocate_async(MIB, stream=home)
            busy(buffer)
            copy = buffer.copy_from(bytes(MIB), stream=side)
            assert not copy.done()
            busy(buffer)
            await copy
            assert device.now == 1.0
            buffer.copy_to(bytearray(MIB), stream=side)
            buffer.free()
            again = await pool.allocate_async(MIB, stream=home)
            busy(again)
            again.free()
            device.run_until_idle()
            whole(pool)

    run_steps(main())


@pytest.mark.may_block
def test_copy_between_buffers_keeps_the_order_of_both_homes() -> None:
    """Whichever stream copies: what either home has been given comes first, and the target's home goes on behind it."""

    async def main() -> None:
        device = quick_device()
        streams = [device.create_stream(name) for name in ("source", "target", "third")]
        async with SteppedPool(device, limit=LIMIT) as pool:
            for on in (None, *streams):
                source = await pool.allocate_async(MIB, stream=streams[0])
                target = await pool.allocate_async(MIB, stream=streams[1])
                busy(source)
                busy(target)
                copy = source.copy_to_device(target, stream=on)
                assert not copy.done()
                source.free()
                busy(target)
                target.free()
                again = await pool.allocate_batch([MIB, MIB], stream=streams[2])
                for one in again:
                    busy(one, streams[2])
                again.free()
            device.run_until_idle()
            whole(pool)

    run_steps(main())


@pytest.mark.may_block
@pytest.mark.parametrize("forward", [True, False])
def test_copy_between_devices_keeps_the_order_of_both(forward: bool) -> None:
    """A peer's stream cannot be noted at the other pool, so the homes follow the copy themselves."""

    async def main() -> None:
        first = quick_device()
        second = quick_device(beside=first)
        async with (
            SteppedPool(first, limit=LIMIT, peers=[second]) as one,
            SteppedPool(second, limit=LIMIT, peers=[first]) as two,
        ):
            there, here = await one.allocate_async(MIB), await two.allocate_async(MIB)
            source, target = (there, here) if forward else (here, there)
            for stream in (None, first.create_stream(), second.create_stream()):
                busy(source)
                busy(target)
                copy = source.copy_to_device(target, stream=stream)
                assert isinstance(source.stream, SimulatedStream)
                source.stream.launch(1.0, reads=[source])
                busy(target)
                await copy
            there.free()
            here.free()
            for pool, device in ((one, first), (two, second)):
                again = await pool.allocate_async(LIMIT)
                busy(again, device.default_stream)
                again.free()
                device.run_until_idle()
                whole(pool)

    run_steps(main())


@pytest.mark.may_block
@pytest.mark.parametrize("call", ["record", "wait"])
def test_copy_that_its_target_cannot_follow_keeps_the_memory_until_it_is_done(call: str) -> None:
    """The failed call is raised; the buffer is free for its owner, and nobody else gets what is still written."""

    async def main() -> None:
        first = quick_device()
        second = quick_device(beside=first)
        async with (
            SteppedPool(first, limit=LIMIT, peers=[second]) as one,
            SteppedPool(second, limit=LIMIT, peers=[first]) as two,
        ):
            source, target = await one.allocate_async(MIB), await two.allocate_async(MIB)
            busy(source)
            (first if call == "record" else second).fail(call)
            with pytest.raises(DeviceError, match=call):
                source.copy_to_device(target)
            source.free()
            target.free()
            assert two.stats().allocated_bytes == MIB
            one._opened.copies.look()  # as the idle worker does
            first.run_until_idle()
            again = await two.allocate_async(LIMIT)
            busy(again)
            again.free()
            second.run_until_idle()

    run_steps(main())


@pytest.mark.may_block
def test_peer_without_access_is_noticed() -> None:
    """What `peers=` is for: without it the simulated machine says that the memory is closed."""

    async def main() -> None:
        first = quick_device()
        second = quick_device(beside=first)
        async with SteppedPool(first, limit=LIMIT) as one, SteppedPool(second, limit=LIMIT) as two:
            there, here = await one.allocate_async(MIB), await two.allocate_async(MIB)
            with pytest.raises(StreamOrderError, match="no access"):
                there.copy_to_device(here)
            there.free()
            here.free()

    run_steps(main())


def test_peers_are_granted_at_the_opening_or_refused() -> None:
    """By name or as devices; what cannot be granted is a wrong argument, and the pool is not open."""
    with pytest.raises(InvalidRequest, match="peers"):
        AsyncMemoryPool(quick_device(), peers=["host"]).__enter__()
    with pytest.raises(InvalidRequest, match="device"):
        AsyncMemoryPool(quick_device(), peers=["cuba:0"]).__enter__()
    device = quick_device()
    with AsyncMemoryPool(device, limit=LIMIT, peers=[quick_device(beside=device)]):
        assert len(device.calls_of("grant_access")) == 1


def test_copying_stream_that_is_captured_is_refused() -> None:
    """Nobody could await such a copy."""
    device = quick_device()
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool, pool.allocate(MIB) as buffer:
        stream.begin_capture()
        with pytest.raises(InvalidRequest, match="being captured"):
            buffer.copy_from(bytes(MIB), stream=stream)
        assert stream.end_capture().records == 0


class Bytes(bytearray):
    """Bytes that can be known weakly."""


@pytest.mark.may_block
def test_cancelled_await_leaves_the_copy_running_and_the_host_memory_alive() -> None:
    """The memory goes once the copy is done, and not before, though nobody knows of it any more."""

    async def main() -> None:
        device = quick_device()
        async with SteppedPool(device, limit=LIMIT) as pool, pool.allocate_async(MIB) as buffer:
            busy(buffer)
            source = Bytes(MIB)
            known = weakref.ref(source)
            copy = buffer.copy_from(source)
            task = asyncio.ensure_future(waiting(copy))
            del source, copy
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            assert known() is not None
            device.run_until_idle()
            await asyncio.sleep(0)
            gc.collect()
            assert known() is None

    run_steps(main())


async def waiting(copy: object) -> None:
    """Await a copy in a task of its own."""
    await copy  # type: ignore[misc]  # any awaitable


def test_host_memory_of_a_closed_pool_is_let_go_too() -> None:
    """The copy ends after its pool."""
    device = quick_device()
    pool = AsyncMemoryPool(device, limit=LIMIT)
    buffer = pool.allocate(MIB)
    busy(buffer)
    source = Bytes(MIB)
    known = weakref.ref(source)
    buffer.copy_from(source)
    buffer.free()
    del source
    pool.close()
    device.run_until_idle()
    for _ in range(6000):
        if known() is None:
            break
        threading.Event().wait(0.01)
    assert known() is None


SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__] = play  # type: ignore[attr-defined]  # a function has a name
    return play


@scenario
async def copies_under_cancellation(stage: Stage) -> None:
    """Buffers are copied in, on and out while the device is busy; who is cancelled frees what a copy still uses."""
    device = quick_device()
    streams = [device.create_stream(name) for name in ("one", "two")]
    async with SteppedPool(device, limit=LIMIT, stall_after=None) as pool:
        host = bytearray(MIB)

        async def through(home: SimulatedStream, side: SimulatedStream) -> None:
            async with (
                stage.watch(pool.allocate_async(3 * MIB, stream=home)) as first,
                pool.allocate_async(2 * MIB, stream=side) as second,
            ):
                busy(first)
                await first.copy_from(host, stream=side)
                busy(first)
                await second.copy_from(first.view("uint8", MIB))
                busy(second)
                await second.copy_to(bytearray(2 * MIB), stream=home)
                second.copy_to_device(first)

        stage.actor("one", partial(through, streams[0], streams[1]))
        stage.actor("two", partial(through, streams[1], streams[0]))
        stage.actor("three", partial(through, streams[0], streams[0]))
        await stage.finish()
        device.run_until_idle()
        whole(pool)
        await refillable(pool, LIMIT)


@pytest.mark.may_block
@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelling_anybody_at_any_step_loses_nothing(name: str) -> None:
    """Neither memory nor order."""
    assert sweep(SCENARIOS[name]).strikes > 20
    assert sweep_on_trio(SCENARIOS[name], stride=2).strikes > 10


def copies_of_every_kind(device: Simulated, pool: AsyncMemoryPool, source: Buffer, target: Buffer) -> list[object]:
    """Start one of each kind, on a side stream."""
    side = device.create_stream("side")
    errors: list[object] = []
    for start in (
        lambda: source.copy_from(bytes(MIB), stream=side),
        lambda: source.copy_to_device(target, stream=side),
        lambda: target.copy_to(bytearray(MIB), stream=side),
    ):
        try:
            assert start().block(5)
        except DeviceError as error:
            errors.append(error)
    pool.check()
    return errors


@pytest.mark.parametrize("call", ["record", "wait", "copy_in", "copy", "copy_out", "block"])
def test_call_that_fails_is_raised_and_loses_nothing(call: str) -> None:
    """Whichever call of a copy fails, the error is raised, the rest goes on, and the memory comes back in order."""
    for nth in range(1, 12):
        device = quick_device()
        home, other = device.create_stream("home"), device.create_stream("other")
        with AsyncMemoryPool(device, limit=LIMIT) as pool:
            source, target = pool.allocate(MIB, stream=home), pool.allocate(MIB, stream=other)
            device.fail(call, nth)
            errors = copies_of_every_kind(device, pool, source, target)
            left = not device.log._faults
            device.log._faults.clear()
            assert len(errors) == left
            source.free()
            target.free()
            pool._opened.run(pool._opened.copies.look).block(60)  # as the idle worker does
            device.run_until_idle()
            pool._opened.run(lambda: None).block(60)  # it has let go of what was done
            whole(pool)
            again = pool.allocate(LIMIT, stream=other)
            busy(again)
            again.free()
            pool._opened.tick()


def test_copy_whose_end_cannot_be_seen_keeps_its_memory_until_it_can() -> None:
    """The failed record is raised, and made up for by the idle worker."""
    device, begun, gate = quick_device(), threading.Event(), threading.Event()
    with AsyncMemoryPool(device, limit=LIMIT) as pool, pool.allocate(MIB) as buffer:
        held_up = pool._opened.run(lambda: begun.set() or gate.wait())  # the worker looks when it is told
        assert begun.wait(60)
        busy(buffer)
        source = Bytes(MIB)
        known = weakref.ref(source)
        device.fail("record")
        with pytest.raises(DeviceError, match="record"):
            buffer.copy_from(source)
        del source
        gc.collect()
        assert known() is not None
        device.fail("record")
        pool._opened.copies.look()
        assert known() is not None
        pool._opened.copies.look()
        device.run_until_idle()
        gate.set()
        held_up.block(60)
        pool._opened.run(lambda: None).block(60)
        gc.collect()
        assert known() is None


class Sluggish(Simulated):
    """A device that copies ordinary host memory by itself only while the caller stands by, as CUDA does."""

    def __init__(self) -> None:
        super().__init__(64 * MIB, backing=True)
        self.gate = threading.Event()
        self.threads: list[int] = []

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        del into
        return not self._pinned_part(np.frombuffer(host, np.uint8))

    def copy_in(self, address: int, source: memoryview, stream: object) -> None:
        self.threads.append(threading.get_ident())
        if self.copy_holds_up(source):
            assert self.gate.wait(60)
        super().copy_in(address, source, stream)  # type: ignore[arg-type]  # as it came


@pytest.mark.anyio
async def test_copy_that_would_hold_up_the_loop_is_made_by_a_thread() -> None:
    """The loop goes on, the freed buffer's memory is kept for it, and page-locked memory needs no thread."""
    device = Sluggish()
    source = np.full(MIB, 3, np.uint8)
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        async with pool.pinned.allocate_async(MIB) as staging, pool.allocate_async(MIB) as buffer:
            await buffer.copy_from(staging)
        buffer = await pool.allocate_async(LIMIT)
        copy = buffer.copy_from(source)
        buffer.free()
        assert pool.stats().exported_bytes == LIMIT
        with anyio.move_on_after(0.05):
            await copy
        assert not copy.done()
        assert not copy.block(0)
        device.gate.set()
        await copy
        assert copy.done()
        assert device.threads[0] == threading.get_ident() != device.threads[1]
        with anyio.fail_after(60):
            (await pool.allocate_async(LIMIT)).free()


@pytest.mark.anyio
async def test_failure_of_a_copy_made_by_a_thread_is_raised_at_the_await() -> None:
    """And the memory comes back."""
    device = Sluggish()
    device.gate.set()
    async with AsyncMemoryPool(device, limit=LIMIT) as pool, pool.allocate_async(MIB) as buffer:
        for call in ("copy_in", "record", "block"):
            device.fail(call)
            copy = buffer.copy_from(bytes(MIB))
            with pytest.raises(DeviceError, match=call):
                await copy
            with pytest.raises(DeviceError, match=call):
                copy.block()
        await buffer.copy_from(bytes(MIB))
