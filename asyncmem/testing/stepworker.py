"""A worker without a thread: its jobs run as ordinary steps of the loop, so a seed can put them anywhere."""

import asyncio
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class StepWorker:
    """Stand in for the pool's background thread in a deterministic test.

    Jobs run in the order of their submission, one a step, on the thread of the running loop (asyncio or trio). It never
    ticks: nothing that somebody waits for may depend on a timer alone. What it cannot show is a job at work while the
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

    def start(self) -> None:
        """Begin to take jobs."""
        self.alive = True

    def submit(self, job: Job) -> None:
        """Let `job` run in a step of its own after those submitted before it; at once where no loop is running."""
        self._jobs.append(job)
        _soon(self._run_next)

    def close(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - nothing here takes time
        """Run what was submitted, as a joined thread would have, and take no more jobs; answer that it has ended."""
        while self._jobs:
            self._run_next()
        self.alive = False
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


def _soon(call: Job) -> None:
    """Schedule `call` as one step of the loop that runs in this thread."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        loop.call_soon(call)
    else:
        _soon_on_trio(call)


def _soon_on_trio(call: Job) -> None:
    """Schedule `call` as a system task of trio; without trio and without a loop there is nobody to wait, so run it."""
    try:
        import trio
    except ImportError:
        call()
        return
    if not trio.lowlevel.in_trio_run():
        call()
        return

    async def step() -> None:
        call()

    trio.lowlevel.spawn_system_task(step)
