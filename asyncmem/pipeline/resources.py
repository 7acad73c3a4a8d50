"""What pipelines, prefetchers and double buffers work with: a pool, streams, blocking requests, worker threads."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, TypeVar, final

from asyncmem.core import Batch, Buffer, Ready
from asyncmem.errors import InvalidRequest
from asyncmem.pool import AsyncMemoryPool, Budget, Request
from asyncmem.pool.share import Share
from asyncmem.runtime import RuntimeDevice
from asyncmem.runtime import device as runtime_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncmem.devices import Device, Stream

T = TypeVar("T", Buffer, Batch)

Memory: TypeAlias = AsyncMemoryPool | Budget | RuntimeDevice | str
"""A pool, a budget of one, or a device whose pool the whole process shares: "cuda:0", `asyncmem.device("cuda:0")`."""


def share_of(memory: object) -> AsyncMemoryPool | Budget:
    """Return the pool or budget that is meant.

    Raises:
        InvalidRequest: It is something else.
    """
    if isinstance(memory, str):
        memory = runtime_device(memory)
    if isinstance(memory, RuntimeDevice):
        memory = memory.pool
    if isinstance(memory, AsyncMemoryPool | Budget):
        return memory
    raise InvalidRequest("pool", memory, "a pool, a budget, or the name of a device")


def pool_of(share: Share) -> AsyncMemoryPool:
    """Return the pool that a share is a part of."""
    *_, pool = share._lineage()
    assert isinstance(pool, AsyncMemoryPool)
    return pool


def stream_of(device: Device, stream: object) -> Stream:
    """Return the stream that a user named; None is the device's default stream."""
    return device.default_stream if stream is None else device.stream_of(stream)


class BlockingRequests:
    """Requests that threads wait for, until all are ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Request[Buffer] | Request[Batch]] = []
        self._over = False

    def wait(self, request: Ready[T] | Request[T]) -> T:
        """Wait on this thread (blocks) for a request, and return what it is granted.

        Raises:
            RequestCancelled: All have been ended.
            OutOfMemoryError: It can never be granted; likewise the other errors of an await.
        """
        if isinstance(request, Request):
            with self._lock:
                over = self._over
                self._requests.append(request)
            if over:
                request.cancel()
            try:
                request.block()
            finally:
                with self._lock:
                    self._requests.remove(request)
        return request.result()

    def end(self) -> None:
        """Cancel what is waited for, now and from now on."""
        with self._lock:
            self._over = True
            requests = list(self._requests)
        for request in requests:
            request.cancel()


class BorrowedStreams:
    """Streams for one user, which others may have once that is gone.

    Work that is still queued on them does no harm: the next user comes behind it.
    """

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._pool = pool
        self._borrowed: list[tuple[str, Stream]] = []
        self.give_back = weakref.finalize(self, _give_back, weakref.ref(pool), self._borrowed)

    @property
    def device(self) -> Device:
        """Whose streams they are."""
        return self._pool.device

    def stream(self, name: str) -> Stream:
        """Return a stream of that name that is not in use."""
        try:
            stream = _idle[self._pool][name].pop()
        except (KeyError, IndexError):
            stream = self._pool.device.create_stream(name)
        self._borrowed.append((name, stream))
        return stream


def _give_back(known: weakref.ref[AsyncMemoryPool], streams: Iterable[tuple[str, Stream]]) -> None:
    pool = known()
    if pool is not None:
        idle = _idle.setdefault(pool, defaultdict(list))
        for name, stream in streams:
            idle[name].append(stream)


_idle: weakref.WeakKeyDictionary[AsyncMemoryPool, defaultdict[str, list[Stream]]] = weakref.WeakKeyDictionary()


Task: TypeAlias = "Callable[[], None]"
Outcomes: TypeAlias = "SimpleQueue[BaseException | None]"


@final
class Workers:
    """Threads that run jobs: each on one of them, which others help with its parts.

    A helper takes the part that has waited longest, so that jobs are over in the order in which they came;
    but a job that is not begun goes before all parts, so that it has parts by the time that the others have none.

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

    def run_parts(self, parts: Sequence[Task]) -> None:
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
        errors = [error for error in (outcomes.get() for _ in parts) if error is not None]
        if errors:
            raise errors.pop(0)  # what this frame kept would keep the frame

    def work(self) -> None:
        """Do what comes, until the end; each thread is in here."""
        while self._calls.get():
            # There may be neither: a thread that shares parts does them without being called.
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
        del part  # before the end is told, because it holds what it worked on
        outcomes.put(outcome)
        return True


def _outcome(part: Task) -> BaseException | None:
    try:
        part()
    except BaseException as error:  # noqa: BLE001 -- the thread that shares the part raises it
        return error
    return None
