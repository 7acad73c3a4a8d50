"""Copies between a buffer and the host, and between buffers: started at the call, awaited for their end.

A copy is work of one stream. What it reads and writes on devices is safe by the order of that stream: a buffer that is
freed or dropped meanwhile is used again only behind it. Memory of the host knows no streams, so it is kept until the
copy is seen done, whether or not anything waits for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from asyncmem.arrays import Array
from asyncmem.core import Buffer
from asyncmem.devices import Fence, Stream
from asyncmem.devices.fences import Joined
from asyncmem.errors import DeviceError, InvalidRequest
from asyncmem.lazy import np
from asyncmem.pool.graph import need_uncaptured
from asyncmem.pool.latch import Latch
from asyncmem.units import parse_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from collections.abc import Set as AbstractSet

    from asyncmem.devices import Device
    from asyncmem.pool.ports import Opened

_ON_HOST = 1  # DLPack's kDLCPU
_APART = 'await other.stream.synchronize(), and then copy to or from "memoryview(other)"'


@final
class Copy:
    """A copy that has started: await it, or ask `done()`. Made by `Buffer.copy_from`, `copy_to` and `copy_to_device`.

    Awaiting it again, or from several tasks, is fine. Cancelling the await stops nothing: the copy goes on, and what it
    needs is kept. You need not await it: work that is submitted to its stream afterwards comes behind it anyway.

    Attributes:
        nbytes: How many bytes it copies.
    """

    __slots__ = ("__weakref__", "_end", "_kept", "nbytes")

    def __init__(self, nbytes: int, end: Fence | Latch[None], kept: tuple[object, ...] = ()) -> None:
        self.nbytes = nbytes
        self._end = end
        self._kept = kept  # memory of the host, until it is done

    def __repr__(self) -> str:
        return f"<asyncmem.pool.Copy of {self.nbytes} bytes>"

    @property
    def ordered(self) -> bool:
        """Whether later work of its stream comes behind it by itself. Else a thread makes it: await it first."""
        return isinstance(self._end, Fence)

    def done(self) -> bool:
        """Return whether all of it is there.

        Raises:
            DeviceError: The device is lost.
        """
        end = self._end
        return self._seen(end.done() if isinstance(end, Fence) else end.done)

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (blocks) until all of it is there; False when `timeout` seconds passed first.

        Raises:
            DeviceError: It failed, or the device is lost.
        """
        end = self._end
        longest = parse_timeout(timeout)
        if isinstance(end, Fence):
            return self._seen(end.block(longest))
        end.block(longest)
        return end.done

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio until all of it is there.

        Raises:
            DeviceError: It failed, or the device is lost.
        """
        end = self._end
        if isinstance(end, Fence):
            yield from end.__await__()
            self._seen()
        else:
            yield from end.wait().__await__()

    def _seen(self, done: bool = True) -> bool:
        if done:
            self._kept = ()
        return done


class Part(NamedTuple):
    """The part of a buffer that is copied."""

    buffer: Buffer
    nbytes: int
    offset: int = 0

    @property
    def address(self) -> int:
        """Where it begins.

        Raises:
            BufferReleased: The buffer has been freed.
        """
        return self.buffer.address + self.offset

    def on_host(self) -> memoryview:
        """Return its bytes, where the host can read them."""
        return memoryview(self.buffer)[self.offset : self.offset + self.nbytes]


class Copies:
    """The copies of one pool's buffers."""

    def __init__(self, opened: Opened) -> None:
        self._pool = opened
        self._running: set[Copy] = set()  # those that keep memory
        self._unseen: list[tuple[Stream, Copy]] = []  # those behind which no fence could be recorded yet

    def start(self, part: Part, other: object, stream: object, *, into: bool) -> Copy:
        """Start a copy from `other` into a part of a buffer, or out of that part to `other`.

        Raises:
            InvalidRequest: `other` is no memory, is not contiguous or writable, or does not fit.
        """
        what = "source" if into else "target"
        there = part_of(other)
        if there is None:
            host = host_bytes(other, what, writable=not into)
            _need_room(host.nbytes, part.nbytes, what)
            return self._with_host(part, host, stream, into=into)
        source, target = (there, part) if into else (part, there)
        if target.buffer.readonly:
            raise InvalidRequest(what, target.buffer, "memory that may be written")
        _need_room(source.nbytes, target.nbytes, what if into else "nbytes")
        return self._between(source, target, stream, caller=part.buffer)

    # -- between a buffer and the host -------------------------------------------------------------------------------

    def _with_host(self, part: Part, host: memoryview, stream: object, *, into: bool) -> Copy:
        """Start copying all of `host` to where the part begins, or from there to all of `host`.

        Later work of the home comes behind what is written to the buffer.

        Raises:
            InvalidRequest: The stream is another device's, or is being captured.
            DeviceError: The device refuses.
        """
        buffer, address = part.buffer, part.address
        device, home = buffer.device, buffer.stream
        on = home if stream is None else device.stream_of(stream)
        _need_no_capture(on, home)
        if host.nbytes == 0:
            return Copy(0, Joined(()))
        if on != home:
            buffer.use_on(on)
        followers = {home} if into and on != home else set()

        submit = partial(device.copy_in, address, host) if into else partial(device.copy_out, host, address)
        if device.copy_holds_up(host, into=into):
            # It would hold this thread: another one makes it, and keeps the block meanwhile as an export would.
            return self._beside(host, submit, on.for_any_thread(), buffer._pin())
        submit(on)
        return self._started(host.nbytes, on, followers, (host,))

    def _beside(self, host: memoryview, submit: Callable[[Stream], None], on: Stream, export: object) -> Copy:
        kept = [host, export]

        def make() -> None:
            try:
                submit(on)
                on.record().block()
            finally:
                kept.clear()

        latch: Latch[None] = Latch(make)
        self._pool.copier().submit(latch)
        return Copy(host.nbytes, latch)

    # -- between two buffers -----------------------------------------------------------------------------------------

    def _between(self, source: Part, target: Part, stream: object, *, caller: Buffer) -> Copy:
        """Start copying the source's bytes to where the target begins, in the order of both their homes.

        Args:
            source: What is read.
            target: What is written; later work of its home comes behind the copy.
            stream: A stream of either device; None for the home of `caller`.
            caller: The one of the two whose method was called.
        """
        on = caller.stream if stream is None else _stream_of_either(source.buffer.device, target.buffer.device, stream)
        _need_no_capture(on, source.buffer.stream, target.buffer.stream)
        if source.nbytes == 0:
            return Copy(0, Joined(()))
        followers = {self._precede(one.buffer, on) for one in (source, target)} | {target.buffer.stream}
        kept = self._submit(source, target, on)
        behind = {one for one in followers if one is not None and one != on}
        buffers = tuple(one.buffer for one in (source, target) if one.buffer.stream in behind)
        return self._started(source.nbytes, on, behind, kept, buffers)

    @staticmethod
    def _precede(buffer: Buffer, on: Stream) -> Stream | None:
        """Order the copy's stream behind the buffer's home.

        Returns:
            The home, where it has to follow the copy itself: its pool cannot note another device's stream as a user.
        """
        if on == buffer.stream:
            return None
        if _is_own(buffer.device, on):
            buffer.use_on(on)
            return None
        try:
            on.wait(buffer.stream.record())
        except InvalidRequest as error:
            raise InvalidRequest("other", buffer, "a buffer whose stream can be waited for", hint=_APART) from error
        return buffer.stream

    @staticmethod
    def _submit(source: Part, target: Part, on: Stream) -> tuple[object, ...]:
        to, from_, nbytes = target.buffer.device, source.buffer.device, source.nbytes
        if to is from_:
            to.copy(target.address, source.address, nbytes, on)
        elif to.kind == from_.kind or not (to.host_readable or from_.host_readable):
            to.peer_copy(target.address, source.address, nbytes, from_, on)
        elif from_.host_readable:
            view = source.on_host()
            to.copy_in(target.address, view, on)
            return (view,)
        else:
            view = target.on_host()[:nbytes]
            from_.copy_out(view, source.address, on)
            return (view,)
        return ()

    # -- their ends ----------------------------------------------------------------------------------------------------

    def _started(
        self, nbytes: int, on: Stream, followers: AbstractSet[Stream], kept: tuple[object, ...],
        buffers: tuple[Buffer, ...] = (),
    ) -> Copy:  # fmt: skip
        try:
            fence = on.record()
        except DeviceError:
            # It runs, and its end cannot be seen: what it needs is kept until a later fence, on devices too where
            # a home has not followed.
            copy = Copy(nbytes, Joined(()), (*kept, *_pins(buffers)))
            if copy._kept:
                self._unseen.append((on, copy))
            raise
        copy = Copy(nbytes, fence, kept)
        if kept:
            self._keep(copy, fence)
        try:
            for follower in followers:
                follower.wait(fence)
        except DeviceError:
            # It runs, and a home is not behind it: no request gets this memory before the copy is seen done.
            self._keep(Copy(nbytes, fence, _pins(buffers)), fence)
            raise
        return copy

    def _keep(self, copy: Copy, fence: Fence) -> None:
        self._running.add(copy)

        def ended() -> None:
            # On the device's own thread, where nothing may call the device, and letting go of memory may.
            self._running.discard(copy)
            if copy._kept:
                self._pool.run_last(copy._seen)

        fence.notify(ended)

    def look(self) -> None:
        """Record the fences that could not be recorded before, on the worker's thread."""
        unseen, self._unseen = self._unseen, []
        for on, copy in unseen:
            try:
                self._keep(copy, on.record())
            except DeviceError:
                self._unseen.append((on, copy))


