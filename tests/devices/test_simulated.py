"""The simulated device: exact times, each call written down, faults where they were ordered, memory that ends."""

import asyncio
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncmem.devices import Call, Latencies, Simulated, StreamOrderError, simulated
from asyncmem.devices.simulated.calls import CALLS
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError

MIB = 1 << 20


@pytest.fixture
def free_of_charge() -> Simulated:
    """A device whose calls take no time, so that times are those of the work."""
    return Simulated(latencies=Latencies.zero())


class TestVirtualTime:
    def test_stands_still_while_nobody_waits(self, free_of_charge: Simulated) -> None:
        """Submitting and asking move nothing."""
        stream = free_of_charge.create_stream()
        stream.launch(1.0)
        assert not stream.record().done()
        assert free_of_charge.now == 0.0

    def test_blocking_jumps_to_the_fence(self, free_of_charge: Simulated) -> None:
        """A wait takes exactly the work's time, and no real time."""
        stream = free_of_charge.create_stream()
        stream.launch(3600.0)
        assert stream.record().block()
        assert free_of_charge.now == 3600.0

    def test_work_of_one_stream_adds_up_and_streams_overlap(self, free_of_charge: Simulated) -> None:
        """Two pieces of 1 s on one stream end at 2 s, beside one of 1.5 s on another; a wait brings them together."""
        a, b = free_of_charge.create_stream(), free_of_charge.create_stream()
        a.launch(1.0)
        a.launch(1.0)
        b.launch(1.5)
        assert (a.record().at, b.record().at) == (2.0, 1.5)
        b.wait(a.record())
        b.launch(1.0)
        assert b.record().at == 3.0

    def test_work_starts_when_it_is_submitted(self, free_of_charge: Simulated) -> None:
        """An idle stream does not work ahead of its submissions."""
        stream = free_of_charge.create_stream()
        free_of_charge.advance(5.0)
        stream.launch(1.0)
        assert stream.record().at == 6.0

    def test_advance_calls_back_at_each_fences_own_time(self, free_of_charge: Simulated) -> None:
        """Callbacks come in the order of their fences and see the time of theirs."""
        stream = free_of_charge.create_stream()
        times: list[float] = []
        stream.launch(1.0)
        first = stream.record()
        stream.launch(1.0)
        stream.record().notify(lambda: times.append(free_of_charge.now))
        first.notify(lambda: times.append(free_of_charge.now))
        free_of_charge.advance(10.0)
        assert times == [1.0, 2.0]
        assert free_of_charge.now == 10.0

    def test_run_until_idle_goes_to_the_end_of_all_work_that_ends(self, free_of_charge: Simulated) -> None:
        """Work without an end is left alone."""
        free_of_charge.create_stream().launch(2.0)
        free_of_charge.create_stream().launch(math.inf)
        free_of_charge.run_until_idle()
        assert free_of_charge.now == 2.0

    def test_an_await_jumps_after_the_others_had_their_turn(self, free_of_charge: Simulated) -> None:
        """Tasks that are ready run before time moves."""
        stream = free_of_charge.create_stream()
        stream.launch(1.0)
        seen: list[float] = []

        async def main() -> None:
            other = asyncio.ensure_future(look())
            await stream.synchronize()
            await other

        async def look() -> None:
            seen.append(free_of_charge.now)

        asyncio.run(main())
        assert seen == [0.0]
        assert free_of_charge.now == 1.0

    def test_without_autojump_a_wait_is_held_until_somebody_advances(self) -> None:
        """A test can keep a waiter waiting as long as it likes."""
        device = Simulated(autojump=False, latencies=Latencies.zero())
        device.default_stream.launch(1.0)
        fence = device.default_stream.record()
        waiter = threading.Thread(target=fence.block)
        waiter.start()
        device.advance(0.5)
        assert waiter.is_alive()
        device.advance(0.5)
        waiter.join()
        assert not waiter.is_alive()

    @pytest.mark.parametrize("clock", ["virtual", "wall"])
    def test_waiting_for_work_without_an_end_is_an_error_not_a_hang(self, clock: str) -> None:
        """`block` without a timeout refuses; with one it gives up."""
        device = Simulated(clock=clock, latencies=Latencies.zero())  # type: ignore[arg-type]  # both are valid
        device.default_stream.launch(math.inf)
        with pytest.raises(DeviceError, match="WORK_NEVER_ENDS"):
            device.default_stream.record().block()
        assert not device.default_stream.record().block(0.001)

    def test_is_the_same_in_every_run(self) -> None:
        """One program, one history: times and calls are equal."""
        assert _history() == _history()

    def test_a_wall_clock_cannot_be_moved(self) -> None:
        """Nobody advances real time."""
        with pytest.raises(InvalidRequest, match="virtual"):
            Simulated(clock="wall").advance(1.0)

    @pytest.mark.parametrize("duration", [-1.0, math.nan, "1 s", None])
    def test_work_takes_a_time(self, free_of_charge: Simulated, duration: Any) -> None:
        """A negative duration or no number is a mistake, and the clock does not go back."""
        with pytest.raises(InvalidRequest, match="duration: expected seconds from 0 on"):
            free_of_charge.default_stream.launch(duration)
        with pytest.raises(InvalidRequest, match="seconds: expected seconds from 0 on"):
            free_of_charge.advance(duration)

    def test_an_unknown_clock_is_refused(self) -> None:
        """There are two clocks."""
        with pytest.raises(InvalidRequest, match="'virtual' or 'wall'"):
            Simulated(clock="lunar")  # type: ignore[arg-type]  # that is the point


