"""The importer's side: memory of other processes, mapped once, and told of once it is let go of."""

from __future__ import annotations

import itertools
import json
import os
import struct
import sys
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncmem.devices.cuda import Cuda
from asyncmem.devices.shared_host import open_mapping
from asyncmem.errors import AsyncmemError, DeviceError, InvalidRequest, StaleDescriptor
from asyncmem.exchange import asarray
from asyncmem.pool.latch import Latch
from asyncmem.share.broker import Broker, Connection, connect
from asyncmem.share.exports import process
from asyncmem.share.messages import DESCRIPTOR, VERSION, Kind, pack, unpack

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Generator, Iterator

    from asyncmem.arrays import Array
    from asyncmem.devices import Device
    from asyncmem.devices.gpu.shared import PoolOfAnother
    from asyncmem.devices.shared import Region


_CAPTURE: Final = 0.01
"""Seconds after which a fence is tried again that cannot be had while a graph is captured."""


class Loan:
    """Memory of another process, which hears of it when this is dropped and the work on it is done."""

    def __init__(self, source: SourceConnection, number: int, region: Region, facts: dict[str, Any]) -> None:
        """Take what was opened; its place has been checked."""
        self._source = source
        self._number = number
        self._region = region  # closed after the last loan
        self._facts = facts
        self._device: Device | None = None
        data, shape = (region.address + facts["offset"], False), (facts["nbytes"],)
        self._interface = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}

    def array(self, stream: object) -> Array:
        """Return it as an array, which keeps it."""
        whole = asarray(_OnGpu(self) if self._facts["device"] == "cuda" else np.asarray(_OnHost(self)), stream=stream)
        self._device = whole.buffer.device
        return whole.buffer.view(self._facts["dtype"], self._facts["shape"])

    def __del__(self) -> None:
        # The region stays open until the work is done, also where the other process has ended and nobody else has it.
        free = partial(_let_go, self._source, self._number, self._region)
        if self._device is None:
            free()
        else:
            _behind_all(self._source.broker, self._device, free)


def _let_go(source: SourceConnection, number: int, region: Region) -> None:
    del region
    source.send(pack(Kind.FREE, number))


def _behind_all(broker: Broker, device: Device, free: Callable[[], None]) -> None:
    """Call once all work is done that the device's streams have now. From finalizers too."""
    try:
        fence = device.record_all()
    except DeviceError as error:
        if error.code == DeviceError.CAPTURE_UNSUPPORTED:  # its end is waited for
            broker.post(partial(broker.later, _CAPTURE, partial(_behind_all, broker, device, free)))
        else:  # a lost device does nothing any more
            free()
        return
    if fence.over():
        free()
    else:
        fence.notify(free)


class _OnHost:
    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self.__array_interface__ = loan._interface


class _OnGpu:
    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self.__cuda_array_interface__ = loan._interface


