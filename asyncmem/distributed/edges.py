"""The two ends of an edge: how items are sent by its kind of link, and what becomes of their memory."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from asyncmem import share
from asyncmem.arrays import Array
from asyncmem.core import Buffer
from asyncmem.devices.shared import Shareable
from asyncmem.distributed.credit import Credit, Inbox, Window, cost
from asyncmem.distributed.frames import CREDIT, ITEM, pack
from asyncmem.distributed.link import LinkLost
from asyncmem.distributed.ucx import new_tag
from asyncmem.errors import AsyncmemError, Described, InvalidRequest, ReaderLost
from asyncmem.figures import format_size
from asyncmem.lazy import np
from asyncmem.pipeline.trees import buffers_in
from asyncmem.pool.pool import pool_of
from asyncmem.share.items import PLAIN, Leaf, ProtocolError, bytes_of, decode, encode, flatten, leaf_of, unflatten

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from asyncmem.distributed.link import Link
    from asyncmem.distributed.plan import Edge
    from asyncmem.distributed.ucx import Ucx, Way
    from asyncmem.pool.share import Share

_HINT: Final = "name dataclasses and named tuples: place(cluster, types=[...])"
_INLINE: Final = 4096
"""Bytes up to which arrays of numpy go beside a descriptor's link, and not by one."""


@dataclass(slots=True, eq=False)
class Parcel:
    """An item on its way.

    Attributes:
        number: Its place in the order of all items.
        name: Its id, the same if it is sent once more.
        value: The item.
        done: What tells the sender that the item is no longer needed as it came.
        error: Why the item cannot be made here; None where it is.
    """

    number: int
    name: int
    value: object
    done: Callable[[], None]
    error: ProtocolError | None = None

    def open(self) -> object:
        """Return the item.

        Raises:
            ProtocolError: It cannot be made here.
        """
        if self.error is not None:
            raise self.error
        return self.value


def nothing() -> None:
    """Tell nobody."""


class Mailbox:
    """The items of a part, in their order: an `Inbox` that can be waited for."""

    def __init__(self, at: int, parts: int, edges: int) -> None:
        self._inbox = Inbox[Parcel](at, parts, edges)
        self._arrived = asyncio.Event()

    def put(self, edge: int, parcel: Parcel) -> None:
        """Take an item in.

        Raises:
            ProtocolError: It is not the next.
        """
        self._inbox.put(edge, parcel.number, parcel)
        self._arrived.set()

    def clear(self) -> None:
        """Drop the items that were not taken."""
        self._inbox.clear()

    async def __aiter__(self) -> AsyncIterator[Parcel]:
        """Wait for one item after the other."""
        while True:
            parcel = self._inbox.get()
            if parcel is None:
                self._arrived.clear()
                await self._arrived.wait()
            else:
                yield parcel
                del parcel


