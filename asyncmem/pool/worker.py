"""The pool's background thread: it makes the calls that block, so that no event loop does.

A thread and not a task: driver calls block, and a task held open across a block would tie opening and closing a pool
to one task. It keeps the pool alive only while it works; a pool that is dropped without being closed ends it.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.25  # seconds between looks at an idle pool
_SOON = 0.01  # and until the next one after a job, which may be worth looking after
_ROOM = 100 << 10  # bytes; the C library gives back what is more than 128 KiB at a heap's end


class Worker:
    """Runs jobs in order on one thread, and `tick` when there are none.

    Args:
        name: The thread's name.
        tick: Called a while after a job and when there are none, between jobs if need be; answers the seconds until the
            next time, None when the thread is no longer needed.
        died: Called with the error that a job raised; the thread ends with it, because jobs handle what they expect.
    """

    def __init__(self, name: str, tick: Callable[[], float | None], died: Callable[[BaseException], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
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

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job run soon. From any thread."""
        self._jobs.put(job)

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
        try:
            while self._step():
                pass
        except BaseException as error:  # noqa: BLE001 -- the pool must hear of anything that ends its worker
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
            self.close(0)  # after what was submitted before: somebody may wait for it
        self._due = time.monotonic() + (TICK if pause is None else pause)
