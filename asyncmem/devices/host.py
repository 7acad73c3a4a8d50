"""The host as a device: real memory, and streams that run Python and numpy work on threads of their own.

With it a pipeline is real on a machine without a GPU: work of one stream runs in order, streams overlap (numpy lets go
of the interpreter lock in its loops), and waiting for a fence holds only the stream's own thread.
"""

import functools
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from asyncmem.devices.awaiting import call_all
from asyncmem.devices.base import Device, Fence, MemoryInfo, Segment, Stream, whole_segment
from asyncmem.devices.fences import FenceThread, Joined, ThreadedFence
from asyncmem.devices.host_memory import PAGE, Bytes, Pages, bytes_at, host_memory, total_memory
from asyncmem.devices.queues import QueueDevice
from asyncmem.devices.streams import QueueStream, WorkQueue
from asyncmem.errors import AsyncmemWarning, DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.lazy import np
from asyncmem.text import printable

P = ParamSpec("P")
T = TypeVar("T")


class HostQueue(FenceThread, WorkQueue[Fence]):
    """Runs callables one after another on its own thread, started by the first one.

    Positions are counted: the n-th piece of work submitted is complete once `completed` has reached n. So a fence is a
    number, recording one costs no trip through the thread, and a queue that never got work never starts a thread.
    """

    def __init__(self, name: str) -> None:
        """Name the thread; it does not start yet."""
        super().__init__(name)
        self.key = id(self)
        self.completed = 0
        self._submitted = 0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    @property
    def thread(self) -> FenceThread:
        """The queue itself."""
        return self

    def submit(self, work: Callable[[], None]) -> int:
        """Queue `work`, which must not raise, and return its position.

        Raises:
            InvalidRequest: The queue has been stopped.
        """
        with self._lock:
            if self._stopped:
                raise InvalidRequest("stream", self.name, "a stream whose device is open")
            self._start()  # first, as it fails where the process may have no more threads
            self._submitted += 1
            self._work.put(work)
            return self._submitted

    def record(self) -> Fence:
        """Return a fence behind everything submitted so far."""
        return HostQueueFence(self, self._submitted)

    def block(self, position: int, timeout: float | None) -> bool:
        """Wait on this thread until `position` is reached; False when `timeout` seconds passed first."""
        with self._lock:
            return self._changed.wait_for(lambda: self.completed >= position, timeout)

    def notify(self, fence: Fence, callback: Callable[[], None]) -> None:
        """Call back once, now if the fence is reached, else on the queue's thread."""
        with self._lock:
            if not fence.done():
                self._waits.append((fence, callback, 0.0))
                return
        callback()

    def stop(self) -> None:
        """Take no more work; the thread ends after what is queued."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # Not kept while the thread idles: it may hold the last reference to an array, or to the stream itself.
            del work
            call_all(self._complete_one())

    def _complete_one(self) -> list[Callable[[], None]]:
        with self._lock:
            self.completed += 1
            self._changed.notify_all()
        return self._take_due()


class HostQueueFence(ThreadedFence):
    """The point behind the first `position` pieces of work of a queue."""

    def __init__(self, queue: HostQueue, position: int) -> None:
        """Take a position that has been submitted."""
        self._thread = self.queue = queue
        self.position = position

    def done(self) -> bool:
        """Return whether the queue has come this far."""
        return self.queue.completed >= self.position

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread; False when `timeout` seconds passed first."""
        return self.done() or self.queue.block(self.position, timeout)


class Work(HostQueueFence, Generic[T]):
    """A fence behind one call that a stream runs, and what came of the call.

    As a fence it is only a point in the stream: `block()` and another stream's `wait()` do not mind an error, which is
    where the work is awaited or its `result()` asked for.
    """

    def __init__(self, queue: HostQueue, call: Callable[[], T]) -> None:
        """Use `HostStream.run` instead, which submits it."""
        self._call: Callable[[], T] | None = call
        self._values: list[T] = []
        self._unseen = False
        self.error: BaseException | None = None
        super().__init__(queue, queue.submit(self._run))

    def result(self, timeout: float | None = None) -> T:
        """Wait on this thread (**blocks**) and return the call's value or raise its error.

        Raises:
            TimeoutError: `timeout` seconds passed first; the call goes on.
        """
        if not self.block(timeout):
            raise TimeoutError(f"the stream has not come to this work within {timeout} s")
        return self._outcome()

    def __await__(self) -> Generator[object, object, T]:
        """Wait for the call and return its value or raise its error. Cancelling the wait does not stop the call."""
        yield from super().__await__()
        return self._outcome()

    def _outcome(self) -> T:
        if self.error is not None:
            self._unseen = False
            raise self.error
        return self._values[0]

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._values.append(call())
        except BaseException as error:  # noqa: BLE001  # it belongs to the caller, not to this thread
            # Without this frame, which would tie the error, its traceback and this object into a cycle.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            self._unseen = True
        finally:
            del call  # the error's frames know this one as their caller, and would keep the arguments

    def __del__(self) -> None:
        if self._unseen:
            text = f"work on a stream failed and was not awaited: {self.error!r}"
            warnings.warn(printable(text), AsyncmemWarning, stacklevel=1)


