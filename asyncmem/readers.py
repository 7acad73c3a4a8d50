"""Readers: from what a user wrote to an option's value, one for each kind of option.

A reader takes the value, as an argument or as text from the environment, and as `what` the name to blame in the error.
Some options need no more than what `units` reads.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias, cast

from asyncmem.errors import InvalidRequest
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.figures import format_duration, format_share
from asyncmem.units import Share, Size, parse_count, parse_duration, parse_share, parse_size

Reader: TypeAlias = Callable[..., object]
"""Takes a value and, by name, `what` to blame; returns what the option holds; raises `InvalidRequest`."""

OnOutOfMemory: TypeAlias = Callable[[OutOfMemoryFacts], bool]
"""Is shown the facts before an out-of-memory error; True asks for one more try."""

Warmup: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a size in bytes and how many buffers of it to have ready."""

Peers: TypeAlias = tuple[object, ...]
"""Devices, or their names."""


class Patience(NamedTuple):
    """How long growth may wait for memory that is about to be ready."""

    seconds: float = math.inf
    """The most for each request, from when it was asked."""
    share: float = math.inf
    """The most for all of them together, as a share of the time since the pool was opened."""

    def __str__(self) -> str:
        """Write it as it may be given."""
        return format_duration(self.seconds) if self.share == math.inf else format_share(self.share)


_WORDS: Final = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
SHARED: Final = "shared"
"""The limit of a pool that agrees on it with the pools of other processes."""

_MOST_BUFFERS: Final = 1 << 18  # of one batch, which is made in one go
_ANY_SHARE: Final = "a size, or a share such as 0.25 or '400%'"
_PAIR: Final = re.compile(r"(?P<size>[^*]+)\*\s*(?P<count>\d+)\s*")


def positive_size(value: object, what: str) -> int:
    """Read bytes, at least one."""
    nbytes = parse_size(cast("Size", value), what=what)
    if nbytes == 0:
        raise InvalidRequest(what, value, "more than 0 bytes")
    return nbytes


def positive_share(value: object, what: str) -> float:
    """Read a share above 0."""
    part = parse_share(cast("Share", value), what=what)
    if part == 0:
        raise InvalidRequest(what, value, "a share above 0")
    return part


def size_or_share(value: object, what: str) -> int | float:
    """Read bytes (then the answer is an int) or a share of the device's memory (then it is a float)."""
    found = size_or_share_or_nothing(value, what)
    return found or positive_size(value, what)


def limit(value: object, what: str) -> int | float | str:
    """Read bytes, a share of the device's memory, or "shared"."""
    return SHARED if isinstance(value, str) and value.strip() == SHARED else size_or_share(value, what)


def size_or_share_or_nothing(value: object, what: str) -> int | float:
    """Read bytes or a share, as `size_or_share` does, and 0 bytes as well."""
    if isinstance(value, float) or (isinstance(value, str) and "%" in value):
        return positive_share(value, what)
    return parse_size(cast("Size", value), what=what)


def size_or_any_share(value: object, what: str) -> int | float:
    """Read bytes or a share, as `size_or_share` does, and nothing at all or more than the whole as well."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            value = float(value.strip()[:-1]) / 100
        except ValueError:
            raise InvalidRequest(what, value, _ANY_SHARE) from None
    if not isinstance(value, float):
        return parse_size(cast("Size", value), what=what)
    if not 0 <= value < math.inf:
        raise InvalidRequest(what, value, _ANY_SHARE)
    return value


def patience(value: object, what: str) -> Patience:
    """Read a time span for each wait, or a share of the time for all of them together."""
    if isinstance(value, Patience):
        return value
    if isinstance(value, str) and "%" in value:
        return Patience(share=parse_share(value, what=what))
    return Patience(seconds=parse_duration(cast("float | str", value), what=what))


def factor(value: object, what: str) -> float:
    """Read a number from 0."""
    try:
        number = -1.0 if isinstance(value, bool) else float(cast("float | str", value))
    except Exception as error:  # of the caller's own type, whatever it raises
        raise InvalidRequest(what, value, "a number from 0") from error
    if not 0 <= number < math.inf:
        raise InvalidRequest(what, value, "a number from 0")
    return number


def switch(value: object, what: str) -> bool:
    """Read a yes or no: a bool, or "1", "true", "yes", "on" and their opposites."""
    answer = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(answer, bool):
        raise InvalidRequest(what, value, 'True or False (in the environment "on" or "off")')
    return answer


def label(value: object, what: str) -> str:
    """Read a name: text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(what, value, "a name")
    return value.strip()


def file(value: object, what: str) -> str:
    """Read the name of a file, which the system must be able to have."""
    name = label(value, what)
    try:
        known = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        known = False
    if not known:
        raise InvalidRequest(what, value, "the name of a file")
    return name


def one_of(*names: str) -> Reader:
    """Make a reader of one of these words."""

    def read(value: object, what: str) -> str:
        if not isinstance(value, str) or value not in names:
            raise InvalidRequest(what, value, " or ".join(f'"{name}"' for name in names))
        return value

    return read


def optional(reader: Reader) -> Reader:
    """Make a reader that also takes None ("none" in the environment), which switches the option off."""

    def read(value: object, what: str) -> object:
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        return reader(value, what=what)

    return read


def warmup(value: object, what: str) -> Warmup:
    """Read pairs of size and count: `[("4 KiB", 100)]`, or the text "4KiB*100; 1MiB*10"."""
    pairs = _pairs_of_text(value, what) if isinstance(value, str) else value
    if not isinstance(pairs, Iterable):
        raise InvalidRequest(what, value, "pairs of size and count")
    found: list[tuple[int, int]] = []
    total = 0
    for pair in pairs:
        found.append(_pair(pair, what))
        total += found[-1][1]
        if total > _MOST_BUFFERS:
            raise InvalidRequest(what, value, f"at most {_MOST_BUFFERS} buffers in all")
    return tuple(found)


def callback(value: object, what: str) -> OnOutOfMemory:
    """Read a callable, or from the environment its place: "package.module:function"."""
    found = value
    if isinstance(value, str):
        import pkgutil

        try:
            found = pkgutil.resolve_name(value)
        except (ValueError, ImportError, AttributeError) as error:
            raise InvalidRequest(what, value, 'a callable or its place "package.module:function"') from error
    if not callable(found):
        raise InvalidRequest(what, value, "a callable that takes OutOfMemoryFacts and returns whether to try again")
    return cast("OnOutOfMemory", found)


def peers(value: object, what: str) -> Peers:
    """Read devices or their names, or the text "cuda:1; cuda:2"."""
    found = value.split(";") if isinstance(value, str) else value
    if not isinstance(found, Iterable):
        raise InvalidRequest(what, value, 'devices or their names, such as ["cuda:1"]')
    return tuple(one.strip() if isinstance(one, str) else one for one in found)


def _pairs_of_text(text: str, what: str) -> list[tuple[str, str]]:
    found = [_PAIR.fullmatch(part) for part in text.split(";") if part.strip()]
    if None in found:
        raise InvalidRequest(what, text, 'pairs such as "4KiB*100; 1MiB*10"')
    return [(pair["size"], pair["count"]) for pair in found if pair is not None]


def _pair(value: object, what: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidRequest(what, value, 'a pair of size and count, such as ("4 KiB", 100)')
    return positive_size(value[0], what), parse_count(value[1], what=what, most=_MOST_BUFFERS)
