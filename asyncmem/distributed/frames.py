"""What goes over a link: frames with a header of fixed size, and items as JSON and the bytes of their arrays.

Nothing is unpickled. What comes is checked before memory is taken for it: sizes, shapes, element types, numbers.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from asyncmem.arrays import Array
from asyncmem.arrays.elements import element_type
from asyncmem.core import Buffer
from asyncmem.distributed.credit import ProtocolError
from asyncmem.errors import AsyncmemError, InvalidRequest
from asyncmem.lazy import np
from asyncmem.share.messages import DESCRIPTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER: Final = struct.Struct("<3sBIQQ")
"""The magic, the kind, the bytes of what describes the rest, and two numbers: of an item, its number and its id."""
MAGIC: Final = b"am\x01"
HELLO, UCX, ITEM, CREDIT, BEAT, FAILED, STOP, LOST = KINDS = range(1, 9)
MOST_META: Final = 1 << 20
"""The most bytes that describe an item, or a message of control."""
HELLO_META: Final = struct.Struct("<16sI")
"""A pipeline's token, and the edge; `CONTROL` for the client's connection to a worker."""
CONTROL: Final = 0xFFFFFFFF

_NUMPY_KINDS: Final = "biufcmMSU"
_KINDS: Final = ("array", "buffer", "numpy", "scalar", "bytes", "bytearray")
# As the sender spells them; numpy reads much more, and warns of some.
_OF_NUMPY: Final = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}|[<>][mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_OF_DEVICES: Final = re.compile(r"bool|(u?int|b?float|complex)\d{1,3}(_\w{1,12})?")


class Frame(NamedTuple):
    """A header that has been checked."""

    kind: int
    meta: int
    number: int
    name: int


def pack(kind: int, meta: int = 0, number: int = 0, name: int = 0) -> bytes:
    """Return a header."""
    return HEADER.pack(MAGIC, kind, meta, number, name)


def unpack(header: bytes | bytearray) -> Frame:
    """Read a header.

    Raises:
        ProtocolError: It is none.
    """
    if len(header) != HEADER.size:
        raise ProtocolError(f"a header of {len(header)} bytes")
    magic, kind, meta, number, name = HEADER.unpack(header)
    if magic != MAGIC or kind not in KINDS or meta > MOST_META:
        raise ProtocolError(f"no header of this version: {bytes(header)!r}")
    return Frame(kind, meta, number, name)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of an item that is bytes.

    Attributes:
        kind: What it is: "array", "buffer", "numpy", "scalar", "bytes" or "bytearray".
        dtype: Its elements.
        shape: The lengths of its dimensions.
        nbytes: Its bytes.
        device: The kind of device that it is on; "" for what the host can read.
        descriptor: By which shared memory is opened; None where the bytes follow.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str = ""
    descriptor: bytes | None = None


def leaf_of(value: object) -> Leaf | None:
    """Return what a value is on a link; None for what has no bytes.

    Raises:
        InvalidRequest: An array of numpy's has elements that cannot go.
    """
    if isinstance(value, Array):
        return Leaf("array", value._element.name, value.shape, value.nbytes, _device_of(value.buffer))
    if isinstance(value, Buffer):
        return Leaf("buffer", "uint8", (value.nbytes,), value.nbytes, _device_of(value))
    if isinstance(value, bytes | bytearray):
        return Leaf(type(value).__name__, "uint8", (len(value),), len(value))
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _NUMPY_KINDS:
            raise InvalidRequest("item", value.dtype, "arrays of numbers, dates or text, which need no pickle")
        kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
        return Leaf(kind, value.dtype.str, value.shape, value.nbytes)
    return None


def _device_of(buffer: Buffer) -> str:
    return "" if buffer.device.host_readable else buffer.device.kind


def flatten(item: object, types: Sequence[type]) -> tuple[Any, list[object]]:
    """Take an item apart: a tree that JSON can hold, and its parts that are bytes.

    Args:
        item: Buffers, arrays, plain values, and tuples, lists, dicts, dataclasses and named tuples of them.
        types: The dataclasses and named tuples that it may have.

    Raises:
        InvalidRequest: It has something else.
    """
    leaves: list[object] = []
    return _tree_of(item, leaves, types), leaves


def _tree_of(value: object, leaves: list[object], types: Sequence[type]) -> Any:  # noqa: ANN401  # JSON
    # No closure that calls itself: it would be garbage only the collector finds, and keep the leaves until then.
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if leaf_of(value) is not None:
        leaves.append(value)
        return ["a", len(leaves) - 1]
    if type(value) in types:
        parts = [getattr(value, one.name) for one in fields(value)] if is_dataclass(value) else cast("Any", value)
        return ["r", types.index(type(value)), *(_tree_of(part, leaves, types) for part in parts)]
    if isinstance(value, tuple | list) and type(value) in {tuple, list}:
        return ["t" if type(value) is tuple else "l", *(_tree_of(part, leaves, types) for part in value)]
    if isinstance(value, dict) and type(value) is dict:
        return ["d", *([_tree_of(key, leaves, types), _tree_of(part, leaves, types)] for key, part in value.items())]
    hint = "name dataclasses and named tuples: place(cluster, types=[...])"
    raise InvalidRequest("item", value, "arrays, plain values, and tuples, lists and dicts of them", hint=hint)


def unflatten(tree: Any, leaves: Sequence[object], types: Sequence[type]) -> object:  # noqa: ANN401  # JSON
    """Make an item of what `flatten` has made of it.

    Raises:
        ProtocolError: It cannot be made of that.
    """
    try:
        return _item_of(tree, leaves, types)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"an item that cannot be made: {error!r}") from None


def _item_of(node: Any, leaves: Sequence[object], types: Sequence[type]) -> object:  # noqa: ANN401  # JSON
    if not isinstance(node, list):
        return node
    kind, *parts = node
    if kind == "a":
        return leaves[parts[0]]
    if kind == "r":
        record, *values = parts
        return types[record](*(_item_of(value, leaves, types) for value in values))
    if kind in {"t", "l"}:
        return (tuple if kind == "t" else list)(_item_of(part, leaves, types) for part in parts)
    if kind == "d":
        return {_item_of(key, leaves, types): _item_of(value, leaves, types) for key, value in parts}
    raise ProtocolError(f"an item with a part of kind {kind!r}")


def encode(tree: Any, leaves: Sequence[Leaf]) -> bytes:  # noqa: ANN401  # JSON
    """Return what describes an item.

    Raises:
        InvalidRequest: It is too much.
    """
    table = [
        [one.kind, one.dtype, one.shape, one.nbytes, one.device, one.descriptor.hex() if one.descriptor else None]
        for one in leaves
    ]
    # Text arrives as it was: the reader is this file, and takes what others would not.
    meta = json.dumps([tree, table], separators=(",", ":")).encode()
    if len(meta) > MOST_META:
        raise InvalidRequest("item", f"{len(meta)} bytes of plain values", "at most 1 MiB: put them into an array")
    return meta


def decode(meta: bytes | bytearray, room: int) -> tuple[Any, list[Leaf]]:
    """Read what describes an item.

    Args:
        meta: What came.
        room: The most bytes that its parts may have whose bytes follow.

    Raises:
        ProtocolError: It is none, or of more.
    """
    try:
        tree, table = json.loads(meta)
        leaves = [_leaf(*row) for row in table]
    except (AsyncmemError, AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ProtocolError(f"no description of an item: {error!r}") from None
    follow = sum(leaf.nbytes for leaf in leaves if leaf.descriptor is None)
    if follow > room:
        raise ProtocolError(f"an item of {follow} bytes comes, with room for {room}")
    return tree, leaves


def _leaf(kind: str, dtype: str, shape: list[int], nbytes: int, device: str, descriptor: str | None) -> Leaf:
    if kind not in _KINDS or type(dtype) is not str or type(device) is not str or len(shape) > 64:
        raise ProtocolError(f"a part of kind {kind!r}")
    if any(type(one) is not int or one < 0 for one in [nbytes, *shape]):
        raise ProtocolError("a part of no size")
    found = None if descriptor is None else bytes.fromhex(descriptor)
    if found is not None and len(found) != DESCRIPTOR.size:
        raise ProtocolError("a descriptor of another size")
    numpys = kind in {"numpy", "scalar"}
    if not re.fullmatch(_OF_NUMPY if numpys else _OF_DEVICES, dtype):
        raise ProtocolError(f"elements of type {dtype!r}")
    itemsize = np.dtype(dtype).itemsize if numpys else element_type(dtype).itemsize
    if math.prod(shape) * itemsize != nbytes:
        raise ProtocolError(f"{nbytes} bytes of shape {shape}")
    return Leaf(kind, dtype, tuple(shape), nbytes, device, found)
