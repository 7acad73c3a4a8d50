"""Items as text and bytes: what another process is told of an item, and what is made of it there. No pickle.

What comes is checked before memory is taken for it: sizes, shapes, element types.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from asyncmem.arrays import Array
from asyncmem.arrays.elements import element_type
from asyncmem.core import Buffer
from asyncmem.errors import AsyncmemError, InvalidRequest
from asyncmem.lazy import np
from asyncmem.share.messages import DESCRIPTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

Json: TypeAlias = Any
"""What JSON can hold."""

MOST_TEXT: Final = 1 << 20
"""The most bytes that describe an item."""
PLAIN: Final = frozenset({"bytes", "bytearray", "scalar"})
"""Parts of an item that are in no pool."""

_KINDS: Final = PLAIN | {"array", "buffer", "numpy"}
_NUMPY_KINDS: Final = "biufcmMSU"
# As the sender spells them; numpy reads much more, and warns of some.
_OF_NUMPY: Final = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}|[<>][mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_OF_DEVICES: Final = re.compile(r"bool|(u?int|b?float|complex)\d{1,3}(_\w{1,12})?")


class ProtocolError(ValueError):
    """Another process sent what it may not send."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of an item that is bytes.

    Attributes:
        kind: What it is: "array", "buffer", "numpy", "scalar", "bytes" or "bytearray".
        dtype: Its elements.
        shape: The lengths of its dimensions.
        nbytes: Its bytes.
        device: The kind of device that it is on; "" for what the host can read.
        inline: What is told in place of the bytes: of what is in `PLAIN` they themselves, else the descriptor by which
            shared memory is opened. None where the bytes come by another way.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str = ""
    inline: bytes | None = None

    def made_of(self, memory: bytes | bytearray | Buffer) -> object:
        """Return the part, of its bytes or of memory that has them.

        Raises:
            ProtocolError: Only memory of a pool will do.
        """
        if self.kind in {"bytes", "bytearray"}:
            return (bytes if self.kind == "bytes" else bytearray)(cast("Any", memory))
        if self.kind in {"numpy", "scalar"}:
            array = np.frombuffer(memoryview(memory), self.dtype).reshape(self.shape)
            return array if self.kind == "numpy" else array[()]
        if not isinstance(memory, Buffer):
            raise ProtocolError(f"a part of kind {self.kind!r} comes without memory")
        return memory if self.kind == "buffer" else memory.view(self.dtype, self.shape)


