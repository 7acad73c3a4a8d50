"""The fake driver is as strict as a driver: contexts, streams, events, captures, and what it tells of missing order."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from .fake import FakeDriver
from .fake.program import GLOBAL, MIB, RELAXED, code, enter, fill, ok, read, recorded, stream, wait

pytestmark = pytest.mark.fake_only

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 3, 201, 400
NOT_READY, ILLEGAL_ADDRESS, DESTROYED, LAUNCH_FAILED = 600, 700, 709, 719
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT, CAPTURED_EVENT = 900, 901, 904, 906, 907


@pytest.fixture(autouse=True)
def context(fake: FakeDriver) -> Iterator[Any]:
    yield enter()
    ok(cuda.cuCtxSetCurrent(None))
    fake.reset()


@pytest.fixture
def memory(context: Any) -> int:
    del context
    return int(ok(cuda.cuMemAlloc(MIB)))


class TestContexts:
    def test_without_one_a_call_is_refused(self, context: Any) -> None:
        """What needs a current context says so when there is none."""
        own = stream()
        ok(cuda.cuCtxSetCurrent(None))
        assert code(cuda.cuMemAlloc(MIB)) == INVALID_CONTEXT
        assert code(cuda.cuStreamSynchronize(own)) == INVALID_CONTEXT
        assert code(cuda.cuEventCreate(0)) == INVALID_CONTEXT
        ok(cuda.cuCtxSetCurrent(context))

    def test_each_thread_has_its_own_current_one(self) -> None:
        """A thread that entered no context has none."""
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(code(cuda.cuCtxSynchronize())))
        thread.start()
        thread.join()
        assert answers == [INVALID_CONTEXT]
        assert code(cuda.cuCtxSynchronize()) == 0

    def test_push_and_pop_are_a_stack(self, context: Any) -> None:
        """Popping brings back the context before; one too many is refused."""
        ok(cuda.cuCtxPushCurrent(context))
        assert int(ok(cuda.cuCtxPopCurrent())) == int(context)
        assert int(ok(cuda.cuCtxPopCurrent())) == int(context)
        assert code(cuda.cuCtxPopCurrent()) == INVALID_CONTEXT
        assert code(cuda.cuMemAlloc(MIB)) == INVALID_CONTEXT

    def test_ends_with_its_last_release_and_takes_everything_along(self, fake: FakeDriver, context: Any) -> None:
        """Streams, events and plain memory of a context die with it."""
        again = ok(cuda.cuDevicePrimaryCtxRetain(0))
        assert int(again) == int(context)
        event = recorded(stream())
        ok(cuda.cuMemAlloc(MIB))
        ok(cuda.cuDevicePrimaryCtxRelease(0))
        assert fake.live() == {"contexts": 1, "events": 1, "plain": 1, "streams": 1}
        ok(cuda.cuDevicePrimaryCtxRelease(0))
        assert fake.live() == {}
        assert fake.used() == 0
        assert code(cuda.cuCtxSynchronize()) == DESTROYED
        assert code(cuda.cuEventQuery(event)) == INVALID_HANDLE
        assert code(cuda.cuDevicePrimaryCtxRelease(0)) == INVALID_CONTEXT

    def test_unknown_devices_are_refused(self) -> None:
        """Only devices that are there can be asked."""
        assert code(cuda.cuDeviceGet(1)) == 101
        assert code(cuda.cuDevicePrimaryCtxRetain(7)) == 101

    def test_a_lost_device_answers_every_call_so(self, fake: FakeDriver, memory: int) -> None:
        """The error sticks, and no fence is ever reached."""
        own = stream()
        fake.hold(int(own))
        event = recorded(own)
        fake.lose(0, LAUNCH_FAILED)
        fake.release()
        assert code(cuda.cuEventQuery(event)) == LAUNCH_FAILED
        assert code(cuda.cuMemFree(memory)) == LAUNCH_FAILED
        assert code(cuda.cuStreamSynchronize(own)) == LAUNCH_FAILED
        assert code(cuda.cuDevicePrimaryCtxRetain(0)) == LAUNCH_FAILED

    def test_losing_a_device_ends_a_wait(self, fake: FakeDriver, context: Any) -> None:
        """Who blocks in the driver hears of it."""
        own = stream()
        fake.hold(int(own))
        event = recorded(own)
        answers: list[int] = []

        def block() -> None:
            ok(cuda.cuCtxSetCurrent(context))
            answers.append(code(cuda.cuEventSynchronize(event)))

        thread = threading.Thread(target=block)
        thread.start()
        while not fake.calls("cuEventSynchronize"):
            pass
        fake.lose()
        thread.join()
        assert answers == [ILLEGAL_ADDRESS]


class TestStreams:
    def test_work_waits_while_its_stream_is_held(self, fake: FakeDriver, memory: int) -> None:
        """Nothing behind the hold happens; afterwards everything does, in order."""
        own = stream()
        fill(memory, 1, 4, own)
        fake.hold(int(own))
        fill(memory, 2, 2, own)
        event = recorded(own)
        assert code(cuda.cuStreamQuery(own)) == NOT_READY
        assert code(cuda.cuEventQuery(event)) == NOT_READY
        assert ctypes.string_at(memory, 4) == bytes([1] * 4)
        fake.release(int(own))
        assert code(cuda.cuEventQuery(event)) == 0
        assert read(memory, 4, own) == bytes([2, 2, 1, 1])

    def test_work_takes_its_time(self, fake: FakeDriver) -> None:
        """A kernel of some duration is not done before; the clock alone ends it."""
        own, timed = stream(), [ok(cuda.cuEventCreate(0)) for _ in range(2)]
        ok(cuda.cuEventRecord(timed[0], own))
        fake.launch(int(own), 3_000_000)
        ok(cuda.cuEventRecord(timed[1], own))
        ok(cuda.cuEventSynchronize(timed[1]))
        assert ok(cuda.cuEventElapsedTime(*timed)) >= 3.0

    def test_waiting_for_an_event_orders_streams(self, fake: FakeDriver, memory: int) -> None:
        """The waiting stream goes on behind the other one's work, and a third does not mind."""
        a, b, other = stream(), stream(), stream()
        fake.hold(int(a))
        fill(memory, 7, 1, a)
        wait(b, a)
        behind = recorded(b)
        assert code(cuda.cuEventQuery(behind)) == NOT_READY
        assert code(cuda.cuEventQuery(recorded(other))) == 0
        fake.release()
        assert read(memory, 1, b) == b"\x07"
        assert fake.violations() == []

    @pytest.mark.parametrize(("flags", "answer"), [(0, NOT_READY), (1, 0)])
    def test_the_legacy_stream_waits_for_blocking_ones(self, fake: FakeDriver, flags: int, answer: int) -> None:
        """The default stream is behind every blocking stream and before all their later work."""
        own = stream(flags)
        fake.hold(int(own))
        fake.launch(int(own))
        assert code(cuda.cuEventQuery(recorded(0))) == answer
        fake.release()
        fake.hold(0)
        fake.launch(0)
        assert code(cuda.cuEventQuery(recorded(own))) == answer

    def test_each_thread_has_a_default_stream_of_its_own(self, context: Any) -> None:
        """Handle 2 means another stream in each thread, and the legacy one is another still."""
        ids = {ok(cuda.cuStreamGetId(handle)) for handle in (0, 1, 2)}
        assert len(ids) == 2

        def ask() -> None:
            ok(cuda.cuCtxSetCurrent(context))
            ids.add(ok(cuda.cuStreamGetId(2)))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert len(ids) == 3

    def test_a_destroyed_streams_handle_comes_again_but_not_its_id(self, fake: FakeDriver) -> None:
        """As with a driver's pointers; and work already queued still runs. To name it meanwhile is a mistake."""
        own = stream()
        handle, number = int(own), ok(cuda.cuStreamGetId(own))
        fake.launch(handle, 1_000_000)
        event = recorded(own)
        ok(cuda.cuStreamDestroy(own))
        assert code(cuda.cuStreamQuery(own)) == INVALID_HANDLE
        assert fake.violations() == ["cuStreamQuery names a stream that was destroyed"]
        again = stream()
        assert int(again) == handle
        assert ok(cuda.cuStreamGetId(again)) != number
        ok(cuda.cuEventSynchronize(event))

    def test_an_event_belongs_to_its_context(self, fake: FakeDriver) -> None:
        """It is recorded only on streams of the device it was made on, and any stream may wait for it."""
        fake.devices(2)
        enter(0)
        own = stream()
        enter(1)
        event = ok(cuda.cuEventCreate(2))
        assert code(cuda.cuEventRecord(event, own)) == INVALID_HANDLE
        ok(cuda.cuEventRecord(event, stream()))
        ok(cuda.cuStreamWaitEvent(own, event, 0))
        ok(cuda.cuEventDestroy(event))
        assert code(cuda.cuEventDestroy(event)) == INVALID_HANDLE

    def test_a_host_function_runs_in_order_and_off_the_callers_thread(self) -> None:
        """It comes after the work before it and holds up the work behind it."""
        threads: list[int] = []
        gate = threading.Event()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def function(argument: int) -> None:
            del argument
            threads.append(threading.get_ident())
            gate.wait()

        own = stream()
        ok(cuda.cuLaunchHostFunc(own, cuda.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0))
        event = recorded(own)
        assert code(cuda.cuEventQuery(event)) == NOT_READY
        gate.set()
        ok(cuda.cuEventSynchronize(event))
        assert threads
        assert threads[0] != threading.get_ident()

    def test_an_event_of_the_context_is_behind_every_stream(self, fake: FakeDriver, context: Any) -> None:
        """Destroyed streams too."""
        own, event = stream(), ok(cuda.cuEventCreate(2))
        fake.hold(int(own))
        fake.launch(int(own))
        ok(cuda.cuCtxRecordEvent(context, event))
        assert code(cuda.cuEventQuery(event)) == NOT_READY
        fake.release()
        assert code(cuda.cuEventQuery(event)) == 0


