"""Keys as they are pressed, while a terminal is watched."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """Give what waits for a key for so many seconds, and answers it, or nothing.

    Keys are neither shown nor kept until the line ends; Ctrl-C interrupts as ever. The terminal is left as it was.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield lambda seconds: _key(number, seconds)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _key(number: int, seconds: float) -> str:
    ready, _, _ = select.select([number], [], [], seconds)
    return os.read(number, 64).decode(errors="replace") if ready else ""


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
