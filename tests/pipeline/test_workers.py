"""Workers do jobs side by side, and the parts of one together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from asyncmem.pipeline.staging import Workers
from asyncmem.pool.latch import Latch

LONG = 30.0  # seconds that are never over, unless something is broken


@contextmanager
def workers_of(size: int) -> Iterator[Workers]:
    """Yield running workers; afterwards, their threads have ended."""
    workers = Workers(size, "test")
    yield workers
    workers.end()
    assert workers.join(LONG)


def do(workers: Workers, job: Callable[[], None]) -> None:
    """Have workers do a job, and raise what it raises."""
    latch = Latch(job)
    workers.submit(latch)
    latch.block(LONG)
    assert latch.done


def meeting_of(count: int) -> Callable[[], None]:
    """Return a call that so many threads have to be in before it ends."""
    barrier = threading.Barrier(count, timeout=LONG)

    def meet() -> None:
        barrier.wait()

    return meet


def test_parts_of_one_job_are_done_by_all_threads_at_the_same_time() -> None:
    """Each part waits for three others."""
    meet = meeting_of(4)
    with workers_of(4) as workers:
        do(workers, lambda: workers.run_parts([meet] * 8))


def test_job_does_its_parts_itself_where_nobody_is_idle() -> None:
    """The other thread is in a job until the first one's is over."""
    release = threading.Event()
    done: list[int] = []

    def hold() -> None:
        release.wait(LONG)

    with workers_of(2) as workers:
        workers.submit(hold)
        do(workers, lambda: workers.run_parts([partial(done.append, number) for number in range(5)]))
        assert done == list(range(5))
        release.set()


def test_job_goes_on_when_all_of_its_parts_are_done() -> None:
    """Also those that others do: the last part to end is not its own thread's."""
    done: list[str] = []
    with workers_of(2) as workers:
        other = threading.Event()

        def part(owner: int) -> None:
            if threading.get_ident() == owner:
                assert other.wait(LONG)
            else:
                other.set()
                time.sleep(0.01)  # in which a job that waits for nobody goes on
            done.append("part")

        def job() -> None:
            workers.run_parts([partial(part, threading.get_ident())] * 2)
            done.append("job")

        do(workers, job)
    assert done == ["part", "part", "job"]


def test_older_parts_are_done_first() -> None:
    """The second job, whose thread has its own parts to do, begins with what is left of the first one's."""
    shared, release = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        shared.set()
        assert release.wait(LONG)

    def second() -> None:
        assert shared.wait(LONG)
        workers.run_parts([partial(done.append, "b"), partial(done.append, "b"), release.set])

    with workers_of(2) as workers:
        submitted = threading.Event()

        def first() -> None:
            assert submitted.wait(LONG)  # so that the other thread is in the second job before there are parts
            workers.run_parts([hold, partial(done.append, "a"), partial(done.append, "a")])

        workers.submit(first)
        workers.submit(second)
        submitted.set()
    assert done == ["a", "a", "b", "b"]


def test_new_job_goes_before_the_parts_of_older_ones() -> None:
    """It comes while each of two threads is in a part, and before the third."""
    held, release = threading.Event(), threading.Event()
    done: list[str] = []

    def part(owner: int) -> None:
        if threading.get_ident() == owner:
            held.set()
            assert release.wait(LONG)
        else:
            assert held.wait(LONG)
            workers.submit(partial(done.append, "job"))

    def last() -> None:
        done.append("part")
        release.set()

    with workers_of(2) as workers:
        do(workers, lambda: workers.run_parts([*[partial(part, threading.get_ident())] * 2, last]))
    assert done == ["job", "part"]


@pytest.mark.parametrize("size", [1, 3])
def test_error_of_a_part_is_raised_by_its_job_after_the_others(size: int) -> None:
    """So nothing of the job is under way when it lets go of what the parts work on."""
    done: list[int] = []

    def part(number: int) -> None:
        if number == 1:
            raise ValueError("the second part")
        done.append(number)

    with workers_of(size) as workers:
        with pytest.raises(ValueError, match="the second part"):
            do(workers, lambda: workers.run_parts([partial(part, number) for number in range(6)]))
        assert sorted(done) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [0, 1])
def test_job_of_hardly_any_parts_is_done(count: int) -> None:
    """Without help."""
    done: list[int] = []
    with workers_of(2) as workers:
        do(workers, lambda: workers.run_parts([partial(done.append, 1)] * count))
    assert len(done) == count


def test_threads_that_are_told_of_the_end_still_help() -> None:
    """The end comes before the parts of the last job are shared."""
    meet = meeting_of(3)
    told = threading.Event()
    outcome: list[str] = []
    workers = Workers(3, "test")

    def last() -> None:
        assert told.wait(LONG)
        workers.run_parts([meet] * 3)
        outcome.append("done")

    workers.submit(last)
    workers.end()
    told.set()
    assert workers.join(LONG)
    assert outcome == ["done"]


@pytest.mark.parametrize("started", [0, 1])
def test_threads_that_an_interrupt_kept_from_starting_are_not_waited_for(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where there is none; a job is done by those that there are."""
    starts = [threading.Thread.start] * started

    def start(thread: threading.Thread) -> None:
        if not starts:
            raise KeyboardInterrupt
        starts.pop()(thread)

    workers, done = Workers(2, "test"), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            workers.submit(done.set)
    assert workers.started == bool(started)
    assert done.wait(LONG if started else 0) == workers.started
    workers.end()
    assert workers.join(LONG)
