"""Threads that do jobs, and help each other with those that come in parts."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Task: TypeAlias = "Callable[[], None]"
Outcomes: TypeAlias = "SimpleQueue[BaseException | None]"


@final
class Crew:
    """Has jobs done by several threads: each by one of them, whom others help with its parts.

    Whoever comes to help takes the part that has waited longest, so that jobs are over in the order in which they came;
    but a job that nobody has begun goes before all parts, so that it has parts by the time that the others have none.

    Args:
        size: How many threads there are; each is to `work`, as those of `start` do.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._left = 1  # jobs that are not done, and one more while others may follow
        self._jobs: deque[Task] = deque()
        self._parts: deque[tuple[Task, Outcomes]] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # one for each job or part to look for; False at the end

    def start(self, name: str) -> None:
        """Start threads for it; after `end` they end when all jobs are done."""
        for number in range(1, self._size + 1):
            threading.Thread(target=self.work, name=f"{name} {number}", daemon=True).start()

    def submit(self, job: Task) -> None:
        """Have a thread do a job, which raises nothing, once all that came before have begun."""
        with self._lock:
            self._left += 1
        self._jobs.append(job)
        self._calls.put(True)

    def end(self) -> None:
        """Say, once, that no job follows. The threads end when all jobs are done, and help until then."""
        self._one_less()

    def share(self, parts: Sequence[Task]) -> None:
        """Do the parts of a job (blocks): on this thread, and on all that have no other job.

        Raises:
            BaseException: A part raised it; all others have been done.
        """
        outcomes: Outcomes = SimpleQueue()
        self._parts.extend((part, outcomes) for part in parts)
        for _ in parts[1:]:
            self._calls.put(True)
        while outcomes.qsize() < len(parts) and self._do_a_part():
            pass
        for error in [outcomes.get() for _ in parts]:
            if error is not None:
                raise error

    def work(self) -> None:
        """Do what comes, until the end; each thread is in here."""
        while self._calls.get():
            # There may be neither: whoever shares parts does them without being called.
            self._do_a_job() or self._do_a_part()

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            none_left = not self._left
        if none_left:
            for _ in range(self._size):
                self._calls.put(False)

    def _do_a_job(self) -> bool:
        try:
            job = self._jobs.popleft()
        except IndexError:
            return False
        try:
            job()
        finally:
            self._one_less()
        return True

    def _do_a_part(self) -> bool:
        try:
            part, outcomes = self._parts.popleft()
        except IndexError:
            return False
        outcome = _outcome(part)
        del part  # before anybody is told, because it holds what it worked on
        outcomes.put(outcome)
        return True


def _outcome(part: Task) -> BaseException | None:
    try:
        part()
    except BaseException as error:  # noqa: BLE001 -- whoever shares the part raises it
        return error
    return None