class Outgoing:
    """The sender's end of an edge.

    Args:
        edge: The edge.
        types: The records that items may have.
        deliver: Hands an item to the other end in the same process; None for one that is elsewhere.
        memory: The pool of the sending stage, which is closed after this edge; None for the source.
        keep: The pool of memory to share with the receiver, for what is not in such memory; None for others.
        staging: The pool of the host's memory by which arrays of a GPU go over TCP and UCX.
        pid: The receiver's process.
        ucx: By which arrays go in place of TCP; None where they do not.
    """

    def __init__(
        self, edge: Edge, types: Sequence[type], *, deliver: Callable[[Parcel], None] | None = None,
        memory: Share | None = None, keep: Share | None = None, staging: Share | None = None, pid: int = 0,
        ucx: Ucx | None = None,
    ) -> None:  # fmt: skip
        self.edge = edge
        self._types = types
        self._deliver = deliver
        self._memory = memory
        self._keep = keep
        self._staging = staging
        self._pid = pid
        self._ucx = ucx
        self._way: Way | None = None
        self._credit = Credit(edge.window)
        self._returned = asyncio.Event()
        self._link: Link | None = None
        self._closed = False
        # By the task that waits for the reader: the export, and its buffer if the pipeline itself owns that.
        self._exported: dict[asyncio.Task[None], tuple[share.Export, Buffer | Array | None]] = {}

    async def run(self, link: Link) -> None:
        """Serve the edge over a link, until that ends.

        Raises:
            LinkLost: It has ended.
            ProtocolError: The other side sent what it may not.
        """
        if self._ucx is not None:
            self._way = await self._ucx.meet(link)
        self._link = link
        self._returned.set()
        while True:
            frame, _ = await link.read_frame()
            if frame.kind != CREDIT:
                raise ProtocolError(f"a frame of kind {frame.kind} comes to a sender")
            self._credit.give_back(frame.number)
            self._returned.set()

    async def send(self, parcel: Parcel) -> None:
        """Send an item, once there is credit for it.

        Raises:
            InvalidRequest: It cannot go over this edge: it has what would need pickle, or is larger than the window.
            LinkLost: The link has ended.
        """
        if self._deliver is not None:
            self._deliver(parcel)
            return
        tree, values = flatten(parcel.value, self._types, hint=_HINT)
        for buffer in buffers_in(parcel.value):
            await buffer.stream.synchronize()
        leaves = [cast("Leaf", leaf_of(value)) for value in values]
        if self._keep is not None:
            leaves = [await self._share(value, leaf) for value, leaf in zip(values, leaves, strict=True)]
        inline = [(value, leaf) for value, leaf in zip(values, leaves, strict=True) if leaf.inline is None]
        meta = encode(tree, leaves)
        await self._need(cost([len(meta), *(leaf.nbytes for _, leaf in inline)]))
        assert self._link is not None
        parts = [(leaf, await self._readable(value, leaf)) for value, leaf in inline if leaf.nbytes]
        head = pack(ITEM, len(meta), parcel.number, parcel.name) + meta
        if self._way is None:
            await self._link.write(head, *(bytes_of(part) for _, part in parts))
            return
        await self._link.write(head)
        for leaf, part in parts:  # in the order in which they are read, or both sides would wait for each other
            await (self._link.write if leaf.kind in PLAIN else self._way.send)(bytes_of(part))

    async def _readable(self, value: object, leaf: Leaf) -> object:
        """Return a part of an item where the host can read it."""
        if not leaf.device:
            return value
        assert self._staging is not None
        copy = await self._staging.allocate_async(leaf.nbytes)
        await cast("Buffer | Array", value).copy_to(copy)
        return copy

    def _fit(self, nbytes: int) -> None:
        if nbytes > self.edge.window:
            most = f"at most {format_size(self.edge.window)}, the window of its edge"
            hint = f"place(cluster, window={format_size(nbytes)!r})"
            raise InvalidRequest("item", Described(format_size(nbytes)), most, hint=hint)

    async def _need(self, nbytes: int) -> None:
        self._fit(nbytes)
        while self._link is None or not self._credit.take(nbytes):
            self._returned.clear()
            await self._returned.wait()

    async def _share(self, value: object, leaf: Leaf) -> Leaf:
        """Export a part of an item, from where it is or from a copy; small parts go as they are."""
        if leaf.kind in PLAIN or (leaf.kind == "numpy" and leaf.nbytes <= _INLINE):
            return leaf
        assert self._keep is not None
        source = value
        if not isinstance(_device_of(source), Shareable):
            self._fit(leaf.nbytes)
            source = await self._keep.allocate_async(leaf.nbytes)
            try:
                if leaf.nbytes:
                    await source.copy_from(
                        np.ascontiguousarray(value).view(np.uint8).reshape(-1) if leaf.kind == "numpy" else value
                    )
            except BaseException:
                source.free()  # behind the copy
                raise
        if self._closed:  # nobody would end what is exported now
            raise LinkLost("the edge has ended")
        source = cast("Buffer | Array", source)
        exported = share.export(source, pid=self._pid)
        own = source is not value or (self._memory is not None and _device_of(source) is pool_of(self._memory).device)
        task = asyncio.get_running_loop().create_task(_read(exported))
        self._exported[task] = exported, source if own else None
        task.add_done_callback(self._end)
        return replace(leaf, inline=exported.descriptor)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._exported.pop(task)[0].close()

    async def close(self) -> None:
        """End all exports: the receiver has opened them, or is gone. The pipeline's own buffers are freed.

        The stage may still be at work, if the receiver has ended before it; it exports nothing more.
        """
        self._closed = True
        for task, (_, own) in self._exported.items():
            if own is not None:
                own.free()
            task.cancel()
        await asyncio.gather(*self._exported, return_exceptions=True)