class HostStream(QueueStream[Fence]):
    """An ordered queue of callables with a thread of its own, started by the first of them.

    The thread ends when the stream is forgotten or its device closed, after the work that is queued.
    """

    work: HostQueue

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Queue ``function(*args, **kwargs)`` behind the work submitted so far.

        The arguments are kept until it has run: arrays over a buffer of a pool may be passed, and the buffer may be
        freed at once, because its memory comes back in the order of this stream.

        Returns:
            A fence behind the call. Awaiting it, or its `result()`, gives the call's value or raises its error; an
            error ends neither the stream nor the work queued behind. An error that is never raised becomes a warning.

        Raises:
            InvalidRequest: The device has been closed.
        """
        return Work(self.work, functools.partial(function, *args, **kwargs))

    def wait(self, fence: Fence) -> None:
        """Block this stream's thread, and no other, until `fence` is reached."""
        if isinstance(fence, HostQueueFence) and fence.queue is self.work:
            return
        if not fence.done():
            self.work.submit(functools.partial(_hold, fence))


def _hold(fence: Fence) -> None:
    try:
        fence.block()
    except DeviceError:
        return  # a lost device runs nothing any more, so there is nothing left to be behind of


class Host(QueueDevice[HostStream, Fence]):
    """Memory of this machine. Any number may exist; they share the memory and accept each other's streams.

    Closing ends the threads of its streams; a `Host` that is only forgotten ends them as its streams are collected.
    """

    kind = "host"
    stream_kind = HostStream
    segment_kinds = ("mapped", "direct")
    host_readable = True
    dlpack_device = (1, 0)  # kDLCPU

    def __init__(self) -> None:
        """Start nothing yet: threads come with the first work."""
        super().__init__("host")
        self._driver_calls = 0
        self.capacity = total_memory()
        self._pages = Pages()
        self.default_stream: HostStream = self._new_stream("default", 0)

    def __repr__(self) -> str:
        return f"<Host with {len(self.book.alive())} streams>"

    @property
    def driver_calls(self) -> int:
        """How many segments and copies this object has asked for."""
        return self._driver_calls

    def memory(self) -> MemoryInfo:
        """Ask the system how much memory there is (blocks)."""
        return host_memory()

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:  # noqa: ARG002  # the host's memory is there for all streams at once
        """Map zeroed pages (blocks); they may be used by any stream at once.

        Refuses more than the system says it has available, because it would rather kill the process than refuse.
        """
        nbytes, kind = whole_segment(nbytes, kind, self.segment_kinds, PAGE)
        available = host_memory().free
        self._driver_calls += 1
        if nbytes <= available:
            with suppress(OSError, OverflowError):
                return Segment(self._pages.take(nbytes), nbytes, kind)
        raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self.name, device_free=available))

    def free_segment(self, segment: Segment) -> None:
        """Unmap the pages (blocks)."""
        self._driver_calls += 1
        self._pages.give_back(segment.address)

    def stream_of(self, source: object) -> HostStream:
        """Return the stream meant by None, a host stream, a handle, or an object with `__cuda_stream__`."""
        # All hosts are the same machine: a stream of another one orders this one's memory just as well.
        return source if isinstance(source, HostStream) else self.book.find(source)

    def record_all(self) -> Fence:
        """Return a fence behind everything submitted to every stream, also to streams that have been forgotten."""
        return Joined(self.book.record_each())

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes on the stream's thread, which copies, too, and keeps what it copies until then."""
        self._submit(stream, functools.partial(bytes_at(address, nbytes).fill, value))

    def pinned(self) -> "Host":
        """Return the host itself: its copies read and write all of its memory without a detour."""
        return self

    def shareable(self) -> "Host":
        """Return a host whose memory other processes can open.

        Raises:
            BackendUnavailable: This system has no such memory.
        """
        from asyncmem.devices.shared_host import SharedHost

        return SharedHost()

    def shares_memory_with(self, peer: Device) -> bool:
        """Return whether it is a host, too."""
        return isinstance(peer, Host)

    def _open_queue(self, name: str, queue: object) -> HostQueue:
        assert queue is None
        return HostQueue(f"asyncmem {self.name} {name}")

    def _copy(self, target: Bytes, source: Bytes, stream: Stream) -> None:
        self._submit(stream, functools.partial(np.copyto, target, source))

    def _submit(self, stream: Stream, call: Callable[[], None]) -> None:
        self._driver_calls += 1
        self.stream_of(stream).run(call)