class TestOrder:
    def test_unordered_writes_are_told(self, fake: FakeDriver, memory: int) -> None:
        """Although the first write was long done: nothing had ordered it."""
        a, b = stream(), stream()
        fill(memory, 1, MIB, a)
        fill(memory, 2, 16, b)
        assert "memset on stream" in fake.violations()[0]

    def test_reads_beside_reads_are_fine_and_a_write_beside_them_is_not(self, fake: FakeDriver, memory: int) -> None:
        """Only a write needs to be alone."""
        a, b, c = stream(), stream(), stream()
        fill(memory, 1, MIB, a)
        wait(b, a)
        wait(c, a)
        fake.launch(int(b), reads=[(memory, 16)])
        fake.launch(int(c), reads=[(memory, 16)])
        assert fake.violations() == []
        wait(a, b)
        fill(memory, 1, MIB, a)
        assert len(fake.violations()) == 1
        assert "read by work of stream" in fake.violations()[0]

    def test_an_event_recorded_too_early_covers_nothing_later(self, fake: FakeDriver, memory: int) -> None:
        """The mistake that corrupted data in a public pool: an old fence is not one for new work."""
        a, b = stream(), stream()
        early = recorded(a)
        fill(memory, 1, 16, a)
        ok(cuda.cuStreamWaitEvent(b, early, 0))
        fill(memory, 2, 16, b)
        assert len(fake.violations()) == 1

    def test_what_the_host_saw_done_is_in_order(self, fake: FakeDriver, memory: int) -> None:
        """By an event, a stream or the whole context."""
        a, b = stream(), stream()
        for look in (
            lambda event: ok(cuda.cuEventQuery(event)),
            lambda event: ok(cuda.cuEventSynchronize(event)),
            lambda _: ok(cuda.cuStreamQuery(a)),
            lambda _: ok(cuda.cuStreamSynchronize(a)),
            lambda _: ok(cuda.cuCtxSynchronize()),
        ):
            fill(memory, 1, 16, a)
            look(recorded(a))
            fill(memory, 2, 16, b)
            ok(cuda.cuStreamSynchronize(b))
        assert fake.violations() == []

    def test_an_event_of_the_context_is_behind_streams_that_are_gone(
        self, fake: FakeDriver, context: Any, memory: int
    ) -> None:
        """A destroyed stream whose work has ended is no more, but what it wrote was written before."""
        own, event = stream(), ok(cuda.cuEventCreate(2))
        fill(memory, 1, 16, own)
        ok(cuda.cuStreamDestroy(own))
        ok(cuda.cuStreamSynchronize(stream()))  # time goes on, and the host sees nothing of what was written
        ok(cuda.cuCtxRecordEvent(context, event))
        ok(cuda.cuEventSynchronize(event))
        fill(memory, 2, 16, stream())
        assert fake.violations() == []

    def test_freeing_under_unfinished_work_is_told_and_loses_the_device(self, fake: FakeDriver, memory: int) -> None:
        """The kernel finds nothing where its memory was."""
        own = stream()
        fake.hold(int(own))
        fake.launch(int(own), writes=[(memory, MIB)])
        ok(cuda.cuMemFree(memory))
        assert "cuMemFree by the host: written by work" in fake.violations()[0]
        fake.release()
        assert code(cuda.cuCtxSynchronize()) == ILLEGAL_ADDRESS

    def test_a_kernel_where_nothing_is_loses_the_device(self, fake: FakeDriver, memory: int) -> None:
        """Past the end is nowhere."""
        fake.launch(int(stream()), reads=[(memory + MIB - 1, 2)])
        assert "nothing is there" in fake.violations()[0]
        assert code(cuda.cuCtxSynchronize()) == ILLEGAL_ADDRESS


