"""Streams of a Metal device (command queues, its own and others') and fences, and what the host does in their order.

Metal lets go of work that fails without a word: what it should have signalled stays unsignalled, for ever, and other
queues may be waiting for it. So all that is given to a queue here is remembered until its end was seen.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from asyncmem.devices.base import Fence, Stream
from asyncmem.devices.fences import PolledFence
from asyncmem.devices.host import HostQueue
from asyncmem.devices.metal.api import COMPLETED, FAILED, SIGNALLED
from asyncmem.devices.queue_device import QueueStreams
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices.fences import FencePoller
    from asyncmem.devices.metal.api import MTLCommandBuffer, MTLCommandQueue, MTLSharedEvent
    from asyncmem.devices.metal.device import Metal
    from asyncmem.devices.metal.driver import Driver, PhysicalDevice


@dataclass(slots=True, eq=False)
class Given:
    """One command buffer that was handed in."""

    position: int
    work: MTLCommandBuffer
    behind: tuple[MetalFence, ...]
    signals: int
    """What it sets the queue's event to, or 0."""


@dataclass(slots=True)
class _Failure:
    first: int
    last: int
    """Up to where it concerns the caller; 0 while none has been told."""
    code: int
    words: str


class Commands:
    """Hands work in, and tells how far the queue is.

    Attributes:
        queue: Where it goes.
        event: What later work of other queues waits for.
    """

    def __init__(self, driver: Driver, queue: MTLCommandQueue, event: MTLSharedEvent) -> None:
        """Begin with nothing handed in."""
        self.queue = queue
        self.event = event
        self._driver = driver
        self._open: deque[Given] = deque()
        self._given = 0
        self._ended = 0
        self._marks = 0
        self._failures: list[_Failure] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and record here.
        self._lock = threading.RLock()

    def give(self, encode: Callable[[MTLCommandBuffer], None]) -> None:
        """Hand in what `encode` writes.

        Raises:
            DeviceError: Metal fails; nothing has been handed in then.
        """
        with self._driver.pool():
            work = self._begin()
            encode(work)
            with self._lock:
                self._commit(work)

    def hold(self, *behind: MetalFence) -> None:
        """Let nothing run that is handed in from now on, by whomever, before these fences are reached.

        Raises:
            DeviceError: Metal fails; nothing is held then.
        """
        with self._driver.pool():
            work = self._begin()
            for fence in behind:
                self._driver.call(work.encodeWaitForEvent_value_, fence.event, fence.value)
            with self._lock:
                self._commit(work, behind=behind)

    def mark(self) -> Given:
        """Have the event signalled behind all that was handed in so far, by whomever.

        Raises:
            DeviceError: Metal fails.
        """
        with self._driver.pool():
            work = self._begin()
            with self._lock:
                # Others wait for a value and more, so no later value may be signalled before this one.
                self._marks += 1
                self._driver.call(work.encodeSignalEvent_value_, self.event, self._marks)
                return self._commit(work, signals=self._marks)

    def over(self, position: int) -> bool:
        """Return whether everything up to there has ended, in whatever way."""
        # What has ended is asked for no more: its queue may by now wait for one that waits for this point.
        if self._ended < position:
            self._look()
        return self._ended >= position

    def reached(self, position: int) -> bool:
        """Return whether everything up to there has ended.

        Raises:
            DeviceError: It has, and some of it has failed, or of what it was behind; everybody is told who asks for
                what was handed in before the first was told.
        """
        if not self.over(position):
            return False
        for failure in self._failures:
            if failure.first <= position <= (failure.last or position):
                failure.last = failure.last or self._given
                raise self._driver.failure("MTLCommandBuffer", failure.code, failure.words)
        return True

    def _begin(self) -> MTLCommandBuffer:
        # Also for those who hand in and never ask.
        self._look()
        return self._driver.get(self.queue.commandBuffer)

    def _commit(self, work: MTLCommandBuffer, *, behind: tuple[MetalFence, ...] = (), signals: int = 0) -> Given:
        self._driver.call(work.commit)
        self._given += 1
        given = Given(self._given, work, behind, signals)
        self._open.append(given)
        return given

    def _look(self) -> None:
        """Strike off what has ended. No lock is held while others are asked, whose queues may wait for this one."""
        while True:
            try:
                first = self._open[0]
            except IndexError:
                return
            status = self._driver.call(first.work.status)
            # Asked in any case: were one of these to fail, its queue would have to be told.
            waits = [fence for fence in first.behind if not fence.over()]
            if status not in (COMPLETED, FAILED) or waits:
                return
            with self._driver.pool():
                error = self._driver.failure_of(first.work) if status == FAILED else _error_before(first)
                self._strike_off(first, error)
                del first

    def _strike_off(self, first: Given, error: DeviceError | None) -> None:
        with self._lock:
            if not self._open or self._open[0] is not first:
                return  # another thread has
            if error is not None:
                self._failures.append(_Failure(first.position, 0, error.code, error.code_name))
                if first.signals:
                    self._driver.call(self.event.setSignaledValue_, max(first.signals, self.event.signaledValue()))
            self._open.popleft()
            self._ended = max(self._ended, first.position)


