"""A run of a pipeline over several processes, as one of them sees it."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncmem.errors import InvalidRequest, RankLost, StaleDescriptor, StepError
from asyncmem.pipeline.parallel import Step
from asyncmem.pipeline.parallel.link import LinkRun, Plan, Sending
from asyncmem.pipeline.parallel.schedule import StageTally
from asyncmem.pipeline.trees import free_buffers
from asyncmem.ranks.carriers import pack, places_of
from asyncmem.ranks.peers import DONE, FAILED
from asyncmem.share.items import leaves_of, unflatten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncmem.core import Buffer
    from asyncmem.devices import Stream
    from asyncmem.ranks.carriers import Carrier, Nccl
    from asyncmem.ranks.peers import Group
    from asyncmem.share.items import Json

_MOST_FORM = 50_000
_SOON = 1.0
"""Seconds within which the end of a process is known whose memory cannot be opened."""


class RankRun(LinkRun):
    """What this process sends and takes; the neighbour before has the stages before, the one behind those behind."""

    def __init__(self, group: Group, nccl: Nccl, plan: Plan) -> None:
        self._group = group
        self._nccl = nccl
        self._plan = plan
        self._first: dict[int, int] = {}  # the first stage of each rank
        self._carriers: dict[int, Carrier] = {}
        self._taken = {True: 0, False: 0}  # items that have come, by whether they go forward
        self._number = group.number
        self._ended = False

    async def begin(self) -> None:
        """Agree with the others; see `Ranks.begin`."""
        group, plan = self._group, self._plan
        same = [plan.schedule, plan.micro_batches, list(plan.stages)]
        ends = plan.pools[0], plan.pools[-1]
        devices = [self._nccl.end(pool, group.rank + way) for way, pool in zip((-1, 1), ends, strict=True)]
        facts = [plan.own.start, plan.own.stop, *devices]
        try:
            group.send(None, "plan", [same, facts])
            answers = await group.receive_all("plan")
            answers[group.rank] = [same, facts]
            self._agree([one for one, _ in answers], [facts for _, facts in answers])
            for other in (group.rank - 1, group.rank + 1):
                if 0 <= other < group.size:
                    before = other < group.rank
                    facing = [answers[other][1][3 if before else 2], devices[0 if before else 1]]
                    self._carriers[other] = await self._nccl.carrier(group, other, ends[0 if before else 1], facing)
        except RankLost as lost:
            raise self._step_error(lost) from None

    def _agree(self, plans: Sequence[Json], facts: Sequence[Json]) -> None:
        for rank, plan in enumerate(plans):
            if plan != plans[self._group.rank]:
                raise InvalidRequest("run()", plans[self._group.rank], f"what rank {rank} is about to run, {plan}")
            self._first[rank] = facts[rank][0]
        bounds = [0, *(stop for _, stop, *_ in facts)]
        if [start for start, *_ in facts] != bounds[:-1] or bounds[-1] != len(self._plan.stages):
            got = [f"{start} to {stop - 1}" for start, stop, *_ in facts]
            raise InvalidRequest("pools", got, f"each of {len(self._plan.stages)} stages once, in the order of ranks")

    async def send(self, sending: Sending) -> None:
        """Queue the transfer of an item, and announce it to the neighbour."""
        packed = pack(sending.item)
        if len(str(packed.form)) > _MOST_FORM:
            raise InvalidRequest("item", f"{len(str(packed.form))} bytes besides its memory", f"at most {_MOST_FORM}")
        to, topic = self._group.rank + (1 if sending.step.forward else -1), _topic(sending.step)
        descriptor, ready = (await self._carriers[to].send(packed, sending)) if packed.nbytes else (None, sending.ended)
        self._send(to, topic, [packed.form, descriptor])
        ready.notify(partial(self._send, to, f"{topic} is there", None))

    def _send(self, to: int, topic: str, content: Json) -> None:
        if not self._ended:
            self._group.send(to, topic, content, self._number)

    async def receive(self, step: Step, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
        """Wait for an item, and have its memory come."""
        other, topic = self._group.rank + (-1 if step.forward else 1), _topic(step)
        buffers: list[Buffer] = []
        try:
            (tree, rows), descriptor = await self._group.receive(other, topic)
            leaves = leaves_of(rows)
            of_memory = [leaf for leaf in leaves if leaf.inline is None]
            for leaf in of_memory:
                buffers.append(await allocate(leaf.nbytes))  # noqa: PERF401  # what there is must be freed if one fails
            arrays = [one.view(leaf.dtype, leaf.shape) for one, leaf in zip(buffers, of_memory, strict=True)]
            there = partial(self._group.receive, other, f"{topic} is there")
            if any(array.nbytes for array in arrays):
                async with self._carriers[other].fetch(descriptor, stream, forward=step.forward) as take:
                    await there()
                    for array, offset in zip(arrays, places_of(arrays), strict=False):  # it has one more
                        take(array, offset)
            else:
                await there()
        except BaseException as error:
            free_buffers(buffers)
            if isinstance(error, RankLost):
                raise self._step_error(error) from None
            if isinstance(error, StaleDescriptor):
                with anyio.move_on_after(_SOON):
                    raise await self.failure() from None
            raise
        self._taken[step.forward] += 1
        memory = iter(buffers)
        return unflatten(tree, [leaf.made_of(next(memory) if leaf.inline is None else leaf.inline) for leaf in leaves])

    async def failure(self) -> StepError:
        """Wait until another process has failed or ended."""
        return self._step_error(await self._group.failure())

    def _step_error(self, lost: RankLost) -> StepError:
        if isinstance(lost.details, list):
            stage, micro_batch, forward, reason = lost.details
            error = StepError(stage, micro_batch, forward=forward, reason=reason)
        else:
            forward = lost.rank < self._group.rank
            stage = self._plan.stages[self._first[lost.rank]] if self._first else f"of rank {lost.rank}"
            error = StepError(stage, self._taken[forward], forward=forward, reason=str(lost))
        error.__cause__ = lost
        return error

    async def finish(self, tallies: Sequence[StageTally]) -> list[StageTally]:
        """Send the figures of this process to the others, and wait for theirs."""
        own = [asdict(one) for one in tallies]
        self._group.send(None, DONE, own)
        try:
            answers = await self._group.receive_all(DONE)
        except RankLost as lost:
            raise self._step_error(lost) from None
        self._ended = True
        answers[self._group.rank] = own
        return [StageTally(**one) for tallies in answers for one in tallies]

    def abort(self, error: StepError | None) -> None:
        """Tell the others, end NCCL's communicators, and close what has not been opened. After the end nothing."""
        if not self._ended:
            self._ended = True
            reason = "its process gave up the run"
            details = [self._plan.stages[self._plan.own.start], 0, True, reason]
            if error is not None:
                details = [error.stage, error.micro_batch, error.forward, error.reason[:1000]]
            self._group.send(None, FAILED, details)
            self._nccl.abort()
        for carrier in self._carriers.values():
            carrier.drop()


def _topic(step: Step) -> str:
    return f"{'forward' if step.forward else 'backward'} {step.micro_batch}"
