"""Items as trees: tuples, lists, dicts and dataclasses, whose leaves are buffers, arrays and plain values."""

import copy
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass

from asyncmem.arrays import Array
from asyncmem.core import Batch, Buffer
from asyncmem.devices import Fence, Stream


def map_leaves(tree: object, change: Callable[[object], object]) -> object:
    """Return a tree of the same kind and shape, with what `change` makes of each leaf, in order.

    Named tuples, subclasses of dict and list, and dataclasses keep their types. Whatever else there is, is a leaf.
    """
    if isinstance(tree, MutableMapping):
        mapping = copy.copy(tree)
        for key, part in tree.items():
            mapping[key] = map_leaves(part, change)
        return mapping
    if isinstance(tree, list):
        parts = copy.copy(tree)
        parts[:] = [map_leaves(part, change) for part in tree]
        return parts
    if type(tree) is tuple:
        return tuple(map_leaves(part, change) for part in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_make"):
        return tree._make(map_leaves(part, change) for part in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        record = copy.copy(tree)
        for one in fields(tree):
            object.__setattr__(record, one.name, map_leaves(getattr(tree, one.name), change))
        return record
    return change(tree)


PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of which it is seen at once that they have no buffers."""


def buffers_in(item: object) -> Iterator[Buffer]:
    """Yield the buffers of an item; an object without any is a plain value."""
    if type(item) in PLAIN_TYPES:
        return
    if isinstance(item, Buffer):
        yield item
    elif isinstance(item, Array):
        yield item.buffer
    elif isinstance(item, dict):
        for part in item.values():
            yield from buffers_in(part)
    elif isinstance(item, tuple | list | Batch):
        for part in item:
            yield from buffers_in(part)
    elif is_dataclass(item) and not isinstance(item, type):
        for one in fields(item):
            yield from buffers_in(getattr(item, one.name))


def fence_behind(item: object, stream: Stream | None) -> Fence | None:
    """Return a fence behind what a stream was given to do with an item; None where there is nothing to order."""
    return None if stream is None or next(buffers_in(item), None) is None else stream.record()


def order_behind(item: object, fence: Fence | None, stream: Stream) -> None:
    """Let later work of a stream wait for the work of an item's home streams, and for a fence of its last user.

    The stream counts as a user of the buffers from here on: freed, they go home behind its work. Buffers of devices
    that do not have this stream are left alone, because a copy from one device to another orders itself.

    Raises:
        BufferReleased: One of the buffers has been freed.
    """
    for buffer in buffers_in(item):
        if buffer.device is stream.device:
            buffer.use_on(stream)
    if fence is not None:
        stream.wait(fence)


async def copy_buffers(item: object, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
    """Start copying an item to memory that is asked for, by a stream of where it is; return the item that this makes.

    Of a batch come its buffers, in a list. Cancelled: what was asked for is free, in the order of the copies that have
    begun.
    """
    leaves: list[object] = []
    map_leaves(item, leaves.append)
    arrived = iter([await _copy_leaf(leaf, allocate, stream) for leaf in leaves])
    return map_leaves(item, lambda _: next(arrived))


async def _copy_leaf(leaf: object, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
    if isinstance(leaf, Buffer):
        target = await allocate(leaf.nbytes)
        leaf.copy_to_device(target, stream=stream)
        return target
    if isinstance(leaf, Array):
        target = await allocate(leaf.nbytes)
        view = target.view(leaf.dtype, leaf.shape)
        leaf.copy_to(view, stream=stream)
        return view
    if isinstance(leaf, Batch):
        return [await _copy_leaf(buffer, allocate, stream) for buffer in leaf]
    return leaf


def buffers_except(item: object, *, but: object) -> list[Buffer]:
    """Return the buffers of an item that are not in `but` too."""
    others = {id(buffer) for buffer in buffers_in(but)}
    return [buffer for buffer in buffers_in(item) if id(buffer) not in others]


def set_home(item: object, stream: Stream) -> None:
    """Make a stream the home of an item; the caller has ordered it behind all that was done with that.

    Handing over would order it behind all that the former home was given, also for items that have come since.
    """
    for buffer in buffers_in(item):
        buffer.hand_over(stream, ordered=True)


def free_buffers(item: object) -> None:
    """Free the buffers of an item."""
    for buffer in buffers_in(item):
        buffer.free()
