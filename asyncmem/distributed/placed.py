"""`PlacedPipeline`: a pipeline whose stages run on the workers of a Dask cluster. Made by `Pipeline.place`.

To the client all stages are one, which sends an item and waits for its result. Items whose results are not here are
kept, and sent once more if a worker is lost; so an item is worked on at least once, and its result comes exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import secrets
import time
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from distributed import Client
from distributed.protocol.pickle import dumps

from asyncmem.distributed.edges import Parcel
from asyncmem.distributed.plan import RESULTS_OF, SOURCE, Node, Plan, make_plan
from asyncmem.distributed.runner import Assignment, describe, give_back, host_identity, prepare, take_error
from asyncmem.distributed.session import Pending, Session
from asyncmem.distributed.ucx import ENCRYPTED
from asyncmem.errors import InvalidRequest, StageError, StageLost
from asyncmem.pipeline.pipeline import Pipeline
from asyncmem.pipeline.report import PipelineReport, StageReport
from asyncmem.pipeline.run import RemoteError, Results
from asyncmem.pipeline.stage import IN_FLIGHT, AnyStage, stage
from asyncmem.pipeline.tasks import describe_error
from asyncmem.pool import AsyncMemoryPool
from asyncmem.pool.pool import pool_of
from asyncmem.pool.share import Share
from asyncmem.runtime import device
from asyncmem.share.items import ProtocolError
from asyncmem.text import quoted
from asyncmem.units import Size, parse_count, parse_duration, parse_size

A = TypeVar("A")
B = TypeVar("B")

_TRIES: Final = 3
"""Plans that may be lost one after the other, without a result in between."""
_PAUSE: Final = 0.1
"""Seconds until workers are looked for again."""

_logger = logging.getLogger("asyncmem")


class PlacedPipeline(Generic[A, B]):
    """A pipeline on a cluster: ``async with Pipeline(decode, forward).place(cluster) as pipe``.

    Inside the block it is used as a `Pipeline`, with the same results, order and failures. Made by `Pipeline.place`.
    """

    def __init__(
        self, stages: Sequence[AnyStage], cluster: object, *, name: str, pool: Share | None,
        window: Size | None, limit: Size | None, timeout: float | str, types: Sequence[type], share: bool, ucx: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self._stages = stages
        self._address, self._security = _scheduler_of(cluster)
        readable = pool is not None and pool_of(pool).device.host_readable
        self._pool = pool if pool is not None and readable else device("host").pool
        self._window = None if window is None else parse_size(window, what="window")
        self._limit = None if limit is None else parse_size(limit, what="limit")
        self._silence = parse_duration(timeout)
        if not self._silence:
            raise InvalidRequest("timeout", timeout, "more than 0 seconds")
        for one in types:
            if not isinstance(one, type):
                raise InvalidRequest("types", one, "a list of classes")
        self._types = tuple(types)
        self._share, self._ucx = share, ucx
        self._run = secrets.token_hex(8)
        self._names = itertools.count()
        self._pending: dict[int, Pending] = {}
        self._results = 0
        self._session: Session | None = None
        self._plan: Plan | None = None
        self._broken: Exception | None = None
        self._avoided = ""  # the worker that was lost last, while others will do
        self._unable: dict[str, str] = {}  # workers that could not take their parts, and why
        self._lost: list[str] = []
        self._reports: list[tuple[Plan, dict[int, StageReport]]] = []
        self._most = IN_FLIGHT * sum(one.workers for one in stages)
        self._pipe: Pipeline[Any, Any] | None = None
        self._resources = AsyncExitStack()

    def __repr__(self) -> str:
        state = "open" if self._pipe is not None and self._pipe._tasks is not None else "not open"
        return f"<asyncmem.PlacedPipeline {quoted(self.name)} on {self._address}: {state}>"

    async def __aenter__(self) -> Self:
        """Connect to the cluster, make the plan, and have the workers take their stages.

        Raises:
            InvalidRequest: The plan needs more than a limit, the text has the sums; or others could reach a worker's
                address, which has no TLS.
            StageLost: No worker can run a stage.
        """
        if self._plan is not None:
            raise InvalidRequest("pipeline", self, "one that was not entered before; make another")
        async with AsyncExitStack() as resources:
            if isinstance(self._pool, AsyncMemoryPool):
                await self._pool.open()
            options = {"security": self._security, "asynchronous": True, "set_as_default": False}
            self._client = await Client(self._address, timeout=self._silence, **options)
            resources.push_async_callback(self._leave)
            self._session = await self._begin(first=True)
            tasks = await anyio.create_task_group().__aenter__()
            resources.push_async_exit(partial(_stop, tasks))
            tasks.start_soon(self._keep_going)
            whole = stage(workers=self._most, credit=0)(self._call)
            self._pipe = await resources.enter_async_context(Pipeline(whole, pool=self._pool, name=self.name))
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is under way, and wait until the workers have given its memory back."""
        await self._resources.__aexit__(kind, error, trace)

    def map(
        self,
        source: Iterable[A] | AsyncIterable[A],
        *,
        ordered: bool = True,
        in_flight: int | Literal["auto"] = "auto",
        progress: bool = False,
    ) -> Results[B]:
        """Run the pipeline over a source, as `Pipeline.map` does; at most four items for each worker are under way."""
        if self._pipe is None:
            raise InvalidRequest("pipeline", self, 'one that is open: "async with pipeline.place(...) as pipe"')
        most = self._most
        if in_flight != "auto":
            most = parse_count(in_flight, what="in_flight", least=1, most=1 << 20)
        return self._pipe.map(source, ordered=ordered, in_flight=most, progress=progress)

    def plan(self) -> Plan:
        """Return where stages run and how items go; printed, a table. After a worker was lost it is another one."""
        if self._plan is None:
            raise InvalidRequest("pipeline", self, "one that has been opened")
        return self._plan

    def report(self) -> PipelineReport:
        """Return the figures so far, stage by stage, of all workers; they come twice a second, and at the end."""
        if self._pipe is None:
            raise InvalidRequest("pipeline", self, "one that has been opened")
        own = self._pipe.report()
        stages = [
            _merge(one, [figures for plan, parts in self._reports for number, figures in parts.items()
                         if plan.parts[number].index == index], own.seconds)
            for index, one in enumerate(self._stages)
        ]  # fmt: skip
        return PipelineReport(
            stages=tuple(stages),
            items=own.items,
            seconds=own.seconds,
            limit_bytes=sum(part.nbytes for part in self.plan().parts),
            peak_bytes=sum(one.peak_bytes for one in stages),
            lost=tuple(self._lost),
        )

    # -- plans --------------------------------------------------------------------------------------------------------

    async def _begin(self, *, first: bool = False) -> Session:
        """Make a plan for the workers that are there, and have them take it; wait for workers where some are missing.

        Raises:
            StageLost: A stage has no worker.
            InvalidRequest: The plan is refused.
        """
        deadline, reason = time.monotonic() + self._silence, ""
        while True:
            unable = len(self._unable)
            try:
                return await self._try_to_begin()
            except (StageLost, OSError, TimeoutError) as error:
                if len(self._unable) > unable:
                    continue  # the others may do
                if time.monotonic() > deadline or (first and isinstance(error, StageLost)):
                    if isinstance(error, StageLost):
                        raise
                    raise StageLost(self._stages[0].name, 0, describe_error(error)) from error
                before, reason = reason, describe_error(error)
                if reason != before:
                    _logger.warning("pipeline %s: no plan yet: %s", quoted(self.name), reason)
            self._avoided = ""
            await asyncio.sleep(_PAUSE)

    async def _try_to_begin(self) -> Session:
        nodes = await self._nodes()
        plan = make_plan(self._stages, nodes, window=self._window)
        token = secrets.token_bytes(16)
        context = self._client.security.get_connection_args("client").get("ssl_context")
        session = Session(
            plan, token, pool=self._pool, types=self._types, silence=self._silence, context=context,
            arrived=self._arrived, failed=self._failed,
        )  # fmt: skip
        told = self._told(session)
        async with AsyncExitStack() as unless_it_begins:
            asked = asyncio.gather(
                *(self._prepare(session, told, node) for node in session.nodes()), return_exceptions=True
            )
            unless_it_begins.push_async_callback(self._give_back, session, asked)
            await asyncio.wait([asked])  # cancelled, it leaves them alone: who is asked may take its parts
            answers = asked.result()
            refusal = next(filter(None, answers), None)
            self._unable |= {
                plan.nodes[node].name: answer.reason
                for node, answer in zip(session.nodes(), answers, strict=True) if isinstance(answer, StageLost)
            }  # fmt: skip
            try:
                if refusal is not None:
                    raise refusal
            finally:
                del asked, answers, refusal  # which keep this frame by their tracebacks
            await session.open()
            unless_it_begins.pop_all()
        self._plan = plan
        self._reports.append((plan, session.reports))
        for item in self._pending.values():
            session.offer(item)
        return session

    def _told(self, session: Session) -> bytes:
        """Return what all workers are told.

        Raises:
            StageLost: Dask cannot pickle it.
        """
        try:
            told: bytes = dumps(
                Assignment(session.token, self._run, session.plan, self._stages, self._types, self._silence)
            )
        except Exception as error:
            raise StageLost(self._stages[0].name, 0, describe_error(error)) from error
        return told

    async def _prepare(self, session: Session, told: bytes, node: int) -> None:
        worker = session.plan.nodes[node].name
        refusal = await self._on(worker, prepare, told, node)
        if refusal:
            part = next(part for part in session.plan.parts if part.node == node)
            raise StageLost(part.stage, 0, f"{worker}: {refusal}")

    async def _give_back(self, session: Session, asked: asyncio.Future[list[Any]]) -> None:
        with anyio.CancelScope(shield=True):
            answers = zip(session.nodes(), await asked, strict=True)
            workers = [session.plan.nodes[node].name for node, answer in answers if not answer]
            calls = [self._on(worker, give_back, session.token) for worker in workers]
            await asyncio.gather(*calls, return_exceptions=True)

    async def _nodes(self) -> list[Node]:
        """Return the client, and the workers that say what they have.

        Raises:
            InvalidRequest: Others could reach a worker's address, which has no TLS.
        """
        known = await asyncio.wait_for(self._client.scheduler.identity(n_workers=-1), self._silence)
        accelerators = any(one.device not in {None, "host"} for one in self._stages)
        workers = [worker for worker in known["workers"] if worker != self._avoided]
        asked = [self._describe(worker, accelerators=accelerators, ucx=self._ucx) for worker in workers]
        found = await asyncio.gather(*asked, return_exceptions=True)
        place = await asyncio.to_thread(host_identity)  # it reads files
        nodes = [Node(name="client", pid=os.getpid(), place=place, limits={"host": self._pool.capacity()})]
        unable = []
        for worker, facts in zip(workers, found, strict=True):
            if isinstance(facts, dict):
                if "refused" in facts:
                    raise InvalidRequest("cluster", worker, "workers that listen on loopback, or with TLS")
                if facts["ucx"] and self._client.security.require_encryption:
                    facts |= {"ucx": False, "note": ENCRYPTED}
                if self._limit is not None:
                    facts["limits"] = {name: min(most, self._limit) for name, most in facts["limits"].items()}
                nodes.append(Node(**facts))
            else:
                reason = facts.reason if isinstance(facts, StageLost) else describe_error(facts)
                unable.append(Node(name=worker, note=f"takes no stage: {reason.removeprefix(f'{worker}: ')}"))
        if nodes[1:]:
            nodes += unable  # which have no device
        elif errors := [error for error in found if isinstance(error, StageLost)]:
            self._unable.clear()  # the next time they may
            raise errors[0]
        return nodes if self._share else [replace(node, place="") for node in nodes]

    async def _describe(self, worker: str, **more: object) -> Any:  # noqa: ANN401  # as `describe`
        if worker in self._unable:
            raise StageLost(self._stages[0].name, 0, self._unable[worker])
        return await self._on(worker, describe, **more)

    async def _on(self, worker: str, call: Any, *arguments: object, **more: object) -> Any:  # noqa: ANN401  # of any call
        """Call a function on a worker, by Dask.

        Raises:
            OSError: The worker is gone.
            TimeoutError: It does not answer.
            StageLost: It cannot make the call, as where a module is missing.
        """
        try:
            async with asyncio.timeout(min(self._silence, 10.0)):
                answers = await self._client.run(call, *arguments, workers=[worker], **more)
            return answers[worker]
        except (OSError, TimeoutError):
            raise
        except Exception as error:
            raise StageLost(self._stages[0].name, 0, f"{worker}: {describe_error(error)}") from error

    async def _keep_going(self) -> None:
        """Run one plan after the other; end when no other can be made."""
        fruitless = 0
        try:
            while True:
                session, before = self._session, self._results
                assert session is not None
                try:
                    await session.run()
                finally:
                    self._session = None
                    await session.close()
                fruitless = fruitless + 1 if session.lost and self._results == before else 0
                if session.lost:
                    node, reason = session.lost
                    self._lost.append(reason)
                    _logger.warning("pipeline %s: lost %s", quoted(self.name), reason)
                    self._avoided = session.plan.nodes[node].name  # it may stand still, and those who ask it with it
                if fruitless == _TRIES:
                    raise _gone(session)  # noqa: TRY301  # as what the session raises
                self._session = await self._begin()
        except Exception as error:  # noqa: BLE001  # it is each item's
            self._broken = error
            for item in self._pending.values():
                item.fail(_remote(error))

    async def _leave(self) -> None:
        with suppress(OSError, TimeoutError), anyio.CancelScope(shield=True):
            async with asyncio.timeout(5):
                await self._client.close()

    # -- items --------------------------------------------------------------------------------------------------------

    async def _call(self, value: object, pool: object) -> object:
        """Have the cluster make a result of an item: what the only stage does that the client sees."""
        del pool
        if self._broken is not None:
            raise _remote(self._broken)
        item = Pending(next(self._names), value, asyncio.get_running_loop().create_future())
        self._pending[item.name] = item
        if self._session is not None:
            self._session.offer(item)
        try:
            return await item.result
        finally:
            del self._pending[item.name]

    def _arrived(self, parcel: Parcel) -> None:
        item = self._pending.get(parcel.name)
        if item is not None and not item.result.done():
            self._results += 1
            try:
                item.result.set_result(parcel.open())
            except ProtocolError as error:
                item.fail(RemoteError(StageError, RESULTS_OF, describe_error(error), error))

    async def _failed(self, session: Session, node: int, stage: str, name: int, reason: str) -> None:
        """Fail an item whose stage has failed, with what the stage raised."""
        cause: BaseException | None = None
        with suppress(Exception):  # what cannot be pickled is told by its text alone
            cause = pickle.loads(await self._on(session.plan.nodes[node].name, take_error, session.token))  # noqa: S301  # Dask's
        item = self._pending.get(name)
        error = RemoteError(StageError, stage, reason, cause)
        for one in [item] if item is not None else list(self._pending.values()):
            one.fail(error)


