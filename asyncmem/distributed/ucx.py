"""UCX between workers: the bytes of items go by it, where the user asks for it. Needs `ucxx`.

Two workers tell each other by their link where UCX finds them, and a tag that nobody else knows. UCX itself encrypts
nothing, and takes a connection from whoever reaches its ports.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Final

from asyncmem.distributed.frames import UCX
from asyncmem.distributed.link import LinkLost
from asyncmem.share.items import ProtocolError

if TYPE_CHECKING:
    from asyncmem.distributed.link import Link

ENCRYPTED: Final = "no UCX, as the cluster demands encryption"

_STEPS: Final = 64
"""What UCX does before others on the event loop have their turn."""


def ucx_missing() -> str:
    """Return why this process cannot use UCX, or "". It imports much."""
    try:
        import ucxx  # noqa: F401
    except Exception as error:  # noqa: BLE001  # it looks for drivers, too
        return f"no UCX: {error}"
    return ""


class Ucx:
    """UCX for one pipeline on one worker, driven by the event loop.

    Attributes:
        address: Where others find it.
    """

    def __init__(self, *, loopback: bool) -> None:
        from ucxx import libucxx

        devices = {"NET_DEVICES": "lo"} if loopback else {}
        context = libucxx.UCXContext(devices, (libucxx.Feature.TAG, libucxx.Feature.WAKEUP))
        self.api: Any = libucxx
        self._worker: Any = libucxx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self.address: bytes = self._worker.address.tobytes()
        self._waiting: dict[Any, asyncio.Future[None]] = {}
        self._ways: list[Way] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._worker.epoll_file_descriptor, self._go_on)

    async def meet(self, link: Link, *, tag: int = 0) -> Way:
        """Tell the other side of a link where this one is, and hear the same.

        Args:
            link: The link; when it ends, so does the way.
            tag: What its messages are known by, from the side that receives them.

        Raises:
            LinkLost: The link has ended, or UCX finds no way.
            ProtocolError: The other side says something else.
        """
        link.send(UCX, self.address, tag)
        frame, address = await link.read_frame()
        if frame.kind != UCX:
            raise ProtocolError(f"a frame of kind {frame.kind} comes in place of an address")
        try:
            found = self.api.UCXAddress.create_from_buffer(address)
            endpoint = self._worker.create_endpoint_from_worker_address(found, True)  # tell of errors
        except self.api.UCXError as error:
            raise LinkLost(f"UCX: {error}") from error
        self._ways.append(Way(self, endpoint, link, tag or frame.number))
        return self._ways[-1]

    async def done(self, request: Any) -> None:  # noqa: ANN401  # ucxx has no types
        """Wait until UCX no longer needs the memory of a message.

        Raises:
            UCXError: It was not brought over.
        """
        if not request.completed:
            future = self._waiting[request] = self._loop.create_future()
            self._go_on()
            await future
        request.check_error()

    def _go_on(self) -> None:
        if self._worker is None:
            return
        for _ in range(_STEPS):
            if not self._worker.progress_once():
                break
        ended = [request for request in self._waiting if request.completed]
        for request in ended:
            future = self._waiting.pop(request)
            if not future.done():
                future.set_result(None)
        if not self._worker.arm():  # there is more to do
            self._loop.call_soon(self._go_on)

    def close(self) -> None:
        """End it."""
        for way in self._ways:
            way.close()
        self._loop.remove_reader(self._worker.epoll_file_descriptor)
        self._worker = None


def new_tag() -> int:
    """Return a tag that nobody can guess."""
    return 1 + secrets.randbits(63)


class Way:
    """Brings memory to the other side, or from it. One message at a time."""

    def __init__(self, ucx: Ucx, endpoint: Any, link: Link, tag: int) -> None:  # noqa: ANN401  # as `done`
        from ucxx._lib.arr import Array

        self._array = Array
        self._ucx = ucx
        self._endpoint = endpoint
        self._link = link
        self._tag = ucx.api.UCXXTag(tag)
        self._end = asyncio.get_running_loop().create_task(self._close_with_link())

    async def send(self, memory: memoryview) -> None:
        """Send memory; it is no longer needed when this returns. Cancelled, the way ends.

        Raises:
            LinkLost: The other side is gone.
        """
        await self._bring(self._endpoint.tag_send, memory)

    async def receive(self, memory: memoryview) -> None:
        """Fill memory with the next message; see `send`."""
        await self._bring(self._endpoint.tag_recv, memory)

    async def _bring(self, call: Any, memory: memoryview) -> None:  # noqa: ANN401  # as `done`
        try:
            await self._ucx.done(call(self._array(memory), self._tag))
        except asyncio.CancelledError:
            self.close()
            raise
        except self._ucx.api.UCXError as error:
            self._link.close()
            raise LinkLost(f"UCX: {error}") from error

    async def _close_with_link(self) -> None:
        await self._link.ended.wait()
        self.close()

    def close(self) -> None:
        """End it; UCX lets go of all memory."""
        self._end.cancel()
        self._endpoint.close_blocking()
