"""The exporter's side: which memory others may open, who has it open, and when it comes back."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from asyncmem.arrays import Array
from asyncmem.core import Buffer
from asyncmem.devices.shared import Place, Shareable
from asyncmem.errors import InvalidRequest, ReaderLost
from asyncmem.pool.latch import Latch
from asyncmem.share.broker import Broker, Connection, Process
from asyncmem.share.messages import DESCRIPTOR, KEY, VERSION, Kind, pack, unpack
from asyncmem.text import to_json

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


_MOST: Final = 4096
_numbers = itertools.count(1)
_known: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def _number(one: object) -> int:
    """Return the number of a group or a region."""
    return _known.setdefault(one, next(_numbers))


class Export:
    """Memory that other processes may open. Made by `export`.

    ``async with`` and ``with`` enter with the export itself, and leave once its readers have let go of it; an error in
    the block closes it instead. Dropping it changes nothing: the memory is held for the readers all the same.

    Attributes:
        descriptor: The bytes by which a reader opens it: send them by any channel. They are a secret.
        nbytes: The bytes of the memory.
    """

    def __init__(
        self, broker: Broker, array: Array, readers: int | None, pid: int | None, *, ordered: bool = True
    ) -> None:
        """Take what it is about; see `export`. Readers wait for the work that is under way if it is `ordered`."""
        buffer = array.buffer
        assert isinstance(buffer.device, Shareable)
        self._broker = broker
        self._process = os.getpid()
        self.nbytes = array.nbytes
        self._pin = buffer.pin()
        place = buffer.device.place(array.address if array.nbytes else buffer.address)
        self.place: Place | None = place  # until it has ended
        facts = {
            **place.facts, "device": buffer.device.kind, "group": _number(place.group),
            "region": _number(place.region), "offset": place.offset, "nbytes": array.nbytes,
            "dtype": array._element.name, "shape": array.shape,
        }  # fmt: skip
        self.reply = to_json(facts).encode()
        if len(self.reply) > _MOST:
            raise InvalidRequest("source", array, "an array of fewer dimensions")
        self._ready = buffer.stream.record() if ordered else None
        self._left = readers
        self.pid = pid
        self._open = 0
        self._lost: int | None = None
        self._closed = False
        self._ended: Latch[None] = Latch()
        self.key = secrets.token_bytes(KEY)
        self.descriptor = DESCRIPTOR.pack(VERSION, broker.token, self.key)

    def __repr__(self) -> str:
        state = "ended" if self._ended.done else f"open in {self._open}" if self._open else "not open"
        return f"<asyncmem.share.Export of {self.nbytes} B: {state}>"

    def close(self) -> None:
        """Let nobody open it any more. Its memory comes back once those who have it open let go. Twice is fine."""
        self._broker.post(self._close)

    async def wait(self) -> None:
        """Wait until all readers have let go of it. Cancelling changes nothing.

        Raises:
            ReaderLost: One of them ended before it did. You still have the memory if you have not freed it.
        """
        self._need()
        await self._ended.wait()
        self._raise_lost()

    def block(self, timeout: float | None = None) -> None:
        """Wait on this thread until all readers have let go of it.

        Raises:
            TimeoutError: They have not within so many seconds.
            ReaderLost: One of them ended before it did.
        """
        self._need()
        self._ended.block(timeout)
        if not self._ended.done:
            raise TimeoutError(f"shared memory was not let go of within {timeout} s")
        self._raise_lost()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the readers; close it where the block has failed, or the wait is cancelled."""
        try:
            if kind is None:
                await self.wait()
        finally:
            self.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the readers on this thread; close it where the block has failed."""
        try:
            if kind is None:
                self.block()
        finally:
            self.close()

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise ReaderLost(self._lost, self.nbytes)

    def _need(self) -> None:
        if os.getpid() != self._process:
            raise InvalidRequest("export", self, "a call in the process that exported it")

    # -- on the broker's thread ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch the one who may open it."""
        if self.pid is not None and not self._closed:
            self._broker.watch(self.pid, self._reader_gone)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call once the work that its home stream had when it was exported is done."""
        if self._ready is None or self._ready.over():
            call()
        else:
            self._ready.notify(partial(self._broker.post, call))

    def refusal(self, pid: int) -> str:
        """Return why a process may not open it, "" where it may."""
        if self._closed or self._left == 0:
            return "it has been closed, or opened as often as it may be"
        return f"it is for process {self.pid}, not {pid}" if self.pid not in (None, pid) else ""

    def opened(self) -> None:
        """Count a reader."""
        self._open += 1
        if self._left is not None:
            self._left -= 1

    def freed(self, *, lost: int | None = None) -> None:
        """Count one less; `lost` is the process that ended with it."""
        self._open -= 1
        self._lost = self._lost if lost is None else lost
        self._look()

    def _close(self) -> None:
        self._closed = True
        self._look()

    def _reader_gone(self) -> None:
        self._lost = self.pid
        self._close()

    def _look(self) -> None:
        if self._closed or self._left == 0:
            _exports.pop(self.key, None)
            if not self._open and not self._ended.done:
                if self.pid is not None:
                    self._broker.unwatch(self.pid, self._reader_gone)
                self.place = None
                self._pin.unpin()
                self._ended()


_exports: dict[bytes, Export] = {}


class ReaderConnection(Connection):
    """The connection to a process that opens memory of this one."""

    def __init__(self, broker: Broker, end: socket.socket) -> None:
        """Take what was accepted."""
        super().__init__(broker, end)
        self._open: dict[int, Export] = {}  # by the number of the request
        # Groups and regions that it has, by number: what is kept until it has closed them, and what has it do so.
        self._sent: dict[int, tuple[object, weakref.finalize[..., object]]] = {}

    def receive(self, message: bytes, fds: list[int]) -> None:
        """Open memory, or see that it is let go of."""
        del fds
        kind, number, key = unpack(message)
        if kind == Kind.OPEN:
            export = _exports.get(key)
            if export is None:
                self._refuse(number, "it has been closed, was opened as often as it may be, or never was")
            else:
                export.when_ready(partial(self._answer, number, export))
        elif kind == Kind.CLOSED:
            self._forget(number)
        elif kind == Kind.FREE:
            self._open.pop(number).freed()
        else:
            raise ValueError("no message of a reader's")

    def lost(self) -> None:
        """Take back what it has open."""
        while self._open:
            self._open.popitem()[1].freed(lost=self.pid)
        for number in tuple(self._sent):
            self._forget(number)

    def _answer(self, request: int, export: Export) -> None:
        reason = "its reader has ended" if self.closed else export.refusal(self.pid)
        if reason or request in self._open:
            self._refuse(request, reason or "it has another memory of that number open")
            return
        self._open[request] = export
        export.opened()
        place = export.place
        assert place is not None
        fds = [place.fd] if self._is_new(place.group, place.kept) else []
        self._is_new(place.region, place.kept)
        self.send(pack(Kind.OPENED, request, export.reply), fds)

    def _is_new(self, part: object, kept: object) -> bool:
        """Note that it has a group or a region from now on; return whether it had not before."""
        number = _number(part)
        if number in self._sent:
            return False
        end = weakref.finalize(part, self.send, pack(Kind.DROP, number))
        end.atexit = False
        self._sent[number] = kept, end
        return True

    def _forget(self, number: int) -> None:
        if (sent := self._sent.pop(number, None)) is not None:
            sent[1].detach()

    def _refuse(self, request: int, reason: str) -> None:
        self.send(pack(Kind.REFUSED, request, reason.encode()))


process: Final = Process(ReaderConnection)
if sys.platform == "linux":
    os.register_at_fork(after_in_child=_exports.clear)


def export(source: Buffer | Array, *, readers: int | None = 1, pid: int | None = None) -> Export:
    """Let other processes of this user and host open memory, without a copy.

    The memory is held for them, whether you free the buffer meanwhile or not, until all readers have opened it and let
    go of it, or the export is closed. A reader that ends, by SIGKILL too, lets go. Memory whose descriptor gets lost on
    its way is held until the export is closed: name the reader's process, then its end closes it.

    A reader sees all work that the buffer's home stream was given before this call. Write to it no more: what you write
    is seen at once, and in no order.

    Args:
        source: A buffer of `pool.shared`, or an array over one.
        readers: How often it may be opened; None for any number of times, until it is closed.
        pid: The only process that may open it; None for any of this user.

    Raises:
        InvalidRequest: It is other memory, or an argument cannot be right.
        BufferReleased: It has been freed.
        BackendUnavailable: This system cannot share memory.
    """
    array: object = source.view() if isinstance(source, Buffer) else source
    if not isinstance(array, Array) or not isinstance(array.buffer.device, Shareable):
        raise InvalidRequest("source", source, "a buffer of pool.shared, or an array over one")
    for name, number in (("readers", readers), ("pid", pid)):
        if number is not None and not (type(number) is int and number > 0):
            raise InvalidRequest(name, number, "None, or a number from 1")
    return _offer(Export(process.broker, array, readers, pid))


def export_ahead(source: Buffer, pid: int | None) -> Export:
    """Let another process open a buffer of `pool.shared` before what it is for is there; the two say when it is."""
    return _offer(Export(process.broker, source.view(), 1, pid, ordered=False))


def _offer(made: Export) -> Export:
    _exports[made.key] = made
    if made.pid is not None:
        process.broker.post(made.begin)
    return made
