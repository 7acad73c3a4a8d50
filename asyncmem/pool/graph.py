"""Memory of captured work: a CUDA graph repeats its work on the same addresses.

So what is allocated on a stream while it is being captured stays with its `GraphMemory` until that is released, also
when it is freed. Such memory must not wait for anything outside of the capture either: a launch may be on any stream,
and a capture cannot wait for other work. It is therefore taken only where every earlier use has been seen done, in the
name of a stream that is never given any work, and the pool records no fence on a stream that is being captured.

An interrupt could end the notes on this half-way, so it comes after them (`uninterruptible`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from asyncmem.core import FLAG_WAITING, GRANULE
from asyncmem.errors import DeviceError, InvalidRequest, LeakWarning
from asyncmem.figures import format_size
from asyncmem.pool.alarm import alarm
from asyncmem.pool.handles import Handle
from asyncmem.pool.worker import uninterruptible

if TYPE_CHECKING:
    from asyncmem.core import Buffer, Request
    from asyncmem.devices import Stream
    from asyncmem.pool.ports import Opened

_HINT = "allocate inside `with pool.graph() as memory:` and keep `memory` for as long as the graph is launched"


class Captured(NamedTuple):
    """That a request is for captured work.

    Attributes:
        graph: Whose memory it will be.
        home: The captured stream, by the core's number; its buffer's home.
    """

    graph: GraphMemory
    home: int


@final
class GraphMemory(Handle):
    """What was allocated on captured streams inside one ``with pool.graph()`` block. Made by `AsyncMemoryPool.graph`.

    Inside the block, freed memory serves later requests of the same captured stream. It serves no other request before
    `release`, so that you may launch the graph any number of times. Dropping this object releases nothing, because the
    graph may still be in use: it gives a `LeakWarning`, and the memory stays reserved.
    """

    def __init__(self, opened: Opened, stream: int | None) -> None:
        self.stream = stream
        self._pool = opened
        self._open = False  # its block
        self.kept = opened.captures.keep()
        self._spares: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.released = False

    def __repr__(self) -> str:
        state = "released" if self.released else "open" if self._open else "kept"
        return f"<asyncmem.pool.GraphMemory of {format_size(self.nbytes)}: {state}>"

    @property
    def nbytes(self) -> int:
        """Bytes that were freed and stay for the graph's launches; what buffers still hold comes on top."""
        return sum(list(self.kept.values()))

    def __enter__(self) -> Self:
        """Take in what is allocated on captured streams from here on; the capture may begin before or after."""
        if self.released or self._open:
            raise InvalidRequest("graph", self, "one that was not entered before; ask the pool for another")
        self._open = True
        try:
            self._pool.captures.opened(self)
        except BaseException:
            self._pool.captures.ended(self)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Take in nothing more; all that was stays."""
        try:
            self._pool.captures.ended(self)
        except BaseException:  # an interrupt, which may have come first
            self._pool.captures.ended(self)
            raise

    def release(self) -> None:
        """Give the memory back, after the last launch. Twice is not an error; from any thread.

        The memory is reused only behind all work that the device's streams have so far, launches included. Live buffers
        of the capture become ordinary ones.

        Raises:
            InvalidRequest: Its block has not ended.
        """
        if self._open:
            raise InvalidRequest("release()", self, "a graph whose block has ended")
        if not self.released:
            self._pool.captures.give_back(self)

    @uninterruptible
    def serve(self, request: Request[Any]) -> bool:
        """Serve a request from what its capture has freed. Return whether it is served."""
        capture = request._capture
        if capture is None or request._is_batch or not request.nbytes:
            return False
        spares = self._spares[capture.home, _rounded(request)] if self._open else []
        if not spares:
            return False
        block = spares.pop()
        del self.kept[block]
        buffer = self._pool.core.adopt(block, request.nbytes, request.tag)
        buffer._noted().graph = self
        request._granted(buffer)
        return True

    def keep(self, block: int, home: int, size: int, used_elsewhere: bool) -> None:
        """Serve requests by a block in `kept` that was freed. From anywhere, finalizers included.

        Args:
            block: The block.
            home: Its home stream, by the core's number.
            size: Its bytes.
            used_elsewhere: Whether other streams use it too.
        """
        if self._open and not used_elsewhere and not self._hand_on(block, home, size):
            self._spares[home, size].append(block)
        if self.released:  # by another thread, just now
            self._pool.core.post(partial(self._pool.captures.give_back, self))

    @uninterruptible
    def _hand_on(self, block: int, home: int, size: int) -> bool:
        """Serve a request of the same capture that waits."""
        for one in self._pool.core.requests():
            request = one["request"]
            waits = request is not None and request._capture == (self, home) and not request._is_batch
            if waits and _rounded(request) == size:
                del self.kept[block]
                self._pool.core.give(request, block)
                return True
        return False

    def __del__(self) -> None:
        # A pool that was closed has warned of all that was still held.
        if not getattr(self, "released", True) and self.kept and self._pool.closed is None:
            alarm(
                f"the memory of a captured graph was dropped and never released: {format_size(self.nbytes)} stay taken",
                LeakWarning,
            )


def _rounded(request: Request[Any]) -> int:
    return -(-request.nbytes // GRANULE) * GRANULE


class Captures:
    """The captures of one pool."""

    def __init__(self, opened: Opened) -> None:
        self._pool = opened
        self._changing = threading.Lock()
        self._open: list[GraphMemory] = []
        self._all: list[dict[int, int]] = []  # blocks and their bytes, of each graph that is not released

    @property
    def open(self) -> bool:
        """Whether a block of `pool.graph()` is under way."""
        return bool(self._open)

    @property
    def nbytes(self) -> int:
        """Bytes that were freed and stay for graphs."""
        return sum(sum(list(kept.values())) for kept in list(self._all))

    def keep(self) -> dict[int, int]:
        """Return where a graph notes its blocks; they stay here, also when the graph itself is forgotten."""
        kept: dict[int, int] = {}
        self._all.append(kept)
        return kept

    @uninterruptible
    def opened(self, graph: GraphMemory) -> None:
        """Check each request for a captured stream from now on, until `ended`."""
        opened = self._pool
        with self._changing:
            opened.executor.quiet()  # made before the capture begins, as a rule
            opened.device.begin_captures()  # it may have begun, on a stream that is not known here
            self._open.append(graph)  # first, so that memory that grows meanwhile has its fence, too
            # What was freed on a stream that is captured next has to be within others' reach meanwhile. A fence behind
            # all streams would be refused, and made up for after the block, where it may end a capture.
            for index, stream in enumerate(list(opened.core.stream_objects)):
                if stream is not None:
                    with suppress(DeviceError):
                        opened.retire.fence(index)
            opened.observe()

    def settle(self) -> None:
        """Wait on this thread (blocks) until the host has seen done what free memory was used for.

        What only a fence behind all streams would tell of is left out, because there is none now.

        Raises:
            DeviceError: The device is lost.
        """
        opened = self._pool
        for index, stream in enumerate(list(opened.core.stream_objects)):
            if not is_captured(stream):
                try:
                    opened.retire.settle([(index, opened.core.close_epoch(index))])
                except DeviceError as error:
                    if error.code != DeviceError.CAPTURE_UNSUPPORTED:
                        raise

    @uninterruptible
    def ended(self, graph: GraphMemory) -> None:
        """End the checks if this was the last graph; twice is fine."""
        opened = self._pool
        with self._changing:
            graph._open = False
            graph._spares.clear()
            if graph not in self._open:
                return
            self._open.remove(graph)
            opened.device.end_captures()
        opened.core.scheduler.set_capturing(False)
        opened.observe()
        opened.core.scheduler.freed(FLAG_WAITING, opened.core.time)  # fences that were refused can be recorded now
        opened.core.carry_out()

    def admit(self, home: int) -> Captured:
        """Return the graph that a request on a captured stream takes memory for, with its stream.

        Raises:
            InvalidRequest: It is outside of a block of `pool.graph()`, or in one for another stream.
        """
        streams = self._pool.core.stream_objects
        stream = streams[home]
        for graph in reversed(self._open):
            mine = None if graph.stream is None else streams[graph.stream]
            # A stream of which only the handle is known may be another object while it is captured.
            if mine is None or (stream is not None and mine.handle == stream.handle):
                return Captured(graph, home)
        raise InvalidRequest("stream", stream, "a stream that is not being captured", hint=_HINT)

    @uninterruptible
    def give_back(self, graph: GraphMemory) -> bool:
        """Free a graph's blocks behind all streams, and from now on what is freed of it; twice is fine."""
        graph.released = True
        kept = graph.kept
        self._all = [one for one in self._all if one is not kept]
        if kept:
            retire, core = self._pool.retire, self._pool.core
            entries = retire.entries_for([retire.everywhere()], sum(kept.values()))
            quiet = self._pool.executor.quiet()
            flags = 0
            while kept:
                block, _ = kept.popitem()
                core.set_home(block, quiet)  # behind all streams: the captured one adds nothing
                flags |= core.free(block, entries)
            core.scheduler.freed(flags, core.time)
            core.carry_out()
        return True


def need_uncaptured(stream: Stream | None, *, named: bool = False, hint: str) -> None:
    """Raise `InvalidRequest` where a fence would be recorded into a capture, or a capture wait for what is outside."""
    if is_captured(stream, named=named):
        raise InvalidRequest("stream", stream, "a stream that is not being captured", hint=hint)


def is_captured(stream: Stream | None, *, named: bool = False) -> bool:
    """Return whether work submitted to a stream is captured now.

    The legacy default stream cannot be asked while a stream is captured that is ordered with it; it never is itself. A
    stream without a reference can be asked only where the caller has just `named` it.
    """
    try:
        return stream is not None and (named or stream.lasting) and stream.capturing()
    except DeviceError:
        return False


def graph_of(buffer: Buffer) -> GraphMemory | None:
    """Return the graph that a buffer was allocated for, or None."""
    notes = buffer._notes
    return None if notes is None else notes.graph
