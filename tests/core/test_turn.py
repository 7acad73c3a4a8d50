"""The pool's lock, and the order of arrival: what the pool's compiled ways stand on."""

import threading
from collections.abc import Callable

import pytest

from asyncmem.core import Line, Turn, Waiter


class Pump:
    """Settles by noting that it did, and owes what it was given."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.during: list[str] = []
        self.turn = Turn(self.settle)

    def settle(self) -> list[Callable[[], None]]:
        """Say so; leave the notes that a settlement may raise."""
        self.log.append("settled")
        for text in self.during:
            self.note(text)
        self.during = []
        return [lambda: self.log.append("owed")]

    def note(self, text: str) -> None:
        """Leave a note that says this."""
        self.turn.post(lambda: self.log.append(text))


def test_note_left_while_the_turn_is_held_runs_before_it_ends() -> None:
    """Whoever cannot have the lock leaves a note, and does not wait."""
    pump = Pump()
    with pump.turn:
        pump.note("noted")
        assert pump.log == []
    assert pump.log == ["noted", "settled", "owed"]


def test_note_left_while_nobody_holds_the_turn_runs_at_once() -> None:
    """Nobody else would come to run it."""
    pump = Pump()
    pump.note("noted")
    assert pump.log == ["noted", "settled", "owed"]


def test_note_that_settling_raises_is_heard_before_anybody_is_woken() -> None:
    """A grant that crosses a mark is told before its waiter can free it again."""
    pump = Pump()
    pump.during = ["crossed"]
    with pump.turn:
        pass
    assert pump.log == ["settled", "crossed", "settled", "owed", "owed"]


def test_turn_is_free_after_a_defect() -> None:
    """An error in a note or in settling is raised, and is no hang."""

    def broken() -> list[Callable[[], None]]:
        raise RuntimeError("broken")

    turn = Turn(broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"), turn:
            pass


def test_second_thread_waits_for_the_turn() -> None:
    """Exclusion holds between threads, and the waiting one lets the other run."""
    pump = Pump()
    pump.turn.acquire()
    entered = threading.Event()

    def enter() -> None:
        with pump.turn:
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.05)
    pump.turn.leave()
    thread.join(10)
    assert entered.is_set()


def test_line_forgets_who_left() -> None:
    """Whoever leaves is skipped, wherever it stood, and what it asked for is no longer counted."""
    line: Line[Waiter] = Line()
    waiters = [Waiter(size) for size in range(1, 1001)]
    for waiter in waiters:
        line.join(waiter)
    assert [waiter.seq for waiter in waiters] == list(range(1, 1001))
    for waiter in waiters[::2] + waiters[1:900:2]:
        line.leave(waiter)
        line.leave(waiter)
    assert list(line) == waiters[901::2]
    assert (len(line), line.oldest(), line.bytes) == (50, waiters[901], sum(one.nbytes for one in waiters[901::2]))
    for waiter in waiters:
        line.leave(waiter)
    assert (line.empty, line.bytes, line.oldest()) == (True, 0, None)


def test_line_tells_newcomers_once() -> None:
    """Those that came since the last question and still stand."""
    line: Line[Waiter] = Line()
    first, second, third = Waiter(1), Waiter(2), Waiter(3)
    line.join(first)
    assert line.unfiled() == [first]
    line.join(second)
    line.join(third)
    line.leave(second)
    assert line.unfiled() == [third]
    assert line.unfiled() == []
