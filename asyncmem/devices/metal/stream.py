"""Streams of a Metal device (command queues, its own and others') and fences, and what the host does in their order.

Metal lets go of work that fails without a word: what it should have signalled stays unsignalled, for ever, and other
queues may be waiting for it. So all that is given to a queue here is remembered until its end was seen.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from asyncmem.devices.base import Fence
from asyncmem.devices.fences import PolledFence
from asyncmem.devices.streams import QueueStream, WorkQueue
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices.fences import FencePoller, FenceThread
    from asyncmem.devices.host import HostQueue
    from asyncmem.devices.metal.api import MTLCommandBuffer, MTLCommandQueue, MTLSharedEvent
    from asyncmem.devices.metal.device import Metal
    from asyncmem.devices.metal.driver import Driver, PhysicalDevice

SIGNALLED: Final = 1  # the value of an event that has happened once; it begins with 0
COMPLETED: Final = 4  # `MTLCommandBufferStatusCompleted`
FAILED: Final = 5  # `MTLCommandBufferStatusError`


@dataclass(slots=True, eq=False)
class Submitted:
    """One command buffer that was submitted."""

    position: int
    work: MTLCommandBuffer
    behind: tuple[MetalFence | HostWork, ...]
    signals: int
    """What it sets the queue's event to, or 0."""


@dataclass(slots=True, eq=False)
class HostWork:
    """What the host does in the order of a queue; it uses memory to its end, also if its place in the queue fails."""

    ended: bool = False

    def over(self) -> bool:
        """Return whether it has been done."""
        return self.ended

    def done(self) -> bool:
        """Return the same: it never fails."""
        return self.ended


@dataclass(slots=True)
class _Failure:
    first: int
    last: int
    """The last position that reports it; 0 until it is reported."""
    code: int
    words: str


@dataclass(eq=False)
class Commands(WorkQueue["MetalFence"]):
    """Submits work, and knows how far the queue is.

    Attributes:
        queue: Where it goes.
        host_queue: What the host does in the order of the queue.
        event: What later work of other queues waits for.
    """

    driver: Driver
    physical: PhysicalDevice
    poller: FencePoller
    queue: MTLCommandQueue
    host_queue: HostQueue

    def __post_init__(self) -> None:
        """Begin with nothing submitted."""
        self.key = self.driver.objc.pyobjc_id(self.queue)
        self.event: MTLSharedEvent = self.driver.make(self.physical.gpu.newSharedEvent)
        self._open: deque[Submitted] = deque()
        self._submitted = 0
        self._ended = 0
        self._marks = 0
        self._failures: list[_Failure] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and record here.
        self._lock = threading.RLock()

    @property
    def thread(self) -> FenceThread:
        """The thread of what the host does."""
        return self.host_queue

    def submit(self, encode: Callable[[MTLCommandBuffer], object], *behind: MetalFence | HostWork) -> None:
        """Submit what `encode` writes, which waits for these.

        Raises:
            DeviceError: Metal fails; nothing has been submitted then.
        """
        with self.driver.pool():
            work = self._begin()
            encode(work)
            with self._lock:
                self._commit(work, behind=behind)

    def hold(self, *behind: MetalFence) -> None:
        """Run nothing that any thread submits from now on before these fences are reached.

        Raises:
            DeviceError: Metal fails; nothing is held then.
        """
        call = self.driver.call
        self.submit(lambda to: [call(to.encodeWaitForEvent_value_, one.event, one.value) for one in behind], *behind)

    def record(self) -> MetalFence:
        """Return a fence behind all that was submitted so far, by any library.

        Raises:
            DeviceError: Metal fails.
        """
        with self.driver.pool():
            work = self._begin()
            with self._lock:
                # Others wait for a value and more, so no later value may be signalled before this one.
                self._marks += 1
                self.driver.call(work.encodeSignalEvent_value_, self.event, self._marks)
                return MetalFence(self, self._commit(work, signals=self._marks))

    def over(self, position: int) -> bool:
        """Return whether everything up to there has ended, in whatever way."""
        # What has ended is not asked for again: its queue may by now wait for one that waits for this point.
        if self._ended < position:
            self._look()
        return self._ended >= position

    def reached(self, position: int) -> bool:
        """Return whether everything up to there has ended.

        Raises:
            DeviceError: It has, and some of it, or of what it was behind, has failed. All fences report a failure
                whose work was submitted before it was first reported.
        """
        if not self.over(position):
            return False
        for failure in self._failures:
            if failure.first <= position <= (failure.last or position):
                failure.last = failure.last or self._submitted
                raise self.driver.failure("MTLCommandBuffer", failure.code, failure.words)
        return True

    def _begin(self) -> MTLCommandBuffer:
        # Also for callers that submit and never ask.
        self._look()
        return self.driver.get(self.queue.commandBuffer)

    def _commit(
        self, work: MTLCommandBuffer, *, behind: tuple[MetalFence | HostWork, ...] = (), signals: int = 0
    ) -> Submitted:
        self.driver.call(work.commit)
        self._submitted += 1
        submitted = Submitted(self._submitted, work, behind, signals)
        self._open.append(submitted)
        return submitted

    def _look(self) -> None:
        """Remove what has ended. No lock is held while others are asked, whose queues may wait for this one."""
        while True:
            try:
                first = self._open[0]
            except IndexError:
                return
            status = self.driver.call(first.work.status)
            # Asked in any case: the queue of one that fails has to note that.
            waits = [one for one in first.behind if not one.over()]
            if status not in (COMPLETED, FAILED) or waits:
                return
            with self.driver.pool():
                error = self.driver.failure_of(first.work) if status == FAILED else _error_before(first)
                self._remove_ended(first, error)
                del first

    def _remove_ended(self, first: Submitted, error: DeviceError | None) -> None:
        with self._lock:
            if not self._open or self._open[0] is not first:
                return  # another thread has
            if error is not None:
                self._failures.append(_Failure(first.position, 0, error.code, error.code_name))
                if first.signals:
                    self.driver.call(self.event.setSignaledValue_, max(first.signals, self.event.signaledValue()))
            self._open.popleft()
            self._ended = max(self._ended, first.position)