def leaf_of(value: object) -> Leaf | None:
    """Return what another process is told of a value; None for what has no bytes.

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


def bytes_of(value: object) -> memoryview:
    """Return the bytes of a part that the host can read."""
    if isinstance(value, bytes | bytearray):
        return memoryview(value)
    if isinstance(value, Array):
        return value._bytes()
    if isinstance(value, Buffer):
        return memoryview(value)
    return np.ascontiguousarray(cast("Any", value)).reshape(-1).view(np.uint8).data


def flatten(item: object, types: Sequence[type] = (), *, hint: str = "") -> tuple[Json, list[object]]:
    """Take an item apart: a tree that JSON can hold, and its parts that are bytes.

    Args:
        item: Buffers, arrays, plain values, and tuples, lists, dicts, dataclasses and named tuples of them.
        types: The dataclasses and named tuples that it may have.
        hint: What to do where it has something else.

    Raises:
        InvalidRequest: It has something else.
    """
    leaves: list[object] = []
    return _tree_of(item, leaves, types, hint), leaves


def _tree_of(value: object, leaves: list[object], types: Sequence[type], hint: str) -> Json:
    # No closure that calls itself: it would be garbage only the collector finds, and keep the leaves until then.
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if leaf_of(value) is not None:
        leaves.append(value)
        return ["a", len(leaves) - 1]
    if type(value) in types:
        parts = [getattr(value, one.name) for one in fields(value)] if is_dataclass(value) else cast("Any", value)
        return ["r", types.index(type(value)), *(_tree_of(part, leaves, types, hint) for part in parts)]
    if isinstance(value, tuple | list) and type(value) in {tuple, list}:
        return ["t" if type(value) is tuple else "l", *(_tree_of(part, leaves, types, hint) for part in value)]
    if isinstance(value, dict) and type(value) is dict:
        return ["d", *([_tree_of(one, leaves, types, hint) for one in pair] for pair in value.items())]
    raise InvalidRequest("item", value, "arrays, plain values, and tuples, lists and dicts of them", hint=hint)


def unflatten(tree: Json, leaves: Sequence[object], types: Sequence[type] = ()) -> object:
    """Make an item of what `flatten` has made of it.

    Raises:
        ProtocolError: It cannot be made of that.
    """
    try:
        return _item_of(tree, leaves, types)
    except Exception as error:  # noqa: BLE001  # of the program's records, too
        reason = repr(error)
    raise ProtocolError(f"an item that cannot be made: {reason}")  # the other error would keep the leaves


def _item_of(node: Json, leaves: Sequence[object], types: Sequence[type]) -> object:
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


def row_of(leaf: Leaf) -> list[Json]:
    """Return a leaf as JSON can hold it."""
    inline = None if leaf.inline is None else leaf.inline.hex()
    return [leaf.kind, leaf.dtype, list(leaf.shape), leaf.nbytes, leaf.device, inline]


def leaves_of(rows: Json) -> list[Leaf]:
    """Read what `row_of` made of leaves.

    Raises:
        ProtocolError: They are none.
    """
    try:
        return [_leaf(*row) for row in rows]
    except (AsyncmemError, AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"no description of an item: {error!r}") from None


def _leaf(kind: str, dtype: str, shape: list[int], nbytes: int, device: str, inline: str | None) -> Leaf:
    if kind not in _KINDS or type(dtype) is not str or type(device) is not str or len(shape) > 64:
        raise ProtocolError(f"a part of kind {kind!r}")
    if any(type(one) is not int or one < 0 for one in [nbytes, *shape]):
        raise ProtocolError("a part of no size")
    found = None if inline is None else bytes.fromhex(inline)
    if found is not None and len(found) != (nbytes if kind in PLAIN else DESCRIPTOR.size):
        raise ProtocolError(f"{len(found)} bytes of a part of kind {kind!r}")
    numpys = kind in {"numpy", "scalar"}
    if not re.fullmatch(_OF_NUMPY if numpys else _OF_DEVICES, dtype):
        raise ProtocolError(f"elements of type {dtype!r}")
    itemsize = np.dtype(dtype).itemsize if numpys else element_type(dtype).itemsize
    if math.prod(shape) * itemsize != nbytes:
        raise ProtocolError(f"{nbytes} bytes of shape {shape}")
    return Leaf(kind, dtype, tuple(shape), nbytes, device, found)


def encode(tree: Json, leaves: Sequence[Leaf]) -> bytes:
    """Return what describes an item.

    Raises:
        InvalidRequest: It is too much.
    """
    # Text arrives as it was: the reader is this file, and takes what others would not.
    text = json.dumps([tree, [row_of(leaf) for leaf in leaves]], separators=(",", ":")).encode()
    if len(text) > MOST_TEXT:
        raise InvalidRequest("item", f"{len(text)} bytes of plain values", "at most 1 MiB: put them into an array")
    return text


def decode(text: bytes | bytearray, room: int) -> tuple[Json, list[Leaf]]:
    """Read what describes an item.

    Args:
        text: What came.
        room: The most bytes that its parts may have whose bytes follow.

    Raises:
        ProtocolError: It is none, or of more.
    """
    try:
        tree, rows = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise ProtocolError(f"no description of an item: {error!r}") from None
    leaves = leaves_of(rows)
    follow = sum(leaf.nbytes for leaf in leaves if leaf.inline is None)
    if follow > room:
        raise ProtocolError(f"an item of {follow} bytes comes, with room for {room}")
    return tree, leaves