def _history() -> list[tuple[str, int, float]]:
    device = Simulated()
    a, b = device.create_stream(), device.create_stream()
    segment = device.allocate_segment(64 * MIB, stream=a)
    a.launch(0.001, writes=[(segment.address, MIB)])
    b.wait(a.record())
    b.launch(0.002, reads=[(segment.address, MIB)])
    b.synchronize_blocking()
    device.free_segment(segment)
    return [(call.name, call.nbytes, call.at) for call in device.calls]


class TestLatencies:
    @pytest.mark.parametrize(
        ("call", "mib", "microseconds"),
        [
            ("allocate_stream_ordered", 2, 34),
            ("allocate_stream_ordered", 1024, 737),
            ("allocate_direct", 64, 29),
            ("free", 256, 74),
            ("free", 1, 23),
        ],
    )
    def test_are_the_measured_ones(self, call: str, mib: int, microseconds: float) -> None:
        """At the sizes that were measured, and below the smallest, the figures are those of the measurement."""
        assert Latencies().of(call, mib * MIB) == pytest.approx(microseconds * 1e-6)

    def test_lie_between_the_measured_ones_and_grow_above(self) -> None:
        """Half way between two sizes is half way between their times; twice the largest takes twice as long."""
        latencies = Latencies()
        assert latencies.of("allocate_direct", 160 * MIB) == pytest.approx(31e-6)
        assert latencies.of("allocate_direct", 2048 * MIB) == pytest.approx(140e-6)

    def test_can_be_one_figure_for_all_blocking_calls(self) -> None:
        """For an experiment: blocking calls of a millisecond, the others as they are."""
        latencies = Latencies.blocking(0.001)
        assert {latencies.of(call, MIB) for call in ("allocate_direct", "free", "memory")} == {0.001}
        assert latencies.record == Latencies().record

    def test_pass_on_the_virtual_clock(self) -> None:
        """A driver call takes its time there."""
        device = Simulated(latencies=Latencies.blocking(0.25))
        segment = device.allocate_segment(MIB)
        assert device.now == 0.25
        device.free_segment(segment)
        assert device.now == 0.5

    def test_really_pass_on_the_wall_clock(self) -> None:
        """There the calling thread is held."""
        device = Simulated(clock="wall", latencies=Latencies.blocking(0.005))
        before = device.now
        device.allocate_segment(MIB)
        assert device.now - before >= 0.005
        device.close()

    def test_of_a_refusal_do_not_grow_with_the_size(self) -> None:
        """What is not mapped takes no time to map."""
        device = Simulated(capacity=MIB)
        with pytest.raises(OutOfMemoryError):
            device.allocate_segment(1 << 46)
        assert device.now < 0.001