class SourceConnection(Connection):
    """The connection to a process whose memory is opened here."""

    def __init__(self, broker: Broker, end: socket.socket) -> None:
        """Take a connected socket."""
        super().__init__(broker, end)
        self._requests = itertools.count()
        self._asked: dict[int, Attachment] = {}
        self._groups: dict[int, PoolOfAnother] = {}
        self._regions: dict[int, Region] = {}

    def ask(self, key: bytes, attachment: Attachment) -> None:
        """Ask for memory. From any thread."""
        number = next(self._requests)
        self._asked[number] = attachment
        self.send(pack(Kind.OPEN, number, key))
        if self.ended:
            self.lost()

    def receive(self, message: bytes, fds: list[int]) -> None:
        """Take the answer to a request, or forget a file."""
        kind, number, rest = unpack(message)
        if kind == Kind.OPENED:
            attachment = self._asked.pop(number)
            attachment.outcome = self._loan(number, rest, fds)  # nothing else may keep it: its waiter's thread drops it
            attachment.arrive()
        elif kind == Kind.REFUSED:
            self._asked.pop(number).fail(rest.decode())
        elif kind == Kind.DROP:
            opened = self._regions.pop(number, None) or self._groups.pop(number, None)
            if opened is None:  # nothing that says so once it is closed
                self._say_closed(number)
        else:
            raise ValueError("no message of an owner's")

    def hung_up(self) -> None:
        """End, and have who asks next connect anew: nothing is held here for the other process."""
        self.end()

    def lost(self) -> None:
        """Fail who waits. What is open stays, and is unmapped once it is let go of."""
        self._groups.clear()
        self._regions.clear()
        with suppress(KeyError):  # another thread may see the end, too
            while True:
                self._asked.popitem()[1].fail("the process that shared it has ended")

    def _loan(self, number: int, answer: bytes, fds: list[int]) -> Loan | str:
        """Return the memory, or why there is none."""
        try:
            facts = json.loads(answer)
            region = self._regions.get(facts["region"])
            if region is None:
                region = self._regions[facts["region"]] = self._open_region(facts, fds)
            return Loan(self, number, _holding(region, facts), facts)
        except (AsyncmemError, LookupError, OSError, TypeError, ValueError) as error:
            self.send(pack(Kind.FREE, number))
            return f"its process gave no memory: {error!r}"

    def _open_region(self, facts: dict[str, Any], fds: list[int]) -> Region:
        group = facts["group"]
        if facts["device"] == "cuda":
            from asyncmem.devices.gpu.shared import OpenChunk, PoolOfAnother

            if group not in self._groups:
                with self._file(group, fds):
                    self._groups[group] = PoolOfAnother(_gpu(facts["gpu"]), fds[0], partial(self._close, group))
            return OpenChunk(self._groups[group], facts, partial(self._close, facts["region"]))
        with self._file(group, fds):
            mapping = open_mapping(fds.pop())
        weakref.finalize(mapping, self._say_closed, group).atexit = False
        return mapping

    @contextmanager
    def _file(self, group: int, fds: list[int]) -> Iterator[None]:
        """Open what came with the file of a group; if that fails, have the file come again with the next memory."""
        if not fds:
            raise ValueError("its file came before, and could not be opened")
        try:
            yield
        except BaseException:
            self._say_closed(group)
            raise

    def _close(self, number: int, close: Callable[[], None]) -> None:
        # The exporter may free it only then; the driver's calls are for the broker's thread.
        def both() -> None:
            close()
            self._say_closed(number)

        self.broker.post(both)

    def _say_closed(self, number: int) -> None:
        self.send(pack(Kind.CLOSED, number))


def _gpu(identity: str) -> Cuda:
    """Return a GPU; one object for each in this process."""
    if identity not in _gpus:
        index = Cuda.with_identity(identity)
        if index is None:
            raise ValueError(f"this process does not see GPU {identity}")
        _gpus[identity] = Cuda(index)
    return _gpus[identity]


_gpus: dict[str, Cuda] = {}
_sources: dict[bytes, SourceConnection] = {}
"""The connections to processes whose memory was opened here, by their tokens."""


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_sources.clear)


def _holding(region: Region, facts: dict[str, Any]) -> Region:
    """Return the region, in which the memory must lie."""
    if not 0 <= facts["offset"] <= facts["offset"] + facts["nbytes"] <= region.nbytes:
        raise ValueError("it lies outside of its region")
    return region


