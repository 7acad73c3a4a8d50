"""The calls of a journal: the parameters of each, how it is made again, and how a person reads it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncmem.core import Heap, Scheduler
from asyncmem.figures import format_duration, format_size

_ASK: Final = ("nbytes", "stream", "account", "arena", "anywhere", "again", "door")
_TERMS: Final = ("deadline", "priority", "effort", "waits", "calls", "on_loop", "captured")
_PARTS: Final = {"ask": _ASK, "terms": _TERMS, "use": ("stream", "epoch")}
"""Arguments that stand for several parameters."""

HEAP: Final = {
    "add_stream": (), "close_epoch": ("stream",), "publish": ("stream", "epoch"), "mark_done": ("stream", "epoch"),
    "add_space": ("address", "nbytes", "arena", "page"), "remove_space": ("segment",),
    "take": ("ask",), "take_foreign": ("ask", "late"), "take_at": ("ask", "address", "late"),
    "take_many": ("ask", "sizes"), "put_back": ("block", "entries"), "free": ("block", "entries"),
    "free_everywhere": ("block",), "free_many": ("blocks",),
    "set_home": ("block", "stream"), "flush": ("stream",), "merge": ("arena",), "rouse": (),
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
    "grew": ("job", "address", "nbytes", "stream", "ready", "now", "seconds"),
    "grow_failed": ("job", "out_of_memory", "now"), "trimmed": ("job", "count", "now"),
    "remapped": ("job", "unmapped", "mapped", "out_of_memory", "now", "seconds"), "waited": ("job", "seen", "now"),
    "ended": ("job", "now"), "retry": ("job", "now"), "refuse": ("job", "now"), "served_elsewhere": ("job", "now"),
    "expire": ("now",), "quiet": ("now", "claims"), "tick": ("now",), "begin_beat": (), "end_beat": ("now",),
    "set_capturing": ("capturing",), "note_claim": ("now",), "shift_clock": ("seconds",),
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

_WORDS: Final = {
    "heap": "a heap begins", "serve": "a scheduler begins", "add_stream": "a stream is added",
    "close_epoch": "an epoch is closed", "publish": "a fence is recorded", "mark_done": "a fence is done",
    "add_space": "addresses are reserved", "remove_space": "addresses are given back", "take": "take",
    "take_foreign": "take what another stream has used", "take_at": "take at an address", "take_many": "take several",
    "put_back": "a take is undone", "free": "free",
    "free_everywhere": "free behind all streams", "free_many": "free several", "set_home": "a block is handed over",
    "flush": "caches are emptied", "merge": "free blocks are joined", "rouse": "all blocks are looked at",
    "open_lease": "a lease begins", "close_lease": "a lease ends", "add_account": "an account begins",
    "remove_account": "an account ends", "reset_peaks": "peaks begin again",
    "submit": "a request comes", "leave_to": "its call returns", "claim": "its memory is taken",
    "forget": "its failure is known", "cancel": "cancel", "fail": "fail", "give": "a block is given to a request",
    "ordered": "its stream is ordered", "unordered": "its stream could not be ordered", "asleep": "a task sleeps",
    "awake": "the task is awake", "hold": "a block is held", "release": "a hold ends",
    "forget_owner": "an owner is gone", "freed": "memory was freed", "looked": "fences were looked at",
    "grew": "memory came", "grow_failed": "none came", "trimmed": "memory went back", "remapped": "pages have moved",
    "waited": "a wait is over", "ended": "a job is over",
    "retry": "try once more", "refuse": "there is no last resort", "served_elsewhere": "the host's memory serves it",
    "expire": "a deadline is due", "quiet": "nothing has moved for a while", "tick": "a tick", "begin_beat": "a beat",
    "end_beat": "the beat ends", "set_capturing": "a capture", "note_claim": "somebody waits without a request",
    "shift_clock": "another clock", "open_share": "a share opens", "close_share": "a share closes",
    "set_limit": "a limit changes", "configure": "the policy changes", "add_spillable": "memory may move to the host",
    "trim": "give back what is free", "grow_ahead": "grow ahead of need", "drain": "refuse newcomers",
    "close": "the pool closes",
}  # fmt: skip
_TIMERS: Final = {"deadline", "quiet"}
"""Effects that say when, and not for how long."""
_MOST_PAGES: Final = 1 << 26
_LEVELS: Final = ("", "from its stream's cache", "from the shared cache", "from free memory")
_REASONS: Final = ("", "no memory", "over a limit", "behind a gate", "no pages")
_SIZES: Final = {
    "need", "limit", "keep", "page", "granule", "granularity", "segment_size", "small_limit", "ready",
    "stream_cache_bytes", "shared_cache_bytes",
}  # fmt: skip
_USUAL: Final[tuple[object, ...]] = (None, False, -1, 0, math.inf, "all", [], "granted")


# -- made again --------------------------------------------------------------------------------------------------------


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


def make(name: str, given: dict[str, Any], heap: Heap, scheduler: Scheduler | None) -> None:
    """Make a call once more.

    Raises:
        TypeError, ValueError, OverflowError: The arguments cannot be.
    """
    call: Callable[..., object]
    if name == "add_space" and given["nbytes"] > given["page"] * _MOST_PAGES:
        raise ValueError("more pages than any device has")
    if name == "rouse":
        call = heap.segments
    elif name in HEAP:
        call = getattr(heap, name)
        for unused in {"take_at": ("anywhere",), "take_many": ("nbytes",)}.get(name, ()):
            del given[unused]
    elif scheduler is None:
        raise ValueError("no scheduler yet")
    else:
        call = getattr(scheduler, name)
        if name == "submit":
            given = {one: given[one] for one in given if one not in {"anywhere", "again", "door"}}
            given["nbytes"] = given.pop("pieces") or given["nbytes"]
    call(**given)


# -- for a person ------------------------------------------------------------------------------------------------------


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
        """Return what was told, and the result."""
        if name == "submit":
            given = {"request": result, **given}
        told = ", ".join(self._fields(given))
        came = self.result(name, result)
        return _WORDS[name] + (f": {told}" if told else "") + (f" → {came}" if came else "")

    def effect(self, effect: Mapping[str, Any]) -> str:
        """Return what is to be done."""
        fields = {one: value for one, value in effect.items() if one != "kind"}
        if effect["kind"] in _TIMERS:
            fields["deadline"] = fields.pop("seconds")
        told = ", ".join(self._fields(fields))
        return str(effect["kind"]).replace("_", " ") + (f": {told}" if told else "")

    def _fields(self, given: Mapping[str, Any]) -> list[str]:
        return [
            self._field(name, value)
            for name, value in given.items()
            if name not in {"now", "pieces"} and value not in _USUAL
        ] + ([f"in {len(given['pieces'])} pieces"] if given.get("pieces") else [])

    def _field(self, name: str, value: Any) -> str:  # noqa: ANN401
        plain = name.replace("_", " ")
        match name, value:
            case "request", _:
                return f"request {self._numbers.get(value, '?')}"
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
            case "claim", [None, [int(block), int(address)], []]:
                return f"block {block} at {address:#x}" if block else ""
        return "" if result in _USUAL else str(result)
