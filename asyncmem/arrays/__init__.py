"""Typed views over buffers, and their exchange with other libraries by DLPack and the array interfaces.

`array` is one view, `layout` many over one buffer, `elements` the types that both can have.
"""

from asyncmem.arrays.array import Array
from asyncmem.arrays.elements import (
    ElementType,
    dtype_size,
    element_from_dlpack,
    element_type,
    extent,
    lengths_of,
)
from asyncmem.arrays.layout import ALIGN, ArrayBatch, Layout

__all__ = [
    "ALIGN",
    "Array",
    "ArrayBatch",
    "ElementType",
    "Layout",
    "dtype_size",
    "element_from_dlpack",
    "element_type",
    "extent",
    "lengths_of",
]
