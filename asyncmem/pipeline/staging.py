"""Data of the host on its way to a device: arrays, how their bytes are copied, and the threads that read them."""

import array
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar, cast, final

import numpy as np

from asyncmem.arrays import element_type
from asyncmem.core import Batch, Buffer, Ready
from asyncmem.errors import InvalidRequest
from asyncmem.exchange import asarray
from asyncmem.pool import AsyncMemoryPool, Copy, Request
from asyncmem.pool.latch import Latch

T = TypeVar("T", Buffer, Batch)
Task: TypeAlias = Callable[[], None]

# DLPack's device types of memory that the host reads: plain, and page-locked by CUDA or ROCm.
_HOST: Final = (1, 3, 11)

# Text, objects, records and dates: no device has such elements.
_FOREIGN_KINDS: Final = "OSUVMm"


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array of the host, in row-major order; its bytes keep their owner alive."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | str
    data: memoryview


def host_array(leaf: object) -> HostArray | None:
    """Return what a leaf is an array of, or a copy of it in row-major order where it lies otherwise.

    Returns:
        None for what is no array of the host, or has elements that no device has.

    Raises:
        InvalidRequest: It has elements in swapped byte order, or such as numpy cannot put in order either.
        BufferError: Its owner does not give it away.
    """
    if isinstance(leaf, np.ndarray):
        return _of_numpy(leaf)
    if isinstance(leaf, bytearray | memoryview | array.array):
        return _of_numpy(np.asarray(memoryview(leaf)))
    if not _is_on_host(leaf):
        return None
    try:
        plain = np.from_dlpack(leaf)  # type: ignore[arg-type]  # it speaks DLPack
    except (BufferError, RuntimeError, TypeError, ValueError):
        found = asarray(leaf)  # it knows more kinds of elements, and says what is wrong
        return HostArray(found.shape, found.dtype, memoryview(found.buffer)[: found.nbytes])
    return _of_numpy(plain)


def _of_numpy(found: np.ndarray[Any, Any]) -> HostArray | None:
    try:
        element_type(found.dtype)
    except InvalidRequest:
        if found.dtype.kind in _FOREIGN_KINDS:
            return None
        raise
    plain = np.asarray(found)
    in_rows = plain if plain.flags.c_contiguous else plain.copy(order="C")
    return HostArray(plain.shape, plain.dtype, in_rows.reshape(-1).view(np.uint8).data)


def _is_on_host(leaf: object) -> bool:
    place = getattr(leaf, "__dlpack_device__", None)
    return place is not None and not isinstance(leaf, type) and place()[0] in _HOST


Piece: TypeAlias = tuple[int, memoryview]
"""Bytes of the host, and where in a buffer they belong."""

AT_ONCE: Final = 4 << 20
"""Bytes that one thread reads before it looks for more: long beside a call, short beside a batch that many read."""


@final
@dataclass(eq=False)
class HostCopier:
    """Copies data of the host to buffers of a pool, by way of page-locked memory where that is wanted and faster.

    What its threads wait for is ended together.
    """

    pool: AsyncMemoryPool
    pinned: bool
    tag: str | None

    def __post_init__(self) -> None:
        self._requests: set[Ready[Any] | Request[Any]] = set()
        self._over = False

    def wait(self, request: Ready[T] | Request[T]) -> T:
        """Wait on this thread (blocks) for a request, and return what it is granted.

        Raises:
            RequestCancelled: All have been ended.
            OutOfMemoryError: It can never be granted; likewise the other errors of an await.
        """
        self._requests.add(request)
        try:
            if self._over:  # else its end finds the request, which it looks for after that
                request.cancel()
            request.block()
        finally:
            self._requests.discard(request)
        return request.result()

    def end(self) -> None:
        """Cancel what is waited for, now and from now on."""
        self._over = True
        for request in list(self._requests):
            request.cancel()

    def blocks(self, pieces: Sequence[Piece]) -> bool:
        """Return whether `stage` is to copy these, on a thread: they are not page-locked."""
        return self.pinned and any(self.pool.device.copy_holds_up(source, into=True) for _, source in pieces)

    def copy(self, target: Buffer, pieces: Sequence[Piece]) -> list[Copy]:
        """Start copying pieces to where they belong, each by the buffer's home stream."""
        parts = (target.view("uint8", source.nbytes, offset).copy_from(source) for offset, source in pieces)
        return [cast("Copy", part) for part in parts]

    def stage(self, target: Buffer, pieces: Sequence[Piece], workers: "Workers") -> Copy:
        """Read pieces into page-locked memory (blocks), by the workers together, and start one copy of the whole."""
        nbytes = max(offset + source.nbytes for offset, source in pieces)
        staging = self.wait(self.pool.pinned.allocate_async(nbytes, stream=target.stream, tag=self.tag))
        try:
            workers.run_parts([partial(_read, staging, part) for part in parts_of(pieces)])
            return target.copy_from(staging)
        finally:
            staging.free()  # its memory follows when the copy is done


