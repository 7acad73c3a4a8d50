"""Streams and fences of the simulated device, and captured work, with replays that the order checker sees."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from asyncmem.devices.awaiting import call_all, let_others_run
from asyncmem.devices.base import Addressed, Fence, Span, Stream
from asyncmem.devices.simulated.order import Moment, StreamOrderError
from asyncmem.devices.simulated.timeline import VirtualClock
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from asyncmem.devices.simulated.device import Simulated


@dataclass(frozen=True, slots=True)
class Step:
    """One captured piece of work: how long it takes, what it touches, and what it does to real memory."""

    duration: float
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    effect: Callable[[], None] | None


@dataclass(eq=False)
class Capture:
    """A capture under way, or its outcome, on the stream that began it and those that joined it."""

    steps: list[Step] = field(default_factory=list)
    records: int = 0
    """Fences recorded into it."""
    broken: DeviceError | None = None
    """Why it cannot become a graph."""

    def break_by(self, call: str, code: int, name: str) -> DeviceError:
        """End the hope for a graph, and return the error."""
        self.broken = DeviceError(call, code=code, code_name=name)
        return self.broken


class SimulatedGraph:
    """Work that can be launched again and again. Made by `SimulatedStream.end_capture`."""

    def __init__(self, capture: Capture) -> None:
        """Take a capture that has ended."""
        self._steps = tuple(capture.steps)
        self.records = capture.records

    def __len__(self) -> int:
        """Return the number of pieces of work."""
        return len(self._steps)

    def launch(self, stream: "SimulatedStream") -> None:
        """Submit all of it to a stream, in the order in which it was captured.

        Raises:
            StreamOrderError: It touches what other work may still be using, or what is there no more.
        """
        if stream.capturing():
            raise InvalidRequest("stream", stream, "a stream that is not being captured itself")
        stream.device.log.enter("launch_graph")
        for step in self._steps:
            stream.submit(step.duration, step.reads, step.writes, step.effect)


Touched: TypeAlias = Addressed | tuple[int, int]
"""What work reads or writes: a buffer, or an address and a number of bytes."""


class SimulatedFence(Fence):
    """A time at which a stream has done something, and the order that comes with it."""

    def __init__(self, device: "Simulated", at: float, moment: Moment, capture: Capture | None = None) -> None:
        """Take the time and what is complete by then, or the capture in which it is only a mark."""
        self.capture = capture
        self.device = device
        self.at = at
        self.moment = moment
        self._timeline = device.timeline
        self._callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<SimulatedFence at {self.at:.9f} s of {self.device.name}>"

    def done(self) -> bool:
        """Ask the driver whether the time has come."""
        self.device.log.enter("query")
        return self._look()

    def block(self, timeout: float | None = None) -> bool:
        """Let time pass until the fence is reached (**blocks**); on the virtual clock that is a jump."""
        self.device.log.enter("block")
        return self._timeline.clock.block(self.at, timeout) and self._look()

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once: now, or on the thread that moves the virtual clock, or on the wall clock's own."""
        with self._timeline.lock:
            if not self._look():
                if not self._callbacks:
                    self._timeline.clock.call_at(self.at, self._ring)
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        with self._timeline.lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def __await__(self) -> Generator[object, object, None]:
        """Wait; a virtual clock with autojump jumps to the fence once other tasks have had their turn."""
        clock = self._timeline.clock
        if isinstance(clock, VirtualClock) and clock.autojump and not self.done():
            yield from let_others_run()
            clock.block(self.at, None)
        yield from super().__await__()

    def _look(self) -> bool:
        if self.capture is not None:
            raise DeviceError("query", code=907, code_name="CAPTURED_EVENT", device=self.device.name)
        return self._timeline.look(self.at, self.moment)

    def _ring(self) -> None:
        with self._timeline.lock:
            self._look()
            due, self._callbacks = self._callbacks, []
        call_all(due)