async def _stop(
    tasks: TaskGroup, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Cancel tasks and wait for their end. Their group would wrap an error of the block, which is none of theirs."""
    tasks.cancel_scope.cancel()
    cancelled = isinstance(error, anyio.get_cancelled_exc_class())
    await tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))


def _remote(error: Exception) -> Exception:
    if isinstance(error, StageError):
        return RemoteError(type(error), error.stage, error.reason, error.__cause__)
    return RemoteError(StageError, SOURCE, describe_error(error), error)


def _gone(session: Session) -> StageLost:
    node, reason = session.lost or (0, "")
    stage = next(part.stage for part in session.plan.parts if part.node == node)
    return StageLost(stage, 0, f"{_TRIES} workers one after the other, without a result; the last is {reason}")


def _scheduler_of(cluster: object) -> tuple[str, Any]:
    """Return the address of a scheduler, and what secures connections to it."""
    if isinstance(cluster, Client):
        address = cluster.scheduler.address if cluster.scheduler is not None else ""
    else:
        address = getattr(cluster, "scheduler_address", cluster)
    if not isinstance(address, str) or not address:
        raise InvalidRequest("cluster", cluster, "a Dask cluster or client that is open, or a scheduler's address")
    return address, getattr(cluster, "security", None)


def _merge(one: AnyStage, parts: Sequence[StageReport], seconds: float) -> StageReport:
    """Add up the figures of a stage's parts; shares of time are averages over their workers."""
    workers = sum(part.workers for part in parts) or 1
    items = sum(part.items for part in parts)

    def average(name: str) -> float:
        return float(sum(getattr(part, name) * part.workers for part in parts) / workers)

    return StageReport(
        name=one.name,
        workers=one.workers,
        items=items,
        items_per_s=items / seconds if seconds else 0.0,
        busy=average("busy"),
        waiting_for_memory=average("waiting_for_memory"),
        waiting_for_input=average("waiting_for_input") if parts else 1.0,
        held_back=average("held_back"),
        peak_bytes=sum(part.peak_bytes for part in parts),
        kept_bytes=sum(part.kept_bytes for part in parts),
    )
