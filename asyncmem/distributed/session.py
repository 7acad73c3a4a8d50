"""One plan at work, seen by the client: connections to its workers, items that go out, and results that come in."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from asyncmem.distributed.credit import route
from asyncmem.distributed.edges import Incoming, Outgoing, Parcel, nothing
from asyncmem.distributed.frames import BEAT, CONTROL, FAILED, HELLO, HELLO_META, LOST, STOP
from asyncmem.distributed.link import Link, LinkLost, connect
from asyncmem.distributed.plan import SOURCE, Plan
from asyncmem.distributed.runner import memory_for
from asyncmem.errors import StageError
from asyncmem.pipeline.report import StageReport
from asyncmem.pipeline.run import RemoteError
from asyncmem.pipeline.tasks import describe_error
from asyncmem.pool import Budget
from asyncmem.share.items import ProtocolError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from asyncmem.pool.share import Share


@dataclass(eq=False)
class Pending:
    """An item whose result is not here yet.

    Attributes:
        name: Its id.
        value: What it is.
        result: What is waited for.
    """

    name: int
    value: object
    result: asyncio.Future[object]

    def fail(self, error: Exception) -> None:
        """Have an error in place of the result."""
        if not self.result.done():
            self.result.set_exception(error)


class Session:
    """A plan that the workers have taken.

    Attributes:
        plan: The plan.
        token: What connections name.
        reports: The last figures of each part, by its number.
        lost: The worker that was lost, and why; None while none is.
    """

    def __init__(
        self, plan: Plan, token: bytes, *, pool: Share, types: Sequence[type], silence: float,
        context: ssl.SSLContext | None, arrived: Callable[[Parcel], None],
        failed: Callable[[Session, int, str, int, str], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.token = token
        self.reports: dict[int, StageReport] = {}
        self.lost: tuple[int, str] | None = None
        self._error: Exception | None = None
        self._pool = pool
        self._types, self._silence, self._context = types, silence, context
        self._arrived, self._failed = arrived, failed
        self._items: deque[Pending] = deque()
        self._more = asyncio.Event()
        self._over = asyncio.Event()
        self._heard: dict[int, float] = {}
        self._control: dict[int, Link] = {}
        self._links: list[Link] = []
        self._out: list[Outgoing] = []
        self._serving: list[Callable[[], Any]] = []
        self._listening: dict[int, asyncio.Task[None]] = {}
        self._resources = AsyncExitStack()

    def nodes(self) -> list[int]:
        """Return the workers that have parts."""
        return sorted({part.node for part in self.plan.parts if part.workers})

    def offer(self, item: Pending) -> None:
        """Have an item be sent."""
        self._items.append(item)
        self._more.set()

    async def open(self) -> None:
        """Connect to the workers, once all of them have their parts.

        Raises:
            OSError: One of them is gone.
        """
        try:
            for node in self.nodes():
                self._control[node] = await self._connect(node, CONTROL)
                self._heard[node] = time.monotonic()
                self._listening[node] = asyncio.create_task(self._listen(node, self._control[node]))
            for number in self.plan.out_of(0):
                edge = self.plan.edges[number]
                receiver = self.plan.nodes[self.plan.parts[edge.receiver].node]
                keep = None
                if edge.kind == "share":
                    keep = await memory_for(self._resources, self.plan.name_of(edge), "host", edge.window, "shared")
                self._out.append(Outgoing(edge, self._types, keep=keep, pid=receiver.pid))
                await self._serve(number, self._out[-1].run, edge.receiver)
            for number in self.plan.into(len(self.plan.parts) - 1):
                edge = self.plan.edges[number]
                window = None if edge.kind == "share" else await self._window(edge.window)
                await self._serve(number, Incoming(edge, self._types, self._take, window).run, edge.sender)
        except BaseException:
            await self.close()
            raise

    async def _window(self, nbytes: int) -> Share:
        """Reserve a range of the client's pool, to which results belong that are held for longer."""
        lease = await self._resources.enter_async_context(self._pool.lease(nbytes))
        return self._resources.enter_context(Budget(lease, "results", nbytes, waits=True))

    async def _connect(self, node: int, edge: int) -> Link:
        link = await connect(self.plan.nodes[node].address, self._context, silence=self._silence)
        link.send(HELLO, HELLO_META.pack(self.token, edge))
        self._links.append(link)
        return link

    async def _serve(self, number: int, run: Callable[[Link], Any], part: int) -> None:
        node = self.plan.parts[part].node
        link = await self._connect(node, number)

        async def serve() -> None:
            try:
                await run(link)
            except (LinkLost, ProtocolError) as error:
                # The worker's own connection says more, if it has ended too.
                await asyncio.sleep(0.05)
                self._lose(node, str(error))
            except Exception as error:  # noqa: BLE001  # whoever runs it raises it
                self._error = error
                self._over.set()

        self._serving.append(serve)

    async def run(self) -> None:
        """Send items and take results, until a worker is lost or a stage has failed.

        What the client itself fails by is raised, as where its pool is closed.
        """
        async with anyio.create_task_group() as tasks:
            for serve in self._serving:
                tasks.start_soon(serve)
            tasks.start_soon(self._send)
            tasks.start_soon(self._beat)
            await self._over.wait()
            tasks.cancel_scope.cancel()
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Have the workers give back what they have, and wait for it, though not for those that stand still."""
        with anyio.CancelScope(shield=True):
            for link in self._control.values():
                link.send(STOP)
            ending = [task for node, task in self._listening.items() if self.lost is None or node != self.lost[0]]
            if ending:
                await asyncio.wait(ending, timeout=min(self._silence, 5.0))
            for link in self._links:
                link.close()
            await asyncio.gather(*self._listening.values())
            for edge in self._out:
                await edge.close()
            await self._resources.aclose()

    def _lose(self, node: int, reason: str) -> None:
        if not self._over.is_set():
            self.lost = node, f"{self.plan.nodes[node].name}: {reason}"
            self._over.set()

    # -- control ------------------------------------------------------------------------------------------------------

    async def _listen(self, node: int, link: Link) -> None:
        try:
            while True:
                frame, meta = await link.read_frame()
                self._heard[node] = time.monotonic()
                if frame.kind == FAILED:
                    await self._failed(self, node, *json.loads(meta))
                    self._over.set()
                else:
                    self._hear(frame.kind, meta)
        except (LinkLost, LookupError, TypeError, ValueError) as error:
            self._lose(node, str(error))

    def _hear(self, kind: int, meta: bytearray) -> None:
        if kind == BEAT:
            self.reports |= {number: StageReport(**figures) for number, figures in json.loads(meta)}
        elif kind == LOST:
            number, reason = json.loads(meta)
            edge = self.plan.edges[number]
            ends = [self.plan.parts[end].node for end in (edge.receiver, edge.sender)]
            asyncio.get_running_loop().call_later(0.05, self._lose, ends[0] or ends[1], reason)

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            for node, link in self._control.items():
                link.send(BEAT)
                if now - self._heard[node] > self._silence:
                    self._lose(node, f"it has been silent for {self._silence:.3g} s")
            await asyncio.sleep(min(0.5, self._silence / 4))

    # -- items --------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        number = 0
        while True:
            while not self._items:
                self._more.clear()
                await self._more.wait()
            item = self._items.popleft()
            if item.result.done():  # it was given up meanwhile
                continue
            try:
                await route(number, self._out).send(Parcel(number, item.name, item.value, nothing))
            except LinkLost:
                return  # as whoever serves that link says
            except Exception as error:  # noqa: BLE001  # of the program's records, too
                item.fail(RemoteError(StageError, SOURCE, describe_error(error), error))
            else:
                number += 1
            del item

    def _take(self, parcel: Parcel) -> None:
        self._arrived(parcel)
        parcel.value = None
        parcel.done()
