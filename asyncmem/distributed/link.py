"""A connection between two processes of a pipeline: bytes go from memory to memory, on asyncio and on uvloop.

Only loopback addresses are without TLS.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from asyncmem.distributed.frames import HEADER, Frame, pack, unpack
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

_SPARE: Final = 1 << 16
"""Bytes that may be here before they are asked for."""
_CHUNK: Final = 1 << 18
"""Bytes that are given to the transport at once: it keeps a copy of what does not fit into the socket."""


class LinkLost(ConnectionError):
    """A link has ended."""


class Link(asyncio.BufferedProtocol):
    """One end of a connection, for one reader and one writer.

    Args:
        accepted: Called with it once it is connected, where it is the listening side's.
    """

    def __init__(self, accepted: Callable[[Link], object] | None = None) -> None:
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self._spare = memoryview(bytearray(_SPARE))
        self._begin = self._end = 0  # of what lies there
        self._target: memoryview | None = None  # what is read into past it
        self._lost = ""  # why it has ended
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self.ended = asyncio.Event()

    # -- for the transport --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of no class of asyncio's
        # Wait for the last byte. What TLS has is never a single one, and with 0 asyncio would wait for less than none.
        self._transport.set_write_buffer_limits(0 if transport.get_extra_info("sslcontext") is None else 1)
        self._writable.set()
        if self._accepted is not None:
            self._accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._spare[self._end :] if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._target = self._target[nbytes:]
            if self._target:
                return
            self._target = None
        else:
            self._end += nbytes
            if self._end == _SPARE:
                self._pause()
        self._readable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = f"the other side is gone: {error}" if error else "the other side has closed the link"
        self.ended.set()
        self._readable.set()
        self._writable.set()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- for users ----------------------------------------------------------------------------------------------------

    async def read_into(self, target: memoryview) -> None:
        """Fill memory with what comes next. Cancelled: what has come of it is lost, and the link is to be closed.

        Raises:
            LinkLost: The link has ended.
        """
        while target:
            here = min(self._end - self._begin, len(target))
            if here:
                target[:here] = self._spare[self._begin : self._begin + here]
                self._begin += here
                target = target[here:]
                if self._begin == self._end:
                    self._begin = self._end = 0
                    self._resume()
            elif self._lost:
                raise LinkLost(self._lost)
            else:
                direct = len(target) >= _SPARE
                if direct:
                    self._target = target
                await self._wait_for_bytes()
                if direct:
                    return

    async def _wait_for_bytes(self) -> None:
        self._readable.clear()
        try:
            await self._readable.wait()
            if self._target is not None and self._lost:
                raise LinkLost(self._lost)
        finally:
            self._target = None

    async def read(self, nbytes: int) -> bytearray:
        """Return the next bytes; see `read_into`."""
        found = bytearray(nbytes)
        await self.read_into(memoryview(found))
        return found

    async def read_frame(self) -> tuple[Frame, bytearray]:
        """Return the next frame's header, and what describes the rest.

        Raises:
            ProtocolError: It is no frame.
            LinkLost: The link has ended.
        """
        frame = unpack(await self.read(HEADER.size))
        return frame, await self.read(frame.meta)

    async def write(self, *parts: bytes | memoryview) -> None:
        """Send bytes; the memory is no longer needed when this returns. One call at a time.

        Raises:
            LinkLost: The link has ended.
        """
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), _CHUNK):
                self._put(view[begin : begin + _CHUNK])
                await self._writable.wait()
                if self._lost:
                    raise LinkLost(self._lost)

    def send(self, kind: int, meta: bytes = b"", number: int = 0) -> None:
        """Send a frame that is small, without a wait. Not beside `write`."""
        with suppress(LinkLost):
            self._put(pack(kind, len(meta), number) + meta)

    def _put(self, data: bytes | memoryview) -> None:
        if self._lost:
            raise LinkLost(self._lost)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self, *, at_once: bool = True) -> None:
        """End it: what is under way is dropped, unless there is no hurry. Twice is fine."""
        if self._transport is not None and not self._lost:  # asyncio's may fail where it has ended
            (self._transport.abort if at_once else self._transport.close)()


def is_loopback(host: str) -> bool:
    """Whether nobody else can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def need_tls(host: str, context: ssl.SSLContext | None) -> None:
    """Refuse an address that others can reach, without TLS.

    Raises:
        InvalidRequest: It is one.
    """
    if context is None and not is_loopback(host):
        hint = "give the cluster and its clients a distributed.Security with TLS, or have workers listen on 127.0.0.1"
        raise InvalidRequest("address", host, "a loopback address, or TLS", hint=hint)


async def listen(
    host: str, accept: Callable[[Link], object], context: ssl.SSLContext | None
) -> tuple[asyncio.Server, str]:
    """Listen at a port of the system's choice; return the server and its address.

    Raises:
        InvalidRequest: Others could reach it, without TLS.
    """
    need_tls(host, context)
    server = await asyncio.get_running_loop().create_server(lambda: Link(accept), host, 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    return server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect(address: str, context: ssl.SSLContext | None, *, silence: float) -> Link:
    """Connect to a process that listens.

    Args:
        address: What `listen` returned there.
        context: The client's side of TLS.
        silence: Seconds after which a network that takes nothing any more ends the link.

    Raises:
        OSError: Nobody listens there.
        InvalidRequest: It is an address of others, without TLS.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    need_tls(host, context)
    transport, link = await asyncio.get_running_loop().create_connection(Link, host, int(port), ssl=context)
    end = transport.get_extra_info("socket")
    if end is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence / 2)))
    return link
