"""What a stage passes on: buffers and arrays, nested in tuples, lists, dicts and dataclasses among plain values."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from asyncmem.arrays import Array
from asyncmem.core import Batch, Buffer
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncmem.devices import Device, Fence, Stream


PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of which it is seen at once that they have no buffers."""


def buffers_in(item: object) -> Iterator[Buffer]:
    """Go through the buffers of an item; whatever has none in sight is a plain value."""
    if type(item) in PLAIN:
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


def fence_of(item: object, stream: Stream | None) -> Fence | None:
    """Answer a fence behind what a stream was given to do with an item; None where there is nothing to order."""
    return None if stream is None or next(buffers_in(item), None) is None else stream.record()


def order_behind(item: object, fence: Fence | None, stream: Stream) -> None:
    """Let later work of a stream wait for the work of an item's home streams, and for a fence of whoever had it last.

    The stream counts as a user of the buffers from here on: freed, they go home behind its work. Buffers of devices
    that do not have this stream are left alone, because a copy from one device to another orders itself.

    Raises:
        BufferReleased: One of the buffers has been freed.
    """
    for buffer in buffers_in(item):
        if _has_stream(buffer.device, stream):
            buffer.use_on(stream)
    if fence is not None:
        stream.wait(fence)


def _has_stream(device: Device, stream: Stream) -> bool:
    try:
        return device.stream_of(stream) is stream
    except InvalidRequest:
        return False
