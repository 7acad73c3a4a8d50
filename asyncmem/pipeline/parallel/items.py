"""What goes from stage to stage: how it is copied, whose it is, and when it is freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.arrays import Array
from asyncmem.core import Batch, Buffer
from asyncmem.pipeline.nest import changed
from asyncmem.pipeline.parcels import buffers_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncmem.devices import Stream


async def copied(item: object, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
    """Start copying an item to memory that is asked for, by a stream of where it is; answer the item that this makes.

    Of a batch come its buffers, in a list. Cancelled: what was asked for is free, in the order of the copies that have
    begun.
    """
    leaves: list[object] = []
    changed(item, leaves.append)
    arrived = iter([await _copied(leaf, allocate, stream) for leaf in leaves])
    return changed(item, lambda _: next(arrived))


async def _copied(leaf: object, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
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
        return [await _copied(buffer, allocate, stream) for buffer in leaf]
    return leaf


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
