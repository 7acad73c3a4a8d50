"""One run: each stage's task queues its steps in the schedule's order, and follows the device at a distance.

A task waits for another task only until that has queued its step; that one stage's work comes behind another's is said
to the streams. So the tasks are ahead of the devices, and nothing but the schedule holds these up. Memory is freed as
soon as its last use has been queued: whoever gets it next comes behind that, in stream order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asyncmem.errors import StepError
from asyncmem.figures import format_duration
from asyncmem.pipeline.frames import empty_frames
from asyncmem.pipeline.mishaps import is_its_own, said
from asyncmem.pipeline.parallel.items import free, settle
from asyncmem.pipeline.parallel.schedule import Step
from asyncmem.pipeline.parallel.seat import Moment, Taken
from asyncmem.pipeline.parallel.stage import StepContext
from asyncmem.pipeline.parcels import buffers_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from asyncmem.pipeline.parallel.schedule import Schedule
    from asyncmem.pipeline.parallel.seat import Parcel, Seat


class Post:
    """Where one step of one stage finds what it takes."""

    __slots__ = ("came", "parcel")

    def __init__(self) -> None:
        self.came = anyio.Event()
        self.parcel: Parcel | None = None

    def put(self, parcel: Parcel) -> None:
        """Leave it, for whoever waits."""
        self.parcel = parcel
        self.came.set()

    async def take(self) -> Parcel:
        """Wait for it. Cancelled: it stays."""
        await self.came.wait()
        parcel, self.parcel = self.parcel, None
        assert parcel is not None
        return parcel


class Run:
    """Takes micro-batches through the seats. Nothing of it outlives `main`."""

    def __init__(
        self,
        schedule: Schedule,
        seats: Sequence[Seat],
        micro_batches: Sequence[object],
        *,
        timeout: float | None,
        ahead: int | None,
    ) -> None:
        self._schedule = schedule
        self._seats = seats
        self._micro_batches = micro_batches
        self._timeout = timeout
        self._ahead = ahead
        self._last = len(seats) - 1
        self._posts = {
            (at, step): Post()
            for at, steps in enumerate(schedule.steps)
            for step in steps
            if at != (0 if step.forward else self._last)
        }
        self._scope: anyio.CancelScope | None = None
        self._error: StepError | None = None
        self._results: list[object] = [None] * schedule.micro_batches
        self._done = False

    async def main(self) -> list[object]:
        """Run all stages until everything is done, and answer what the last one's forwards answered.

        Raises:
            StepError: A step failed. Everything is free then.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                for at, seat in enumerate(self._seats):
                    tasks.start_soon(self._take_steps, at, name=seat.name)
            if self._error is not None:
                raise self._error
            self._done = True
        finally:
            self._free_what_is_left()
        return self._results

    # -- a stage's task ------------------------------------------------------------------------------------------------

    async def _take_steps(self, at: int) -> None:
        seat = self._seats[at]
        for number, step in enumerate(self._schedule.steps[at]):
            if self._ahead is not None and not await self._follow(seat, number + 1 - self._ahead):
                return
            try:
                await (self._forward if step.forward else self._backward)(at, seat, step)
            except BaseException as error:
                empty_frames(error)
                if not is_its_own(error):
                    raise
                self._fail(seat, step, error)
                return
        await self._follow(seat, len(seat.taken))

    async def _forward(self, at: int, seat: Seat, step: Step) -> None:
        parcel = await self._posts[at, step].take() if at else None
        item = self._micro_batches[step.micro_batch] if parcel is None else parcel.item
        memory = seat.memory(step)
        context = StepContext(seat.name, step, seat.streams.compute, memory)
        taken, callers = ((), item) if parcel is None else (item, ())
        answer: object = ()
        try:
            began = self._begin(seat, parcel)
            for buffer in buffers_in(callers):
                buffer.use_on(seat.streams.compute)
            answer = await self._limited(seat.stage.forward(item, context))
            memory.need_answer(answer, taken)
            await self._pass_on(at, seat, context, answer, parcel, began)
        finally:
            seat.kept[step.micro_batch] = context.saved
            seat.leave((taken, answer), but=(context.saved, self._results[step.micro_batch], callers))

    async def _backward(self, at: int, seat: Seat, step: Step) -> None:
        parcel = await self._posts[at, step].take() if at < self._last else None
        gradient = None if parcel is None else parcel.item
        saved = seat.kept.pop(step.micro_batch)
        memory = seat.memory(step)
        context = StepContext(seat.name, step, seat.streams.compute, memory)
        answer: object = ()
        try:
            began = self._begin(seat, parcel)
            answer = await self._limited(seat.stage.backward(gradient, saved, context))
            memory.need_answer(answer, gradient)
            await self._pass_on(at, seat, context, answer, parcel, began)
        finally:
            seat.leave((gradient, saved, context.saved, answer), but=self._results[step.micro_batch])

    def _begin(self, seat: Seat, parcel: Parcel | None) -> float:
        if parcel is not None:
            seat.streams.compute.wait(parcel.fence)
            settle(parcel.item, seat.streams.compute)
        return seat.device.now

    async def _pass_on(
        self, at: int, seat: Seat, context: StepContext, answer: object, parcel: Parcel | None, began: float
    ) -> None:
        """Note that a step has been queued, and send what it answered where it belongs."""
        step, ended = context.step, seat.streams.compute.record()
        taken = Taken(
            step,
            called=began,
            source=None if parcel is None else parcel.source,
            arrived=None if parcel is None else parcel.arrived,
            ended=Moment(ended, seat.device),
            work=context.work,
        )
        seat.taken.append(taken)
        to = at + 1 if step.forward else at - 1
        if to > self._last:
            self._results[step.micro_batch] = answer
        elif to >= 0:
            sent = await seat.send(answer, step, ended, self._seats[to])
            taken.sent = sent.arrived
            taken.nbytes = sum(buffer.nbytes for buffer in buffers_in(answer))
            self._posts[to, step].put(sent)

    # -- the device, at a distance -------------------------------------------------------------------------------------

    async def _follow(self, seat: Seat, upto: int) -> bool:
        """Wait until the device is done with so many steps; False where one of them failed."""
        while seat.followed < upto:
            taken = seat.taken[seat.followed]
            try:
                if taken.arrived is not None:
                    await taken.arrived.wait()  # whoever sends it is held to the limit
                await self._limited(_over(taken))
            except BaseException as error:
                if not is_its_own(error):
                    raise
                self._fail(seat, taken.step, error)
                return False
            seat.followed += 1
        return True

    async def _limited(self, work: Awaitable[object]) -> object:
        with anyio.move_on_after(self._timeout) as limit:
            return await work
        assert limit.cancelled_caught
        raise TimeoutError(f"it took longer than {format_duration(self._timeout or 0.0)}")

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _fail(self, seat: Seat, step: Step, error: BaseException) -> None:
        empty_frames(error)
        if self._error is None:
            self._error = StepError(seat.name, step.micro_batch, forward=step.forward, reason=said(error))
            self._error.__cause__ = error
            assert self._scope is not None
            self._scope.cancel()

    def _free_what_is_left(self) -> None:
        for post in self._posts.values():
            if post.parcel is not None:
                free(post.parcel.item)
        for seat in self._seats:
            seat.free_all()
        if not self._done:
            free(self._results)


async def _over(taken: Taken) -> None:
    await taken.ended.wait()
    for work in taken.work:
        await work
    taken.work.clear()
    if taken.sent is not None:
        await taken.sent.wait()