def _error_before(given: Given) -> DeviceError | None:
    """Return what failed of that which it was behind, and so is a failure of what is behind it."""
    for fence in given.behind:
        try:
            fence.done()
        except DeviceError as error:
            return error
    return None


class MetalFence(PolledFence):
    """A value of a queue's shared event.

    Attributes:
        event: For command buffers of other code: `MTLSharedEvent`.
        value: What to wait for with it.
    """

    def __init__(self, physical: PhysicalDevice, poller: FencePoller, commands: Commands, mark: Given) -> None:
        """Use `MetalStream.record` instead."""
        super().__init__(poller)
        self.event: MTLSharedEvent = commands.event
        self.value = mark.signals
        self.physical = physical
        self.commands = commands
        self._position = mark.position
        self._reached = False

    def __repr__(self) -> str:
        return f"<MetalFence of value {self.value}>"

    def done(self) -> bool:
        """Ask Metal whether the queue has come this far.

        Raises:
            DeviceError: Work that the device handed in before the fence has failed.
        """
        if not self._reached:
            self._reached = self.commands.reached(self._position)
        return self._reached

    def over(self) -> bool:
        """Return whether there is nothing left to wait for: the point is reached, or never will be."""
        return self._reached or self.commands.over(self._position)


DEPTH: Final = 1024
"""How many command buffers a queue takes before submitting blocks. Metal's default is 64, which a pool exceeds."""


class MetalStream(Stream):
    """A command queue. Work that was queued still runs when this object goes."""

    device: Metal

    def __init__(self, device: Metal, name: str, handle: int, commands: Commands, host_queue: HostQueue) -> None:
        """Use `Metal.create_stream` or `Metal.stream_of` instead."""
        self.device = device
        self.name = name
        self.handle = handle
        self.commands = commands
        self._host_queue = host_queue
        # Not at exit: daemon threads end with the interpreter anyway.
        weakref.finalize(self, host_queue.stop).atexit = False

    def __repr__(self) -> str:
        return f"<MetalStream {self.name!r} of {self.device.name}>"

    @property
    def queue(self) -> Any:  # noqa: ANN401 - PyObjC has no types
        """For kernels: `MTLCommandQueue`, of PyObjC."""
        return self.commands.queue

    def record(self) -> MetalFence:
        """Return a fence behind everything handed in to the queue so far, by any library."""
        return self.device.streams.record(self.commands)

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, MetalFence) or fence.physical is not self.device.physical:
            raise InvalidRequest("fence", fence, f"a fence of {self.device.name!r}")
        if fence.commands is not self.commands:
            self.commands.hold(fence)

    def run_on_host(self, work: Callable[[], None]) -> None:
        """Have a thread of the stream's call `work`, which must not raise, in the order of the queue.

        Raises:
            DeviceError: Metal fails; nothing is called then.
            InvalidRequest: The device is closed.
        """
        driver = self.device.driver
        gate, before = driver.make(self.device.mtl_device.newSharedEvent), self.record()
        # First a place in the thread's order, then one in the queue's: a call in between, be it of a finalizer on
        # this very thread, would else come before this in the one and behind it in the other, and both wait for ever.
        holds: SimpleQueue[bool] = SimpleQueue()
        self._host_queue.submit(partial(_carry_out, holds, before, work, gate))
        given = False
        try:
            self.commands.give(partial(_wait_for, driver, gate))
            given = True
        finally:
            holds.put(given)


