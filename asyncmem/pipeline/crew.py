"""Threads that do jobs, and help each other with those that come in parts."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Task: TypeAlias = "Callable[[], None]"


@final
class Crew:
    """Has jobs done by several threads: each by one of them, which others help with its parts when they are idle.

    Args:
        size: How many threads there are; each is to `work`.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._left = 1  # jobs that are not done, and one more while others may follow

    def submit(self, job: Task) -> None:
        """Have a thread do a job, which raises nothing, once all that came before have begun."""
        with self._lock:
            self._left += 1
        self._tasks.put(partial(self._do, job))

    def end(self) -> None:
        """Say, once, that no job follows. The threads end when all jobs are done, and help until then."""
        self._one_less()

    def share(self, parts: Sequence[Task]) -> None:
        """Do the parts of a job (blocks): on this thread, and on those that are idle.

        Raises:
            BaseException: A part raised it; all others have been done.
        """
        shared = _Shared(parts)
        for _ in range(min(self._size, len(parts)) - 1):
            self._tasks.put(shared.help)
        shared.help()
        shared.join()

    def work(self) -> None:
        """Do what comes, until the end; each thread is in here."""
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        task = self._tasks.get()
        if task is None:
            return False
        task()
        return True

    def _do(self, job: Task) -> None:
        try:
            job()
        finally:
            self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            none_left = not self._left
        if none_left:
            for _ in range(self._size):
                self._tasks.put(None)


@final
class _Shared:
    """The parts of one job, each done by whoever comes first."""

    def __init__(self, parts: Sequence[Task]) -> None:
        self._count = len(parts)
        self._parts = deque(parts)
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def help(self) -> None:
        """Do parts until all have begun."""
        with suppress(IndexError):  # another thread took the last
            while True:
                # A part is dropped before its outcome is told: nothing holds what it worked on any more.
                self._outcomes.put(_outcome(self._parts.popleft()))

    def join(self) -> None:
        """Wait until all are done (blocks)."""
        for error in [self._outcomes.get() for _ in range(self._count)]:
            if error is not None:
                raise error


def _outcome(part: Task) -> BaseException | None:
    try:
        part()
    except BaseException as error:  # noqa: BLE001 -- whoever shares the parts raises it
        return error
    return None