class SimulatedStream(Stream):
    """An ordered queue of pretended work."""

    device: "Simulated"

    def __init__(self, device: "Simulated", name: str, handle: int) -> None:
        """Use `Simulated.create_stream` instead."""
        super().__init__(device, name, handle)
        # Handles are those of one device; in the timeline its machine's other devices have default streams too.
        self.timeline_key = handle or -device.number
        self._capture: Capture | None = None
        device.timeline.add_stream(self.timeline_key, name)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Offer the handle as CUDA streams do; only this device knows what it means."""
        return (0, self.handle)

    def launch(self, duration: float = 0.0, *, reads: Iterable[Touched] = (), writes: Iterable[Touched] = ()) -> None:
        """Submit work that takes `duration` seconds once the stream comes to it; `math.inf` never ends.

        Args:
            duration: Seconds of device time.
            reads: What it reads. Any number of streams may read the same bytes at once.
            writes: What it writes (and may read as well).

        Raises:
            StreamOrderError: It touches bytes that another stream may still be using, or that are in no segment.
        """
        self.device.log.enter("launch")
        self.submit(duration, [_range(one) for one in reads], [_range(one) for one in writes], None)

    def submit(
        self, duration: float, reads: Sequence[Span], writes: Sequence[Span], effect: Callable[[], None] | None
    ) -> None:
        """Submit work with what it does to real memory, or add it to the capture that is under way."""
        if self._capture is not None:
            self._capture.steps.append(Step(duration, tuple(reads), tuple(writes), effect))
            return
        if len(self.device.machine) > 1:
            self._need_access([*reads, *writes])
        self.device.timeline.submit(self.timeline_key, duration, reads, writes)
        if effect is not None:
            effect()

    def _need_access(self, ranges: Iterable[Span]) -> None:
        for address, nbytes in ranges:
            for other in self.device.machine:
                if other is self.device or other.reads_all or self.device in other.peers or not other.holds(address):
                    continue
                problem = f"used by {self.device.name!r}, which has no access to the memory of {other.name!r},"
                raise StreamOrderError(problem, address=address, nbytes=nbytes, stream=self.name)

    def record(self) -> SimulatedFence:
        """Return a fence behind everything submitted here so far, or a mark in the capture that is under way."""
        self.device.log.enter("record")
        if self._capture is not None:
            self._capture.records += 1
            return SimulatedFence(self.device, 0.0, {}, self._capture)
        return SimulatedFence(self.device, *self.device.timeline.record(self.timeline_key))

    def wait(self, fence: Fence) -> None:
        """Order all later work of this stream behind a fence of the same machine.

        A fence that was recorded into a capture makes this stream join it. A capture cannot wait for any other.
        """
        if not isinstance(fence, SimulatedFence) or fence.device.machine is not self.device.machine:
            raise InvalidRequest("fence", fence, f"a fence of device {self.device.name!r}")
        self.device.log.enter("wait")
        if fence.capture is not None:
            self._capture = fence.capture
        elif self._capture is not None:
            raise self._capture.break_by("wait", 905, "STREAM_CAPTURE_ISOLATION")
        else:
            self.device.timeline.wait(self.timeline_key, fence.at, fence.moment)

    def capturing(self) -> bool:
        """Return whether work submitted here is captured."""
        return self._capture is not None

    def begin_capture(self) -> None:
        """Capture all work that is submitted here from now on, and run none of it."""
        if self._capture is not None:
            raise InvalidRequest("stream", self, "a stream that is not being captured yet")
        self._capture = Capture()

    def end_capture(self) -> SimulatedGraph:
        """End the capture and return what was captured, to be launched any number of times.

        Raises:
            DeviceError: The capture was broken, by waiting for work outside of it.
        """
        capture = self._capture
        if capture is None:
            raise InvalidRequest("stream", self, "a stream that is being captured")
        for stream in self.device.streams():
            stream.leave(capture)
        if capture.broken is not None:
            raise capture.broken
        return SimulatedGraph(capture)

    def leave(self, capture: Capture) -> None:
        """Take no more part in a capture that has ended."""
        if self._capture is capture:
            self._capture = None


def _range(item: Touched) -> tuple[int, int]:
    return item if isinstance(item, tuple) else (item.address, item.nbytes)
