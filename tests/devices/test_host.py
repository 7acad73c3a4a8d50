"""Streams of the host really run work: in order, beside each other, and each failure stays its own."""

import asyncio
import gc
import threading
import traceback
import warnings
import weakref

import numpy as np
import pytest

from asyncmem.devices import Host, HostStream
from asyncmem.errors import AsyncmemWarning, InvalidRequest


class Broken(Exception):
    """What the work in these tests fails with."""


def fail_with(_: object) -> None:
    raise Broken


def fail() -> None:
    raise Broken


class TestWork:
    def test_that_failed_keeps_none_of_its_arguments(self, host: Host) -> None:
        """Once the frames of its error are cleared, however long that is kept."""
        argument = np.zeros(1)
        gone = weakref.ref(argument)
        with pytest.raises(Broken) as caught:
            host.create_stream().run(fail_with, argument).result()
        del argument
        traceback.clear_frames(caught.value.__traceback__)
        assert gone() is None

    def test_is_not_queued_where_no_thread_can_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fence behind it would never be reached; later work runs, and the device can be closed."""
        host = Host()
        first, second = host.create_stream(), host.create_stream()

        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            for stream in (first, second):
                with pytest.raises(RuntimeError, match="new thread"):
                    stream.run(len, ())
        assert first.record().done()
        assert first.run(len, (1, 2)).result() == 2
        host.close()

    def test_of_one_stream_runs_in_the_order_of_submission(self, host: Host) -> None:
        """A stream is a queue."""
        stream = host.create_stream()
        seen: list[int] = []
        for number in range(200):
            stream.run(seen.append, number)
        stream.synchronize_blocking()
        assert seen == list(range(200))

    def test_of_two_streams_overlaps(self, host: Host) -> None:
        """Two streams meet at a barrier, which neither could pass if they took turns."""
        barrier = threading.Barrier(2, timeout=60)
        works = [host.create_stream().run(barrier.wait) for _ in range(2)]
        assert sorted(work.result(60) for work in works) == [0, 1]

    def test_of_many_submitting_threads_keeps_each_threads_order(self, host: Host) -> None:
        """Submission is safe from any thread and loses nothing."""
        stream = host.create_stream()
        seen: list[tuple[int, int]] = []

        def submit(thread: int) -> None:
            for number in range(100):
                stream.run(seen.append, (thread, number))

        threads = [threading.Thread(target=submit, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stream.synchronize_blocking()
        assert len(seen) == 400
        for index in range(4):
            assert [number for thread, number in seen if thread == index] == list(range(100))

    def test_gives_its_value(self, host: Host) -> None:
        """Arguments go in by position and name; `result` brings the value out, as often as asked."""
        work = host.default_stream.run(divmod, 17, 5)
        assert work.result(60) == (3, 2)
        assert work.result() == (3, 2)
        assert host.default_stream.run(int, "ff", base=16).result(60) == 255

    def test_runs_numpy_over_a_segment(self, host: Host) -> None:
        """Work sees the device's memory as it is."""
        segment = host.allocate_segment(4096)
        stream = host.create_stream()
        host.fill(segment.address, 4096, 3, stream)
        target = bytearray(4096)
        host.copy_out(memoryview(target), segment.address, stream)
        assert stream.run(np.sum, np.frombuffer(target, np.uint8)).result(60) == 3 * 4096
        host.free_segment(segment)

    def test_lets_go_of_its_arguments_once_it_has_run(self, host: Host) -> None:
        """An idle stream keeps no array alive."""
        stream = host.create_stream()
        array = np.zeros(16)
        alive = weakref.ref(array)
        work = stream.run(np.sum, array)
        del array
        assert work.result(60) == 0
        # The thread drops the call before it comes to the next one.
        stream.run(int).result(60)
        assert alive() is None

    def test_result_gives_up_after_its_timeout(self, host: Host) -> None:
        """The caller stops waiting; the work goes on and can be asked again."""
        gate = threading.Event()
        work = host.create_stream().run(gate.wait)
        with pytest.raises(TimeoutError):
            work.result(0.001)
        gate.set()
        assert work.result(60)


