"""Actors on asyncio: one class for each way to be cancelled, each knowing what counts as a proper end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import final

import anyio

from asyncmem.errors import RequestCancelled
from tests.sweeps.stage import Astray, Cancellable, Kind

Play = Callable[[], Awaitable[object]]


class Actor(ABC):
    """A coroutine of a scenario that can be struck once. A strike before its first step may do nothing."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.struck = False
        self.request: Cancellable | None = None

    @abstractmethod
    async def run(self) -> None:
        """Play the part; the task of the actor runs this."""

    @abstractmethod
    def strike(self) -> None:
        """Cancel the part; called between two steps, outside of any task."""

    def judge(self, task: asyncio.Task[None]) -> None:
        """Raise what went wrong in the finished `task`."""
        if task.cancelled():
            raise Astray(f"{task.get_name()} ended cancelled though its own task was not the one to cancel")
        error = task.exception()
        if error is not None:
            raise error


@final
class TaskActor(Actor):
    """Struck by `task.cancel()`; once that answered True, the task has to end cancelled."""

    task: asyncio.Task[object] | None = None

    async def run(self) -> None:
        """Play without anything around."""
        self.task = asyncio.current_task()
        await self.play()

    def strike(self) -> None:
        """Cancel the task."""
        self.struck = self.task is not None and self.task.cancel()

    def judge(self, task: asyncio.Task[None]) -> None:
        """Require a cancelled end after a strike that answered True."""
        if not self.struck:
            super().judge(task)
        elif not task.cancelled():
            raise Astray(f"{task.get_name()} swallowed its cancellation and ended with {task.exception()!r}")


@final
class ScopeActor(Actor):
    """Struck by `anyio.CancelScope.cancel()`, which keeps cancelling every further await of the scope."""

    def __init__(self, play: Play) -> None:
        super().__init__(play)
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        """Play inside the scope."""
        with self.scope:
            await self.play()
        _expect_uncancelled()

    def strike(self) -> None:
        """Cancel the scope."""
        self.struck = True
        self.scope.cancel()


@final
class TimeoutActor(Actor):
    """Struck by the expiry of an `asyncio.timeout` around it."""

    def __init__(self, play: Play) -> None:
        super().__init__(play)
        self.timeout = asyncio.timeout(None)
        self.entered = False

    async def run(self) -> None:
        """Play inside the timeout, which expires at once where the strike came early."""
        try:
            async with self.timeout:
                self.entered = True
                if self.struck:
                    self.strike()
                await self.play()
        except TimeoutError:
            if not self.timeout.expired():
                raise
        _expect_uncancelled()

    def strike(self) -> None:
        """Let the timeout expire."""
        self.struck = True
        if self.entered:
            self.timeout.reschedule(asyncio.get_running_loop().time())


class SiblingFailed(Exception):
    """What the sibling of a struck `GroupActor` raises."""


@final
class GroupActor(Actor):
    """Struck by the failure of a sibling task in the same TaskGroup."""

    def __init__(self, play: Play) -> None:
        super().__init__(play)
        self.failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = self.listening = False

    async def run(self) -> None:
        """Play in a task of a group, beside a sibling that waits for its end."""
        try:
            async with asyncio.TaskGroup() as group:
                part = group.create_task(self._part())
                sibling = group.create_task(self._sibling())
                await asyncio.wait([part])
                sibling.cancel()
        except* SiblingFailed:
            # Whether the group takes its cancellation of this task back is not looked at: before CPython 3.13 it
            # forgets to when the sibling fails just as the group is being left.
            pass

    async def _part(self) -> None:
        self.begun = True
        await self.play()

    async def _sibling(self) -> None:
        self.listening = True
        await self.failing

    def strike(self) -> None:
        """Let the sibling fail, once there is something to cancel, and somebody to hear of it."""
        if self.begun and self.listening and not self.failing.done():
            self.struck = True
            self.failing.set_exception(SiblingFailed())
            self.failing.exception()  # seen, also where the part is over before the sibling comes to look


@final
class RequestActor(Actor):
    """Struck by `cancel()` of the request it watches; nothing happens to it while it watches none."""

    async def run(self) -> None:
        """Play without anything around, and take the end of a request that a strike cancelled."""
        try:
            await self.play()
        except RequestCancelled:
            if not self.struck:
                raise

    def strike(self) -> None:
        """Cancel the request that is watched now."""
        self.struck = self.request is not None and self.request.cancel()


def _expect_uncancelled() -> None:
    """Raise unless whoever cancelled this task has taken its cancellation back."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise Astray("the task went on with a cancellation still counted against it")


ACTORS: dict[Kind, type[Actor]] = {
    Kind.TASK: TaskActor,
    Kind.SCOPE: ScopeActor,
    Kind.TIMEOUT: TimeoutActor,
    Kind.GROUP: GroupActor,
    Kind.REQUEST: RequestActor,
}
