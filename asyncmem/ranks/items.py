"""Items as text and bytes: what goes between processes of an item, and what is made of it there. No pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from asyncmem.arrays import Array, element_type
from asyncmem.core import Buffer
from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.stage import granules

if TYPE_CHECKING:
    from collections.abc import Callable

Json: TypeAlias = Any
"""What JSON can hold."""


class Leaf(NamedTuple):
    """Memory of an item: its elements, and where it lies among the bytes of all."""

    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    offset: int


class Packed(NamedTuple):
    """An item for another process.

    Attributes:
        form: All but the memory, as JSON has it.
        arrays: The memory, in order.
        offsets: Where each array begins among the bytes of all.
        nbytes: The bytes of all, each array from a multiple of 512 on.
    """

    form: Json
    arrays: list[Array]
    offsets: list[int]
    nbytes: int


def pack(item: object) -> Packed:
    """Take an item apart.

    Raises:
        InvalidRequest: It has other parts than buffers, arrays, plain values, and tuples, lists and dicts of them.
    """
    arrays: list[Array] = []
    offsets: list[int] = []
    end = 0

    def take(part: object) -> Json:
        nonlocal end
        if part is None or isinstance(part, bool | int | float | str):
            return part
        if isinstance(part, bytes):
            return {"bytes": part.hex()}
        if type(part) in (tuple, list):
            return {type(part).__name__: [take(one) for one in part]}  # type: ignore[attr-defined]  # it is one of both
        if type(part) is dict:
            return {"dict": [[take(key), take(value)] for key, value in part.items()]}
        if not isinstance(part, Array | Buffer):
            expected = "buffers, arrays, plain values, and tuples, lists and dicts of them, to go to another process"
            raise InvalidRequest("output", part, expected)
        array = part.view() if isinstance(part, Buffer) else part
        leaf = [array._element.name, None if isinstance(part, Buffer) else list(array.shape), array.nbytes, end]
        arrays.append(array)
        offsets.append(end)
        end += granules(array.nbytes)
        return {"memory": leaf}

    return Packed(take(item), arrays, offsets, end)


def leaves_of(form: Json) -> list[Leaf]:
    """Return what memory an item has, in order.

    Raises:
        ValueError: It is no item.
    """
    leaves: list[Leaf] = []
    unpack(form, leaves.append)
    return leaves


def unpack(form: Json, memory: Callable[[Leaf], object]) -> object:
    """Put an item together again, with what `memory` returns for each part of memory, in order.

    Raises:
        ValueError: It is no item.
    """
    try:
        return _unpack(form, memory)
    except (RecursionError, TypeError) as error:  # as of a dict whose key is a list
        raise ValueError("no item") from error


def _unpack(form: Json, memory: Callable[[Leaf], object]) -> object:
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if isinstance(form, dict) and len(form) == 1:
        ((kind, value),) = form.items()
        if kind == "bytes" and isinstance(value, str):
            return bytes.fromhex(value)
        if kind == "memory":
            return memory(_leaf(value))
        if kind == "dict" and isinstance(value, list):
            return {_unpack(key, memory): _unpack(part, memory) for key, part in _pairs(value)}
        if kind in ("tuple", "list") and isinstance(value, list):
            parts = [_unpack(one, memory) for one in value]
            return tuple(parts) if kind == "tuple" else parts
    raise ValueError("no item")


def _pairs(value: list[Any]) -> list[tuple[Any, Any]]:
    if not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise ValueError("no item")
    return [(key, part) for key, part in value]


def _leaf(value: Json) -> Leaf:
    if not isinstance(value, list) or len(value) != 4 or not isinstance(value[0], str):
        raise ValueError("no item")
    dtype, shape, nbytes, offset = value
    numbers = [nbytes, offset, *(shape if isinstance(shape, list) else [])]
    if not all(type(one) is int and 0 <= one < 1 << 60 for one in numbers):
        raise ValueError("no item")
    count = nbytes
    if shape is not None:
        count = element_type(dtype).itemsize
        for one in shape:
            count *= one
    if count != nbytes:
        raise ValueError("no item")
    return Leaf(dtype, None if shape is None else tuple(shape), nbytes, offset)
