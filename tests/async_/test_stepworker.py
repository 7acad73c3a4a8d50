"""The worker without a thread runs its jobs in order, a step each, on the loop that submitted them."""

import asyncio
import threading
import time
from functools import partial

import anyio
import pytest
import trio

from asyncmem.testing import StepLoop, run_steps
from asyncmem.testing.stepworker import StepWorker


def make_worker() -> tuple[StepWorker, list[BaseException]]:
    errors: list[BaseException] = []
    worker = StepWorker("name", lambda: True, errors.append)
    worker.start()
    return worker, errors


async def submitted(log: list[str]) -> None:
    """Submit two jobs and let a neighbour run meanwhile."""
    worker, _ = make_worker()
    for name in ("first", "second"):
        worker.submit(partial(log.append, name))
    log.append("submitted")
    for _ in range(8):
        await anyio.lowlevel.checkpoint()
        log.append("neighbour")


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_jobs_are_steps_in_order_of_submission(seed: int | None) -> None:
    """Whatever the seed, jobs run after the submitting step, in order, on the loop's thread."""
    log: list[str] = []
    run_steps(submitted(log), StepLoop(seed))
    jobs = [name for name in log if name in {"first", "second"}]
    assert jobs == ["first", "second"]
    assert log[0] == "submitted"


def test_jobs_are_system_tasks_on_trio() -> None:
    """On trio a job takes a step of a task of its own."""
    log: list[str] = []
    trio.run(submitted, log)
    assert [name for name in log if name != "neighbour"] == ["submitted", "first", "second"]


def test_job_without_a_loop_runs_at_once() -> None:
    """Where no loop runs nobody could be waiting, so the job is done by the caller."""
    ran: list[int] = []
    worker, _ = make_worker()
    worker.submit(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]


def test_close_finishes_what_was_submitted() -> None:
    """Closing leaves no job behind, and the step that was meant for it finds nothing to do."""
    log: list[str] = []

    async def main() -> None:
        worker, _ = make_worker()
        assert worker.alive
        worker.submit(partial(log.append, "job"))
        assert worker.close(1.0)
        assert log == ["job"]
        assert not worker.alive
        await asyncio.sleep(0)

    run_steps(main())
    assert log == ["job"]


def test_job_that_raises_ends_the_worker() -> None:
    """The pool hears of the error, and the jobs behind it do not run."""
    worker, errors = make_worker()
    worker.submit(partial(divmod, 1, 0))
    worker.submit(lambda: errors.append(AssertionError("ran all the same")))
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert not worker.alive


def test_without_a_loop_jobs_run_one_after_the_other() -> None:
    """However many each leads to: a chain of jobs is no recursion."""
    left = 10_000

    def job() -> None:
        nonlocal left
        left -= 1
        if left:
            worker.submit(job)

    worker = StepWorker("worker", lambda: None, lambda error: pytest.fail(repr(error)))
    worker.start()
    worker.submit(job)
    assert left == 0
    worker.close()


def test_threads_without_a_loop_run_no_two_jobs_at_once() -> None:
    """As there is only one worker; and none is left behind."""
    running = done = 0

    def job() -> None:
        nonlocal running, done
        running += 1
        assert running == 1
        time.sleep(0)
        done += 1
        running -= 1

    worker, errors = make_worker()
    threads = [threading.Thread(target=lambda: [worker.submit(job) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (done, errors) == (2000, [])