def parts_of(pieces: Iterable[Piece], nbytes: int = AT_ONCE) -> Iterator[list[Piece]]:
    """Yield pieces in parts of about so many bytes: long pieces are cut, and short ones come together."""
    part: list[Piece] = []
    length = 0
    for offset, source in pieces:
        for at in range(0, source.nbytes, nbytes):
            cut = source[at : at + nbytes]
            part.append((offset + at, cut))
            length += cut.nbytes
            if length >= nbytes:
                yield part
                part, length = [], 0
    if part:
        yield part


def _read(staging: Buffer, part: Sequence[Piece]) -> None:
    whole = staging.view("uint8").numpy(np.uint8)
    for offset, source in part:
        # By numpy, which releases the interpreter's lock meanwhile.
        np.copyto(whole[offset : offset + source.nbytes], np.asarray(source))


@final
class Workers:
    """Threads that run jobs: each on one of them, which others help with its parts.

    A helper takes the part that has waited longest, so that jobs are over in the order in which they came;
    but a job that is not begun goes before all parts, so that it has parts by the time that the others have none.

    Args:
        size: How many threads there are. They start with the first job; after `end` they end when all jobs are done.
        name: What they are called.

    Attributes:
        ended: Whether no job is left, and none follows.
    """

    def __init__(self, size: int, name: str) -> None:
        self.ended: Latch[None] = Latch()
        self._lock = threading.Lock()
        self._left = 1  # jobs that are not done, and one more while others may follow
        self._jobs: deque[Task] = deque()
        self._parts: deque[Task] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # one for each job or part to look for; False at the end
        self._names = [f"{name} {number}" for number in range(1, size + 1)]
        self._threads: list[threading.Thread] = []

    def submit(self, job: Task) -> None:
        """Queue a job, which must not raise; a thread runs it once all that came before have begun."""
        with self._lock:
            self._left += 1
            new = [threading.Thread(target=self._work, name=name, daemon=True) for name in self._names]
            self._names = []
            self._threads += new
        self._jobs.append(partial(self._run_job, job))
        self._calls.put(True)
        for thread in new:
            thread.start()

    def end(self) -> None:
        """Take no more jobs; call it once. The threads go on until all jobs are done."""
        with self._lock:
            self._left -= 1
            none_left = not self._left
        if none_left:
            self.ended()
            for _ in self._threads:
                self._calls.put(False)

    @property
    def started(self) -> bool:
        """Whether a thread is there to do the jobs; an interrupt may have kept all of them from starting."""
        return any(thread.ident is not None for thread in self._threads)

    def join(self, timeout: float) -> bool:
        """Wait until the threads have ended (blocks), unless this is one; False where jobs are left after `timeout`."""
        if self.started and threading.current_thread() not in self._threads:
            self.ended.block(timeout)
            if not self.ended.done:
                return False
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()
        return True

    def run_parts(self, parts: Sequence[Task]) -> None:
        """Do the parts of a job (blocks): on this thread, and on all that have no other job.

        Raises:
            BaseException: A part raised it; all others have been done.
        """
        outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._parts.extend(partial(_run_part, part, outcomes) for part in parts)
        for _ in parts[1:]:
            self._calls.put(True)
        while outcomes.qsize() < len(parts) and _run_first(self._parts):
            pass
        errors = [error for error in (outcomes.get() for _ in parts) if error is not None]
        if errors:
            raise errors.pop(0)  # what this frame kept would keep the frame

    def _work(self) -> None:
        while self._calls.get():
            # There may be neither: a thread that shares parts does them without being called.
            _run_first(self._jobs) or _run_first(self._parts)

    def _run_job(self, job: Task) -> None:
        try:
            job()
        finally:
            self.end()


def _run_part(part: Task, outcomes: SimpleQueue[BaseException | None]) -> None:
    try:
        part()
    except BaseException as error:  # noqa: BLE001 -- the thread that shares the part raises it
        outcomes.put(error)
    else:
        outcomes.put(None)


def _run_first(tasks: deque[Task]) -> bool:
    try:
        task = tasks.popleft()
    except IndexError:
        return False
    task()
    return True
