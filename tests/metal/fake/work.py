"""Command buffers, what is written into them, and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .bridge import method, objc_object, temporary

if TYPE_CHECKING:
    from .machine import FakeMetal
    from .memory import Memory, MTLBuffer
    from .queue import MTLCommandQueue

NOT_ENQUEUED, COMMITTED, COMPLETED, FAILED = 0, 2, 4, 5


class MTLSharedEvent(objc_object):
    def __init__(self, machine: FakeMetal) -> None:
        super().__init__(machine, new=True)
        self.value = 0

    @method
    def signaledValue(self) -> int:
        return self.value

    @method
    def setSignaledValue_(self, value: int) -> None:
        self.machine.signal(self, max(value, self.value))


class NSError(objc_object):
    def __init__(self, machine: FakeMetal, code: int, words: str) -> None:
        super().__init__(machine)
        self._code, self._words = code, words

    @method
    def code(self) -> int:
        return self._code

    @temporary
    def localizedDescription(self) -> str:
        return self._words


class MTLCommandBuffer(objc_object):
    """Steps that return whether they are done; one that is not is asked again."""

    def __init__(self, machine: FakeMetal, queue: MTLCommandQueue) -> None:
        super().__init__(machine)
        self.state = NOT_ENQUEUED
        self.steps: list[Callable[[], bool]] = []
        self.memory: list[Memory] = []
        self.failure: NSError | None = None
        self.encoding = False
        self.begun = False
        self._queue = queue

    @temporary
    def blitCommandEncoder(self) -> MTLBlitCommandEncoder:
        self.open_for("blitCommandEncoder")
        self.encoding = True
        return MTLBlitCommandEncoder(self.machine, self)

    @method
    def encodeSignalEvent_value_(self, event: MTLSharedEvent, value: int) -> None:
        self.open_for("encodeSignalEvent:value:")

        def signal() -> bool:
            if value < event.value:
                self.machine.note(f"an event went back from {event.value} to {value}")
            event.value = value
            return True

        self.steps.append(signal)

    @method
    def encodeWaitForEvent_value_(self, event: MTLSharedEvent, value: int) -> None:
        self.open_for("encodeWaitForEvent:value:")
        self.steps.append(lambda: event.value >= value)

    @method
    def commit(self) -> None:
        self.open_for("commit")
        self.state = COMMITTED
        for memory in self.memory:
            memory.retain()
            memory.used_by += 1
        self.machine.commit(self._queue, self)

    @method
    def status(self) -> int:
        return self.state

    @temporary
    def error(self) -> NSError | None:
        return self.failure

    def open_for(self, what: str) -> None:
        if self.encoding or self.state != NOT_ENQUEUED:
            self.machine.note(f"{what} on a command buffer that is being encoded or was committed")

    def end(self, state: int) -> None:
        """Let go of all that it used."""
        self.steps.clear()
        for memory in self.memory:
            memory.used_by -= 1
            memory.release()
        self.memory.clear()
        self.state = state
        self._queue.outstanding -= 1

    def __del__(self) -> None:
        if self.encoding:
            self.machine.note("an encoder was let go of before its end")
        if self.state == NOT_ENQUEUED:
            self._queue.outstanding -= 1


class MTLBlitCommandEncoder(objc_object):
    def __init__(self, machine: FakeMetal, work: MTLCommandBuffer) -> None:
        super().__init__(machine)
        self._work = work

    @method
    def fillBuffer_range_value_(self, buffer: MTLBuffer, where: tuple[int, int], value: int) -> None:
        if not -128 <= value <= 127:
            raise ValueError(f"depythonifying 'char', got {value}")  # as PyObjC does
        start, count = where
        there = self._part(buffer, start, count)

        def fill() -> bool:
            there[:] = value % 256
            return True

        self._work.steps.append(fill)

    @method
    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: MTLBuffer, source_offset: int, target: MTLBuffer, target_offset: int, nbytes: int
    ) -> None:
        here, there = self._part(source, source_offset, nbytes), self._part(target, target_offset, nbytes)

        def copy() -> bool:
            there[:] = here
            return True

        self._work.steps.append(copy)

    @method
    def endEncoding(self) -> None:
        self._work.encoding = False

    def _part(self, buffer: MTLBuffer, start: int, count: int):  # noqa: ANN202  # an array of bytes
        if start % 4 or count % 4 or count <= 0:
            self.machine.note(f"{count} bytes from {start} are no whole words")
        if start < 0 or start + count > buffer.memory.nbytes:
            self.machine.note(f"{count} bytes from {start} are not all in a buffer of {buffer.memory.nbytes}")
        self._work.memory.append(buffer.memory)
        return buffer.memory.bytes[start : start + count]
