"""What is on the host and can go to a device: arrays of any library, and their bytes."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncmem.arrays import element_type
from asyncmem.errors import InvalidRequest
from asyncmem.exchange import asarray

# DLPack's device types of memory that the host reads: plain, and page-locked by CUDA or ROCm.
_HOST: Final = (1, 3, 11)

# Text, objects, records and dates: no device has such elements.
_FOREIGN_KINDS: Final = "OSUVMm"


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array of the host, in row-major order; its bytes keep whoever owns them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | str
    data: memoryview


def host_array(leaf: object) -> HostArray | None:
    """Answer what a leaf is an array of, or a copy of it in row-major order where it lies otherwise.

    Returns:
        None for what is no array of the host, or has elements that no device has.

    Raises:
        InvalidRequest: It has elements in swapped byte order, or such as numpy cannot put in order either.
        BufferError: Its owner does not give it away.
    """
    if isinstance(leaf, np.ndarray):
        return _of_numpy(leaf)
    if isinstance(leaf, bytearray | memoryview | array.array):
        return _of_numpy(np.asarray(memoryview(leaf)))
    if not _is_on_host(leaf):
        return None
    try:
        plain = np.from_dlpack(leaf)  # type: ignore[arg-type]  # it speaks DLPack
    except (BufferError, RuntimeError, TypeError, ValueError):
        found = asarray(leaf)  # it knows more kinds of elements, and says what is wrong
        return HostArray(found.shape, found.dtype, memoryview(found.buffer)[: found.nbytes])
    return _of_numpy(plain)


def _of_numpy(found: np.ndarray[Any, Any]) -> HostArray | None:
    try:
        element_type(found.dtype)
    except InvalidRequest:
        if found.dtype.kind in _FOREIGN_KINDS:
            return None
        raise
    plain = np.asarray(found)
    in_rows = plain if plain.flags.c_contiguous else plain.copy(order="C")
    return HostArray(plain.shape, plain.dtype, in_rows.reshape(-1).view(np.uint8).data)


def _is_on_host(leaf: object) -> bool:
    place = getattr(leaf, "__dlpack_device__", None)
    return place is not None and not isinstance(leaf, type) and place()[0] in _HOST