class Attachment:
    """Memory of another process that is being opened: await it for the array, or use ``async with``.

    Attributes:
        outcome: The memory, or why there is none; None before, and once it is taken or given up.
    """

    def __init__(self, descriptor: bytes, stream: object) -> None:
        """Ask for it; see `attach_async`."""
        try:
            version, token, key = DESCRIPTOR.unpack(descriptor)
        except (TypeError, struct.error):
            expected = f"the {DESCRIPTOR.size} bytes of an export's descriptor"
            raise InvalidRequest("descriptor", descriptor, expected) from None
        if version != VERSION:
            raise InvalidRequest("descriptor", descriptor, "a descriptor of this version of asyncmem")
        self._stream = stream
        self._arrived: Latch[None] = Latch()
        self.outcome: Loan | str | None = None
        self._given_up = False
        self._array: Array | None = None
        broker = process.broker
        source = _sources.get(token)
        if source is None or source.ended:
            broker.post(partial(self._connect, broker, token, key))
        else:
            source.ask(key, self)

    def arrive(self) -> None:
        """See that the outcome is there. On the broker's thread."""
        if self._given_up:
            self.outcome = None
        self._arrived()

    def fail(self, reason: str) -> None:
        """Take why there is no memory. On the broker's thread."""
        self.outcome = reason
        self.arrive()

    def block(self, timeout: float | None) -> Array:
        """Wait on this thread for the array.

        Raises:
            TimeoutError: It has not come within so many seconds.
        """
        try:
            self._arrived.block(timeout)
            if not self._arrived.done:
                raise TimeoutError(f"the process that shared it has not answered within {timeout} s")
            return self._take()
        finally:
            self._give_up()

    async def _wait(self) -> Array:
        try:
            await self._arrived.wait()
            return self._take()
        finally:
            self._give_up()

    def __await__(self) -> Generator[object, object, Array]:
        """Wait for the array. Cancelled: the memory is let go of."""
        return self._wait().__await__()

    async def __aenter__(self) -> Array:
        """Wait for the array."""
        self._array = await self._wait()
        return self._array

    async def __aexit__(self, *_: object) -> None:
        """Free it."""
        if self._array is not None:
            self._array.free()

    def _take(self) -> Array:
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, Loan):
            return outcome.array(self._stream)
        raise StaleDescriptor(outcome or "it was waited for twice")

    def _give_up(self) -> None:
        self._given_up = True
        self.outcome = None

    def _connect(self, broker: Broker, token: bytes, key: bytes) -> None:
        # On the broker's thread, because a full queue of connections is waited for.
        source = _sources.get(token)
        if source is None or source.ended:
            try:
                source = SourceConnection(broker, connect(token))
            except (PermissionError, StaleDescriptor) as error:
                self.fail(getattr(error, "reason", str(error)))
                return
            for other in [name for name, one in _sources.items() if one.ended]:
                del _sources[other]
            _sources[token] = source
            source.open()
        source.ask(key, self)


def attach_async(descriptor: bytes, *, stream: object = None) -> Attachment:
    """Open memory that another process of this user and host has exported, without a copy.

    The array that it gives is as one of `asyncmem.asarray`. Free or drop it to let go of the memory: its process hears
    of it once all work is done that the streams of its device had then, and all exports of the array have gone. It
    stays valid if the other process ends.

    Args:
        descriptor: What `Export.descriptor` was.
        stream: The stream that will use it, its home stream; None for the device's default stream.

    Raises:
        StaleDescriptor: At the await: it is forged, was closed, was opened as often as it may be, is for another
            process, or its process has ended.
        InvalidRequest: It is no descriptor at all.
        BackendUnavailable: This system cannot share memory.
    """
    return Attachment(descriptor, stream)


def attach(descriptor: bytes, *, stream: object = None, timeout: float | None = None) -> Array:
    """Open memory that another process has exported, as `attach_async` does, and wait for it on this thread.

    Args:
        descriptor: What `Export.descriptor` was.
        stream: The stream that will use it, its home stream; None for the device's default stream.
        timeout: The most seconds to wait; None for any.

    Raises:
        TimeoutError: The other process has not answered.
        StaleDescriptor: As of `attach_async`.
        InvalidRequest: It is no descriptor at all.
        BackendUnavailable: This system cannot share memory.
    """
    return Attachment(descriptor, stream).block(timeout)