def _wait_for(driver: Driver, gate: MTLSharedEvent, work: MTLCommandBuffer) -> None:
    driver.call(work.encodeWaitForEvent_value_, gate, SIGNALLED)


def _carry_out(holds: SimpleQueue[bool], before: MetalFence, work: Callable[[], None], gate: MTLSharedEvent) -> None:
    if holds.get():  # the queue is held up for it
        before.outlast()  # what failed of it is raised where a fence behind this is waited for
        try:
            work()
        finally:
            gate.setSignaledValue_(SIGNALLED)


class MetalStreams(QueueStreams[MetalStream, Commands, MetalFence]):
    """Makes and finds streams."""

    def __init__(self, device: Metal, driver: Driver, physical: PhysicalDevice, poller: FencePoller) -> None:
        """Know none."""
        super().__init__(device.name)
        self._device = weakref.ref(device)
        self._driver = driver
        self._physical = physical
        self._poller = poller
        self._host_queues: weakref.WeakSet[HostQueue] = weakref.WeakSet()
        # Where all others are waited for.
        self._meeting = self.new_queue()

    def find(self, source: object) -> MetalStream:
        """Return the stream that `source` means; see `Metal.stream_of`."""
        objc = self._driver.objc
        if not isinstance(source, objc.objc_object):
            return self.book.find(source)
        return self.adopt(objc.pyobjc_id(source), partial(self._adopted, source))

    def record(self, queue: Commands) -> MetalFence:
        """Return a fence behind everything in a queue so far."""
        return MetalFence(self._physical, self._poller, queue, queue.mark())

    def record_all(self) -> MetalFence:
        """Return a fence behind everything in all queues so far, those of streams that are gone too."""
        each = self.record_each()
        self._meeting.hold(*each)
        return self.record(self._meeting)

    def new_queue(self) -> Commands:
        """Make a queue."""
        return self._over(self._driver.make(self._physical.gpu.newCommandQueueWithMaxCommandBufferCount_, DEPTH))

    def key_of(self, queue: Commands) -> int:
        """Return the address of Metal's object."""
        return int(self._driver.objc.pyobjc_id(queue.queue))

    def stream_over(self, queue: Commands, name: str, handle: int) -> MetalStream:
        """Make the stream that stands for a queue."""
        device = self._device()
        assert device is not None
        host_queue = HostQueue(f"asyncmem {device.name} {name} copies")
        self._host_queues.add(host_queue)
        return MetalStream(device, name, handle, queue, host_queue)

    def end_threads(self) -> None:
        """Wait for the threads of all streams (blocks)."""
        queues = list(self._host_queues)
        for queue in queues:
            queue.stop()
        for queue in queues:
            queue.join()

    def _adopted(self, source: MTLCommandQueue) -> Commands:
        driver, wanted = self._driver, f"a command queue of {self._driver.device!r}"
        with driver.pool():
            if not source.respondsToSelector_("commandBuffer"):  # type: ignore[attr-defined]  # all objects have that
                raise InvalidRequest("stream", source, wanted)
            if driver.call(source.device).registryID() != self._physical.gpu.registryID():
                raise InvalidRequest("stream", source, wanted)
            return self._over(source)

    def _over(self, queue: MTLCommandQueue) -> Commands:
        return Commands(self._driver, queue, self._driver.make(self._physical.gpu.newSharedEvent))
