"""What the compiled core asks of its pool: all that is rare about a buffer or a request."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from anyio.lowlevel import checkpoint

from asyncmem.core import Batch, Users
from asyncmem.errors import InvalidRequest, LeakWarning
from asyncmem.pool.alarm import alarm, caller_site
from asyncmem.pool.copies import Copy, Part
from asyncmem.pool.graph import Notes, graph_of, need_uncaptured, notes_of
from asyncmem.pool.loops import running_loop
from asyncmem.pool.owners import named_owner
from asyncmem.pool.pins import Pin
from asyncmem.pool.ports import Opened
from asyncmem.units import format_size

if TYPE_CHECKING:
    from asyncmem.core import Buffer, Request
    from asyncmem.pool.copies import Copies
    from asyncmem.pool.loops import EventLoop, Sleeper


class CoreHooks(Opened):
    """An open pool as its core calls it, with the interpreter's lock and no other."""

    copies: Copies

    # -- requests ------------------------------------------------------------------------------------------------------

    def _bind(self, request: Request[Any]) -> EventLoop:
        """Return the loop to sleep on, which becomes the pool's own until it closes.

        Raises:
            InvalidRequest: No loop runs here, or another one is served that is still open.
        """
        served = self.core.loop
        loop = running_loop(served)
        if loop is None:
            raise InvalidRequest("await", request, "a running event loop, asyncio's or trio's")
        if loop is not served:
            if served is not None and not served.is_closed():
                raise InvalidRequest("await", loop, f"the event loop that pool {self.name!r} serves, {served!r}")
            self._serve_loop(loop)
        return loop

    def meet(self) -> None:
        """Serve the loop that runs here, where none is served yet."""
        loop, served = running_loop(self.core.loop), self.core.loop
        if loop is not None and (served is None or served.is_closed()):
            self._serve_loop(loop)

    def _serve_loop(self, loop: EventLoop) -> None:
        self.core.set_loop(loop)
        self.core.expire()

    async def _wait(self, request: Request[Any]) -> None:
        """Let the task that runs here wait for a request, where that is not done by the core."""
        loop = self._bind(request)
        if request.done():  # and the loop is to turn once
            try:
                await checkpoint()
            except BaseException:
                request._awake(True)
                raise
            return
        place = _RequestPlace(request, loop)
        await loop.park(place)
        place.end()

    # torch, CuPy and plain threads cannot await. Their requests stand in the same queue as all others, so they barge
    # past nobody; only the device's calls are theirs, because a thread that calls may block and need not wait for the
    # worker.

    def _serve(self, request: Request[Any]) -> None:
        """See a synchronous request through: return once it has ended, at its deadline at the latest."""
        gate, jobs = request._gate, request._jobs
        assert gate is not None
        assert jobs is not None
        waits = False  # for others, and is named among those who do
        try:
            request._admit(_ThreadSleeper(gate))
            while not request.done():
                if jobs:
                    if self.on_loop():
                        self.loop_blocking_calls += 1
                    self.executor.run(jobs.pop(0))
                elif not waits and request._deadline is not None:
                    waits = True
                    request._asleep(threading.get_ident())
                elif not _wait_for(gate, self._left(request)):
                    request._expire()
        except BaseException:  # an interrupt: nobody would see it through any more
            request.cancel()
            raise
        finally:
            if waits:
                request._awake(False)

    def _block(self, request: Request[Any], timeout: float | None) -> None:
        """Wait on this thread until a request of the event loop's has ended, for at most `timeout` seconds."""
        gate: Gate = SimpleQueue()
        sleeper = _ThreadSleeper(gate)
        left = self._left(request)
        bounds = [bound for bound in (timeout, left) if bound is not None]
        if request._admit(sleeper):
            request._asleep(threading.get_ident())
            try:
                _wait_for(gate, min(bounds, default=None))
            finally:
                request._abandon_sleeper(sleeper)
                request._awake(False)
        if left is not None and self._left(request) == 0:
            request._expire()

    def _left(self, request: Request[Any]) -> float | None:
        if request._deadline is None:
            return None
        return min(max(0.0, request._deadline - self.core.time), threading.TIMEOUT_MAX)

    def _loop_here(self) -> EventLoop | None:
        return running_loop(self.core.loop)

    def _call_site(self) -> str:
        return caller_site()

    def _reuse(self, request: Request[Any]) -> bool:
        """Serve a request of captured work from what the same capture has freed; return whether there was some."""
        capture = request._capture
        assert capture is not None
        return capture.graph.serve(request, capture)

    def _elsewhere(self, request: Request[Any]) -> Buffer | Batch:
        """Return what the host has given for a request."""
        return self.executor.elsewhere.pop(id(request))

    def _note(self, request: Request[Any], found: Buffer | Batch) -> None:
        """Note what there is to note on a buffer that was granted."""
        capture = request._capture
        for buffer in found if isinstance(found, Batch) else [found]:
            if request._site is not None:
                notes_of(buffer).site = request._site
            if capture is not None:
                capture.graph.own(buffer, capture.home)
            self._note_plain(buffer, request._holder)

    def _holder(self) -> int | None:
        """Return the number of who runs here, where `pool.owner(...)` has named it."""
        name = named_owner.get()
        if name is None:
            return None
        self.core.label(name)
        return self.core.owner()

    def _note_plain(self, buffer: Buffer, holder: int | None) -> None:
        checker = self.device.checker
        if holder is not None:
            buffer._hold(holder)
        if checker is not None and buffer.nbytes:
            notes_of(buffer).checked = True
            checker.open_block(buffer.address, buffer.nbytes)

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _free_noted(self, buffer: Buffer, stream: object) -> None:
        notes = buffer.notes
        users = set(notes.users) if isinstance(notes, Users) else set()
        if stream is not None:
            users.add(self.stream_index(stream))
        users.discard(buffer.home)
        if isinstance(notes, Notes) and notes.checked and self.device.checker is not None:
            self.device.checker.close_block(buffer._address)
        graph = graph_of(buffer)
        if graph is not None and not graph.released:
            graph.keep(buffer, users)
            return
        if graph is not None:  # it was launched nobody knows where
            users.add(self.retire.everywhere())
        buffer._release(self.retire.entries_for(users, buffer.nbytes) if users else ())

    def _use_on(self, buffer: Buffer, stream: object) -> None:
        index = self.retire.everywhere() if stream is None else self.stream_index(stream)
        if stream is not None and index != buffer.home:
            self._need_uncaptured(buffer.home, index)
            self.retire.use_on(buffer.home, index)
        if index != buffer.home:
            notes_of(buffer).add_user(index)

    def _lend(self, buffer: Buffer, stream: int | None) -> None:
        """Order another library's use: on the stream of that number, or on streams that it does not name."""
        retire = self.retire
        index = None if stream is None else self.stream_index(stream)
        if index == buffer.home:
            return
        if index is not None:
            self._need_uncaptured(buffer.home, index)
            retire.use_on(buffer.home, index)
            known = retire.streams[index]
            # Who consumes an export may end its stream before it lets go: then nothing can be asked of the mere number.
            index = index if known is None or known.lasting else None
        notes_of(buffer).add_user(retire.everywhere() if index is None else index)

    def _hand_over(self, buffer: Buffer, stream: object) -> None:
        if buffer._block:
            index = self.stream_index(stream)
            if index != buffer.home:
                self._need_uncaptured(buffer.home, index)
                self.retire.hand_over(buffer._block, index)
                buffer._set_home(index)

    def _need_uncaptured(self, home: int, other: int) -> None:
        streams = self.core.stream_objects
        need_uncaptured(streams[home])
        need_uncaptured(streams[other], named=True)

    def _copy(self, buffer: Buffer, nbytes: int, other: object, stream: object, into: bool, offset: int) -> Copy:
        copy: Copy = self.copies.start(Part(buffer, nbytes, offset), other, stream, into=into)
        return copy

    def _pin(self, buffer: Buffer) -> Pin:
        return Pin(self.pins, buffer)

    def _forgotten(self, buffer: Buffer) -> None:
        site = buffer.notes.site if isinstance(buffer.notes, Notes) else None
        tag = f" tagged {buffer.tag!r}" if buffer.tag else ""
        text = f"a buffer of {format_size(buffer.nbytes)}{tag} was dropped and never freed; it was made at {site}"
        alarm(text, LeakWarning, site)