class TestFailure:
    def test_surfaces_where_the_work_is_asked_for(self, host: Host) -> None:
        """`result` raises what the call raised."""
        work = host.default_stream.run(fail)
        with pytest.raises(Broken):
            work.result(60)
        assert isinstance(work.error, Broken)

    @pytest.mark.asyncio
    async def test_surfaces_where_the_work_is_awaited(self, host: Host) -> None:
        """So does `await`."""
        with pytest.raises(Broken):
            await host.default_stream.run(fail)
        assert await host.default_stream.run(int, "7") == 7

    def test_ends_neither_the_stream_nor_the_work_behind(self, host: Host) -> None:
        """Work behind a failure runs, and fences behind it are reached."""
        stream = host.create_stream()
        failing = stream.run(fail)
        assert stream.run(int, "7").result(60) == 7
        assert failing.block(10)
        with pytest.raises(Broken):
            failing.result()

    def test_is_only_a_point_for_a_stream_that_waits(self, host: Host) -> None:
        """Waiting orders; it does not inherit the error."""
        a, b = host.create_stream(), host.create_stream()
        failing = a.run(fail)
        b.wait(failing)
        assert b.run(int, "7").result(60) == 7
        with pytest.raises(Broken):
            failing.result()

    def test_that_nobody_sees_becomes_a_warning(self, host: Host) -> None:
        """An error is not lost because its work was dropped."""
        stream = host.create_stream()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream.run(fail)
            stream.synchronize_blocking()
            stream.run(int).result(60)  # the thread has let go of the failed work by then
            gc.collect()
        assert [str(one.message) for one in caught if one.category is AsyncmemWarning] == [
            "work on a stream failed and was not awaited: Broken()"
        ]

    def test_of_an_exit_stays_with_the_work(self, host: Host) -> None:
        """Not even SystemExit ends a stream's thread."""
        stream = host.create_stream()
        leaving = stream.run(_leave)
        assert stream.run(int, "7").result(60) == 7
        with pytest.raises(SystemExit):
            leaving.result()


def _leave() -> None:
    raise SystemExit


class TestWaiting:
    def test_holds_only_the_waiting_streams_thread(self, host: Host) -> None:
        """The caller goes on at once, and so do other streams."""
        gate = threading.Event()
        busy, waiting, other = (host.create_stream() for _ in range(3))
        busy.run(gate.wait)
        waiting.wait(busy.record())
        behind = waiting.run(int, "7")
        assert other.run(int, "8").result(60) == 8
        assert not behind.done()
        gate.set()
        assert behind.result(60) == 7

    @pytest.mark.asyncio
    async def test_cancelling_an_await_does_not_stop_the_work(self, host: Host) -> None:
        """What has been submitted runs; only the waiting ends."""
        gate = threading.Event()
        work = host.create_stream().run(gate.wait)
        waiting = asyncio.ensure_future(_value_of(work))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        assert await work

    def test_orders_behind_another_host_objects_stream(self, host: Host) -> None:
        """Hosts are one machine: their streams are accepted by each other."""
        other = Host()
        gate = threading.Event()
        foreign = other.create_stream()
        foreign.run(gate.wait)
        stream = host.create_stream()
        stream.wait(foreign.record())
        behind = stream.record()
        assert host.stream_of(foreign) is foreign
        assert not behind.done()
        gate.set()
        assert behind.block(10)
        other.close()


async def _value_of(work: object) -> object:
    return await work  # type: ignore[misc]  # any awaitable


class TestThreads:
    def test_start_with_the_first_work(self, host: Host) -> None:
        """Streams, fences and waits for what is done start nothing."""
        before = set(threading.enumerate())
        a, b = host.create_stream(), host.create_stream()
        b.wait(a.record())
        assert set(threading.enumerate()) <= before
        assert {_thread_of(a)} == set(threading.enumerate()) - before

    def test_end_with_a_forgotten_stream_after_its_work(self, host: Host) -> None:
        """A dropped stream finishes what it was given, then leaves no thread."""
        gate, done = threading.Event(), threading.Event()
        stream = host.create_stream("dropped")
        thread = _thread_of(stream)
        stream.run(gate.wait)
        stream.run(done.set)
        del stream
        gc.collect()
        assert thread.is_alive()
        gate.set()
        assert done.wait(60)
        thread.join()
        assert not thread.is_alive()

    def test_do_not_hold_up_the_end_of_the_program(self, host: Host) -> None:
        """They are daemons."""
        stream = host.create_stream()
        stream.run(int).result(60)
        assert _thread_of(stream).daemon

    def test_are_named_after_their_stream(self, host: Host) -> None:
        """A stack dump tells which stream hangs."""
        assert host.create_stream("decode").run(threading.current_thread).result(60).name == "asyncmem host decode"

    def test_are_joined_by_close_after_the_queued_work(self) -> None:
        """Closing waits for what was submitted, and refuses more."""
        before = set(threading.enumerate())
        device = Host()
        stream = device.create_stream()
        seen: list[int] = []
        for number in range(50):
            stream.run(seen.append, number)
        device.close()
        assert seen == list(range(50))
        assert set(threading.enumerate()) <= before
        with pytest.raises(InvalidRequest, match="open"):
            stream.run(int)
        with pytest.raises(InvalidRequest, match="open"):
            device.create_stream()

    def test_may_close_the_device_themselves(self) -> None:
        """Work that closes its own device does not wait for itself."""
        device = Host()
        assert device.create_stream().run(device.close).block(60)

    def test_of_a_forgotten_device_end(self) -> None:
        """A device that nobody closed leaves no thread once it is collected."""
        device = Host()
        device.default_stream.run(int).result(60)
        thread = _thread_of(device.default_stream)
        del device
        gc.collect()
        thread.join()
        assert not thread.is_alive()


def _thread_of(stream: HostStream) -> threading.Thread:
    return stream.run(threading.current_thread).result(60)
