"""What is on the host and can go to a device: arrays of any library, and their bytes."""

from __future__ import annotations

import array
from typing import Final

import numpy as np

from asyncmem.core import Array
from asyncmem.errors import InvalidRequest
from asyncmem.exchange import asarray

# DLPack's device types of memory that the host reads: plain, and page-locked by CUDA.
_HOST: Final = (1, 3)

# Text, objects and dates: no device has such elements.
_FOREIGN_KINDS: Final = "OSUVMm"


def host_array(leaf: object) -> Array | None:
    """Answer an array over a leaf's memory, or over a copy of it in row-major order where it lies otherwise.

    Returns:
        None for what is no array of the host, or has elements that no device has.

    Raises:
        InvalidRequest: It has elements in swapped byte order, or such as numpy cannot put in order either.
        BufferError: Its owner does not give it away.
    """
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind in _FOREIGN_KINDS:
            return None
        return asarray(leaf if leaf.flags.c_contiguous else leaf.copy(order="C"))
    if not isinstance(leaf, bytearray | memoryview | array.array) and not _is_on_host(leaf):
        return None
    try:
        return asarray(leaf)
    except InvalidRequest as error:
        if error.what != "strides":
            raise
        return asarray(np.from_dlpack(leaf).copy(order="C"))  # type: ignore[arg-type]  # it speaks DLPack


def bytes_of(source: Array) -> memoryview:
    """Answer the bytes of an array of the host."""
    return memoryview(source.buffer)[source.offset : source.offset + source.nbytes]


def _is_on_host(leaf: object) -> bool:
    place = getattr(leaf, "__dlpack_device__", None)
    return place is not None and not isinstance(leaf, type) and place()[0] in _HOST
