"""What runs on a worker: the parts of pipelines that are placed there, and the links between them.

Dask calls `describe` and `prepare`. Everything else goes over links: a connection of control from the client for each
worker, whose end is the end of the worker's parts, and one for each edge.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import time
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import anyio
from distributed import Worker, WorkerPlugin
from distributed.protocol.pickle import loads

from asyncmem.devices import Cuda
from asyncmem.devices.discovery import devices
from asyncmem.devices.gpu.shared import driver_shares
from asyncmem.distributed.credit import route
from asyncmem.distributed.edges import Incoming, Mailbox, Outgoing, Parcel, nothing
from asyncmem.distributed.frames import BEAT, CONTROL, FAILED, HELLO, HELLO_META, LOST, STOP
from asyncmem.distributed.link import Link, LinkLost, connect, is_loopback, listen
from asyncmem.distributed.plan import Plan
from asyncmem.distributed.plugin import record_with
from asyncmem.distributed.ucx import ENCRYPTED, Ucx, ucx_missing
from asyncmem.errors import AsyncmemError, InvalidRequest, StageError
from asyncmem.pipeline.pipeline import Pipeline
from asyncmem.pipeline.stage import IN_FLIGHT
from asyncmem.pipeline.tasks import describe_error
from asyncmem.pool import AsyncMemoryPool
from asyncmem.pool.pool import pool_of
from asyncmem.runtime import device
from asyncmem.share.items import ProtocolError
from asyncmem.text import to_json

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from asyncmem.pipeline.stage import AnyStage
    from asyncmem.pool.share import Share

HOST_SHARE: Final = 0.6
"""The part of a worker's memory limit that pipelines may have; of a GPU's memory, the part of what is free."""
_MOST_TEXT: Final = 10_000
"""Letters of an error's text that the client is told."""

Memory = Literal["own", "shared", "pinned"]
"""A device's own memory, what other processes can open, or what the host copies to it from."""


@dataclass(frozen=True, slots=True)
class Item:
    """The item that a stage works on.

    Attributes:
        run: The pipeline's token, the same as long as the pipeline is open.
        id: The item's number in all that the pipeline was given. An item that is worked on again, because a worker was
            lost, has the same.
    """

    run: str
    id: int


_current: ContextVar[Item] = ContextVar("asyncmem item")


def current_item() -> Item:
    """Return the item that this stage works on, for sinks that write each only once.

    Raises:
        LookupError: No stage of a pipeline over workers runs here.
    """
    item = _current.get(None)
    if item is None:
        raise LookupError("current_item() is for stages of a pipeline that is placed on workers, while they run there")
    return item


@dataclass(frozen=True, slots=True)
class Assignment:
    """What all workers of a pipeline are told.

    Attributes:
        token: What connections of the pipeline name, and nobody else knows; a new one for each plan.
        run: What stays the same when there is a new plan.
        plan: The plan.
        stages: The stages.
        types: The records that items may have.
        silence: Seconds without a sign of life after which the client is gone.
    """

    token: bytes
    run: str
    plan: Plan
    stages: Sequence[AnyStage]
    types: Sequence[type]
    silence: float


# -- a worker --------------------------------------------------------------------------------------------------------


