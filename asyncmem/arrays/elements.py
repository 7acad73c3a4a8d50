"""Element types of arrays: numpy's plain kinds, and the short floats of accelerators that numpy has no name for."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Final, cast

from asyncmem.errors import InvalidRequest
from asyncmem.lazy import np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

# DLPack's type codes (dlpack.h, DLDataTypeCode).
_NUMPY_KINDS: Final = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
SHORT_FLOATS: Final = {
    "bfloat16": (4, 16),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}


@dataclass(frozen=True, slots=True)
class ElementType:
    """What one element is."""

    name: str
    """numpy's name, or the name of a short float."""
    itemsize: int
    """Bytes of one element."""
    dlpack: tuple[int, int, int]
    """DLPack's (code, bits, lanes)."""
    numpy: np.dtype[np.generic] | None
    """The numpy dtype, None for a short float."""


def element_type(dtype: object) -> ElementType:
    """Return the element type of a dtype or a name.

    Raises:
        InvalidRequest: No such type, or one that devices do not share (objects, records, dates, swapped bytes).
    """
    if isinstance(dtype, str) and dtype in SHORT_FLOATS:
        return _short_float(dtype)
    try:
        plain = np.dtype(cast("DTypeLike", dtype))
    except Exception:  # noqa: BLE001  # numpy parses text, and asks objects for theirs
        if not isinstance(dtype, str):
            with contextlib.suppress(InvalidRequest):
                # torch's dtypes are none of numpy's, but are called the same: torch.float32.
                return element_type(str(dtype).rpartition(".")[2])
        raise InvalidRequest("dtype", dtype, f"a numpy dtype, or one of {', '.join(SHORT_FLOATS)}") from None
    return _of_numpy(plain)


@functools.cache  # numpy makes a type's name anew each time, which takes longer than all the rest
def _of_numpy(dtype: np.dtype[np.generic]) -> ElementType:
    # The package ml_dtypes gives numpy short floats of the same names, which devices share only under these.
    if dtype.name in SHORT_FLOATS:
        return _short_float(dtype.name)
    if dtype.kind not in _NUMPY_KINDS or not dtype.isnative:
        raise InvalidRequest("dtype", dtype, "a number or bool in native byte order")
    return ElementType(dtype.name, dtype.itemsize, (_NUMPY_KINDS[dtype.kind], 8 * dtype.itemsize, 1), dtype)


def _short_float(name: str) -> ElementType:
    code, bits = SHORT_FLOATS[name]
    return ElementType(name, bits // 8, (code, bits, 1), None)


def element_from_dlpack(dtype: tuple[int, int, int]) -> ElementType:
    """Return the element type of DLPack's (code, bits, lanes).

    Raises:
        InvalidRequest: An array has no such elements: vectors, handles, less than a byte.
    """
    code, bits, lanes = dtype
    names = [name for name, short in SHORT_FLOATS.items() if short == (code, bits)]
    names += [f"{kind}{bits // 8}" for kind, number in _NUMPY_KINDS.items() if number == code and bits % 8 == 0]
    if not names or lanes != 1:
        raise InvalidRequest("dtype", dtype, "DLPack's (code, bits, lanes) of one number or bool of whole bytes")
    return element_type(names[0])


def dtype_size(dtype: object) -> int:
    """Return the bytes of one element of a dtype or a name."""
    return element_type(dtype).itemsize


def extent(shape: int | Sequence[int], dtype: object) -> tuple[tuple[int, ...], int]:
    """Return the dimensions of an array, a lone length among them, and the bytes that it takes."""
    dims = lengths_of(shape)
    return dims, math.prod(dims) * dtype_size(dtype)


def lengths_of(shape: object) -> tuple[int, ...]:
    """Read the lengths of an array's dimensions, one of which may stand alone.

    Raises:
        InvalidRequest: They are no whole numbers, or below zero.
    """
    try:
        lengths = tuple(map(index, shape if isinstance(shape, Sequence) else (shape,)))
    except Exception:  # noqa: BLE001  # of the caller's own type, whatever it raises
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise InvalidRequest("shape", shape, "lengths of 0 and above")
    return lengths
