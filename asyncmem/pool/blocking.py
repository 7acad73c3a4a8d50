"""Synchronous callers: they carry out by themselves what their request needs, or block their own thread.

torch, CuPy and plain threads cannot await. Their requests stand in the same queue as all others, so they barge past
nobody; only the device's calls are theirs, because a thread that calls may block and need not wait for the worker.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncmem.core import Request
    from asyncmem.pool.ports import Opened


class ThreadSleeper:
    """A thread that waits for a request."""

    def __init__(self, gate: threading.Semaphore) -> None:
        self._gate = gate

    def wake(self) -> None:
        """Let the thread go on. From any thread."""
        self._gate.release()


def serve(opened: Opened, request: Request[object]) -> None:
    """See a synchronous request through: return once it has ended, at its deadline at the latest."""
    gate, jobs = request._gate, request._jobs
    assert gate is not None
    assert jobs is not None
    waits = False  # for others, and is named among those who do
    try:
        request._admit(ThreadSleeper(gate))
        while not request.done():
            if jobs:
                if opened.on_loop():
                    opened.loop_blocking_calls += 1
                opened.executor.run(jobs.pop(0))
            elif not waits and request._deadline is not None:
                waits = True
                request._asleep(threading.get_ident())
            elif not gate.acquire(timeout=_left(opened, request)):
                request._expire()
    except BaseException:  # an interrupt: nobody would see it through any more
        request.cancel()
        raise
    finally:
        if waits:
            request._awake(False)


def block(opened: Opened, request: Request[object], timeout: float | None) -> None:
    """Wait on this thread until a request of the event loop's has ended, for at most `timeout` seconds."""
    gate = threading.Semaphore(0)
    sleeper = ThreadSleeper(gate)
    left = _left(opened, request)
    bounds = [bound for bound in (timeout, left) if bound is not None]
    if request._admit(sleeper):
        request._asleep(threading.get_ident())
        try:
            gate.acquire(timeout=min(bounds, default=None))
        finally:
            request._abandon_sleeper(sleeper)
            request._awake(False)
    if left is not None and _left(opened, request) == 0:
        request._expire()


def _left(opened: Opened, request: Request[object]) -> float | None:
    if request._deadline is None:
        return None
    return min(max(0.0, request._deadline - opened.core.time), threading.TIMEOUT_MAX)
