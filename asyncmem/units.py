"""Sizes, shares and time spans as people write them. The one place where such text is parsed."""

import contextlib
import operator
import re
import threading
from decimal import Decimal
from typing import Final, Protocol, SupportsIndex, TypeAlias, runtime_checkable

from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_size

Size: TypeAlias = SupportsIndex | str
"""A number of bytes (any integer type), or text such as "64 MiB"."""

Share: TypeAlias = float | str
"""A number between 0 and 1, or text such as "80%"."""

MAX_SIZE: Final = 1 << 47
"""128 TiB, the user address space of common machines: whatever is larger is a mistake in a computation."""

MAX_COUNT: Final = (1 << 63) - 1
"""The most that a count may be: what the compiled core can hold."""

_SIZE: Final = 'bytes as an integer or text such as "64 MiB"'
_NUMBER: Final = re.compile(r"\s*(?P<number>\d[\d_]*(?:\.\d+)?)\s*(?P<unit>[^\d\s.]*)\s*", re.ASCII)
_BINARY: Final = {f"{prefix}i{b}": 1024**power for power, prefix in enumerate("kmgt", start=1) for b in ("", "b")}
_DECIMAL: Final = {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE_UNITS: Final = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_PREFIXES: Final = ("K", "M", "G", "T")
_BEYOND: Final = Decimal("1e400")  # of every size and every float
_TIME_UNITS: Final = {"": "1", "s": "1", "ms": "0.001", "us": "0.000001", "µs": "0.000001", "min": "60", "h": "3600"}


def parse_size(value: Size, *, what: str = "size") -> int:
    """Read a number of bytes.

    Text may use binary units ("64 MiB", "1.5GiB", "2Gi") or decimal ones ("2 GB"), in any case, and underscores
    ("1_000"); a fraction of a byte is dropped. Zero is valid.

    Args:
        value: The size.
        what: The argument's or option's name, for the error.

    Raises:
        InvalidRequest: Not a whole number or such text, negative, or above 128 TiB.
    """
    nbytes = _size_of_text(value, what) if isinstance(value, str) else _whole_number(value, what, _SIZE)
    if not 0 <= nbytes <= MAX_SIZE:
        raise InvalidRequest(what, value, f"0 to {format_size(MAX_SIZE)}")
    return nbytes


def parse_share(value: Share, *, what: str = "share") -> float:
    """Read a share: a number from 0 to 1, or text such as "80%" or "0.8".

    Raises:
        InvalidRequest: Anything else; `what` names the argument or option.
    """
    share = _share_of_text(value, what) if isinstance(value, str) else _real_number(value, what)
    # The comparison is written so that NaN fails it.
    if not 0 <= share <= 1:
        raise InvalidRequest(what, value, "a share from 0 to 1, or from 0% to 100%")
    return share


def parse_duration(value: float | str, *, what: str = "timeout") -> float:
    """Read a time span in seconds: a number, or text such as "500 ms", "10 s", "2 min".

    Raises:
        InvalidRequest: Anything else, or negative, or not finite; `what` names the argument or option.
    """
    seconds = _seconds_of_text(value, what) if isinstance(value, str) else _real_number(value, what)
    if not 0 <= seconds < float("inf"):
        raise InvalidRequest(what, value, "0 or more seconds")
    return seconds


def parse_timeout(value: float | str | None) -> float | None:
    """Read how long a thread may block: as `parse_duration`, at most what threads can wait; None for any time.

    Raises:
        InvalidRequest: Anything else.
    """
    return None if value is None else min(parse_duration(value), threading.TIMEOUT_MAX)


def parse_count(value: SupportsIndex | str, *, what: str = "count", least: int = 0, most: int = MAX_COUNT) -> int:
    """Read a whole number from `least` to `most`, also as text.

    Raises:
        InvalidRequest: Anything else; `what` names the argument or option.
    """
    expected = f"a whole number from {least} to {'2**63 - 1' if most == MAX_COUNT else most}"
    if isinstance(value, str):
        # Python refuses to read integers of thousands of digits.
        number = int(value) if value.strip().isdecimal() and len(value) < 100 else -1
    else:
        number = _whole_number(value, what, expected)
    if not least <= number <= most:
        raise InvalidRequest(what, value, expected)
    return number


@runtime_checkable
class HasTotal(Protocol):
    """What knows how many bytes it comes to: an estimate of `asyncmem.planning`."""

    @property
    def total(self) -> int:
        """Bytes in all."""


Need: TypeAlias = Size | HasTotal
"""A size, or what has a total."""


def bytes_needed(need: Need, what: str = "need") -> int:
    """Return the bytes.

    Raises:
        InvalidRequest: It is neither.
    """
    return parse_size(need.total if isinstance(need, HasTotal) else need, what=what)


def _size_of_text(text: str, what: str) -> int:
    found = _NUMBER.fullmatch(text)
    scale = _SIZE_UNITS.get(found["unit"].lower()) if found else None
    if found is None or scale is None:
        # "64M" means 2**20 to some tools and 10**6 to others, so it is refused rather than guessed.
        hint = ""
        if found and (unit := found["unit"].upper()) in _PREFIXES:
            hint = f'write "{found["number"]} {unit}iB" or "{found["number"]} {unit}B"'
        raise InvalidRequest(what, text, f'{_SIZE} (2**20) or "64 MB" (10**6)', hint=hint)
    return int(_number_of(found) * scale)


def _share_of_text(text: str, what: str) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None or found["unit"] not in ("", "%"):
        raise InvalidRequest(what, text, 'a share such as 0.8 or "80%"')
    return float(_number_of(found) / (100 if found["unit"] else 1))


def _seconds_of_text(text: str, what: str) -> float:
    found = _NUMBER.fullmatch(text)
    scale = _TIME_UNITS.get(found["unit"]) if found else None
    if found is None or scale is None:
        raise InvalidRequest(what, text, 'seconds as a number or text such as "500 ms", "10 s" or "2 min"')
    return float(_number_of(found) * Decimal(scale))


def _number_of(found: re.Match[str]) -> Decimal:
    return min(Decimal(found["number"]), _BEYOND)  # decimals overflow, and large ones take long to become an int


def _whole_number(value: SupportsIndex, what: str, expected: str) -> int:
    # True is an int to Python; as a size it is a slip.
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
        except Exception as error:  # of the caller's own type, whatever it raises
            raise InvalidRequest(what, value, expected) from error
    raise InvalidRequest(what, value, expected)


def _real_number(value: object, what: str) -> float:
    if isinstance(value, float):
        return float.__pos__(value)  # a subclass may convert and compare as it likes
    if isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return int.__float__(value)
    raise InvalidRequest(what, value, "a number")
