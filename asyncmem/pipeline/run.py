"""One run of a pipeline over a source: the workers, the order of items, the first error, and the end."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncmem.errors import StageError
from asyncmem.pipeline.feed import feed_from
from asyncmem.pipeline.frames import empty_frames
from asyncmem.pipeline.line import Line
from asyncmem.pipeline.mishaps import is_its_own, said
from asyncmem.pipeline.parcels import PLAIN, buffers_in, fence_of, order_behind

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
    from typing import Any

    from asyncmem.core import Buffer
    from asyncmem.devices import Fence, Stream
    from asyncmem.pipeline.station import Station


class Flight:
    """An item under way.

    Attributes:
        number: Its number in the source.
        allowed: When it might be taken from the source: until then stages waited for room and not for it.
        value: What the last stage made of it.
        fence: Behind what the last stage's stream was given to do with it.
        stream: That stream.
    """

    __slots__ = ("allowed", "fence", "number", "stream", "value")

    def __init__(self, number: int, value: object, allowed: float) -> None:
        self.number = number
        self.allowed = allowed
        self.value = value
        self.fence: Fence | None = None
        self.stream: Stream | None = None


class Ended(Exception):
    """Nothing more comes out of a run."""


class Run:
    """Takes a source's items through the stations. Nothing of it outlives `main`.

    Every decision is made in a step without awaits; the tasks wait in the lines alone. Between stages a line has no
    bound of its own: memory holds the stages back, and `in_flight` the source.
    """

    def __init__(
        self,
        stations: Sequence[Station],
        source: Iterable[object] | AsyncIterable[object],
        *,
        ordered: bool,
        in_flight: int,
        clock: Callable[[], float],
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._stations = stations
        self._beside = beside
        self._clock = clock
        self._in_flight = in_flight
        self._out: Line[Flight] = Line()
        self._lines: list[Line[Flight]] = []
        self._exits: list[Callable[[Flight], None]] = []
        self._turnstiles: list[Turnstile] = []
        self._doors: dict[int, Line[None]] = {}
        following = self._out
        for at, station in reversed(list(enumerate(stations))):
            several = ordered and station.stage.workers > 1
            if several and not station.calls_plainly:
                # One worker at a time waits for an item and its memory. A later item that began before would keep what
                # the earlier one needs, and be kept itself until that one has passed.
                self._doors[at] = Line()
                self._doors[at].put(None)
            line: Line[Flight] = Line(station.quota.window) if several else Line()
            self._lines.insert(0, line)
            if several:
                self._turnstiles.append(Turnstile(line, following))
            self._exits.insert(0, self._turnstiles[-1] if several else following.put)
            following = line
        self._feed = feed_from(source, self._take_in, self._source_ended)
        self.handed = 0
        self._begun = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._exhausted: float | None = None  # when the source had no more
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self.error: StageError | None = None
        self.over = anyio.Event()
        self._results: weakref.WeakSet[Buffer] = weakref.WeakSet()

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        if self._started is None:
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._started

    @property
    def consumer_waits(self) -> bool:
        """Whether somebody waits for a result, and nobody holds one that has been handed out."""
        return self._out.takers > 0 and not any(buffer.alive for buffer in self._results)

    # -- asked by who iterates ---------------------------------------------------------------------------------------

    async def next(self) -> object:
        """Wait for the next result.

        Raises:
            Ended: There is none; `error` says whether that is because a stage failed.

        Cancelled: the result comes next time.
        """
        flight = await self._out.take()
        self.handed += 1
        if type(flight.value) not in PLAIN:
            self._results.update(buffers_in(flight.value))
        self._feed.allow(self._clock())
        self._stop_at_the_end()
        return flight.value

    def stop(self) -> None:
        """Cancel what is under way and drop what waits; `main` ends soon."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    # -- the work ----------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Run all workers until nothing is left to do, one of them fails, or `stop`."""
        self._started = self._clock()
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                if self._stopped:
                    return
                for at, station in enumerate(self._stations):
                    for number in range(station.stage.workers):
                        tasks.start_soon(self._work, at, name=f"{station.stage.name} {number}")
                tasks.start_soon(self._feed.run, name="source")
                for beside in self._beside:
                    tasks.start_soon(beside)
                for _ in range(self._in_flight):
                    self._feed.allow(self._started)
        finally:
            for line in (*self._lines, self._out):
                line.clear()
            for turnstile in self._turnstiles:
                turnstile.clear()
            self._ended = self._clock()
            self._out.end(Ended)
            self.over.set()

    async def _work(self, at: int) -> None:
        station, line, pass_on, clock = self._stations[at], self._lines[at], self._exits[at], self._clock
        share, stream = station.share, station.stream
        function = station.stage.function
        plainly = station.calls_plainly
        door = self._doors.get(at)
        begun = _nothing if door is None else partial(door.put, None)
        idle = clock()  # since then
        while True:
            try:
                if door is not None:
                    await door.take()
                flight = await line.take()
            except BaseException:  # nothing more comes
                if self._exhausted is not None:
                    station.held_back += clock() - max(idle, self._exhausted)
                raise
            began = clock()
            station.held_back += max(0.0, flight.allowed - idle)
            station.at_work += 1
            try:
                if stream is not None:
                    order_behind(flight.value, None if flight.stream is stream else flight.fence, stream)
                if plainly:
                    flight.value = await function(flight.value, share)
                else:
                    flight.value = await station.call(flight.value, begun)
                if stream is not None:
                    flight.stream, flight.fence = stream, fence_of(flight.value, stream)
            except BaseException as error:
                number = flight.number
                del flight
                empty_frames(error)
                if not is_its_own(error):
                    raise
                self._fail(station.stage.name, number, error)
                return
            finally:
                station.at_work -= 1
            idle = clock()
            station.inside += idle - began
            station.items += 1
            pass_on(flight)
            del flight  # or its memory would stay until the next item comes

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _take_in(self, item: object, allowed: float) -> None:
        self._lines[0].put(Flight(self._begun, item, allowed))
        self._begun += 1

    def _source_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail("source", self._begun, error)
        self._exhausted = self._clock()
        self._stop_at_the_end()

    def _stop_at_the_end(self) -> None:
        if self._exhausted is not None and self.handed == self._begun:
            self.stop()

    def _fail(self, stage: str, item: int, error: BaseException) -> None:
        if self.error is None:
            self.error = StageError(stage, item, said(error))
            self.error.__cause__ = error
            self.stop()


class Turnstile:
    """Lets what several workers have finished pass in the order in which they took it."""

    def __init__(self, line: Line[Flight], following: Line[Flight]) -> None:
        self._line = line
        self._following = following
        self._next = 0
        self._early: dict[int, Flight] = {}

    def __call__(self, flight: Flight) -> None:
        """Take a finished item, and pass on all whose turn it is."""
        self._early[flight.number] = flight
        while self._next in self._early:
            self._following.put(self._early.pop(self._next))
            self._next += 1
            self._line.reopen()

    def clear(self) -> None:
        """Drop the items whose turn has not come."""
        self._early.clear()


def _nothing() -> None:
    """Stand for what an item without a door tells when it has begun."""
