"""The pool's background thread, which makes the calls that block, and what interrupts of the main thread may not end.

The worker is a thread and not a task: driver calls block, and a task held open across a block would tie opening and
closing a pool to one task. It keeps the pool alive only while it works; a pool that is dropped without being closed
ends it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from functools import partial, wraps
from typing import TYPE_CHECKING, Final, ParamSpec, TypeAlias, TypeVar, cast

from asyncmem.core import hold_interrupts, on_main_thread
from asyncmem.pool.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

TICK = 0.25  # seconds between looks at an idle pool
_SOON = 0.01  # and until the next one after a job, which may be worth looking after
_ROOM = 100 << 10  # bytes; the C library gives back what is more than 128 KiB at a heap's end


class Worker:
    """Runs jobs in order on one thread, and `tick` when there are none.

    Args:
        name: The thread's name.
        tick: Called a while after a job and when there are none, between jobs if need be; returns the seconds until the
            next time, None when the thread is no longer needed.
        died: Called with the error that a job raised, because jobs handle what they expect. Other jobs are done all the
            same: a thread may wait for them.

    Attributes:
        submit: Has a job run soon. From any thread; not in Python, so that an interrupt comes before it or after it.
    """

    def __init__(self, name: str, tick: Callable[[], float | None], died: Callable[[BaseException], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.submit: Callable[[Callable[[], object]], None] = self._jobs.put
        self._tick = tick
        self._died = died
        self._dead = False
        self._due = 0.0  # when to tick next
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread takes jobs."""
        return self._thread.is_alive() and not self._dead

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout: float | None = None) -> bool:
        """End the thread after the jobs that were submitted; says whether it has ended.

        Args:
            timeout: The most seconds that this blocks for; 0 does not block, None has no bound.
        """
        self._jobs.put(None)
        if timeout != 0 and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # The C library gives each thread a heap of its own, which grows by the page. Beside a CUDA context that takes
        # 0.1 to 0.2 ms each time, with the interpreter's lock held: so the first jobs find it grown.
        bytearray(_ROOM)
        self._due = time.monotonic() + TICK
        goes_on = True
        while goes_on:
            try:
                goes_on = self._step()
            except BaseException as error:  # noqa: BLE001 -- the pool must hear of anything that ends its worker
                if not self._dead:  # what was submitted before is still done, and may fail for the same reason
                    self._dead = True
                    self._died(error)

    def _step(self) -> bool:
        try:
            job = self._jobs.get(timeout=max(0.0, self._due - time.monotonic()))
        except queue.Empty:
            self._look()
            return True
        if job is None:
            return False
        self._due = min(self._due, time.monotonic() + _SOON)
        job()
        if time.monotonic() >= self._due:
            self._look()
        return True

    def _look(self) -> None:
        pause = self._tick()
        if pause is None:
            self.close(0)  # after what was submitted before: a thread may wait for it
        self._due = time.monotonic() + (TICK if pause is None else pause)


# A signal's handler may raise on the main thread, between any two instructions. So handlers wait for the end of what
# may not stop half-way; and what may also take long is left to another thread, so that an interrupt ends the wait.

Call: TypeAlias = "Callable[[], None]"

idle_helpers: Final[deque[queue.SimpleQueue[Call]]] = deque()
"""The queue of each thread that waits to stand in for the main thread."""


def ready_helper() -> None:
    """Start a thread that can stand in, unless one is idle."""
    if not idle_helpers:
        calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        threading.Thread(target=_help, args=(calls,), name="asyncmem calls", daemon=True).start()
        idle_helpers.append(calls)


def call_aside(call: Callable[[], T]) -> T:
    """Make a call that goes on to its end (blocks), also where an interrupt ends the main thread's wait for it."""
    if not on_main_thread() or sys.is_finalizing():  # then no thread runs any more
        return call()
    latch = Latch(call)
    ready_helper()
    idle_helpers.pop().put(latch)
    try:
        return cast("T", latch.block())
    finally:
        latch.forget()


def uninterruptible(method: Callable[P, T]) -> Callable[P, T]:
    """Have signals' handlers run after a function, not within it; for what waits for nothing that may take long."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return hold_interrupts(partial(method, *args, **kwargs))

    return call


def _help(calls: queue.SimpleQueue[Call]) -> None:
    while True:
        call = calls.get()
        call()
        del call  # it may hold the last reference to a pool
        idle_helpers.append(calls)


os.register_at_fork(after_in_child=idle_helpers.clear)  # the child has none of the threads


def weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """Return a call of a method that does nothing once its object is gone."""
    known = weakref.WeakMethod(method)

    def call(*arguments: object) -> T | None:
        found = known()
        return None if found is None else found(*arguments)

    return call