Gate: TypeAlias = "SimpleQueue[None]"
"""What a thread blocks on: one item for each time that it is to look. A semaphore of threading's costs 2 µs to make."""


def _wait_for(gate: Gate, timeout: float | None) -> bool:
    """Block until there is an item; return False when the seconds have passed first."""
    try:
        gate.get(timeout=timeout)
    except Empty:
        return False
    return True


class _ThreadSleeper:
    """A thread that waits for a request."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def wake(self) -> None:
        """Let the thread go on. From any thread."""
        self._gate.put(None)


class _RequestPlace:
    """A request to park on, for one task."""

    deadline: float | None = None

    def __init__(self, request: Request[Any], loop: EventLoop) -> None:
        self._request = request
        self._loop = loop
        self._asleep = False

    def admit(self, sleeper: Sleeper) -> bool:
        self._asleep = self._request._admit(sleeper)
        if self._asleep:
            self._request._asleep(self._loop.current_task())
        return self._asleep

    def abandon(self, sleeper: Sleeper) -> None:
        self._request._abandon_sleeper(sleeper)
        if self._asleep:
            self._request._awake(True)

    def expire(self) -> None:
        """Never called: the scheduler knows the deadline."""

    def end(self) -> None:
        """The task goes on."""
        if self._asleep:
            self._request._awake(False)