class TestMemory:
    def test_ends_at_the_capacity(self) -> None:
        """What is beyond is out of memory; giving back makes room again."""
        device = Simulated("2 MiB")
        segment = device.allocate_segment(MIB)
        device.allocate_segment(MIB)
        assert device.memory().free == 0
        with pytest.raises(OutOfMemoryError) as caught:
            device.allocate_segment(1)
        assert (caught.value.device, caught.value.facts.device_free) == ("simulated:0", 0)
        device.free_segment(segment)
        assert device.allocate_segment(MIB).nbytes == MIB

    def test_is_as_large_as_asked_else_as_suggested_else_80_gib(self) -> None:
        """The user's word counts before the pool's, and the pool's before the default."""
        device = Simulated()
        assert device.capacity == 80 << 30
        device.suggest_capacity(MIB)
        assert device.capacity == MIB
        asked = Simulated(2 * MIB)
        asked.suggest_capacity(MIB)
        assert asked.capacity == 2 * MIB

    def test_does_not_shrink_under_segments(self) -> None:
        """A second pool's limit comes too late to be the capacity."""
        device = Simulated()
        device.allocate_segment(MIB)
        device.suggest_capacity(MIB)
        assert device.capacity == 80 << 30

    def test_has_nothing_behind_it_unless_asked(self) -> None:
        """80 GiB can be had on any machine, and say that the host cannot read them."""
        device = Simulated()
        segment = device.allocate_segment(64 << 30)
        assert not device.host_readable
        assert device.dlpack_device == (12, 0)
        device.fill(segment.address, 64 << 30, 1, device.default_stream)

    def test_given_back_is_the_first_to_be_used_again(self) -> None:
        """So that a stale pointer meets new memory, as with a real driver."""
        device = Simulated()
        segment = device.allocate_segment(MIB)
        device.free_segment(segment)
        assert device.allocate_segment(MIB).address == segment.address

    def test_shows_its_state_in_one_line(self) -> None:
        """The repr has the name, the bytes and the time."""
        device = Simulated("4 MiB", index=2, latencies=Latencies.zero())
        device.allocate_segment(MIB)
        assert repr(device) == "<Simulated simulated:2: 1 MiB of 4 MiB, at 0.000000000 s>"


class TestCalls:
    def test_are_written_down_with_thread_bytes_and_time(self) -> None:
        """A test can tell which thread made which driver call."""
        device = Simulated(latencies=Latencies.blocking(0.5))
        device.memory()
        worker = threading.Thread(target=device.allocate_segment, args=(MIB,))
        worker.start()
        worker.join()
        assert device.calls_of("memory") == [Call("memory", threading.get_ident(), 0, 0.0)]
        (call,) = device.calls_of("allocate_segment")
        assert (call.nbytes, call.at) == (MIB, 0.5)
        assert call.thread != threading.get_ident()
        assert device.driver_calls == 2

    def test_of_every_kind_are_counted(self) -> None:
        """No call of the contract goes unseen."""
        device = Simulated(backing=True)
        stream = device.create_stream()
        segment = device.allocate_segment(MIB)
        stream.wait(device.default_stream.record())
        device.fill(segment.address, 1, 1, stream)
        device.copy(segment.address, segment.address + 1, 1, stream)
        device.copy_in(segment.address, memoryview(b"x"), stream)
        device.copy_out(memoryview(bytearray(1)), segment.address, stream)
        stream.launch()
        device.record_all().block()
        stream.record().done()
        device.memory()
        device.free_segment(segment)
        device.close()
        assert set(device.log.counts) == {
            *("create_stream", "allocate_segment", "record", "wait", "fill", "copy", "copy_in", "copy_out", "launch"),
            *("record_all", "block", "query", "memory", "free_segment", "close"),
        }


class TestFaults:
    def test_come_at_the_nth_call_of_a_kind_and_once(self) -> None:
        """The calls before and after it succeed."""
        device = Simulated()
        device.fail("record", 3)
        stream = device.create_stream()
        stream.record()
        stream.record()
        with pytest.raises(DeviceError) as caught:
            stream.record()
        assert (caught.value.call, caught.value.device) == ("record", "simulated:0")
        stream.record()

    @pytest.mark.parametrize("nth", range(1, 6))
    def test_come_at_the_nth_call_of_any_kind(self, nth: int) -> None:
        """With "*" every call counts, whatever it is."""
        device = Simulated()
        device.fail("*", nth)
        calls = iter((device.memory, device.create_stream, device.record_all, device.default_stream.record) * 2)
        for _ in range(nth - 1):
            next(calls)()
        with pytest.raises(DeviceError):
            next(calls)()
        next(calls)()

    def test_come_as_often_as_asked_and_with_the_error_asked_for(self) -> None:
        """A device can be lost for some time."""
        device = Simulated()
        device.fail("memory", times=2, error=OSError("unplugged"))
        for _ in range(2):
            with pytest.raises(OSError, match="unplugged"):
                device.memory()
        device.memory()

    def test_leave_everything_as_it_was(self) -> None:
        """A call that failed has done nothing."""
        device = Simulated()
        segment = device.allocate_segment(MIB)
        device.fail("allocate_segment")
        device.fail("free_segment")
        with pytest.raises(DeviceError):
            device.allocate_segment(MIB)
        with pytest.raises(DeviceError):
            device.free_segment(segment)
        assert device.reserved == MIB
        device.free_segment(segment)

    def test_name_a_call_that_there_is(self) -> None:
        """A misspelt name is a fault that could never come; the error has all names, which are those of the source."""
        folder = Path(simulated.__file__).parent
        names = re.findall(r'(?:log\.enter|_submit)\("(\w+)"', "".join(one.read_text() for one in folder.glob("*.py")))
        assert sorted(set(names)) == list(CALLS)
        with pytest.raises(InvalidRequest, match=r"one of allocate_segment, .*, got 'alocate_segment'"):
            Simulated().fail("alocate_segment")
        for name in (*CALLS, "*"):
            Simulated().fail(name)

    @pytest.mark.parametrize(("nth", "times"), [(0, 1), (1, 0), ("1", 1), (1, None), (1.5, 1)])
    def test_are_counted_from_one(self, nth: Any, times: Any) -> None:
        """A fault that could never come is a mistake."""
        with pytest.raises(InvalidRequest):
            Simulated().fail("record", nth, times=times)


