"""A pool without a thread: its worker's jobs run as ordinary steps of the loop, so a seed can put them anywhere."""

import threading
from collections import deque
from collections.abc import Callable

from asyncmem.pool import AsyncMemoryPool
from asyncmem.pool.loops import running_loop

Job = Callable[[], None]


class StepWorker:
    """Stand in for the pool's background thread in a deterministic test.

    Jobs run in the order of their submission, one a step, on the thread of the running loop (asyncio or trio). It never
    ticks: nothing that a task waits for may depend on a timer alone. What it cannot show is a job at work while the
    loop runs; that is for tests with real threads.

    Args:
        name: Taken for the sake of the real worker's signature; likewise `tick`.
        died: Called with the error that a job raised; the worker runs no more then.
    """

    def __init__(self, name: str, tick: Callable[[], float | None], died: Callable[[BaseException], None]) -> None:
        self.name = name
        self.tick = tick
        self.alive = False
        self._died = died
        self._jobs: deque[Job] = deque()
        self._busy = threading.Lock()

    def start(self) -> None:
        """Begin to take jobs."""
        self.alive = True

    def submit(self, job: Job) -> None:
        """Let `job` run in a step of its own after those submitted before it; at once where no loop is running."""
        self._jobs.append(job)
        loop = running_loop()
        if loop is None or not loop.soon(self._step):
            while self._step():
                pass

    def close(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - nothing here takes time
        """Run what was submitted, as a joined thread would have, and take no more jobs; return that it has ended."""
        while self._jobs:
            self._run_next()
        self.alive = False
        return True

    def _step(self) -> bool:
        """Run the next job and return True, unless there is none, or another thread runs one."""
        if not self._jobs or not self._busy.acquire(blocking=False):
            return False
        try:
            self._run_next()
        finally:
            self._busy.release()
        return True

    def _run_next(self) -> None:
        if not self._jobs:
            return
        job = self._jobs.popleft()
        if not self.alive:
            return
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - as with the thread, the pool hears of whatever ends its worker
            self.alive = False
            self._died(error)


class SteppedPool(AsyncMemoryPool):
    """A pool whose worker is steps of the running loop, so that every run with the same seed is the same."""

    _worker_factory = StepWorker  # type: ignore[assignment]  # it has all that a pool asks of its worker
