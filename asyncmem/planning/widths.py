"""How many bytes a value takes, by the name of its type."""

import math
from typing import Final

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
    """Answer the bytes of so many values, rounded up to whole ones."""
    return math.ceil(values * width)
