"""What goes from stage to stage: buffers and arrays, in tuples, lists and dicts among plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.core import Array, Buffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from asyncmem.devices import Stream


def buffers_in(item: object) -> Iterator[Buffer]:
    """Go through the buffers of an item; whatever has none in sight is a plain value."""
    if isinstance(item, Buffer):
        yield item
    elif isinstance(item, Array):
        yield item.buffer
    elif isinstance(item, dict):
        for part in item.values():
            yield from buffers_in(part)
    elif isinstance(item, tuple | list):
        for part in item:
            yield from buffers_in(part)


async def copied(item: object, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
    """Start copying an item to memory that is asked for, by a stream of where it is; answer the item that this makes.

    Cancelled: what was asked for is free, in the order of the copies that have begun.
    """
    if isinstance(item, Buffer):
        target = await allocate(item.nbytes)
        item.copy_to_device(target, stream=stream)
        return target
    if isinstance(item, Array):
        target = await allocate(item.nbytes)
        view = target.view(item.dtype, item.shape)
        item.copy_to(view, stream=stream)
        return view
    if isinstance(item, dict):
        return {key: await copied(part, allocate, stream) for key, part in item.items()}
    if isinstance(item, tuple | list):
        parts = [await copied(part, allocate, stream) for part in item]
        return parts if isinstance(item, list) else tuple(parts)
    return item


def buffers(item: object, *, but: object) -> list[Buffer]:
    """Answer the buffers of an item that are not in `but` too."""
    others = {id(buffer) for buffer in buffers_in(but)}
    return [buffer for buffer in buffers_in(item) if id(buffer) not in others]


def settle(item: object, stream: Stream) -> None:
    """Make a stream the home of an item; the caller has ordered it behind all that was done with that.

    Handing over would order it behind all that the former home was given, also for items that have come since.
    """
    for buffer in buffers_in(item):
        buffer._set_home(buffer._core.register_stream(stream))


def free(item: object) -> None:
    """Free an item."""
    for buffer in buffers_in(item):
        buffer.free()
