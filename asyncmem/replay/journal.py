"""Journals of pools: read from files, printed, and replayed to see whether the same is decided again."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

from asyncmem.core import Heap, Scheduler
from asyncmem.environment import unknown_option
from asyncmem.errors import BadTrace, InvalidRequest
from asyncmem.figures import format_duration, format_size
from asyncmem.files import open_file, parse_json
from asyncmem.text import printable, printable_lines, quoted

_ASK: Final = ("nbytes", "stream", "account", "arena", "anywhere", "again", "fast")
_TERMS: Final = ("deadline", "priority", "effort", "waits", "calls", "on_loop", "captured")
_PARTS: Final = {"ask": _ASK, "terms": _TERMS, "use": ("stream", "epoch")}
"""Arguments that stand for several parameters."""

HEAP: Final = {
    "add_stream": (), "close_epoch": ("stream",), "publish": ("stream", "epoch"), "mark_done": ("stream", "epoch"),
    "add_space": ("address", "nbytes", "arena", "page"), "remove_space": ("segment",),
    "take": ("ask",), "take_foreign": ("ask", "late"), "take_at": ("ask", "address", "late"),
    "take_many": ("ask", "sizes"), "put_back": ("block", "entries"), "free": ("block", "entries"),
    "free_everywhere": ("block",), "free_many": ("blocks",),
    "set_home": ("block", "stream"), "flush": ("stream",), "merge": ("arena",), "coalesce": (),
    "open_lease": ("block",), "close_lease": ("arena",),
    "add_account": ("parent", "limit"), "remove_account": ("account",), "reset_peaks": (),
}  # fmt: skip
"""The heap's calls and their parameters."""

SCHEDULER: Final = {
    "submit": ("ask", "pieces", "terms", "now"), "leave_to": ("request",), "claim": ("request",),
    "forget": ("request",), "cancel": ("request", "now"), "fail": ("request", "reason", "now"),
    "give": ("request", "block", "address", "now"), "ordered": ("request", "now"), "unordered": ("request", "now"),
    "asleep": ("request", "owner", "now"), "awake": ("request",),
    "hold": ("owner", "block"), "release": ("hold",), "forget_owner": ("owner",),
    "freed": ("flags", "now"), "looked": ("found", "now"),
    "grew": ("job", "address", "nbytes", "stream", "ready", "now", "seconds", "rest"),
    "grow_failed": ("job", "out_of_memory", "now"), "trimmed": ("job", "count", "now"),
    "remapped": ("job", "moved", "unmapped", "mapped", "out_of_memory", "now", "seconds"),
    "waited": ("job", "seen", "now"),
    "ended": ("job", "ending", "now"),
    "expire": ("now",), "quiet": ("now", "claims"), "tick": ("now",), "offer": ("now",),
    "begin_beat": (), "end_beat": ("now",), "set_capturing": ("capturing",), "note_claim": ("now",),
    "shift_clock": ("seconds",),
    "open_share": ("account", "up", "part_of", "arena", "waits", "bypass"), "close_share": ("account", "now"),
    "set_limit": ("account", "limit", "now"), "configure": ("policy", "now"),
    "add_spillable": ("account", "nbytes", "now"),
    "trim": ("keep", "now"), "grow_ahead": ("now",), "drain": ("now",), "close": ("now",),
}  # fmt: skip
"""The scheduler's calls and their parameters."""

PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "heap": ("granule", "tuning"), "serve": ("policy", "now"), **HEAP, **SCHEDULER,
}  # fmt: skip
"""All calls and their parameters."""

_UNUSED: Final = {"take_at": ("anywhere",), "take_many": ("nbytes",), "submit": ("anywhere", "again", "fast")}
"""Parameters, by call, that are written and not repeated."""

_TIMERS: Final = {"deadline", "quiet"}
"""Effects that say when, and not for how long."""
_MOST_PAGES: Final = 1 << 26
_LEVELS: Final = ("", "from its stream's cache", "from the shared cache", "from free memory")
_REASONS: Final = ("", "no memory", "over a limit", "behind a gate", "no pages", "of an uncut segment")
_SIZES: Final = {
    "need", "limit", "keep", "page", "granule", "granularity", "segment_size", "small_limit", "ready",
    "stream_cache_bytes", "shared_cache_bytes",
}  # fmt: skip
_USUAL: Final[tuple[object, ...]] = (None, False, -1, 0, math.inf, "all", [], "granted")