def _pins(buffers: Iterable[Buffer]) -> tuple[object, ...]:
    """Return what keeps their memory from others, also once they are freed."""
    return tuple(buffer._pin() for buffer in buffers)


def _stream_of_either(first: Device, second: Device, stream: object) -> Stream:
    if isinstance(stream, Stream) and (_is_own(first, stream) or _is_own(second, stream)):
        return stream
    try:
        return first.stream_of(stream)
    except InvalidRequest:
        return second.stream_of(stream)


def _is_own(device: Device, stream: Stream) -> bool:
    try:
        return device.stream_of(stream) is stream
    except InvalidRequest:
        return False


def _need_no_capture(*streams: Stream) -> None:
    for at, stream in enumerate(streams):
        need_uncaptured(stream, named=at == 0, hint="capture the library's own copies instead")


def host_bytes(source: object, what: str, *, writable: bool = False) -> memoryview:
    """Return the bytes of an object of the host, by the buffer protocol or DLPack.

    Raises:
        InvalidRequest: It speaks neither, is not contiguous, or must be written and may not be.
    """
    try:
        view = memoryview(_with_bytes(source))  # type: ignore[arg-type]  # anything may have been passed
    except (TypeError, BufferError, ValueError, RuntimeError):
        hint = "asyncmem.asarray() takes arrays of other libraries on a device"
        raise InvalidRequest(what, source, "a buffer, or an array of the host", hint=hint) from None
    if not view.c_contiguous or (writable and view.readonly):
        raise InvalidRequest(what, source, f"contiguous{' writable' if writable else ''} memory")
    return view


def _with_bytes(source: object) -> object:
    if isinstance(source, np.ndarray):
        # Types that a package adds to numpy, such as bfloat16, have no buffer protocol; their bytes have.
        return source.view(f"V{source.itemsize}") if source.dtype.kind == "V" else source
    place = getattr(source, "__dlpack_device__", None)
    if place is None or place()[0] != _ON_HOST:
        return source
    return np.from_dlpack(source)  # type: ignore[arg-type]  # torch's tensors on the host have no buffer protocol


def part_of(other: object) -> Part | None:
    """Return what is meant by a buffer or an array over one, or None for memory of the host.

    Raises:
        BufferReleased: It has been freed.
    """
    if not isinstance(other, Array | Buffer):
        return None
    part = Part(other.buffer, other.nbytes, other.offset) if isinstance(other, Array) else Part(other, other.nbytes)
    _ = part.address  # a freed one says so
    return part


def _need_room(nbytes: int, room: int, what: str) -> None:
    if nbytes > room:
        raise InvalidRequest(what, nbytes, f"at most {room} bytes")
