"""Journals of pools: read from files, printed, and replayed to see whether the same is decided again."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from asyncmem.core import Heap, Scheduler
from asyncmem.environment import unknown_option
from asyncmem.errors import BadTrace, InvalidRequest
from asyncmem.replay.calls import Words, keywords, make

_VERSION: Final = 1
_HEADING: Final = 1 << 16
"""What the first line may come to, in bytes."""
_TROUBLE: Final = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What wrong arguments may raise."""


@dataclass(frozen=True)
class Difference:
    """The first call of a journal of which a replay makes something else.

    Attributes:
        row: Its line in the file, counted from 0.
        time: Seconds since the journal's beginning, as text; empty where the call does not tell the time.
        call: What was told, in words.
        expected: Result and effects, as they were.
        got: What they are now.
    """

    row: int
    time: str
    call: str
    expected: tuple[str, ...]
    got: tuple[str, ...]

    def __str__(self) -> str:
        """Show both, line by line."""
        at = f" at {self.time} s" if self.time else ""
        lines = [f"row {self.row}{at}: {self.call}", "  expected", *(f"    {one}" for one in self.expected)]
        return "\n".join([*lines, "  got", *(f"    {one}" for one in self.got)])


class Journal:
    """A journal in a file, which a pool with the option `journal` has written.

    Args:
        path: The file. It is read anew each time, line by line, and is never held as a whole.

    Attributes:
        path: The file.
        pool: The name of the pool.
        device: The name of its device.
        asyncmem: The version that wrote it.

    Raises:
        BadTrace: It is no such file, or of a version that this asyncmem does not know.
        OSError: It cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Read the heading."""
        self.path = Path(path)
        with self.path.open("rb") as file:
            try:
                heading = json.loads(file.readline(_HEADING))
            except (RecursionError, ValueError):
                heading = None
        match heading:
            case {"journal": int(known), "pool": str(pool), "device": str(device), "asyncmem": str(written)}:
                if known != _VERSION:
                    raise BadTrace(f"version {known}", f"version {_VERSION}", file=str(path))
            case _:
                raise BadTrace("another kind of file", "a journal", file=str(path))
        self.pool, self.device, self.asyncmem = pool, device, written

    def __repr__(self) -> str:
        """Name the file and the pool."""
        return f"<asyncmem.replay.Journal {str(self.path)!r} of pool {self.pool!r}>"

    def lines(self) -> Iterator[str]:
        """Go through all calls and their effects in words, a line each; effects stand below their call.

        Raises:
            BadTrace: A line is damaged; it is named.
        """
        words = Words()
        for row, call in self._calls():
            try:
                given = keywords(call[0], call[1], {})
                words.follow(call[0], given, call[2])
                yield f"{words.time(given):>12}  {words.call(call[0], given, call[2])}"
                for effect in call[3]:
                    yield f"{'':14}→ {words.effect(effect)}"
            except _TROUBLE as error:
                raise self._fault(row, error) from error

    def replay(self, **changes: object) -> Difference | None:
        """Tell a fresh heap and scheduler the same, and compare what comes of each call.

        Args:
            **changes: Settings of the scheduler by name, such as `bypass=0`, that are to be other than they were.

        Returns:
            The first difference, None where there is none.

        Raises:
            BadTrace: A line is damaged, or tells what no pool is told; it is named.
            InvalidRequest: The scheduler has no such setting.
        """
        words = Words()
        again = _Again()
        for row, call in self._calls():
            try:
                given = keywords(call[0], call[1], changes)
                words.follow(call[0], given, call[2])
                if call[0] == "serve":
                    _need_known(changes, call[1][0])
                got = again.tell(call[0], dict(given))
                if got[2:] != call[2:]:
                    told = words.call(call[0], given, call[2] if call[0] == "submit" else None)
                    expected, came = (tuple(_outcome(words, one)) for one in (call, got))
                    return Difference(row, words.time(given), told, expected, came)
            except InvalidRequest:
                raise
            except _TROUBLE as error:
                raise self._fault(row, error) from error
        return None

    def _calls(self) -> Iterator[tuple[int, list[Any]]]:
        # Each a name, arguments, result and effects. The last line may be torn where its process died.
        with self.path.open("rb") as file:
            file.readline(_HEADING)
            for row, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    call = json.loads(line)
                except (RecursionError, ValueError) as error:
                    raise self._fault(row, error) from error
                match call:
                    case [str(), list(), _]:
                        yield row, [*call, []]
                    case [str(), list(), _, list()]:
                        yield row, call
                    case _:
                        raise self._fault(row, "another shape")

    def _fault(self, row: int, why: object) -> BadTrace:
        return BadTrace(f"a damaged line ({why})", "a call that a pool is told", file=str(self.path), row=row)


class _Again:
    """A heap and a scheduler that are told the same as others were."""

    def __init__(self) -> None:
        self._heap: Heap | None = None
        self._scheduler: Scheduler | None = None

    def tell(self, name: str, given: dict[str, Any]) -> list[Any]:
        """Make a call, and return what its line is now."""
        written = b""
        try:
            self._make(name, given)
        except ValueError:
            written = self._read()
            if not written:
                raise
        written = written or self._read()
        if self._scheduler is not None:
            self._scheduler.effects()
        if not written:
            return [name, [], "nothing", []]
        line = json.loads(written)
        return line if len(line) == 4 else [*line, []]

    def _make(self, name: str, given: dict[str, Any]) -> None:
        if name == "heap":
            self._heap = Heap(journal=True, **given)
        elif self._heap is None:
            raise ValueError("no heap yet")
        elif name == "serve":
            self._scheduler = Scheduler(self._heap, **given)
        else:
            make(name, given, self._heap, self._scheduler)

    def _read(self) -> bytes:
        return b"" if self._heap is None else self._heap.read_journal()


def _need_known(changes: dict[str, object], policy: dict[str, object]) -> None:
    for one in changes:
        if one not in policy:
            raise unknown_option(one, list(policy), "replay")


def _outcome(words: Words, call: list[Any]) -> Iterator[str]:
    # What came of a call, in words.
    _, _, result, effects = call
    if call[0] != "submit" and result is not None:
        yield words.result(call[0], result) or json.dumps(result)
    yield from (words.effect(effect) for effect in effects)
    if result is None and not effects:
        yield "nothing"
