"""Small weighted queues to prove the sweeps on: one that is right, and the ways in which public pools went wrong."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from asyncmem.errors import RequestCancelled


class Slot(Protocol):
    """Where one waiter sleeps. Granting it wakes it; a sleeper may be cancelled after its grant (on asyncio)."""

    nbytes: int
    granted: bool
    refused: bool

    def wake(self) -> None: ...

    async def sleep(self) -> None: ...


class AsyncioSlot:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.granted, self.refused = nbytes, False, False
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def sleep(self) -> None:
        await self._future


class TrioSlot:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.granted, self.refused = nbytes, False, False
        self._wakeup = trio.Event()

    def wake(self) -> None:
        self._wakeup.set()

    async def sleep(self) -> None:
        await self._wakeup.wait()


class Ask:
    """A request of a `Fifo`: awaitable once, cancellable by its own method."""

    def __init__(self, fifo: Fifo, nbytes: int) -> None:
        self._fifo, self._nbytes = fifo, nbytes
        self._slot: Slot | None = None
        self._done = False

    async def wait(self) -> None:
        self._slot = self._fifo.enter(self._nbytes)
        try:
            if not self._slot.granted:
                await self._fifo.sleep(self._slot)
        finally:
            self._done = True
        if self._slot.refused:
            raise RequestCancelled(pool="fifo", asked=self._nbytes)

    def cancel(self) -> bool:
        if self._done or self._slot is None or self._slot.granted:
            return False
        self._slot.refused = True
        self._fifo.leave(self._slot)
        self._slot.wake()
        return True


class Fifo:
    """First come, first served; whoever releases books the grant before it wakes the waiter."""

    def __init__(self, size: int, slot: Callable[[int], Slot] = AsyncioSlot) -> None:
        self.size = self.free = size
        self.least_free = size
        self.waiters: deque[Slot] = deque()
        self._slot = slot

    def ask(self, nbytes: int) -> Ask:
        return Ask(self, nbytes)

    def enter(self, nbytes: int) -> Slot:
        slot = self._slot(nbytes)
        self.waiters.append(slot)
        self.pump()
        return slot

    async def sleep(self, slot: Slot) -> None:
        try:
            await slot.sleep()
        except BaseException:
            self.cancelled(slot)
            raise

    def cancelled(self, slot: Slot) -> None:
        if slot.granted:
            self.release(slot.nbytes)
        else:
            self.leave(slot)

    def leave(self, slot: Slot) -> None:
        if slot in self.waiters:
            self.waiters.remove(slot)
        self.pump()

    def release(self, nbytes: int) -> None:
        self.free += nbytes
        self.pump()

    def take(self, nbytes: int) -> None:
        self.free -= nbytes
        self.least_free = min(self.least_free, self.free)

    def pump(self) -> None:
        while self.waiters and self.waiters[0].nbytes <= self.free:
            slot = self.waiters.popleft()
            self.take(slot.nbytes)
            slot.granted = True
            slot.wake()

    def check(self) -> None:
        """Raise unless everything came back and was never handed out twice."""
        assert not self.waiters, f"{len(self.waiters)} still wait"
        assert self.free == self.size, f"{self.size - self.free} of {self.size} bytes are lost"
        assert self.least_free >= 0, f"{-self.least_free} bytes more than there are were handed out"


class LeakyGrant(Fifo):
    """Broken: a waiter that is cancelled after its grant keeps the bytes for ever (psycopg_pool #503)."""

    def cancelled(self, slot: Slot) -> None:
        if not slot.granted:
            self.leave(slot)


class SilentHead(Fifo):
    """Broken: a cancelled head leaves without looking who is next (go #37852, embassy #6964)."""

    def leave(self, slot: Slot) -> None:
        if slot in self.waiters:
            self.waiters.remove(slot)


class Swallower(Fifo):
    """Broken: a cancellation after the grant is absorbed (psycopg_pool #1275, #1401)."""

    async def sleep(self, slot: Slot) -> None:
        try:
            await slot.sleep()
        except BaseException:
            if slot.granted:
                return
            self.leave(slot)
            raise


class WakeThenRecheck(Fifo):
    """Broken: a release wakes the head, which books for itself later, or never if it is cancelled (aiohttp)."""

    def pump(self) -> None:
        if self.waiters and self.waiters[0].nbytes <= self.free:
            self.waiters.popleft().wake()

    def enter(self, nbytes: int) -> Slot:
        slot = self._slot(nbytes)
        if nbytes <= self.free:
            self.take(nbytes)
            slot.granted = True
        else:
            self.waiters.append(slot)
        return slot

    async def sleep(self, slot: Slot) -> None:
        try:
            await slot.sleep()
        except BaseException:
            if slot in self.waiters:
                self.waiters.remove(slot)
            raise
        if not slot.refused:
            self.take(slot.nbytes)


class Overgranting(WakeThenRecheck):
    """Broken as anyio #1170 was: the woken books without looking whether a newcomer was faster."""

    async def sleep(self, slot: Slot) -> None:
        try:
            await slot.sleep()
        except BaseException:
            if slot in self.waiters:
                self.waiters.remove(slot)
            else:
                self.pump()
            raise
        if not slot.refused:
            self.take(slot.nbytes)
            self.pump()
