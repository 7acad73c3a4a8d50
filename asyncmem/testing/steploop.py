"""An asyncio loop that runs one handle per step, in an order a seed picks, under virtual time.

A bug that needs one particular interleaving is found by asking for that interleaving: `hook` is called before every
handle, so that a cancellation can fall exactly before step k, and the same seed gives the same order again.
"""

import asyncio
import heapq
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import socket

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing is ready and nothing will become ready: a task was never woken."""


PATIENCE: Final = 10.0
"""Seconds of wall time that a loop waits for work outside of it before it calls itself stuck."""


class StepLoop(asyncio.SelectorEventLoop):
    """Run one ready handle per iteration.

    Time stands still while anything is ready and jumps to the next timer when nothing is. With nothing ready and no
    timer left, the loop raises `Stuck` where another loop would sleep for ever.

    Args:
        seed: Picks among the ready handles; None runs them first come, first served.
        hook: Called with the number of the step before its handle is picked; what it schedules can be picked at once.
        on_idle: Called when nothing is ready, before time jumps: returns whether it made progress, for example by
            advancing a simulated device to the next completion.
        max_steps: More handles than this are a livelock.
        horizon: Seconds of virtual time after which timers alone no longer count as progress.
    """

    # What is used of asyncio.BaseEventLoop; the same on CPython 3.11 to 3.14, though not promised by it.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _selector: selectors.BaseSelector
    _stopping: bool
    if TYPE_CHECKING:
        _ssock: socket.socket

        def _process_events(self, event_list: list[tuple[selectors.SelectorKey, int]]) -> None: ...
        def _read_from_self(self) -> None: ...
        def _write_to_self(self) -> None: ...

    def __init__(
        self,
        seed: int | None = None,
        hook: Callable[[int], None] | None = None,
        *,
        on_idle: Callable[[], bool] | None = None,
        max_steps: int = 20_000,
        horizon: float = 3_600.0,
    ) -> None:
        self._now = 0.0
        super().__init__()
        self.hook = hook
        self.steps = 0
        self._random = None if seed is None else random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._on_idle = on_idle
        self._max_steps = max_steps
        self._horizon = horizon
        self._outside = 0
        self._outside_lock = threading.Lock()

    def time(self) -> float:
        """Return the virtual time in seconds since the loop was made."""
        return self._now

    @contextmanager
    def external_work(self) -> Iterator[None]:
        """Note that another thread works for this loop: while inside, the loop waits for it instead of jumping.

        Any thread may enter and leave. The other thread reports through `call_soon_threadsafe` or a watched file.
        """
        self._count_outside(1)
        try:
            yield
        finally:
            self._count_outside(-1)

    def _count_outside(self, change: int) -> None:
        with self._outside_lock:
            self._outside += change
        self._write_to_self()

    def _run_once(self) -> None:
        self._poll(0.0)
        while not (self._ready or self._stopping):
            self._make_progress()
        if self._ready:
            self._step()

    def _poll(self, timeout: float) -> bool:
        """Queue the handles of ready files and due timers; return whether any file was ready."""
        if found := self._selector.select(timeout):
            # The loop's own wake-up pipe is no task's step, and how many bytes wait in it depends on threads.
            if any(key.fd == self._ssock.fileno() for key, _ in found):
                self._read_from_self()
            self._process_events([one for one in found if one[0].fd != self._ssock.fileno()])
        self._drop_cancelled_timers()
        while self._scheduled and self._scheduled[0].when() <= self._now:
            self._ready.append(heapq.heappop(self._scheduled))
            self._drop_cancelled_timers()
        return bool(found)

    def _drop_cancelled_timers(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)

    def _make_progress(self) -> None:
        if self._outside:
            if not self._poll(PATIENCE):
                raise Stuck(f"work outside of the loop did not report within {PATIENCE:g} s")
        elif self._on_idle is not None and self._on_idle():
            self._poll(0.0)
        else:
            self._jump()

    def _jump(self) -> None:
        if not self._scheduled:
            raise Stuck(f"nothing is ready and nothing is scheduled; waiting: {self._where()}")
        self._now = max(self._now, self._scheduled[0].when())
        if self._now > self._horizon:
            raise Stuck(f"only timers fire, for {self._now:g} s of virtual time; waiting: {self._where()}")
        self._poll(0.0)

    def _where(self) -> str:
        """Name each unfinished task and the innermost line it waits at."""
        return "; ".join(sorted(map(_waiting_at, asyncio.all_tasks(self)))) or "no task"

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self._max_steps:
            raise Stuck(f"livelock: more than {self._max_steps} steps; running: {self._where()}")
        if self.hook is not None:
            self.hook(self.steps)
        handle = self._pick()
        if not handle.cancelled():
            handle._run()

    def _pick(self) -> asyncio.Handle:
        index = 0 if self._random is None else self._random.randrange(len(self._ready))
        handle = self._ready[index]
        del self._ready[index]
        return handle


def _waiting_at(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    place = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "its first step"
    return f"{task.get_name()} at {place}"


def run_steps(main: Coroutine[object, object, T], loop: StepLoop | None = None) -> T:
    """Run `main` on a step loop of its own, then close the loop.

    Args:
        main: The coroutine to run.
        loop: A fresh loop to run it on; None makes one that runs handles in order of arrival.

    Raises:
        Stuck: `main` waits for something that will not happen.
        BaseExceptionGroup: A callback failed, or a task failed and its error was not retrieved.
    """
    loop = loop or StepLoop()
    unseen: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: unseen.append(_as_error(context)))
    try:
        result = loop.run_until_complete(main)
    finally:
        _dismantle(loop)
    if unseen:
        raise BaseExceptionGroup("unhandled errors", unseen)
    return result


def _as_error(context: dict[str, object]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))


def _dismantle(loop: StepLoop) -> None:
    """Cancel what is left and close the loop; a task that is stuck even then is left to the garbage collector."""
    loop.hook = None
    loop.steps = 0
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    with suppress(Stuck):
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
