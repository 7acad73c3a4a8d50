"""Streams of a Metal device: command queues, its own and those of other code, and what the host does in their order."""

from __future__ import annotations

import weakref
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Fence, Stream
from asyncmem.devices.lane import Lane
from asyncmem.devices.metal.api import SIGNALLED
from asyncmem.devices.metal.commands import Commands
from asyncmem.devices.metal.fence import MetalFence
from asyncmem.devices.queues import QueueStreams
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices.metal.api import MTLCommandBuffer, MTLCommandQueue, MTLSharedEvent
    from asyncmem.devices.metal.device import Metal
    from asyncmem.devices.metal.driver import Driver
    from asyncmem.devices.metal.place import Place
    from asyncmem.devices.watcher import Watcher

DEPTH: Final = 1024
"""How much work a queue takes before it holds up whoever has more. Metal's own choice is 64, which a pool exceeds."""


class MetalStream(Stream):
    """A command queue. Work that was queued still runs when this object goes."""

    device: Metal

    def __init__(self, device: Metal, name: str, handle: int, commands: Commands, lane: Lane) -> None:
        """Use `Metal.create_stream` or `Metal.stream_of` instead."""
        self.device = device
        self.name = name
        self.handle = handle
        self.commands = commands
        self._lane = lane
        # Not at exit: daemon threads end with the interpreter anyway.
        weakref.finalize(self, lane.stop).atexit = False

    def __repr__(self) -> str:
        return f"<MetalStream {self.name!r} of {self.device.name}>"

    @property
    def queue(self) -> MTLCommandQueue:
        """For kernels: `MTLCommandQueue`."""
        return self.commands.queue

    def record(self) -> MetalFence:
        """Return a fence behind everything handed in to the queue so far, by whomever."""
        return self.device.streams.record(self.commands)

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, MetalFence) or fence.place is not self.device.place:
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
        # First a place in the thread's order, then one in the queue's: whoever comes in between, be it a finalizer on
        # this very thread, would else come before this in the one and behind it in the other, and both wait for ever.
        holds: SimpleQueue[bool] = SimpleQueue()
        self._lane.submit(partial(_carry_out, holds, before, work, gate))
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
        before.outlast()  # what failed of it is for whoever waits for a fence behind this
        try:
            work()
        finally:
            gate.setSignaledValue_(SIGNALLED)


class MetalStreams(QueueStreams[MetalStream, Commands, MetalFence]):
    """Makes and finds streams."""

    def __init__(self, device: Metal, driver: Driver, place: Place, watcher: Watcher) -> None:
        """Know none."""
        super().__init__(device.name)
        self._device = weakref.ref(device)
        self._driver = driver
        self._place = place
        self._watcher = watcher
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
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
        return MetalFence(self._place, self._watcher, queue, queue.mark())

    def record_all(self) -> MetalFence:
        """Return a fence behind everything in all queues so far, those of streams that are gone too."""
        each = self.record_each()
        self._meeting.hold(*each)
        return self.record(self._meeting)

    def new_queue(self) -> Commands:
        """Make a queue."""
        return self._over(self._driver.make(self._place.gpu.newCommandQueueWithMaxCommandBufferCount_, DEPTH))

    def key_of(self, queue: Commands) -> int:
        """Return the address of Metal's object."""
        return int(self._driver.objc.pyobjc_id(queue.queue))

    def stream_over(self, queue: Commands, name: str, handle: int) -> MetalStream:
        """Make the stream that stands for a queue."""
        device = self._device()
        assert device is not None
        lane = Lane(f"asyncmem {device.name} {name} copies")
        self._lanes.add(lane)
        return MetalStream(device, name, handle, queue, lane)

    def end_threads(self) -> None:
        """Wait for the threads of all streams (blocks)."""
        lanes = list(self._lanes)
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join()

    def _adopted(self, source: MTLCommandQueue) -> Commands:
        driver, wanted = self._driver, f"a command queue of {self._driver.device!r}"
        with driver.pool():
            if not source.respondsToSelector_("commandBuffer"):  # type: ignore[attr-defined]  # all objects have that
                raise InvalidRequest("stream", source, wanted)
            if driver.call(source.device).registryID() != self._place.gpu.registryID():
                raise InvalidRequest("stream", source, wanted)
            return self._over(source)

    def _over(self, queue: MTLCommandQueue) -> Commands:
        return Commands(self._driver, queue, self._driver.make(self._place.gpu.newSharedEvent))