async def _read(exported: share.Export) -> None:
    with suppress(ReaderLost):
        await exported.wait()


def _device_of(value: object) -> object:
    buffer = value.buffer if isinstance(value, Array) else value
    return buffer.device if isinstance(buffer, Buffer) else None


class Incoming:
    """The receiver's end of an edge.

    Args:
        edge: The edge.
        types: The records that items may have.
        deliver: Takes each item.
        window: The pool that is kept for the edge where bytes come; None where descriptors do.
        onto: The same of the receiver's device, for arrays that come from such a device; None for the host.
        ucx: As the sender's.
    """

    def __init__(
        self, edge: Edge, types: Sequence[type], deliver: Callable[[Parcel], None],
        window: Share | None = None, onto: Share | None = None, ucx: Ucx | None = None,
    ) -> None:  # fmt: skip
        self.edge = edge
        self._types = types
        self._deliver = deliver
        self._pool = window
        self._onto = onto
        self._ucx = ucx
        self._way: Way | None = None
        self._window = Window(edge.window)

    async def run(self, link: Link) -> None:
        """Take items in, until the link ends.

        Raises:
            LinkLost: It has ended.
            ProtocolError: The other side sent what it may not.
        """
        if self._ucx is not None:
            self._way = await self._ucx.meet(link, tag=new_tag())
        while True:
            frame, meta = await link.read_frame()
            if frame.kind != ITEM:
                raise ProtocolError(f"a frame of kind {frame.kind} comes to a receiver")
            tree, leaves = decode(meta, self._window.free)
            nbytes = cost([len(meta), *(leaf.nbytes for leaf in leaves if leaf.inline is None)])
            self._window.arrive(nbytes)
            held = _Held(self, link, nbytes)
            values = [await self._take(leaf, link, held) for leaf in leaves]
            parcel = Parcel(frame.number, frame.name, None, held.let_go)
            try:
                parcel.value = unflatten(tree, values, self._types)
            except ProtocolError as error:  # all of it has come, so the items behind it are not concerned
                parcel.error = error
            values.clear()
            self._deliver(parcel)
            del parcel, held

    async def _take(self, leaf: Leaf, link: Link, held: _Held) -> object:
        if leaf.kind in PLAIN:
            return leaf.made_of(leaf.inline if leaf.inline is not None else await link.read(leaf.nbytes))
        if leaf.inline is not None:
            try:
                shared = await share.attach_async(leaf.inline)
            except AsyncmemError as error:
                raise ProtocolError(f"memory that cannot be opened: {error}") from error
            if shared.nbytes != leaf.nbytes:
                raise ProtocolError(f"{shared.nbytes} bytes of shared memory, and not {leaf.nbytes}")
            return leaf.made_of(shared.buffer)
        if self._pool is None:
            return leaf.made_of(await link.read(leaf.nbytes))
        buffer = await self._pool.allocate_async(leaf.nbytes)
        if leaf.nbytes:
            await (link.read_into if self._way is None else self._way.receive)(memoryview(buffer))
        if self._onto is not None and leaf.device == pool_of(self._onto).device.kind:
            arrived, buffer = buffer, await self._onto.allocate_async(leaf.nbytes)
            if leaf.nbytes:
                await buffer.copy_from(arrived)
            arrived.free()
        held.hold(buffer)
        return leaf.made_of(buffer)

    def free(self, link: Link, nbytes: int) -> None:
        """Return credit."""
        self._window.give_back(nbytes)
        link.send(CREDIT, number=nbytes)


class _Held:
    """What an item takes of a window: it is free once the item is done with, and all of its buffers are gone."""

    def __init__(self, edge: Incoming, link: Link, nbytes: int) -> None:
        self._edge, self._link, self._nbytes = edge, link, nbytes
        self._loop = asyncio.get_running_loop()
        self._left = 1

    def hold(self, buffer: Buffer) -> None:
        """Wait for a buffer, too. What views it, as arrays of numpy's do, keeps it."""
        self._left += 1
        weakref.finalize(buffer, self.let_go).atexit = False

    def let_go(self) -> None:
        """See that one of them is done with. From any thread, and from finalizers."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            self._edge.free(self._link, self._nbytes)