class Service(WorkerPlugin):
    """Where the links of a worker come in; Dask closes it with the worker."""

    name = "asyncmem links"

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.runners: dict[bytes, Runner] = {}
        self.address = ""
        self.loopback = True
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def of(cls, worker: Worker) -> Service:
        """Return the one of a worker, made where it has none."""
        if cls.name not in worker.plugins:
            await worker.plugin_add(cls(worker), catch_errors=False)
        found = worker.plugins[cls.name]
        assert isinstance(found, cls)
        return found

    async def teardown(self, worker: Worker) -> None:
        """End it."""
        del worker
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def context(self, side: str) -> ssl.SSLContext | None:
        """Return the TLS of Dask's `Security` for one side of a link."""
        security: Any = self.worker.security
        arguments = security.get_listen_args("worker") if side == "listen" else security.get_connection_args("worker")
        context: ssl.SSLContext | None = arguments.get("ssl_context")
        return context

    async def open(self) -> None:
        """Listen, the first time."""
        async with self._opening:
            if self._server is None:
                scheme, _, rest = self.worker.address.partition("://")
                host = "127.0.0.1" if scheme == "inproc" else rest.rpartition(":")[0].strip("[]")
                self._server, self.address = await listen(host, self._accept, self.context("listen"))
                self.loopback = is_loopback(host)

    def _accept(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(self._greet(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, link: Link) -> None:
        try:
            async with asyncio.timeout(10):
                frame, meta = await link.read_frame()
            if frame.kind == HELLO:
                token, edge = HELLO_META.unpack(meta)
                self.runners[token].attach(edge, link)
                return
        except (LinkLost, LookupError, ProtocolError, TimeoutError, struct.error):
            pass
        link.close()


def host_identity() -> str:
    """Return what processes have in common that can share memory: the host, the user, and all they see of others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [Path(f"/proc/self/ns/{one}").stat().st_ino for one in ("net", "pid")]
    except OSError:
        return ""
    return f"{boot} {spaces} {os.geteuid()}"


async def describe(dask_worker: Worker, *, accelerators: bool, ucx: bool) -> dict[str, Any]:
    """Return what a worker has, and listen there. Dask calls it on the worker."""
    service = await Service.of(dask_worker)
    try:
        await service.open()
    except InvalidRequest as error:
        return {"refused": str(error)}
    most = dask_worker.memory_manager.memory_limit
    limits = {"host": int(HOST_SHARE * most) if most else 1 << 40}
    unshared: list[str] = []
    if accelerators:  # to look for them takes long, and memory of theirs
        found = await asyncio.to_thread(devices)
        limits |= {one.name: int(HOST_SHARE * one.free) for one in found if one.free and one.kind != "host"}
        unshared = [name for name in limits if name != "host" and not await asyncio.to_thread(_can_share, name)]
    place = await asyncio.to_thread(host_identity)  # it reads files
    note = ""
    if ucx:
        note = ENCRYPTED if dask_worker.security.require_encryption else await asyncio.to_thread(ucx_missing)
    return {
        "name": dask_worker.address,
        "pid": os.getpid(),
        "place": place,
        "address": service.address,
        "limits": limits,
        "unshared": tuple(unshared),
        "ucx": ucx and not note,
        "note": note,
    }


def _can_share(name: str) -> bool:
    """Return whether other processes can open memory of a device that was found (blocks)."""
    kind, _, number = name.partition(":")
    return kind == "cuda" and driver_shares(Cuda.interface(name), int(number))


async def prepare(told: bytes, node: int, dask_worker: Worker) -> str:
    """Take a worker's parts of a pipeline, and return why it cannot, or "". Dask calls it on the worker.

    Args:
        told: The assignment, pickled once for all workers.
        node: The worker's number in the plan.
        dask_worker: The worker.
    """
    service = await Service.of(dask_worker)
    assignment: Assignment = loads(told)  # what Dask calls comes from its own client
    runner = service.runners[assignment.token] = Runner(service, assignment, node)
    try:
        await runner.start()
    except AsyncmemError as error:
        return str(error)
    return ""


async def give_back(token: bytes, dask_worker: Worker) -> None:
    """End a worker's parts of a plan that does not begin. Dask calls it on the worker."""
    runner = (await Service.of(dask_worker)).runners.get(token)
    if runner is not None:
        await runner.stop()


async def take_error(token: bytes, dask_worker: Worker) -> bytes:
    """Return what a stage has raised, pickled. Dask calls it on the worker."""
    return pickle.dumps((await Service.of(dask_worker)).runners[token].cause)


# -- the parts of a pipeline -----------------------------------------------------------------------------------------


class Runner:
    """The parts of one pipeline on one worker."""

    def __init__(self, service: Service, assignment: Assignment, node: int) -> None:
        self._service = service
        self.it = assignment
        self._node = node
        self._links: dict[int, asyncio.Future[Link]] = {}
        self._heard = time.monotonic()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parts: dict[int, ActivePart] = {}
        self.cause: BaseException | None = None
        self._ucx: Ucx | None = None
        self._control: Link | None = None

    async def start(self) -> None:
        """Begin, and wait until the parts have their memory."""
        self._task = asyncio.get_running_loop().create_task(self._main())
        self._service._tasks.add(self._task)
        self._task.add_done_callback(self._service._tasks.discard)
        await self._ready

    async def stop(self) -> None:
        """End, and wait until its memory is back."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def attach(self, edge: int, link: Link) -> None:
        """Take a connection for an edge, or the one of control."""
        waiting = self._link(edge)
        if waiting.done():
            raise ProtocolError(f"a second connection for edge {edge}")
        waiting.set_result(link)

    def _link(self, edge: int) -> asyncio.Future[Link]:
        if edge != CONTROL and not 0 <= edge < len(self.it.plan.edges):
            raise ProtocolError(f"no edge {edge}")
        return self._links.setdefault(edge, asyncio.get_running_loop().create_future())

    async def _main(self) -> None:
        try:
            async with AsyncExitStack() as resources:
                try:
                    coroutines = await self._make(resources)
                except Exception as error:  # noqa: BLE001  # whoever waits for the start gets it
                    self._ready.set_exception(error)
                    return
                self._ready.set_result(None)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.it.silence):
                        self._control = await self._link(CONTROL)
                if self._control is not None:
                    await self._run(self._control, coroutines)
        finally:
            for waiting in self._links.values():
                if waiting.done() and not waiting.cancelled():
                    waiting.result().close(at_once=waiting is not self._links.get(CONTROL))
            del self._service.runners[self.it.token]
            if not self._ready.done():
                self._ready.set_exception(LinkLost("it was told to stop"))

    async def _run(self, control: Link, coroutines: Sequence[Any]) -> None:
        async with anyio.create_task_group() as tasks:
            for call in coroutines:
                tasks.start_soon(call)
            tasks.start_soon(self._beat, control, tasks.cancel_scope)
            with suppress(LinkLost, ProtocolError):
                while (await control.read_frame())[0].kind != STOP:
                    self._heard = time.monotonic()
            tasks.cancel_scope.cancel()
        self._report(control)

    async def _beat(self, control: Link, scope: anyio.CancelScope) -> None:
        while time.monotonic() - self._heard < self.it.silence:
            self._report(control)
            await asyncio.sleep(min(0.5, self.it.silence / 4))
        scope.cancel()

    def _report(self, control: Link) -> None:
        reports = [[number, asdict(one)] for number, part in self.parts.items() for one in part.reports()]
        control.send(BEAT, to_json(reports).encode())

    def fail(self, stage: str, name: int, error: BaseException) -> None:
        """Tell the client that a stage has failed."""
        if self.cause is None and self._control is not None:
            self.cause = error
            self._control.send(FAILED, to_json([stage, name, describe_error(error)[:_MOST_TEXT]]).encode())

    # -- making it ----------------------------------------------------------------------------------------------------

    async def _make(self, resources: AsyncExitStack) -> list[Any]:
        await device("host").pool.open()  # by which memory of other processes is copied
        plan, me = self.it.plan, self._node
        if any(edge.kind == "ucx" and me in plan.ends_of(edge) for edge in plan.edges):
            self._ucx = Ucx(loopback=self._service.loopback)
            resources.callback(self._ucx.close)
        mailboxes = {}
        coroutines: list[Any] = []
        for number, part in enumerate(plan.parts):
            if part.node == me and part.workers:
                parts = sum(other.index == part.index for other in plan.parts)
                mailboxes[number] = Mailbox(part.at, parts, len(plan.into(number)))
        for number, mailbox in mailboxes.items():
            part = plan.parts[number]
            edges = plan.out_of(number)
            shares = any(plan.edges[edge].kind == "share" for edge in edges)
            kind: Memory = "shared" if shares else "own"
            memory = await self._memory_for(resources, part.stage, part.device, part.nbytes, kind)
            out = []
            for edge in edges:
                out.append(await self._outgoing(edge, memory, mailboxes, resources))
                if plan.edges[edge].kind != "process":
                    coroutines.append(partial(self._serve_out, edge, out[-1]))
            for place, edge in enumerate(plan.into(number)):
                if plan.edges[edge].kind != "process":
                    coroutines.append(await self._incoming(edge, place, mailbox, resources))
            active = self.parts[number] = ActivePart(
                self, self.it.stages[part.index], part.workers, memory, mailbox, out
            )
            coroutines.append(active.run)
            resources.callback(mailbox.clear)  # what nobody takes any more, before the memory that it is in
        return coroutines

    async def _outgoing(
        self, number: int, memory: Share, mailboxes: dict[int, Mailbox], resources: AsyncExitStack
    ) -> Outgoing:
        plan, types = self.it.plan, self.it.types
        edge = plan.edges[number]
        receiver = plan.parts[edge.receiver]
        if edge.kind == "process":
            place = plan.into(edge.receiver).index(number)
            return Outgoing(edge, types, deliver=partial(mailboxes[edge.receiver].put, place))
        on, name = plan.parts[edge.sender].device, plan.name_of(edge)
        if edge.kind == "share":
            keep = await self._memory_for(resources, name, on, edge.window, "shared")
            return Outgoing(edge, types, memory=memory, keep=keep, pid=plan.nodes[receiver.node].pid)
        staging = None if on == "host" else await self._memory_for(resources, name, on, edge.window, "pinned")
        return Outgoing(edge, types, staging=staging, ucx=self._ucx if edge.kind == "ucx" else None)

    async def _incoming(self, number: int, place: int, mailbox: Mailbox, resources: AsyncExitStack) -> Any:  # noqa: ANN401  # a coroutine function
        edge = self.it.plan.edges[number]
        on, name = self.it.plan.parts[edge.receiver].device, self.it.plan.name_of(edge)
        window = onto = None
        if edge.kind != "share":
            window = await self._memory_for(resources, name, on, edge.window, "pinned")
            onto = None if on == "host" else await self._memory_for(resources, name, on, edge.window)
        ucx = self._ucx if edge.kind == "ucx" else None
        incoming = Incoming(edge, self.it.types, partial(mailbox.put, place), window, onto, ucx)
        return partial(self._serve_in, number, incoming)

    async def _memory_for(
        self, resources: AsyncExitStack, name: str, on: str, nbytes: int, kind: Memory = "own"
    ) -> Share:
        """Open a pool as `memory_for` does, and record it where the worker's pool is."""
        memory = await memory_for(resources, name, on, nbytes, kind)
        record_with(self._service.worker, pool_of(memory))
        return memory

    # -- edges --------------------------------------------------------------------------------------------------------

    async def _serve_out(self, number: int, edge: Outgoing) -> None:
        plan = self.it.plan
        node = plan.nodes[plan.parts[edge.edge.receiver].node]
        try:
            if node.address:
                link = await connect(node.address, self._service.context("connect"), silence=self.it.silence)
                self._links[number] = asyncio.get_running_loop().create_future()
                self._links[number].set_result(link)
                link.send(HELLO, HELLO_META.pack(self.it.token, number))
            else:  # the client connects by itself
                link = await self._link(number)
            await edge.run(link)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
            self._lost(number, error)
        finally:
            await edge.close()

    async def _serve_in(self, number: int, edge: Incoming) -> None:
        try:
            await edge.run(await self._link(number))
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
            self._lost(number, error)

    def _lost(self, number: int, error: Exception) -> None:
        if self._control is not None:
            self._control.send(LOST, to_json([number, describe_error(error)[:_MOST_TEXT]]).encode())


async def memory_for(resources: AsyncExitStack, name: str, on: str, nbytes: int, kind: Memory = "own") -> Share:
    """Open a pool of so many bytes of a device, or of memory that it shares or copies fast; closed with those."""
    pool = AsyncMemoryPool(on, name=name, limit=nbytes, share_limit=nbytes, min_free=0)
    await resources.enter_async_context(pool)
    if kind == "own" or (kind == "pinned" and on == "host"):
        return pool
    other = await asyncio.to_thread(getattr, pool, kind)
    await other.open()
    other.resize(limit=nbytes)
    return cast("Share", other)


class ActivePart:
    """A part of a stage at work: a pipeline of one stage, between a mailbox and edges."""

    def __init__(
        self, runner: Runner, stage: AnyStage, workers: int, memory: Share, mailbox: Mailbox, out: Sequence[Outgoing]
    ) -> None:
        self._runner = runner
        self._name = stage.name
        self._function = stage.function
        self._workers = workers
        self._mailbox = mailbox
        self._out = out
        stage = replace(stage, function=self._call, workers=workers, device=None, pool=None)
        self._pipe: Pipeline[Any, Any] = Pipeline(stage, pool=memory, name=stage.name)
        self._names: dict[int, int] = {}  # of the items that are here, by their numbers in the pipeline
        self._failed: int | None = None
        self._open = False

    def reports(self) -> list[Any]:
        """Return its figures, once there are some."""
        return list(self._pipe.report().stages) if self._open else []

    async def run(self) -> None:
        """Work on all that comes."""
        sending = 0
        try:
            async with self._pipe as pipe:
                self._open = True
                results = pipe.map(self._items(), in_flight=IN_FLIGHT * self._workers)
                try:
                    async for parcel in results:
                        await route(parcel.number, self._out).send(parcel)
                        del self._names[sending], parcel
                        sending += 1
                finally:
                    await results.aclose()
        except StageError as error:
            name = self._names.get(error.item, -1) if self._failed is None else self._failed
            self._runner.fail(self._name, name, error.__cause__ or error)
        except LinkLost:
            pass  # as whoever serves that link says
        except Exception as error:  # noqa: BLE001  # of the program's records, too
            self._runner.fail(self._name, self._names.get(sending, -1), error)

    async def _items(self) -> AsyncIterator[Parcel]:
        number = 0
        async for parcel in self._mailbox:
            self._names[number] = parcel.name
            number += 1
            yield parcel
            del parcel

    async def _call(self, parcel: Parcel, pool: Any) -> Parcel:  # noqa: ANN401  # as the stage has it
        _current.set(Item(self._runner.it.run, parcel.name))
        try:
            parcel.value = await self._function(parcel.open(), pool)
        except BaseException:
            if self._failed is None:
                self._failed = parcel.name
            raise
        parcel.done()
        parcel.done = nothing
        return parcel