class TestCaptures:
    def test_a_graph_runs_what_was_captured_each_time_it_is_launched(self, fake: FakeDriver, memory: int) -> None:
        """Nothing runs during the capture; each launch runs all of it again."""
        own, other = stream(), stream()
        fill(memory, 1, 16, own)
        ok(cuda.cuStreamBeginCapture(own, GLOBAL))
        fill(memory, 5, 8, own)
        wait(other, own)
        fill(memory + 8, 6, 8, other)
        wait(own, other)
        graph = ok(cuda.cuStreamEndCapture(own))
        assert read(memory, 16, own) == bytes([1] * 16)
        ready = ok(cuda.cuGraphInstantiate(graph, 0))
        for _ in range(2):
            ok(cuda.cuGraphLaunch(ready, own))
            assert read(memory, 16, own) == bytes([5] * 8 + [6] * 8)
            fill(memory, 1, 16, own)
        ok(cuda.cuGraphExecDestroy(ready))
        ok(cuda.cuGraphDestroy(graph))
        assert code(cuda.cuGraphDestroy(graph)) == INVALID_VALUE
        assert fake.violations() == []

    def test_an_unsafe_call_of_any_thread_ends_it(self, context: Any) -> None:
        """In global mode: memory, queries and waits are refused, and the capture is worth nothing."""
        own, event = stream(), recorded(stream())
        unsafe = [
            lambda: cuda.cuMemAlloc(MIB),
            lambda: cuda.cuEventQuery(event),
            lambda: cuda.cuMemAddressReserve(2 * MIB, 0, 0, 0),
        ]
        for call in unsafe:
            ok(cuda.cuStreamBeginCapture(own, GLOBAL))
            answers: list[int] = []

            def elsewhere(call: Any = call, answers: list[int] = answers) -> None:
                ok(cuda.cuCtxSetCurrent(context))
                answers.append(code(call()))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert answers == [CAPTURE_UNSUPPORTED]
            assert code(cuda.cuStreamEndCapture(own)) == CAPTURE_INVALIDATED
            assert ok(cuda.cuStreamIsCapturing(own)) == 0

    def test_a_relaxed_thread_may_do_everything(self) -> None:
        """That is what the mode is for; and the capture goes on."""
        own = stream()
        ok(cuda.cuStreamBeginCapture(own, GLOBAL))
        before = ok(cuda.cuThreadExchangeStreamCaptureMode(RELAXED))
        try:
            ok(cuda.cuMemFree(ok(cuda.cuMemAlloc(MIB))))
        finally:
            ok(cuda.cuThreadExchangeStreamCaptureMode(before))
        assert before == GLOBAL
        ok(cuda.cuGraphDestroy(ok(cuda.cuStreamEndCapture(own))))

    def test_waiting_for_the_captured_stream_is_refused(self) -> None:
        """Nothing there will ever run; an event recorded in the capture is none of the host's."""
        own = stream()
        ok(cuda.cuStreamBeginCapture(own, RELAXED))
        assert ok(cuda.cuStreamIsCapturing(own)) == 1
        event = recorded(own)
        assert code(cuda.cuEventQuery(event)) == CAPTURED_EVENT
        assert ok(cuda.cuStreamIsCapturing(own)) == 2
        assert code(cuda.cuStreamSynchronize(own)) == CAPTURE_UNSUPPORTED
        assert code(cuda.cuStreamEndCapture(own)) == CAPTURE_INVALIDATED

    def test_work_that_the_first_stream_is_not_behind_is_refused(self, memory: int) -> None:
        """What was forked must be joined."""
        own, other = stream(), stream()
        ok(cuda.cuStreamBeginCapture(own, GLOBAL))
        wait(other, own)
        fill(memory, 1, 16, other)
        wait(own, other)
        fill(memory, 2, 16, other)
        assert code(cuda.cuStreamEndCapture(own)) == CAPTURE_UNJOINED

    def test_the_legacy_stream_is_not_captured_nor_asked_beside_a_capture(self) -> None:
        """It would draw the blocking stream's capture in."""
        assert code(cuda.cuStreamBeginCapture(0, GLOBAL)) == CAPTURE_UNSUPPORTED
        own = stream(0)
        ok(cuda.cuStreamBeginCapture(own, GLOBAL))
        assert code(cuda.cuStreamIsCapturing(0)) == CAPTURE_IMPLICIT
        ok(cuda.cuGraphDestroy(ok(cuda.cuStreamEndCapture(own))))


