"""Interrupt a program at each point at which CPython may run a signal handler.

Such points are few: a call has returned, a function begins, a loop goes round. A tracer that is told of every
instruction finds them, and raises the signal right before one of them, by an attribute whose look-up is no such point
itself. The handler then runs where it would for Ctrl-C.
"""

import ctypes
import dis
import functools
import operator
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import asyncmem

Point = tuple[CodeType, int]

_OURS: Final = str(Path(asyncmem.__file__).parent)
# CPython 3.11 has two instructions for a call, and often skips the second one.
_CALL: Final = "PRECALL" if sys.version_info < (3, 12) else "CALL"
_ASKS: Final = frozenset({_CALL, "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"})


class Stop(KeyboardInterrupt):
    """What the signal's handler raises."""


class _Flag:
    """`flag.raised` raises the signal."""

    raised = property(operator.methodcaller("go"))

    def __init__(self) -> None:
        self.go = functools.partial(ctypes.pythonapi.PyErr_SetInterruptEx, signal.SIGUSR1)


def points_of(program: Callable[[], object], *, within: str = _OURS) -> list[Point]:
    """Return where a program can be interrupted in the code of a folder, or a file: the library's own."""
    seen: dict[Point, None] = {}
    with _traced(seen.setdefault, lambda code: code.co_filename.startswith(within)):
        program()
    return list(seen)


def interrupt(program: Callable[[], object], point: Point, then: Callable[[], object] | None = None) -> bool:
    """Interrupt a program once, where it first comes to a point; return whether it was ended by that.

    With a function, the handler calls it and the program goes on.
    """
    flag, left = _Flag(), [point]

    def count(here: Point) -> None:
        if left and here == point:
            left.clear()
            sys.settrace(None)  # or the handler would run as the tracer is called the next time
            flag.raised  # noqa: B018

    def handle(*_: object) -> None:
        if then is None:
            raise Stop
        then()

    ended = False
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with _traced(count, lambda code: code is point[0]):
            program()
    except* Stop:  # also in the group that anyio makes of what ends its tasks
        ended = True
    finally:
        signal.signal(signal.SIGUSR1, before)
    return ended


@contextmanager
def _traced(count: Callable[[Point], object], which: Callable[[CodeType], bool]) -> Iterator[None]:
    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            code = frame.f_code
            if frame.f_lasti in _asking(code):
                count((code, frame.f_lasti))
        return local

    def begin(frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not which(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.cache
def _asking(code: CodeType) -> frozenset[int]:
    return frozenset(one.offset for one in dis.get_instructions(code) if one.opname in _ASKS)
