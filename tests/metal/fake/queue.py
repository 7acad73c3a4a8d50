"""Queues and the device that makes them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .bridge import method, objc_object, temporary
from .memory import MTLBuffer
from .work import MTLCommandBuffer, MTLSharedEvent

if TYPE_CHECKING:
    from .machine import FakeMetal


class MTLCommandQueue(objc_object):
    def __init__(self, gpu: MTLDevice, count: int) -> None:
        super().__init__(gpu.machine, new=True)
        self._gpu = gpu
        self.waiting: deque[MTLCommandBuffer] = deque()
        self.outstanding = 0
        self._count = count

    @temporary
    def commandBuffer(self) -> MTLCommandBuffer:
        self.machine.wait(lambda: self.outstanding < self._count)
        self.outstanding += 1
        return MTLCommandBuffer(self.machine, self)

    @method
    def device(self) -> MTLDevice:
        return self._gpu


class MTLDevice(objc_object):
    def __init__(self, machine: FakeMetal, number: int) -> None:
        super().__init__(machine)
        self._number = number

    @method
    def name(self) -> str:
        return "Fake GPU"

    @method
    def registryID(self) -> int:
        return self._number

    @method
    def hasUnifiedMemory(self) -> bool:
        return True

    @method
    def recommendedMaxWorkingSetSize(self) -> int:
        return self.machine.total

    @method
    def currentAllocatedSize(self) -> int:
        return self.machine.allocated

    @method
    def maxBufferLength(self) -> int:
        return self.machine.most

    @method
    def newBufferWithLength_options_(self, nbytes: int, options: int) -> MTLBuffer | None:
        if options:
            self.machine.note(f"storage {options} cannot be read by the host")
        if nbytes > min(self.machine.most, self.machine.left):
            return None
        return MTLBuffer(self.machine, nbytes)

    @method
    def newCommandQueueWithMaxCommandBufferCount_(self, count: int) -> MTLCommandQueue:
        return MTLCommandQueue(self, count)

    @method
    def newCommandQueue(self) -> MTLCommandQueue:
        return MTLCommandQueue(self, 64)

    @method
    def newSharedEvent(self) -> MTLSharedEvent:
        return MTLSharedEvent(self.machine)