class TestControls:
    def test_calls_may_be_slow_from_some_time_on(self, fake: FakeDriver, context: Any) -> None:
        """All of a name, or so many from the n-th on."""
        del context

        def four() -> list[float]:
            fake.latency("cuStreamCreate", 20_000_000, nth=2, times=2)
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                stream()
                seconds.append(time.perf_counter() - began)
            return seconds

        fastest = [min(each) for each in zip(*(four() for _ in range(10)), strict=True)]  # of a busy machine, too
        assert [one >= 0.02 for one in fastest] == [False, True, True, False]

    def test_the_nth_call_fails_and_does_nothing(self, fake: FakeDriver) -> None:
        """Counted from now on, for as many times as asked."""
        fake.fail("cuMemAlloc", 2, OUT_OF_MEMORY, times=2)
        answers = [code(cuda.cuMemAlloc(MIB)) for _ in range(4)]
        assert answers == [0, OUT_OF_MEMORY, OUT_OF_MEMORY, 0]
        assert fake.live()["plain"] == 2

    def test_any_call_can_be_the_one(self, fake: FakeDriver) -> None:
        """The star stands for all names."""
        fake.fail("*", 2, LAUNCH_FAILED)
        assert code(cuda.cuCtxGetDevice()) == 0
        assert code(cuda.cuStreamCreate(0)) == LAUNCH_FAILED
        assert code(cuda.cuStreamCreate(0)) == 0

    def test_a_notification_reaches_those_who_registered(self, fake: FakeDriver) -> None:
        """And nobody afterwards."""
        heard: list[int] = []

        @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int * 4), ctypes.c_void_p, ctypes.c_void_p)
        def callback(info: Any, argument: int, handle: int) -> None:
            del argument, handle
            heard.append(info.contents[2])

        address = ctypes.cast(callback, ctypes.c_void_p).value
        registered = ok(cuda.cuDeviceRegisterAsyncNotification(0, cuda.CUasyncCallback(address), 0))
        assert fake.over_budget(4096) == 1
        ok(cuda.cuDeviceUnregisterAsyncNotification(0, registered))
        assert fake.over_budget(1) == 0
        assert heard == [4096]

    def test_a_forked_child_has_no_driver(self) -> None:
        """A driver does not survive a fork."""
        child = os.fork()
        if child == 0:
            os._exit(code(cuda.cuCtxSynchronize()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == NOT_INITIALIZED

    def test_calls_at_exit_are_counted(self, fake: FakeDriver) -> None:
        """A process can be asked what it called on its way out, and what it left."""
        program = (
            f"import ctypes; library = ctypes.CDLL({str(fake.path)!r}); library.cuInit(0); "
            "library.fake_report_at_exit(); context = ctypes.c_void_p(); "
            "library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)"
        )
        finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert finished.stderr == "driver calls at exit: 1\ncontexts 1\n"

    def test_another_program_gets_it_by_the_library_path(self, fake: FakeDriver) -> None:
        """A process that is started with the folder on its library path has the fake for its driver."""
        program = "from cuda.bindings import driver; print(int(driver.cuInit(0)[0]), driver.cuDeviceGetCount()[1])"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(fake.path).parent)}
        finished = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert finished.stdout == "0 1\n"

    @pytest.mark.parametrize(
        ("shown", "found"), [(None, "3 [0, 1, 2]"), ("2,0", "2 [2, 0]"), ("1,7,0", "1 [1]"), ("", "")]
    )
    def test_a_program_is_shown_the_devices_it_may_see(self, fake: FakeDriver, shown: str | None, found: str) -> None:
        """In the order of the list, up to the first number that is no device's."""
        program = (
            "from cuda.bindings import driver\n"
            "if driver.cuInit(0)[0] == 0:\n"
            "    count = driver.cuDeviceGetCount()[1]\n"
            "    print(count, [driver.cuDeviceGetUuid(one)[1].bytes[15] for one in range(count)], end='')"
        )
        environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(fake.path).parent), "FAKE_CUDA_DEVICES": "3"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        environment |= {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
        finished = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert finished.stdout == found