def keywords(name: str, arguments: list[Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by parameter; `changes` are made to a policy.

    Raises:
        KeyError: There is no such call.
        ValueError: It takes others.
    """
    parameters = PARAMETERS[name]
    if len(arguments) != len(parameters) and (name, len(arguments)) != ("free", 1):
        raise ValueError(f"{name} takes {len(parameters)} arguments")
    found: dict[str, Any] = {}
    for parameter, value in zip(parameters, arguments, strict=False):
        if parameter in _PARTS:
            found.update(zip(_PARTS[parameter], value, strict=True))
        elif parameter in {"policy", "tuning"}:
            found.update(value)
            found.update((one, changes[one]) for one in changes if parameter == "policy" or one in value)
        else:
            found[parameter] = value
    for endless in ("deadline", "bypass", "patience", "patience_share", "shrink_after", "quiet_after", "seconds"):
        if endless in found and found[endless] is None:
            found[endless] = math.inf
    return found


# -- for a person ----------------------------------------------------------------------------------------------------


class Words:
    """Says what calls and effects are; requests are numbered in the order of their coming."""

    def __init__(self) -> None:
        self._began = 0.0
        self._numbers: dict[Any, int] = {}

    def follow(self, name: str, given: Mapping[str, Any], result: Any) -> None:  # noqa: ANN401
        """Take note of a call; once for each, in their order."""
        if name == "serve":
            self._began = given["now"]
        elif name == "submit":
            self._numbers[result] = len(self._numbers) + 1
        elif name == "shift_clock":
            self._began += given["seconds"]

    def time(self, given: Mapping[str, Any]) -> str:
        """Return the seconds since the beginning, where the call tells the time."""
        return f"{given['now'] - self._began:.6f}" if "now" in given else ""

    def call(self, name: str, given: Mapping[str, Any], result: Any) -> str:  # noqa: ANN401
        """Return the call's arguments, and the result."""
        if name == "submit":
            given = {"request": result, **given}
        came = self.result(name, result)
        return self._with_fields(name, given) + (f" → {came}" if came else "")

    def effect(self, effect: Mapping[str, Any]) -> str:
        """Return what is to be done."""
        fields = dict(effect)
        kind = str(fields.pop("kind"))
        if kind in _TIMERS:
            fields["deadline"] = fields.pop("seconds")
        return self._with_fields(kind.replace("_", " "), fields)

    def _with_fields(self, what: str, given: Mapping[str, Any]) -> str:
        fields = sorted(given.items(), key=lambda field: field[0] == "pieces")  # those come last
        told = [self._field(name, value) for name, value in fields if name != "now" and value not in _USUAL]
        return what + (f": {', '.join(told)}" if told else "")

    def _field(self, name: str, value: Any) -> str:  # noqa: ANN401
        plain = name.replace("_", " ")
        match name, value:
            case "request", _:
                return f"request {self._numbers.get(value, '?')}"
            case "pieces", list():
                return f"in {len(value)} pieces"
            case "nbytes", int():
                return format_size(value)
            case "address", int():
                return f"at {value:#x}"
            case "deadline", _:
                plain, value = "until", f"{value - self._began:.6f}"
            case "seconds", _:
                plain, value = "for", format_duration(value)
            case _, int() if name in _SIZES:
                value = format_size(value)
        return plain if value is True else f"{plain} {value}"

    def result(self, name: str, result: Any) -> str:  # noqa: ANN401
        """Return what a call has returned, or nothing where that goes without saying."""
        match name, result:
            case "submit", _:
                return ""
            case "take", [int(block), [int(level), int(reason), _, int(address)]]:
                if block and level < len(_LEVELS):
                    return f"block {block} at {address:#x}, {_LEVELS[level]}"
                return f"nothing: {_REASONS[reason]}" if reason < len(_REASONS) else "nothing"
            case "claim", [[int(block), int(address)]]:
                return f"block {block} at {address:#x}"
        return "" if result in _USUAL else str(result)


# -- the file ----------------------------------------------------------------------------------------------------------


_VERSION: Final = 1
_HEADING: Final = 1 << 16
"""What the first line may come to, in bytes."""
_WIDEST: Final = 10_000
"""Characters of a line that is printed."""
_TROUBLE: Final = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
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
        return printable_lines("\n".join([*lines, "  got", *(f"    {one}" for one in self.got)]))


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
        with open_file(path) as file:
            try:
                heading = parse_json(file.readline(_HEADING))
            except ValueError:
                heading = None
        match heading:
            case {"journal": int(known), "pool": str(pool), "device": str(device), "asyncmem": str(written)}:
                if known != _VERSION:
                    raise BadTrace(f"version {known}", f"version {_VERSION}", file=str(path))
            case _:
                raise BadTrace("another kind of file", "a journal", file=str(path))
        self.pool, self.device, self.asyncmem = map(printable, (pool, device, written))

    def __repr__(self) -> str:
        """Name the file and the pool."""
        return f"<asyncmem.replay.Journal {quoted(str(self.path))} of pool {quoted(self.pool)}>"

    def lines(self) -> Iterator[str]:
        """Yield all calls and their effects in words, a line each; effects stand below their call.

        Raises:
            BadTrace: A line is damaged; it is named.
        """
        words = Words()
        for row, call in self._calls():
            try:
                given = keywords(call[0], call[1], {})
                words.follow(call[0], given, call[2])
                yield f"{words.time(given):>12}  {printable(words.call(call[0], given, call[2]), most=_WIDEST)}"
                for effect in call[3]:
                    yield f"{'':14}→ {printable(words.effect(effect), most=_WIDEST)}"
            except _TROUBLE as error:
                raise self._fault(row, error) from error

    def replay(self, **changes: object) -> Difference | None:
        """Make the same calls of a fresh heap and scheduler, and compare what comes of each call.

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
                    expected, came = (tuple(map(printable, _outcome(words, one))) for one in (call, got))
                    return Difference(row, words.time(given), printable(told), expected, came)
            except InvalidRequest:
                raise
            except _TROUBLE as error:
                raise self._fault(row, error) from error
        return None

    def _calls(self) -> Iterator[tuple[int, list[Any]]]:
        # Each a name, arguments, result and effects. The last line may be torn where its process died.
        with open_file(self.path) as file:
            file.readline(_HEADING)
            for row, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    call: Any = parse_json(line)
                except ValueError as error:
                    raise self._fault(row, error) from error
                match call:
                    case [str(), list(), _]:
                        yield row, [*call, []]
                    case [str(), list(), _, list()]:
                        yield row, call
                    case _:
                        raise self._fault(row, "another shape")

    def _fault(self, row: int, why: object) -> BadTrace:
        return BadTrace(
            f"a damaged line ({shorten(printable(str(why)), 200)})",
            "a call that a pool is told",
            file=str(self.path),
            row=row,
        )


class _Again:
    """A heap and a scheduler for which the calls of others are repeated."""

    def __init__(self) -> None:
        self._heap: Heap | None = None
        self._scheduler: Scheduler | None = None

    def tell(self, name: str, given: dict[str, Any]) -> list[Any]:
        """Make a call, and return what its line is now.

        Raises:
            TypeError, ValueError, OverflowError: The arguments cannot be.
        """
        try:
            self._make(name, given)
        except ValueError:
            if not (written := self._read()):
                raise
        else:
            written = self._read()
        if self._scheduler is not None:
            self._scheduler.effects()
        return [*json.loads(written), []][:4] if written else [name, [], "nothing", []]

    def _read(self) -> bytes:
        return b"" if self._heap is None else self._heap.read_journal()

    def _make(self, name: str, given: dict[str, Any]) -> None:
        if name == "heap":
            self._heap = Heap(journal=True, **given)
            return
        if self._heap is None or (self._scheduler is None and name in SCHEDULER):
            raise ValueError("no heap or no scheduler yet")
        if name == "add_space" and given["nbytes"] > given["page"] * _MOST_PAGES:
            raise ValueError("more pages than any device has")
        if name == "submit":
            given["nbytes"] = given.pop("pieces") or given["nbytes"]
        given = {one: value for one, value in given.items() if one not in _UNUSED.get(name, ())}
        if name == "serve":
            self._scheduler = Scheduler(self._heap, **given)
        elif name == "coalesce":
            self._heap.segments()
        else:
            getattr(self._heap if name in HEAP else self._scheduler, name)(**given)


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
