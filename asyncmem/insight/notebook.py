"""`%%asyncmem`, a magic of IPython: records all pools while a cell runs, and shows what happened below it.

`%load_ext asyncmem` makes it known, in Jupyter and in IPython's terminal.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from asyncmem.insight.trackers import MemoryTracker

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension"]

_MAGIC = "%asyncmem"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Make the magic known to a shell; IPython calls it for `%load_ext asyncmem`."""
    shell.magics_manager.register_function(_Magic(shell), "line", _MAGIC[1:])
    if _as_line_magic not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(_as_line_magic)


def _as_line_magic(lines: list[str]) -> list[str]:
    # So the rest of the cell stays what it is, with `await`, other magics and a result, and IPython runs it.
    return [lines[0][1:], *lines[1:]] if lines and lines[0].split()[:1] == [f"%{_MAGIC}"] else lines


class _Magic:
    """Record all pools until the cell ends, and show what happened: `%%asyncmem`, `%%asyncmem --frames 8`.

    `--frames` is how many lines of the call are kept of each request. Everything that the process does meanwhile is
    recorded, by other tasks and threads, too. An error in the cell ends the recording as well.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._tracker: MemoryTracker | None = None

    def __call__(self, line: str) -> None:
        from IPython.core.error import UsageError

        match shlex.split(line):
            case []:
                frames = 1
            case ["--frames", number] if number.isdecimal() and int(number):
                frames = int(number)
            case _:
                raise UsageError(f"{_MAGIC}: expected nothing, or --frames and a number, got {line!r}")
        if self._tracker is not None:
            raise UsageError(f"{_MAGIC}: this cell is being recorded already")
        self._tracker = MemoryTracker(frames=frames)
        self._tracker.__enter__()
        self._shell.events.register("post_run_cell", self._end)

    def _end(self, _result: Any) -> None:  # noqa: ANN401  # of a class that is IPython's
        from IPython.display import display

        tracker, self._tracker = self._tracker, None
        self._shell.events.unregister("post_run_cell", self._end)
        assert tracker is not None
        tracker.__exit__(None, None, None)
        display(tracker.records())  # type: ignore[no-untyped-call]
