"""Calls that the main thread leaves to a helper: each looks out for the other for a moment before it sleeps."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from asyncmem.core import look_out_for_end, next_call

TRIES = 10_000  # of which one must be quick, also on a busy machine

Call = Callable[[], None]


def test_the_end_of_a_call_is_seen_without_sleeping() -> None:
    """Some calls of nothing are seen to end, and every one is made, in order."""
    calls: SimpleQueue[Call] = SimpleQueue()
    made: list[int] = []

    stopped = threading.Event()

    def helper() -> None:
        while not stopped.is_set():
            next_call(calls)()

    def leave(number: int) -> bool:
        calls.put(lambda: made.append(number))
        return look_out_for_end()

    thread = threading.Thread(target=helper)
    thread.start()
    count = next((number for number in range(TRIES) if leave(number)), TRIES)
    calls.put(stopped.set)
    thread.join()
    assert count < TRIES
    assert made == list(range(count + 1))


def test_what_does_not_end_is_looked_at_for_a_moment_only() -> None:
    """The thread may sleep then."""
    assert not look_out_for_end()


def test_a_call_that_is_there_is_had_at_once() -> None:
    """Nothing else needs to happen."""
    calls: SimpleQueue[Call] = SimpleQueue()

    def call() -> None:
        pass

    calls.put(call)
    assert next_call(calls) is call