class TestOrder:
    def test_touching_another_streams_work_raises_at_submission(self) -> None:
        """The error names both streams and the bytes; a wait for a fence behind the work puts it right."""
        device = Simulated()
        a, b = device.create_stream("a"), device.create_stream("b")
        segment = device.allocate_segment(MIB, stream=a)
        a.launch(writes=[(segment.address, 4096)])
        with pytest.raises(StreamOrderError) as caught:
            b.launch(reads=[segment])
        assert (caught.value.stream, caught.value.other, caught.value.address) == ("b", "a", segment.address)
        b.wait(a.record())
        b.launch(reads=[segment])

    def test_being_done_in_time_is_no_order_until_the_host_saw_it(self) -> None:
        """The checker judges what is certain, not what went well this time."""
        device = Simulated()
        a, b = device.create_stream(), device.create_stream()
        segment = device.allocate_segment(MIB, stream=a)
        a.launch(writes=[segment])
        fence = a.record()
        device.advance(10.0)
        with pytest.raises(StreamOrderError):
            b.launch(writes=[segment])
        assert fence.done()
        b.launch(writes=[segment])

    def test_giving_back_needs_the_host_to_have_seen_the_work_done(self) -> None:
        """That another stream waits is not enough to unmap."""
        device = Simulated()
        segment = device.allocate_segment(MIB)
        device.default_stream.launch(writes=[segment])
        with pytest.raises(StreamOrderError, match="given back"):
            device.free_segment(segment)
        device.default_stream.synchronize_blocking()
        device.free_segment(segment)

    def test_touching_what_is_not_there_raises(self) -> None:
        """Before, beyond or after a segment there is nothing."""
        device = Simulated()
        segment = device.allocate_segment(MIB)
        for address in (segment.address - 1, segment.address + segment.nbytes - 1):
            with pytest.raises(StreamOrderError, match="not in any segment"):
                device.default_stream.launch(writes=[(address, 2)])
        device.free_segment(segment)
        with pytest.raises(StreamOrderError, match="not in any segment"):
            device.default_stream.launch(reads=[segment])

    def test_a_stream_ordered_segment_is_born_on_its_stream_and_a_direct_one_for_all(self) -> None:
        """The first comes in the order of the stream that it was asked for on; the second is there at once."""
        device = Simulated()
        a, b = device.create_stream(), device.create_stream()
        with pytest.raises(StreamOrderError):
            b.launch(writes=[device.allocate_segment(MIB, "stream_ordered", a)])
        b.launch(writes=[device.allocate_segment(MIB, "direct", a)])

    def test_the_check_can_be_off(self) -> None:
        """Then anything goes."""
        device = Simulated(check_order=False)
        a, b = device.create_stream(), device.create_stream()
        segment = device.allocate_segment(MIB)
        a.launch(1.0, writes=[segment])
        b.launch(1.0, writes=[segment])
        device.free_segment(segment)

    def test_a_foreign_fence_cannot_be_waited_for(self) -> None:
        """Two simulated devices have two clocks."""
        with pytest.raises(InvalidRequest, match="fence of device"):
            Simulated().default_stream.wait(Simulated(index=1).default_stream.record())

    def test_streams_offer_their_handle_as_cuda_streams_do(self) -> None:
        """So that interoperation can be tested without CUDA."""
        device = Simulated()
        stream = device.create_stream()
        assert stream.__cuda_stream__() == (0, stream.handle)