def _error_before(one: Submitted) -> DeviceError | None:
    """Return what failed of that which it was behind, and so is a failure of what is behind it."""
    for earlier in one.behind:
        try:
            earlier.done()
        except DeviceError as error:
            return error
    return None


class MetalFence(PolledFence):
    """A value of a queue's shared event.

    Attributes:
        event: For command buffers of other code: `MTLSharedEvent`.
        value: What to wait for with it.
    """

    def __init__(self, commands: Commands, mark: Submitted) -> None:
        """Use `MetalStream.record` instead."""
        super().__init__(commands.poller)
        self.event: MTLSharedEvent = commands.event
        self.value = mark.signals
        self.commands = commands
        self._position = mark.position
        self._reached = False

    def __repr__(self) -> str:
        return f"<MetalFence of value {self.value}>"

    def done(self) -> bool:
        """Ask Metal whether the queue has come this far.

        Raises:
            DeviceError: Work that the device submitted before the fence has failed.
        """
        if not self._reached:
            self._reached = self.commands.reached(self._position)
        return self._reached

    def over(self) -> bool:
        """Return whether there is nothing left to wait for: the point is reached, or never will be."""
        return self._reached or self.commands.over(self._position)


class MetalStream(QueueStream[MetalFence]):
    """A command queue. Work that was queued still runs when this object goes."""

    device: Metal
    work: Commands

    @property
    def queue(self) -> Any:  # noqa: ANN401 - PyObjC has no types
        """For kernels: `MTLCommandQueue`, of PyObjC."""
        return self.work.queue

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, MetalFence) or fence.commands.physical is not self.device.physical:
            raise InvalidRequest("fence", fence, f"a fence of {self.device.name!r}")
        if fence.commands is not self.work:
            self.work.hold(fence)

    def run_on_host(self, work: Callable[[], None]) -> None:
        """Call `work`, which must not raise, on a thread of the stream's, in the order of the queue.

        Raises:
            DeviceError: Metal fails; nothing is called then.
            InvalidRequest: The device is closed.
        """
        driver = self.device.driver
        gate, before = driver.make(self.device.mtl_device.newSharedEvent), self.record()
        # First a place in the thread's order, then one in the queue's: a call in between, be it of a finalizer on
        # this very thread, would else come before this in the one and behind it in the other, and both wait for ever.
        holds: SimpleQueue[bool] = SimpleQueue()
        ours = HostWork()
        self.work.host_queue.submit(partial(_carry_out, holds, before, work, ours, gate))
        given = False
        try:
            self.work.submit(partial(_wait_for, driver, gate), ours)
            given = True
        finally:
            holds.put(given)


def _wait_for(driver: Driver, gate: MTLSharedEvent, work: MTLCommandBuffer) -> None:
    driver.call(work.encodeWaitForEvent_value_, gate, SIGNALLED)


def _carry_out(
    holds: SimpleQueue[bool], before: MetalFence, work: Callable[[], None], ours: HostWork, gate: MTLSharedEvent
) -> None:
    if holds.get():  # the queue is held up for it
        before.outlast()  # what failed of it is raised where a fence behind this is waited for
        try:
            work()
        finally:
            ours.ended = True
            gate.setSignaledValue_(SIGNALLED)
