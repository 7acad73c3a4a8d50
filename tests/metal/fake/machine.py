"""The machine: one GPU, the thread that runs its queues, and the faults it was told to have."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import bridge
from .queue import MTLCommandQueue, MTLDevice
from .work import COMPLETED, FAILED, MTLCommandBuffer, MTLSharedEvent, NSError

TIMED_OUT = "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"

_numbers = itertools.count(1)


class FakeMetal:
    """One machine.

    Attributes:
        total: What `recommendedMaxWorkingSetSize` says.
        most: What `maxBufferLength` says.
        allocated: Bytes of all buffers that are there.
        knows_who_owns: Whether PyObjC knows that new objects are owned by their caller, which it does from 12.2.3 on.
        delay: Seconds that each command buffer takes at least.
        calls: How often each method was called.
        busy: The queues that have something to run.
        wrong: What Metal would not have forgiven.
    """

    def __init__(self, *, gpus: int = 1, knows_who_owns: bool = False) -> None:
        self.total = 1 << 30
        self.most = 1 << 29
        self.spare = 1 << 40
        self.allocated = 0
        self.knows_who_owns = knows_who_owns
        self.delay = 0.0
        self.calls: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gpus = [MTLDevice(self, next(_numbers)) for _ in range(gpus)]
        self._faults: dict[str, tuple[int, str]] = {}
        self._failing: list[int] = []
        self.busy: list[MTLCommandQueue] = []
        self._changed = threading.Condition(threading.RLock())
        self._running = False
        self._stopped = False

    @property
    def left(self) -> int:
        """Bytes that can still be had, which may be more than the device uses well."""
        return self.spare - self.allocated

    def modules(self) -> dict[str, ModuleType]:
        """Make the modules that stand in for PyObjC's."""
        metal, objc = ModuleType("Metal"), ModuleType("objc")
        for one in (metal, objc):
            one.__spec__ = ModuleSpec(one.__name__, None)
        for name in ("autorelease_pool", "error", "objc_object", "pyobjc_id"):
            setattr(objc, name, getattr(bridge, name))
        vars(metal)["MTLCreateSystemDefaultDevice"] = lambda: self.gpus[0] if self.gpus else None
        vars(metal)["MTLCopyAllDevices"] = lambda: tuple(reversed(self.gpus))
        return {"Metal": metal, "objc": objc}

    # -- faults --------------------------------------------------------------------------------------------------------

    def fail(self, name: str, *, nth: int = 1, words: str = "") -> None:
        """Let the `nth` call of a method from now on raise PyObjC's error with these words, or return nil without."""
        self._faults[name] = (self.calls[name] + nth, words)

    def fail_work(self, *, nth: int = 1) -> None:
        """Let the `nth` command buffer that comes to run from now on fail, with all that it should have done undone."""
        self._failing.append(nth)

    def enter(self, name: str) -> bool:
        """Count a call, and tell whether it returns nil."""
        with self._changed:
            self.calls[name] += 1
            due, words = self._faults.get(name, (0, ""))
            if self.calls[name] != due:
                return False
            if words:
                raise bridge.error(words)
            return True

    def note(self, what: str) -> None:
        """Note what Metal would not have forgiven."""
        self.wrong.append(what)

    # -- work ----------------------------------------------------------------------------------------------------------

    def signal(self, event: MTLSharedEvent, value: int) -> None:
        """Set an event from the host."""
        with self._changed:
            event.value = value
            self._changed.notify_all()

    def commit(self, queue: MTLCommandQueue, work: MTLCommandBuffer) -> None:
        """Hand work in."""
        with self._changed:
            queue.waiting.append(work)
            if queue not in self.busy:
                self.busy.append(queue)
            if not self._running and not self._stopped:
                self._running = True
                # Metal's own threads are not Python's, so this one is not to be listed as one.
                _thread.start_new_thread(self._serve, ())
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Hold up the caller."""
        with self._changed:
            self._changed.wait_for(until)

    def stop(self) -> None:
        """End the thread, whatever is left to do."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _serve(self) -> None:
        with self._changed:
            while not self._stopped:
                ran = [self._advance(queue) for queue in list(self.busy)]
                if not any(ran):
                    self._changed.wait()

    def _advance(self, queue: MTLCommandQueue) -> bool:
        """Run what can be run of the first command buffer, and tell whether that is anything."""
        work = queue.waiting[0]
        if self._is_to_fail(work):
            work.failure = NSError(
                self, 2, "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
            )
            return self._end(queue, work, FAILED)
        ran = False
        while work.steps:
            if not work.steps[0]():
                return ran
            del work.steps[0]
            ran = True
        if self.delay:
            self._changed.release()
            time.sleep(self.delay)
            self._changed.acquire()
        return self._end(queue, work, COMPLETED)

    def _end(self, queue: MTLCommandQueue, work: MTLCommandBuffer, state: int) -> bool:
        queue.waiting.popleft()
        if not queue.waiting:
            self.busy.remove(queue)
        work.end(state)
        self._changed.notify_all()
        return True

    def _is_to_fail(self, work: MTLCommandBuffer) -> bool:
        """Count command buffers as they come to run, which each does once."""
        if work.begun:
            return False
        work.begun = True
        self._failing = [nth - 1 for nth in self._failing]
        if 0 not in self._failing:
            return False
        self._failing.remove(0)
        return True
