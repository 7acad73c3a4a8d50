"""Bytes: those of a value by the name of its type, and lists of buffers as pairs of a size and a count."""

import math
from collections.abc import Iterable
from typing import Final, TypeAlias

from asyncmem.errors import InvalidRequest

DTYPES: Final[dict[str, float]] = {
    "fp32": 4,
    "float32": 4,
    "bf16": 2,
    "bfloat16": 2,
    "fp16": 2,
    "float16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
    "nf4": 0.5,
}
"""Names of types and their bytes a value; what quantized weights keep beside them, such as scales, is not counted."""

COMPUTED: Final = 2
"""Weights may be narrower than this, but what is computed from them is not."""


def width(value: object, what: str = "bytes_per_value") -> float:
    """Read bytes a value: a number, or the name of a type.

    Raises:
        InvalidRequest: Not a positive number, and no known name.
    """
    if isinstance(value, str):
        found = DTYPES.get(value)
        if found is None:
            raise InvalidRequest(what, value, f"one of {', '.join(DTYPES)}, or bytes as a number")
        return found
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 16:
        raise InvalidRequest(what, value, "a number of bytes above 0, at most 16")
    return value


def bytes_of(values: int, width: float) -> int:
    """Return the bytes of so many values, rounded up to whole ones."""
    return math.ceil(values * width)


Buffers: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a size in bytes and a count, as a pool's `warmup` takes them."""


def total_of(buffers: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of all of them."""
    return sum(size * count for size, count in buffers)


def larger(*candidates: Buffers) -> Buffers:
    """Return the list with the most bytes: of what is never alive at once, that is what counts."""
    return max(candidates, key=total_of)


def times(factor: int, buffers: Buffers) -> Buffers:
    """Return so many of each."""
    return tuple((size, count * factor) for size, count in buffers)


def merged(buffers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join those of one size, largest first; what is empty is left out."""
    counts: dict[int, int] = {}
    for size, count in buffers:
        counts[size] = counts.get(size, 0) + count
    return [(size, counts[size]) for size in sorted(counts, reverse=True) if size and counts[size]]
