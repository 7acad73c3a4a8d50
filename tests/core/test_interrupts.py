"""Handlers of signals run after a call that holds them, and everything about them is as it was."""

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from asyncmem.core import hold_interrupts

FIRST, SECOND = signal.SIGUSR1, signal.SIGUSR2


class Stop(Exception):
    """What a handler raises."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Give back the handlers that a test sets."""
    before = {number: signal.getsignal(number) for number in (FIRST, SECOND, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handle(number: signal.Signals, then: Callable[[], object]) -> None:
    signal.signal(number, lambda *_: then())


def stop() -> None:
    raise Stop


def test_a_handler_runs_after_the_call() -> None:
    """What it raises comes then, and the call has come to its end."""
    done: list[str] = []

    def call() -> None:
        signal.raise_signal(FIRST)
        done.append("called")

    handle(FIRST, lambda: done.append("handled"))
    hold_interrupts(call)
    assert done == ["called", "handled"]
    handle(FIRST, stop)
    with pytest.raises(Stop):
        hold_interrupts(call)
    assert done == ["called", "handled", "called"]


def test_the_result_and_the_error_are_those_of_the_call() -> None:
    """Where no signal comes, and where its handler raises nothing."""
    assert hold_interrupts(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        hold_interrupts(lambda: 1 // 0)
    handle(FIRST, lambda: None)
    assert hold_interrupts(lambda: signal.raise_signal(FIRST) or 6) == 6


def test_every_handler_runs_though_one_raises() -> None:
    """In the order in which the signals came; the interpreter itself has no order of its own then."""
    ran: list[int] = []

    def note(number: int, _frame: object) -> None:
        ran.append(number)
        raise Stop

    signal.signal(FIRST, note)
    signal.signal(SECOND, note)

    def call() -> None:
        signal.raise_signal(SECOND)
        signal.raise_signal(FIRST)

    with pytest.raises(Stop):
        hold_interrupts(call)
    assert ran == [SECOND, FIRST]


def test_one_within_another_holds_on_to_the_outer_end() -> None:
    """A handler runs where nothing is held any more."""
    done: list[str] = []
    handle(FIRST, lambda: done.append("handled"))

    def outer() -> None:
        hold_interrupts(lambda: signal.raise_signal(FIRST))
        done.append("outer")

    hold_interrupts(outer)
    assert done == ["outer", "handled"]


def test_handlers_are_the_same_afterwards() -> None:
    """But for one that the call itself has set."""
    handle(FIRST, stop)
    ours, new = signal.getsignal(FIRST), lambda *_: None
    hold_interrupts(lambda: None)
    assert signal.getsignal(FIRST) is ours
    hold_interrupts(lambda: signal.signal(FIRST, new))
    assert signal.getsignal(FIRST) is new


def test_calls_of_the_system_go_on_as_before() -> None:
    """Event loops have them taken up again after a signal; setting a handler would undo that."""
    handle(signal.SIGALRM, lambda: None)
    signal.siginterrupt(signal.SIGALRM, False)
    hold_interrupts(lambda: None)
    reader, writer = os.pipe()
    threading.Timer(0.2, os.write, (writer, b"x")).start()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1) == 1
    os.close(reader)
    os.close(writer)


def test_an_event_loop_hears_a_signal_once() -> None:
    """Its own handlers are called by the loop, which hears of them in another way."""
    heard: list[None] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(FIRST, heard.append, None)
        hold_interrupts(lambda: signal.raise_signal(FIRST))
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(FIRST)

    asyncio.run(main())
    assert heard == [None]


def test_other_threads_call_as_always() -> None:
    """No handler runs there, whoever takes the signal."""
    handle(FIRST, stop)
    ours, seen = signal.getsignal(FIRST), []
    thread = threading.Thread(target=lambda: hold_interrupts(lambda: seen.append(signal.getsignal(FIRST))))
    thread.start()
    thread.join()
    assert seen == [ours]


def test_signals_without_end_change_nothing() -> None:
    """At whatever moment they come: each call is made whole or not at all, and the handler is the same."""
    begun, ended, armed = [], [], []

    def come() -> None:
        if armed:
            armed.clear()
            raise Stop

    def call() -> None:
        begun.append(None)
        sum(range(50))
        ended.append(None)

    handle(signal.SIGALRM, come)
    ours = signal.getsignal(signal.SIGALRM)
    until, stopped = time.monotonic() + 1.0, 0
    signal.setitimer(signal.ITIMER_REAL, 50e-6, 50e-6)
    while time.monotonic() < until:
        try:
            armed.append(None)
            hold_interrupts(call)
            armed.clear()
        except Stop:
            stopped += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(begun) == len(ended)
    assert stopped > 10
    assert signal.getsignal(signal.SIGALRM) is ours
