"""Many arrays over one buffer, one behind the other: there together or not at all, and read in one sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple, Self, final, overload

from asyncmem.arrays.array import Array
from asyncmem.arrays.elements import ElementType, element_type, lengths_of
from asyncmem.core import GRANULE, Buffer
from asyncmem.errors import InvalidRequest
from asyncmem.units import Size, parse_size

ALIGN = 256
"""Where each array begins unless something else is asked for: what DLPack expects of memory."""

_EXPECTED = "a shape, a pair of shape and dtype, or something that has both"


class Placement(NamedTuple):
    """Where one array lies in a range."""

    shape: tuple[int, ...]
    element: ElementType
    offset: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + math.prod(self.shape) * self.element.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each of several arrays lies in one range.

    Attributes:
        placements: One for each array, in order; each begins at a multiple of the alignment.
    """

    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, specs: Iterable[object], *, dtype: object = "float32", align: Size = ALIGN) -> Self:
        """Lay out arrays one behind the other.

        Args:
            specs: What each array is: a shape, a pair of shape and dtype, or anything with `shape` and `dtype`.
            dtype: The elements of those that are a mere shape.
            align: Bytes, a power of two up to 512; arrays of longer elements begin at multiples of those.

        Raises:
            InvalidRequest: One of the arguments cannot be right.
        """
        if not isinstance(specs, Iterable):
            raise InvalidRequest("specs", specs, "a list of them")
        step = parse_size(align, what="align")
        if step.bit_count() != 1 or step > GRANULE:
            raise InvalidRequest("align", align, f"a power of two up to {GRANULE}")
        placements: list[Placement] = []
        end = 0
        for spec in specs:
            shape, kind = _read(spec, dtype)
            element = element_type(kind)
            multiple = max(step, element.itemsize)
            placements.append(Placement(shape, element, -(-end // multiple) * multiple))
            end = placements[-1].end
        return cls(tuple(placements))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole range."""
        return self.placements[-1].end if self.placements else 0

    def clear_gaps(self, buffer: Buffer) -> None:
        """Set what lies between the arrays to zero where one array could span them all, in the order of the home."""
        if len({placement.element for placement in self.placements}) != 1:
            return
        for before, placement in pairwise(self.placements):
            if placement.offset > before.end:
                gap = placement.offset - before.end
                buffer.device.fill(buffer.address + before.end, gap, 0, buffer.stream)

    def over(self, buffer: Buffer) -> ArrayBatch:
        """Put the arrays into a buffer of `nbytes`."""
        views = (buffer.view(one.element.name, one.shape, one.offset) for one in self.placements)
        return ArrayBatch(buffer, tuple(views))


@final
class ArrayBatch(Sequence[Array]):
    """Arrays that were granted together, one behind the other in one buffer. Made by `empty_batch` of a pool.

    `free()` and the end of a `with` block free them together; so does dropping the batch and all of its arrays.

    Attributes:
        buffer: What they lie in: its address, streams, copies and exports are those of all of them.
    """

    __slots__ = ("__weakref__", "_arrays", "buffer")

    def __init__(self, buffer: Buffer, arrays: tuple[Array, ...]) -> None:
        self.buffer = buffer
        self._arrays = arrays

    def __repr__(self) -> str:
        return f"<asyncmem.ArrayBatch of {len(self)} arrays over {self.buffer!r}>"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and of the gaps between them."""
        return self.buffer.nbytes

    @property
    def flat(self) -> Array:
        """All elements as one array of one dimension, for work that goes through them in one sweep.

        It spans the gaps between the arrays too, where there are any: they were zero when the batch was made.

        Raises:
            InvalidRequest: The arrays have not all the same type of elements.
        """
        kinds = {str(array.dtype) for array in self._arrays}
        if len(kinds) != 1:
            raise InvalidRequest("flat", sorted(kinds), "arrays that all have one type of elements")
        return self.buffer.view(kinds.pop())

    def free(self, stream: object = None) -> None:
        """Free the memory of all arrays, once; `stream` is the one that used it last, as in `Buffer.free`."""
        self.buffer.free(stream)

    def __len__(self) -> int:
        return len(self._arrays)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Array, ...]: ...

    def __getitem__(self, index: int | slice) -> Array | tuple[Array, ...]:
        """Return one of the arrays, or some."""
        return self._arrays[index]

    def __iter__(self) -> Iterator[Array]:
        return iter(self._arrays)

    def __enter__(self) -> Self:
        """Hold them until the block ends; the current task counts as their owner."""
        self.buffer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Free them."""
        self.free()


def _read(spec: object, dtype: object) -> tuple[tuple[int, ...], object]:
    shape, kind = spec, dtype
    if isinstance(spec, tuple) and len(spec) == 2 and not isinstance(spec[1], Integral):
        shape, kind = spec
    elif not isinstance(spec, Integral) and hasattr(spec, "shape") and hasattr(spec, "dtype"):
        shape, kind = spec.shape, spec.dtype
    try:
        return lengths_of(shape), kind
    except InvalidRequest as wrong:
        raise InvalidRequest("specs", spec, f"{_EXPECTED}, with {wrong.expected}") from None
